"""Which ranks of a large world do the same: found by what they do.

The groups of rank 0 say how the world is laid out: an axis joins ranks that stand `stride` apart.
Along each axis we run the ranks at index 0, 1 and the end, and compare what they did. An axis along
which all three did the same makes no difference, and along another only the first rank may differ.
Else each index is a kind of its own. One rank of each kind stands for all of them. Of each kind a
second rank is run, drawn at random, because these are guesses. A rank that is asked to be slow is
of a kind of its own.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from ..ledger.counting import Begin, Enter, Host, Kernel, Leave, Wait

ALIKE = 0.01  # a round number: costs that differ by less are those of one kind of rank


@dataclass(frozen=True)
class Axis:
    """An axis of the world: rank // stride % size is a rank's index along it."""

    name: str
    stride: int
    size: int

    def probes(self) -> list[int]:
        """The indices that are looked at."""
        return sorted(set(self.three()))

    def parts(self, did: dict[int, Did]) -> list[range]:
        """Cut the indices into those that do the same. did: index of a probe -> what it did."""
        first, second, last = (did[i] for i in self.three())
        n = self.size
        if second.alike(last):
            return [range(n)] if first.alike(second) else [one(0), range(1, n)]
        return [one(index) for index in range(n)]

    def three(self) -> tuple[int, int, int]:
        return 0, min(1, self.size - 1), self.size - 1


def apart(parts: list[range], index: int) -> list[range]:
    """Cut the parts so that this index has one of its own."""
    pieces = [
        piece
        for part in parts
        for piece in (
            (range(part.start, index), one(index), range(index + 1, part.stop))
            if index in part
            else (part,)
        )
    ]
    return [piece for piece in pieces if piece]


def one(index: int) -> range:
    return range(index, index + 1)


def axes_of(groups: dict[str, list[int]], names: dict[str, str], world_size: int) -> list[Axis]:
    """The axes that rank 0's groups tell of, innermost first; together they are the whole world."""
    found = [Axis("", 1, 1)]
    for name, ranks in groups.items():
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 0
        even = stride > 0 and ranks == list(range(0, len(ranks) * stride, stride))
        if even and len(ranks) < world_size and "*" not in names.get(name, "*"):
            found.append(Axis(names[name], stride, len(ranks)))
    axes, inside = [], 1
    for axis in sorted(found, key=lambda axis: (axis.stride, -axis.size)):
        if axis.stride == inside and axis.size > 1:
            axes.append(axis)
            inside *= axis.size
    if world_size % inside:
        return [Axis("world", 1, world_size)]
    if inside < world_size:
        axes.append(Axis("world", inside, world_size // inside))
    return axes


@dataclass(frozen=True)
class Kinds:
    """The kinds of ranks of a world. parts: for each axis, innermost first, its indices in parts
    that do the same."""

    axes: list[Axis]
    parts: list[list[range]]

    def firsts(self) -> list[int]:
        """The first rank of each kind."""
        return [rank for rank, _ in self.members()]

    def members(self):
        """For each kind its first rank, and the indices of its ranks along each axis."""
        for parts in itertools.product(*reversed(self.parts)):
            parts = parts[::-1]
            yield sum(p.start * a.stride for p, a in zip(parts, self.axes)), parts

    def sizes(self) -> list[int]:
        sizes = []
        for _, parts in self.members():
            size = 1
            for part in parts:
                size *= len(part)
            sizes.append(size)
        return sizes

    def another(self, draw, known) -> list[int | None]:
        """For each kind a rank other than its first: one that is known already, or drawn at random;
        None where there is none."""
        found = []
        for number, (first, parts) in enumerate(self.members()):
            also = [rank for rank in known if rank != first and self.of(rank) == number]
            if also:
                found.append(also[-1])
                continue
            rank = sum(draw.choice(p) * a.stride for p, a in zip(parts, self.axes))
            if rank == first:
                rank = sum(p[-1] * a.stride for p, a in zip(parts, self.axes))
            found.append(rank if rank != first else None)
        return found

    def of(self, rank: int) -> int:
        """The number of the kind that this rank is of."""
        number = 0
        for axis, parts in zip(reversed(self.axes), reversed(self.parts)):
            index = rank // axis.stride % axis.size
            number = number * len(parts) + next(i for i, p in enumerate(parts) if index in p)
        return number


class Did(NamedTuple):
    """What a rank did, in short.

    order: a digest of its operations and of whom it spoke to, in order, without sizes; between
    backward and the next forward, without kernels. costs: FLOPs, bytes that kernels touched, bytes
    sent, peak of memory.
    """

    order: str
    costs: tuple[float, ...]

    def alike(self, other: Did) -> bool:
        """The same operations in the same order, and all costs within ALIKE of each other. ZeRO
        cuts flat buffers, so two ranks' shards hold parts of different numbers of parameters: in
        the optimizer's step ranks may differ by some small kernels and still be of one kind."""
        return self.order == other.order and all(
            abs(a - b) <= ALIKE * max(a, b) for a, b in zip(self.costs, other.costs)
        )


def what_it_did(rank: int, export: dict) -> Did:
    digests = defaultdict(hashlib.sha256)  # of each thread: between threads, order is chance
    begun, counts = {}, Counter()  # comm -> its thread, and its number in it
    flops = touched = sent = 0
    for thread, event in export["program"]:
        if isinstance(event, Begin):
            # The ledger's own number depends on which of two threads was faster.
            begun[event.comm] = thread, counts[thread]
            counts[thread] += 1
            op, name, dtype, nbytes, detail, *_ = export["comms"][event.comm]
            members = export["groups"][name]
            if op in ("send", "recv"):
                detail = (detail - members.index(rank)) % len(members)
            sent += nbytes
            axis = export["axes"].get(name, "")
            detail = detail if isinstance(detail, int) else ""
            event = (op, axis, dtype, detail, len(members), event.tag)
        elif isinstance(event, Kernel):
            flops, touched = flops + event.flops, touched + event.nbytes
            if event.phase == "step":
                continue
            event = event.name
        elif isinstance(event, Wait):
            event = "wait", begun[event.comm]
        elif isinstance(event, (Enter, Leave)):
            event = type(event).__name__, export["comms"][event.comm][0]
        if not isinstance(event, Host):
            digests[thread].update(str(event).encode())
    order = " ".join(digests[thread].hexdigest() for thread in sorted(digests))
    return Did(order, (flops, touched, sent, export["memory"].peak_bytes()))
