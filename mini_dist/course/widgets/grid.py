"""Explorer of lessons 15 and 17: the ranks in their nodes, and who talks to whom on each axis."""

from __future__ import annotations

from mini_dist.collectives.mesh import Grid
from mini_dist.plan.calculators import Layout, hardware, readable, step_volume
from mini_dist.plan.calculators import model as model_preset

from ..draw.labels import numbered, ticks
from ..draw.picture import Picture
from ..lab import ParameterError, choice, whole
from . import page
from .explorer import Explorer

AXES = ("pp", "dp", "cp", "tp", "ep", "edp")
COLORS = dict(  # of an axis
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
) -> tuple[Picture, str]:
    """Every rank, coloured by its group along `axis`; and what `rank` sends along every axis.

    Raises ValueError for more than 64 ranks, for a rank that is not there, and for a layout that
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
    rows = talk(grid, layout, rank, ranks_per_node, model, gpu)
    head = ("axis", "talks with", "where", "about", f"sends in a step of {model}", "at best in")
    note = "8 micro-batches of one sequence a step, ZeRO-1, bf16; times as if nothing else used the"
    note += f" links of an {gpu}."
    said = f"Rank {rank} sits at {place}."
    return picture, page.paragraph(said) + page.table(rows, head) + page.paragraph(note)


def talk(grid: Grid, layout: Layout, rank: int, ranks_per_node: int, model: str, gpu: str):
    """A row for each axis longer than 1: with whom, over which links, how much, how long."""
    config, machine = model_preset(model), hardware(gpu)
    volume = step_volume(config, layout, pp_rank=grid.coordinates(rank)["pp"])
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
    """Whom `rank` talks with in its group: everyone, and in a pipeline the stages beside it."""
    if axis == "pp":
        place = group.index(rank)
        return group[max(0, place - 1) : place] + group[place + 1 : place + 2]
    return [member for member in group if member != rank]


def draw(grid: Grid, axis: str, rank: int, ranks_per_node: int) -> Picture:
    from matplotlib.collections import PatchCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(9.4, 4.2), dpi=100)
    left, right = (
        figure.add_axes((0.02, 0.02, 0.52, 0.86)),
        figure.add_axes((0.62, 0.1, 0.36, 0.78)),
    )

    groups = grid.groups(axis)
    number = {member: index for index, ranks in enumerate(groups) for member in ranks}
    mine = groups[number[rank]]
    columns = min(ranks_per_node, 8)
    lines_a_node = -(-ranks_per_node // columns)

    def corner(member: int) -> tuple[float, float]:
        node, place = divmod(member, ranks_per_node)
        return place % columns, -(node * (lines_a_node + 0.35) + place // columns)

    boxes = [Rectangle(corner(member), 0.92, 0.92) for member in range(grid.size)]
    faces = [GROUPS[number[member] % len(GROUPS)] for member in range(grid.size)]
    edges = ["#111111" if member in mine else "#ffffff" for member in range(grid.size)]
    widths = [2.2 if member in mine else 0.5 for member in range(grid.size)]
    left.add_collection(
        PatchCollection(boxes, facecolors=faces, edgecolors=edges, linewidths=widths)
    )
    # numbers take longer than all the rest: of many ranks only those of the group have theirs
    for member in range(grid.size) if grid.size <= 32 else mine:
        x, y = corner(member)
        weight = "bold" if member == rank else "normal"
        left.text(x + 0.46, y + 0.46, str(member), ha="center", va="center", weight=weight)
    nodes = -(-grid.size // ranks_per_node)
    bottom = -(nodes * (lines_a_node + 0.35))
    left.set(xlim=(-0.1, 8.1), ylim=(min(bottom, -4) + 0.9, 1.1))
    left.axis("off")
    several = f"{nodes} nodes of {ranks_per_node}" if nodes > 1 else "one node"
    count = f"{len(groups)} group{'s' * (len(groups) > 1)} of {len(mine)}"
    figure.text(0.02, 0.93, f"{grid.size} ranks in {several}; along {axis}: {count}", fontsize=10)

    # Who talks to whom: a pair has the colour of the axis in which alone the two ranks differ.
    shown = [[(1.0, 1.0, 1.0)] * grid.size for _ in range(grid.size)]
    for name in (*grid.axes, axis):  # the chosen one above the others: ep and dp share pairs
        for ranks in grid.groups(name):
            for a in ranks:
                for b in peers(name, ranks, a):
                    shown[a][b] = paint(COLORS[name], strong=name == axis)
    right.imshow(shown, interpolation="nearest")
    for node in range(1, nodes):
        edge = node * ranks_per_node - 0.5
        right.axhline(edge, color="#bbbbbb", linewidth=0.6)
        right.axvline(edge, color="#bbbbbb", linewidth=0.6)
    ends = numbered([0, grid.size - 1])
    ticks(right, ends, ends)
    right.set_title("who talks to whom", fontsize=9)
    used = [name for name, size in grid.axes.items() if size > 1]
    used += [axis] if axis not in grid.axes else []
    for row, name in enumerate(used):
        right.text(
            -0.13,
            0.85 - 0.1 * row,
            name,
            color=COLORS[name],
            transform=right.transAxes,
            fontsize=9,
            ha="center",
            weight="bold" if name == axis else "normal",
        )
    said = f"{grid.size} ranks, along {axis}: rank {rank} is in {mine}"
    return Picture(figure, said)


def paint(color: str, strong: bool) -> tuple[float, ...]:
    """The colour as red, green, blue from 0 to 1; paler unless strong."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return tuple(part if strong else 0.4 * part + 0.6 for part in parts)


def rank_grid(**start) -> Explorer:
    """The explorer; `start` sets some controls, as in rank_grid(dp=4, tp=2, axis="dp")."""
    sizes = whole(1, 32, log=True)
    explorer = Explorer(
        render,
        pp=sizes,
        dp=sizes,
        cp=sizes,
        tp=sizes,
        ep=sizes,
        axis=choice(*AXES),
        rank=whole(0, MOST - 1),
        ranks_per_node=choice(1, 2, 4, 8, 16),
        model=choice("llama3-8b", "llama3-70b", "mixtral-8x7b"),
        gpu=choice("a100-80", "h100", "b200", "l40s"),
    )
    explorer.change(**start)
    return explorer
