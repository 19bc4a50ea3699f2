"""From one placement of a tensor to another: five moves, and the cheapest path through them.

    move            from               to                 bytes per rank, as a part of N*
    slice           A[I]               A[I_X]             nothing: it keeps its piece
    all_gather      A[I_X]             A[I]               (n - 1)/n
    reduce_scatter  A[I]{X}            A[I_X]             (n - 1)/n
    all_reduce      A[I]{X}            A[I]               2 (n - 1)/n
    all_to_all      A[I_X, J]          A[I, J_X]          (n - 1)/n

* N: the tensor of the collective on one rank, the output of an all_gather and the input of the
others (calculators/costs.py).  n: ranks along X.  If X_Y cut a dim, Y moves first.  A sixth move,
the permutation from A[I_X] to A[I_Y] for (n - 1)/n of a piece, is missing here: XLA has it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from mini_dist.plan.calculators import costs, hardware
from mini_dist.plan.calculators.machines import Hardware
from mini_dist.plan.fields import checks_kinds

from .notation import Placed, ways


@dataclass(frozen=True)
class Move:
    """One step. nbytes: N of the table above; sent: bytes by all ranks of the mesh together."""

    op: str
    axes: tuple[str, ...]
    before: Placed
    after: Placed
    nbytes: int
    sent: int

    def __str__(self) -> str:
        return f"{self.op} {'*'.join(self.axes)}: {self.before} -> {self.after}"

    def seconds(self, machine: Hardware | str, mesh: Mapping[str, int]) -> float:
        """Return the time as a ring on the axes' links: the last axes of the mesh are inside a
        node."""
        if not self.sent:
            return 0.0
        machine, size = hardware(machine), math.prod(mesh[axis] for axis in self.axes)
        names = list(mesh)
        first = min(map(names.index, self.axes))
        spans = math.prod(mesh[name] for name in names[first:])  # distance between its neighbors
        inside = spans <= machine.devices_per_node
        link = machine.node_link(self.op) if inside else machine.network_link()
        cost = getattr(costs, self.op)(self.nbytes, size, link=link, **ring_of(self.op))
        return cost.seconds


def ring_of(op: str) -> dict[str, str]:
    return {} if op == "all_to_all" else {"algorithm": "ring"}


def moves(
    at: Placed, sizes: Mapping[str, int], mesh: Mapping[str, int], itemsize: int
) -> Iterator[Move]:
    """Return every move that is possible from this placement."""
    local = itemsize * math.prod(at.local_shape(sizes, mesh))

    def left(dim: str) -> int:
        return sizes[dim] // ways(at.axes_of(dim), mesh)

    def move(op: str, axes: tuple, after: Placed, nbytes: int = local, passes: int = 1) -> Move:
        n = ways(axes, mesh)
        groups = math.prod(mesh.values()) // n
        return Move(op, axes, at, after, nbytes, passes * (n - 1) * nbytes * groups)

    for dim, axes in at.cuts:
        for axis in mesh:
            fits = mesh[axis] > 1 and left(dim) % mesh[axis] == 0
            after = at.with_cut(dim, (*axes, axis))
            if fits and axis not in at.used:
                yield move("slice", (axis,), after, passes=0)
            if fits and axis in at.due:
                after = after.with_due(at.due - {axis})
                yield move("reduce_scatter", (axis,), after)
        if axes:
            *rest, last = axes
            without = at.with_cut(dim, tuple(rest))
            yield move("all_gather", (last,), without, mesh[last] * local)
            for other, its in at.cuts:
                if other != dim and left(other) % mesh[last] == 0:
                    yield move("all_to_all", (last,), without.with_cut(other, (*its, last)))
    due = [axis for axis in mesh if axis in at.due]
    for axes in (some for number in range(len(due)) for some in combinations(due, number + 1)):
        yield move("all_reduce", axes, at.with_due(at.due - {*axes}), passes=2)


@checks_kinds
def cheapest_way(
    start: Placed, end: Placed, sizes: Mapping[str, int], mesh: Mapping[str, int], itemsize: int = 4
) -> tuple[Move, ...]:
    """Return the moves from `start` to `end` that send fewest bytes; of equals the fewest moves.

    Raises ValueError if there is no path: no move turns a whole tensor into summands.
    """
    found = ways_from(start, frozen(sizes), frozen(mesh), itemsize).get(end)
    if found is None:
        raise ValueError(
            f"no move leads from {start} to {end}: a sum can be made, or cut, but not taken apart "
            f"again; leave {{{', '.join(sorted(end.due - start.due))}}} away"
        )
    return found


def frozen(numbers: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(numbers.items())


@cache
def ways_from(start: Placed, sizes: tuple, mesh: tuple, itemsize: int) -> dict[Placed, tuple]:
    """Return the cheapest moves from one placement to all reachable ones (Dijkstra 1959)."""
    sizes, mesh = dict(sizes), dict(mesh)
    reached: dict[Placed, tuple] = {}
    number = 0  # so that equals are taken in the order in which they were found
    ahead = [(0, 0, number, start, ())]
    while ahead:
        sent, calls, _, at, way = heapq.heappop(ahead)
        if at in reached:
            continue
        reached[at] = way
        for move in moves(at, sizes, mesh, itemsize):
            if move.after not in reached:
                number += 1
                later = (sent + move.sent, calls + 1, number, move.after, (*way, move))
                heapq.heappush(ahead, later)
    return reached
