"""Exercises of lesson 26: an all-reduce that spares the uplinks, axes on hosts, exchanged ranks.

The bytes over an uplink are counted in the run's traffic matrix: the ranks of an exercise are on
the hosts that its case names, wherever they really run.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from mini_dist import collectives
from mini_dist.collectives.mesh import Grid, order_on_hosts, uplink_bytes

from . import answers
from .engine import Exercise, Line, Measured, line, on_ranks, yes
from .measures import plain

# ---- all-reduce on hosts ------------------------------------------------------------------------


@dataclass(frozen=True)
class Placed:
    """hosts: the host of each rank."""

    hosts: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return f"hosts {list(self.hosts)}, x {list(self.shape)} of {str(self.dtype)[6:]}"

    def input(self, rank: int) -> torch.Tensor:
        dice = torch.Generator().manual_seed(rank)
        return torch.randint(-(2**20), 2**20, self.shape, generator=dice).to(self.dtype)


def all_reduce_trial(fn, case: Placed, group):
    x = case.input(group.rank())
    result = fn(x, list(case.hosts), group)
    return result, torch.equal(x, case.input(group.rank()))


class OnHosts(Measured):
    def measure(self):
        inputs = [self.case.input(rank) for rank in range(self.size)]
        self.expected, self.nbytes = sum(inputs), inputs[0].nbytes
        self.right = [
            isinstance(found, torch.Tensor)
            and found.dtype == self.expected.dtype
            and torch.equal(found, self.expected)
            for found, _ in self.results
        ]
        hosts, traffic = self.case.hosts, self.run.ledger.traffic()
        self.out = [
            sum(
                traffic[source][target]
                for source in range(self.size)
                for target in range(self.size)
                if hosts[source] == host != hosts[target]
            )
            for host in sorted({*hosts})
        ]
        number = len(self.out)
        self.wanted = 2 * (number - 1) * self.nbytes // number
        # If the parts cannot all be equal, one host may send a few numbers more than another.
        whole = self.expected.numel() % (self.size * number) == 0
        self.room = 0 if whole else 2 * self.size * self.expected.element_size()

    def lines(self) -> list[Line]:
        alone = all(alone for _, alone in self.results)
        right = max(abs(out - self.wanted) for out in self.out) <= self.room
        found, wanted = f"{max(self.out):,}", f"{self.wanted:,}"
        return [
            on_ranks("right values on", self.right),
            yes("x is left alone", alone),
            self.backend_line(),
            Line("bytes out of the busiest host", found, wanted, right),
        ]

    def mistake(self) -> str:
        if self.backend or self.barriers:
            return self.of_the_backend("Combine the three rings.")
        if not all(alone for _, alone in self.results):
            return "x was changed: work on what the rings return."
        if not all(self.right):
            if any(not isinstance(found, torch.Tensor) for found, _ in self.results):
                return "Every rank returns the sum, a tensor like x."
            if any(found.shape != self.expected.shape for found, _ in self.results):
                return "The sum has the shape of x: flatten it for the rings, then reshape."
            if any(found.dtype != self.expected.dtype for found, _ in self.results):
                return "Return the sum in the dtype of x."
            return (
                "Not the sum over all ranks. After the first ring a rank has its chunk summed over "
                "its host; the ring between hosts joins the ranks that have the same chunk, one "
                "per host."
            )
        if max(self.out) < self.wanted:
            return "These are fewer bytes than the sum needs: numbers travel in the dtype of x."
        flat = 2 * (self.size - 1) * self.nbytes // self.size
        if len({*self.case.hosts}) > 1 and max(self.out) >= flat:
            return (
                f"{max(self.out):,} bytes leave a host, at least as many as in a single ring of "
                "all ranks. First add up inside each host, whichever ranks `hosts` puts there; "
                "then send only what is summed, and only a rank's own chunk of it."
            )
        return (
            f"{max(self.out):,} bytes leave the busiest host where {self.wanted:,} do: between "
            "hosts a rank all-reduces its own chunk, in a ring, and no more."
        )


# ---- axes on hosts ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axes:
    axes: tuple[tuple[str, int], ...]
    sent: tuple[tuple[str, int], ...]
    ranks_per_host: int = 4

    def __str__(self) -> str:
        shape = " x ".join(f"{axis} {size}" for axis, size in self.axes)
        return f"{shape}, {self.ranks_per_host} ranks a host"


def order_trial(fn, case: Axes, group):
    return plain(fn(dict(case.axes), dict(case.sent), case.ranks_per_host))


class Ordered(Measured):
    def measure(self):
        axes, sent, k = dict(self.case.axes), dict(self.case.sent), self.case.ranks_per_host
        came = self.results[0]
        self.order = tuple(came) if isinstance(came, (tuple, list, dict)) else ()
        size = Grid(**axes).size
        hosts = [rank // k for rank in range(size)]

        def busiest(order) -> int:
            return uplink_bytes(Grid(**{axis: axes[axis] for axis in order}), sent, hosts)

        self.is_an_order = sorted(map(str, self.order)) == sorted(axes)
        self.best = min(map(busiest, itertools.permutations(axes)))
        self.found = busiest(self.order) if self.is_an_order else None
        self.turned = busiest(self.order[::-1]) if self.is_an_order else None

    def lines(self) -> list[Line]:
        if not self.is_an_order:
            return [line("returns", str(self.results[0]), "each axis once, outermost first")]
        return [line("bytes on the busiest uplink", self.found, self.best)]

    def mistake(self) -> str:
        if not self.is_an_order:
            return "Return the names of the axes, each once, the outermost first: a tuple."
        sent = [dict(self.case.sent)[axis] for axis in self.order]
        if self.turned == self.best and sent == sorted(sent, reverse=True):
            return "Reversed: the axis that is named last joins neighbors, inside a host."
        return (
            f"{self.found:,} bytes on the busiest uplink, and another order has {self.best:,}. "
            "What an axis costs depends on what it sends and on how many of its neighbors are on "
            "another host: two small axes may fit where the one that sends most does. There are "
            "few orders; uplink_bytes tells what each costs."
        )


# ---- two exchanged ranks ------------------------------------------------------------------------


@dataclass(frozen=True)
class Cabled:
    """A ring of ranks, of which two were exchanged. Other pairs of ranks send small messages."""

    size: int
    pair: tuple[int, int] | None
    most: int = 1_000_000  # bytes that a rank sends to the next

    def __str__(self) -> str:
        return f"{self.size} places, " + (f"{self.pair} exchanged" if self.pair else "all in order")

    def traffic(self) -> list[list[int]]:
        rank_at = list(range(self.size))
        if self.pair:
            a, b = self.pair
            rank_at[a], rank_at[b] = rank_at[b], rank_at[a]
        place_of = {rank: place for place, rank in enumerate(rank_at)}
        bytes_of = [
            [(1000 + (7 * i + 3 * j) % 50 * 100) * (place != j) for j in range(self.size)]
            for place, i in enumerate(rank_at)
        ]
        for rank in range(self.size):
            bytes_of[place_of[rank]][place_of[(rank + 1) % self.size]] += self.most
        return bytes_of


def swapped_trial(fn, case: Cabled, group):
    return plain(fn(case.traffic()))


class Found(Measured):
    def measure(self):
        came = self.results[0]
        self.came = tuple(came) if isinstance(came, list) else came
        self.wanted = self.case.pair

    def lines(self) -> list[Line]:
        return [line("exchanged", self.came, self.wanted)]

    def mistake(self) -> str:
        if self.wanted is None:
            return "Nothing is exchanged here, every place sends to the next one: return None."
        if not isinstance(self.came, tuple) or len(self.came) != 2:
            return "Return the two places, the smaller one first: (a, b). The matrix tells both."
        if self.came == self.wanted[::-1]:
            return "Right, but put the smaller index first."
        return (
            f"Not {self.came}. Put the two ranks back: then every place has to send its most to "
            "the next one, and the last to the first. Some ranks send wrongly only because their "
            "neighbor is wrong."
        )


EXERCISES = [
    Exercise(
        "all_reduce_on_hosts",
        collectives.hierarchical_all_reduce,
        all_reduce_trial,
        [
            (4, Placed((0, 0, 1, 1), (1000,))),
            (4, Placed((3, 9, 3, 9), (8, 5))),
            (4, Placed((1, 1, 0, 0), (3,), torch.int64)),
            (4, Placed((0, 0, 0, 0), (5,))),
            (3, Placed((0, 1, 2), (7,))),
            (6, Placed((2, 0, 1, 1, 0, 2), (36,))),
        ],
        OnHosts,
        hints=[
            "Three rings, one after the other. Which ranks are in each, and what do they pass on?",
            "inside = Members(group, ranks of my host). The rank with the same index in every "
            "other host has the same chunk after ring_reduce_scatter(flat, inside).",
        ],
        skeleton="""
def all_reduce_on_hosts(x, hosts, group):
    mine = hosts[group.rank()]
    inside = Members(group, ...)           # the ranks of my host
    across = Members(group, ...)           # of every host the rank at my place
    flat = x.flatten()
    chunk = ring_reduce_scatter(flat, inside)
    chunk = ...
    sizes = split_sizes(len(flat), inside.size())
    return ring_all_gather(chunk, inside, sizes).view(x.shape)
""",
        refuses=[
            collectives.hierarchical_all_gather,
            collectives.hierarchical_reduce_scatter,
            collectives.pipelined_hierarchical_all_reduce,
            collectives.torus_all_reduce,
        ],
        answer=(answers.all_reduce_on_hosts,),
    ),
    Exercise(
        "order_on_hosts",
        order_on_hosts,
        order_trial,
        [
            (1, Axes((("tp", 4), ("dp", 4)), (("tp", 100), ("dp", 10)))),
            (1, Axes((("dp", 4), ("tp", 4)), (("tp", 100), ("dp", 10)))),
            # One order is best in each case. Sorting by size or by bytes sent misses some of them.
            (1, Axes((("a", 2), ("b", 2), ("c", 3)), (("a", 7), ("b", 8), ("c", 4)), 3)),
            (1, Axes((("a", 3), ("b", 2), ("c", 2)), (("a", 2), ("b", 4), ("c", 20)), 3)),
            (1, Axes((("a", 2), ("b", 2), ("c", 4)), (("a", 7), ("b", 3), ("c", 9)))),
            (1, Axes((("a", 4), ("b", 2), ("c", 2)), (("a", 6), ("b", 5), ("c", 1)))),
            (1, Axes((("a", 2), ("b", 3), ("c", 2)), (("a", 7), ("b", 1), ("c", 6)), 3)),
            (1, Axes((("a", 4), ("b", 8)), (("a", 9), ("b", 8)), 8)),
            (1, Axes((("a", 8), ("b", 2)), (("a", 4), ("b", 1)), 2)),
        ],
        Ordered,
        hints=[
            "Which ranks share a host? Ranks that differ only in the innermost axes: in "
            "the last axis first, then also in the one before it.",
            "Try every order: itertools.permutations(axes). uplink_bytes(Grid(**ordered), sent, "
            "hosts) tells what the busiest host sends; rank r is on host r // ranks_per_host.",
        ],
        skeleton="""
def order_on_hosts(axes, sent, ranks_per_host):
    size = math.prod(axes.values())
    hosts = ...                            # of each rank

    def busiest(order):
        return uplink_bytes(Grid(...), sent, hosts)

    return min(..., key=busiest)
""",
    ),
    Exercise(
        "find_exchanged",
        answers.find_exchanged,
        swapped_trial,
        [
            (1, Cabled(8, (2, 5))),
            (1, Cabled(8, None)),
            (1, Cabled(8, (3, 4))),
            (1, Cabled(6, (0, 5))),
            (1, Cabled(5, (0, 2))),
            (1, Cabled(5, (3, 4))),
            (1, Cabled(16, (1, 9))),
            (1, Cabled(7, (0, 5))),
            (1, Cabled(9, (1, 8), most=20_000)),
        ],
        Found,
        hints=[
            "To which index does each rank send most? In a correct ring, to the next.",
            "Try all pairs: with these two put back, does every rank send to the next rank?",
        ],
        skeleton="""
def find_exchanged(traffic):
    n = len(traffic)
    after = [row.index(max(row)) for row in traffic]    # where each place sends most
    for a, b in itertools.combinations(range(n), 2):
        rank_at = list(range(n))
        rank_at[a], rank_at[b] = b, a
        if all(...):
            return a, b
""",
    ),
]
