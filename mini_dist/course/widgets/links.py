"""Explorer of lesson 04: which all-reduce wins, over which links, at which size."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from mini_dist.plan.calculators.costs import Cost, all_reduce
from mini_dist.plan.calculators.links import Hierarchy, Link
from mini_dist.plan.calculators.machines import hardware

from ..draw.svg import Drawing, Panel, numbered, round_places
from ..lab import ParameterError, choice, whole
from . import page
from .explorer import Explorer

COLORS = {
    "star": "#d95f02",
    "tree": "#1b9e77",
    "ring": "#7570b3",
    "halving_doubling": "#e7298a",
    "hierarchical": "#1f78b4",
}
MACHINES = {
    "H100, 8 a node": "NVLink in a node of 8, one 400 Gb/s InfiniBand port a GPU between nodes",
    "H100, 8 a node, crowded network": "the same, with how long a step took on a real cluster",
    "H100, 1 a node": "every message over InfiniBand",
    "TPU v5e, 2D torus": "links to four neighbors only: longer routes share them",
    "laptop": "ranks that share the cores of one machine: messages take turns",
}
YOURS = "yours"
RANKS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SIZES = [4**k for k in range(1, 16)]
MOST = 2**30  # bytes


@dataclass(frozen=True)
class Torus:
    """Ranks in a square, row by row, each with `link` to its neighbors along both axes.

    In a round in which every message crosses k links, the links in the middle carry k messages, and
    each gets 1/k of the bandwidth. (A ring sends to neighbors only.)
    """

    side: int
    link: Link

    def slowest(self, distance: int, size: int, paired: bool = False) -> Link:
        hops = distance if distance < self.side else distance // self.side
        return replace(self.link, bandwidth=self.link.bandwidth / hops)


@dataclass(frozen=True)
class Shared:
    """Cores that all ranks share: all messages take turns, wherever they go."""

    link: Link


def links_of(machine: str, num_ranks: int, yours: Link | None = None):
    """Return the links of a machine: a Link, Hierarchy, Torus or Shared."""
    if machine == YOURS:
        return Shared(yours)
    if machine == "laptop":
        return Shared(hardware("laptop").node_link())
    if machine == "H100, 1 a node":
        return hardware("h100").network_link(num_ranks)
    if machine == "TPU v5e, 2D torus":
        side = 1 << (math.ceil(math.log2(num_ranks)) + 1) // 2
        return Torus(side, hardware("tpu-v5e").node_link())
    known = hardware("h100-hf" if "crowded" in machine else "h100")
    return known.links(max(2, num_ranks // known.devices_per_node))


def num_messages(num_ranks: int, algorithm: str) -> int:
    """Return the number of messages in an all-reduce, over all ranks."""
    paired = 1 << (num_ranks.bit_length() - 1)  # the ranks left after folding
    return {
        "star": 2 * (num_ranks - 1),
        "tree": 2 * (num_ranks - 1),
        "ring": 2 * num_ranks * (num_ranks - 1),
        "halving_doubling": 2 * paired * (paired.bit_length() - 1) + 2 * (num_ranks - paired),
    }[algorithm]


@lru_cache(maxsize=20_000)  # a slider asks for the same curves again and again
def cost(num_bytes: int, num_ranks: int, algorithm: str, link) -> Cost:
    if not isinstance(link, Shared):
        return all_reduce(num_bytes, num_ranks, algorithm, link)
    alone = all_reduce(num_bytes, num_ranks, algorithm)
    waiting = num_messages(num_ranks, algorithm) * link.link.latency
    return replace(alone, seconds=waiting + alone.total_bytes / link.link.bandwidth)


def candidates(num_ranks: int, link) -> list[str]:
    """Return the algorithms that apply; two levels need more than one node, and full nodes."""
    nodes = num_ranks / link.ranks_per_node if isinstance(link, Hierarchy) else 1
    return [name for name in COLORS if name != "hierarchical" or (nodes > 1 and nodes % 1 == 0)]


def race(num_bytes: int, num_ranks: int, link) -> dict[str, Cost]:
    """Return the cost of each algorithm, the fastest first."""
    costs = {a: cost(num_bytes, num_ranks, a, link) for a in candidates(num_ranks, link)}
    return dict(sorted(costs.items(), key=lambda item: item[1].seconds))


def winners(costs: dict[str, Cost]) -> list[str]:
    """Return the fastest, and those within 2 %, which the model cannot tell apart."""
    best = next(iter(costs.values())).seconds
    return [algorithm for algorithm, each in costs.items() if each.seconds <= 1.02 * best]


def latency_only(link):
    """Return the same link with bytes that take no time."""
    if isinstance(link, Hierarchy):
        return replace(link, inner=latency_only(link.inner), outer=latency_only(link.outer))
    if isinstance(link, (Torus, Shared)):
        return replace(link, link=latency_only(link.link))
    return replace(link, bandwidth=1e30)


def explorer(yours: Link | None = None, **start) -> Explorer:
    """Return the explorer; `start` sets controls. `yours`: a link that you measured."""

    def render(
        machine: str = "H100, 8 a node", num_ranks: int = 64, num_bytes: int = 2**20
    ) -> tuple[Drawing, str]:
        link = links_of(machine, num_ranks, yours)
        if isinstance(link, Hierarchy) and num_ranks % min(num_ranks, link.ranks_per_node):
            raise ParameterError(f"{num_ranks} ranks do not fill nodes of {link.ranks_per_node}.")
        return draw(machine, num_ranks, num_bytes, link), words(machine, num_ranks, num_bytes, link)

    machines = [*MACHINES, YOURS] if yours else MACHINES
    shown = Explorer(
        render,
        machine=choice(*machines),
        num_ranks=choice(*RANKS),
        num_bytes=whole(SIZES[0], MOST, log=True),
    )
    shown.change(**start)
    return shown


def draw(machine: str, num_ranks: int, num_bytes: int, link) -> Drawing:
    # Logarithms on both axes.
    races = [race(size, num_ranks, link) for size in SIZES]
    xs = [math.log2(size) for size in SIZES]
    lines = {
        algorithm: [math.log10(each[algorithm].seconds) for each in races]
        for algorithm in candidates(num_ranks, link)
    }
    lowest, highest = min(map(min, lines.values())) - 0.2, max(map(max, lines.values())) + 0.2
    powers = range(math.ceil(lowest), math.floor(highest) + 1, 2)
    left = Panel(
        395, 300, (xs[0] - 1, xs[-1] + 1), (lowest - 0.5, highest),
        title=f"all-reduce, {num_ranks} ranks; the ribbon shows who wins",
        xticks={3: "8 B", 10: "1 KiB", 20: "1 MiB", 30: "1 GiB"},
        yticks={power: time_name(10.0**power) for power in powers},
        legend={algorithm: COLORS[algorithm] for algorithm in lines},
    )  # fmt: skip
    for algorithm, ys in lines.items():
        left.line(zip(xs, ys), COLORS[algorithm], 1.8)
    for x, each in zip(xs, races):
        best = winners(each)
        for number, algorithm in enumerate(best):
            ends = [lowest - 0.5 + 0.3 * place / len(best) for place in (number, number + 1)]
            left.box(x - 1, ends[0], x + 1, ends[1], COLORS[algorithm])
    left.guide(x=math.log2(num_bytes), dash="2 2")

    here = race(num_bytes, num_ranks, link)
    most = 5 * next(iter(here.values())).seconds  # a longer bar is cut off here
    unit, name = unit_of(most)
    right = Panel(
        320, 300, (0, 1.35 * most / unit), (len(here) - 0.4, -0.6), title=size_name(num_bytes),
        xticks=numbered(round_places(0, most / unit, 4)), yticks=dict(enumerate(here)),
        xlabel=f"{name}  (gray: latency)",
    )  # fmt: skip
    for row, (algorithm, each) in enumerate(here.items()):
        waiting = cost(num_bytes, num_ranks, algorithm, latency_only(link)).seconds
        end = min(each.seconds, most) / unit
        right.box(0, row - 0.3, end, row + 0.3, COLORS[algorithm])
        right.box(0, row - 0.3, min(waiting, most) / unit, row + 0.3, "#c0c0c0")
        right.words(end, row, time_name(each.seconds), shift=(5, 0))
    best = " = ".join(winners(here))
    said = f"{machine}, {num_ranks} ranks, {size_name(num_bytes)}: {best} the fastest"
    return Drawing([left, right], said)


def words(machine: str, num_ranks: int, num_bytes: int, link) -> str:
    """Return the race as a table, and the links with their latencies and bandwidths."""
    here = race(num_bytes, num_ranks, link)
    best = next(iter(here.values())).seconds
    head = ("algorithm", "rounds", "bytes a rank sends, at most", "time", "of the best")
    rows = [
        (
            a,
            f"{c.rounds:,}",
            f"{c.bytes_per_rank:,}",
            time_name(c.seconds),
            f"{c.seconds / best:.3g} ×",
        )
        for a, c in here.items()
    ]
    kinds = {"": getattr(link, "link", link)}
    if isinstance(link, Hierarchy):
        kinds = {"in a node: ": link.inner, "between nodes: ": link.outer}
    used = "; ".join(
        f"{where}{1e6 * each.latency:.3g} µs, {each.bandwidth / 1e9:.3g} GB/s"
        for where, each in kinds.items()
    )
    what = MACHINES.get(machine, "the link that you measured")
    return page.table(rows, head) + page.paragraph(f"{what}. A message: {used}.")


def unit_of(seconds: float) -> tuple[float, str]:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return unit, name
    return 1e-6, "µs"


def time_name(seconds: float) -> str:
    unit, name = unit_of(seconds)
    return f"{seconds / unit:.3g} {name}"


def size_name(num_bytes: int) -> str:
    step = min(int(math.log(num_bytes, 1024)), 3)
    return f"{num_bytes / 1024**step:.3g} {('B', 'KiB', 'MiB', 'GiB')[step]}"
