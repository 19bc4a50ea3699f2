"""Explorer of lessons 15 and 17: the ranks in their nodes, and who talks to whom on each axis."""

from __future__ import annotations

from mini_dist.collectives.mesh import Grid
from mini_dist.plan.calculators import Layout, readable, step_volume
from mini_dist.plan.calculators import model as model_preset
from mini_dist.plan.calculators.machines import Hardware

from ..draw.svg import FAINT, INK, Drawing, Panel, numbered
from ..lab import ParameterError, choice, whole
from . import page
from .device import MINE, START, controls, machine_of, shown_if_mine
from .explorer import Explorer

AXES = ("pp", "dp", "cp", "tp", "ep", "edp")
COLORS = dict(  # per axis
    pp="#e6550d", dp="#31a354", cp="#756bb1", tp="#3182bd", ep="#c51b8a", edp="#8c6d31"
)
GROUPS = ("#9ecae1", "#fdd0a2", "#c7e9c0", "#dadaeb", "#fcc5c0", "#d9d9d9", "#fff7bc", "#ccece6")
MOST = 64  # ranks whose numbers can still be read
CARRIES = {
    "tp": "activations, in every layer",
    "cp": "keys and values, in every layer",
    "ep": "tokens to their experts and back, in every layer",
    "pp": "activations of a micro-batch, from stage to stage",
    "dp": "gradients, once a step; with ZeRO-3 parameters, in every layer",
    "edp": "the experts' gradients, once a step",
}


def render(
    pp: int = 2,
    dp: int = 2,
    cp: int = 1,
    tp: int = 4,
    ep: int = 1,
    axis: str = "tp",
    rank: int = 0,
    ranks_per_node: int = 8,
    model: str = "llama3-8b",
    gpu: str = "h100",
    my_network_gb_s: float = START["my_network_gb_s"],
) -> tuple[Drawing, str]:
    """Draw every rank, colored by its group along `axis`; list what `rank` sends on every axis.

    Raises ValueError for more than 64 ranks, for a rank that does not exist, and for a layout that
    cannot cut the model.
    """
    layout = Layout(pp, dp, cp, tp, ep, sequence_parallel=tp > 1, zero=1, num_micro_batches=8)
    grid = Grid(**layout.axes, ep=ep)
    if grid.size > MOST:
        raise ParameterError(f"{grid.size} ranks are too many to draw: make one of the axes less.")
    if rank >= grid.size:
        raise ParameterError(f"rank={rank} is not there: give 0 to {grid.size - 1}.")
    picture = draw(grid, axis, rank, ranks_per_node)
    place = ", ".join(f"{name} {index}" for name, index in grid.coordinates(rank).items())
    machine = machine_of(gpu, my_network_gb_s=my_network_gb_s)
    rows = talk(grid, layout, rank, ranks_per_node, model, machine)
    head = ("axis", "talks with", "where", "about", f"sends in a step of {model}", "at best in")
    note = "8 micro-batches of one sequence a step, ZeRO-1, bf16; times as if nothing else used the"
    note += f" links of {gpu}."
    said = f"Rank {rank} sits at {place}."
    return picture, page.paragraph(said) + page.table(rows, head) + page.paragraph(note)


def talk(grid: Grid, layout: Layout, rank: int, ranks_per_node: int, model: str, machine: Hardware):
    """Return a row for each axis longer than 1: the peers, the links, bytes per step, seconds."""
    volume = step_volume(model_preset(model), layout, pp_rank=grid.coordinates(rank)["pp"])
    sent = {line.name: line.value for line in volume}
    sent["edp"] = sent.get("dp of experts", 0.0)
    rows = []
    for axis, size in {**grid.axes, **grid.experts}.items():
        if size == 1 or (axis == "edp" and layout.ep == 1):
            continue
        over = ("dp", "cp") if axis == "dp" else (axis,)  # cp's ranks hold the same parameters
        (group,) = (ranks for ranks in grid.groups(*over) if rank in ranks)
        others = peers(axis, group, rank)
        inside = {member // ranks_per_node for member in others} == {rank // ranks_per_node}
        link = machine.node_link("send") if inside else machine.network_link()
        nbytes = sent.get(axis, 0.0)
        rows.append(
            (
                " and ".join(over) if layout.cp > 1 else axis,
                " ".join(map(str, others)),
                "inside the node" if inside else "between nodes",
                CARRIES[axis],
                readable(nbytes, "bytes") if nbytes else "-",
                readable(nbytes / link.bandwidth, "s") if nbytes else "-",
            )
        )
    return rows


def peers(axis: str, group: list[int], rank: int) -> list[int]:
    """Return the ranks that `rank` talks with in its group: all, or in a pipeline its neighbors."""
    if axis == "pp":
        place = group.index(rank)
        return group[max(0, place - 1) : place] + group[place + 1 : place + 2]
    return [member for member in group if member != rank]


def draw(grid: Grid, axis: str, rank: int, ranks_per_node: int) -> Drawing:
    groups = grid.groups(axis)
    number = {member: index for index, ranks in enumerate(groups) for member in ranks}
    mine = groups[number[rank]]
    columns = min(ranks_per_node, 8)
    lines_per_node = -(-ranks_per_node // columns)
    nodes = -(-grid.size // ranks_per_node)

    def corner(member: int) -> tuple[float, float]:
        node, place = divmod(member, ranks_per_node)
        return place % columns, node * (lines_per_node + 0.35) + place // columns

    lines = nodes * (lines_per_node + 0.35)
    several = f"{nodes} nodes of {ranks_per_node}" if nodes > 1 else "one node"
    count = f"{len(groups)} group{'s' * (len(groups) > 1)} of {len(mine)}"
    left = Panel(
        330, 300, (0, 8), (max(lines, 6), 0), sides="",
        title=f"{grid.size} ranks in {several}; along {axis}: {count}",
    )  # fmt: skip
    size = 0.92 if lines <= 12 else 0.86
    for member in range(grid.size):
        x, y = corner(member)
        face = GROUPS[number[member] % len(GROUPS)]
        if member in mine:
            left.box(x - 0.03, y - 0.03, x + 0.03 + size, y + 0.03 + size, INK)
            left.box(x + 0.06, y + 0.08, x + size - 0.06, y + size - 0.08, face)
        else:
            left.box(x, y, x + size, y + size, face)
    # In a taller picture only the numbers of this group stay readable.
    for member in range(grid.size) if lines <= 12 else mine:
        x, y = corner(member)
        place = (x + size / 2, y + size / 2)
        left.words(*place, member, "#000000", "middle", bold=member == rank)

    # A pair that communicates has the color of the axis along which it does.
    used = [name for name, size in grid.axes.items() if size > 1]
    used += [axis] if axis not in grid.axes else []
    ends = numbered([0, grid.size - 1])
    square = (-0.5, grid.size - 0.5)
    right = Panel(
        300, 300, square, square[::-1], title="who talks to whom", xticks=ends, yticks=ends,
        legend={name: COLORS[name] for name in used},
    )  # fmt: skip
    for (a, b), name in pairs(grid, axis).items():
        right.box(b - 0.5, a - 0.5, b + 0.5, a + 0.5, COLORS[name], 1 if name == axis else 0.4)
    for node in range(1, nodes):
        edge = node * ranks_per_node - 0.5
        right.guide(y=edge, width=1, dash="", alpha=FAINT)
        right.guide(x=edge, width=1, dash="", alpha=FAINT)
    return Drawing([left, right], f"{grid.size} ranks, along {axis}: rank {rank} is in {mine}")


def pairs(grid: Grid, axis: str) -> dict[tuple[int, int], str]:
    """Map each pair of ranks that communicates to the axis along which it does.

    If axes share a pair, as ep and dp do, `axis` wins.
    """
    return {
        (a, b): name
        for name in (*grid.axes, axis)
        for ranks in grid.groups(name)
        for a in ranks
        for b in peers(name, ranks, a)
    }


SHOWN_IF = {  # A model without experts has nothing to shard over ep.
    "ep": lambda values: bool(model_preset(values["model"]).num_experts) or values["ep"] > 1
}


def rank_grid(**start) -> Explorer:
    """Return the explorer; `start` sets controls, as in rank_grid(dp=4, tp=2, axis="dp")."""
    sizes = whole(1, 32, log=True)
    explorer = Explorer(
        render,
        SHOWN_IF | shown_if_mine("my_network_gb_s"),
        pp=sizes,
        dp=sizes,
        cp=sizes,
        tp=sizes,
        ep=sizes,
        axis=choice(*AXES),
        rank=whole(0, MOST - 1),
        ranks_per_node=choice(1, 2, 4, 8, 16),
        model=choice("llama3-8b", "llama3-70b", "mixtral-8x7b"),
        gpu=choice("a100-80", "h100", "b200", "l40s", MINE),
        **controls("my_network_gb_s"),
    )
    explorer.change(**start)
    return explorer
