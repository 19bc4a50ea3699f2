"""A product of two tensors on a mesh: moves before, a local product, moves after.

Along each axis of the mesh, the ranks' local products differ in one dim, or in nothing:

    they differ in     A . B -> C                                  then C is
    a dim of A and C   A[I_X, J] . B[J, K]                         C[I_X, K]
    a dim of B and C   A[I, J] . B[J, K_X]                         C[I, K_X]
    a dim of both      A[I, J_X] . B[J_X, K]                       C[I, K]{X}, a sum still due
    a term of one      A[I, J]{X} . B[J, K]                        C[I, K]{X}
    nothing            A[I, J] . B[J, K]                           C[I, K], replicated work

The first four rules are complete; everything else is a move before or after (moves.py).  The plan
is the choice, axis by axis, that sends fewest bytes; of equals the one with the fewest
collectives, then with the least to multiply.  It does not guess: it tries all choices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from mini_dist.plan.calculators import hardware
from mini_dist.plan.calculators.machines import Hardware
from mini_dist.plan.fields import checks_kinds

from .moves import Move, cheapest_way, frozen, ways_from
from .notation import Placed, check_numbers, check_sizes, parse, ways


@dataclass(frozen=True)
class Local:
    """What a rank multiplies: its placements of the one or two inputs and of the output."""

    inputs: tuple[Placed, ...]
    result: Placed


@dataclass(frozen=True)
class ProductPlan:
    """How an expression is computed. before: the moves of each input; after: of the result."""

    inputs: tuple[Placed, ...]
    result: Placed
    before: tuple[tuple[Move, ...], ...]
    local: Local
    after: tuple[Move, ...]
    sizes: tuple[tuple[str, int], ...]
    mesh: tuple[tuple[str, int], ...]

    @property
    def moves(self) -> list[Move]:
        return [*itertools.chain(*self.before), *self.after]

    @property
    def collectives(self) -> list[Move]:
        """Return the moves that send something, in order."""
        return [move for move in self.moves if move.op != "slice"]

    @property
    def sent(self) -> int:
        """Return the bytes that all ranks of the mesh send together."""
        return sum(move.sent for move in self.moves)

    @property
    def sent_by_a_rank(self) -> float:
        """Return the mean bytes per rank; every rank sends this if a ring's chunks are equal."""
        return self.sent / math.prod(size for _, size in self.mesh)

    @property
    def flops(self) -> int:
        """Return one rank's FLOPs: two per product of two numbers. Its share, if all axes cut a
        dim."""
        return flops_of(self.local, dict(self.sizes), dict(self.mesh))

    def seconds(self, machine: Hardware | str) -> float:
        """Return the time on a machine without overlap: the moves as rings, and the product."""
        machine = hardware(machine)
        moved = sum(move.seconds(machine, dict(self.mesh)) for move in self.moves)
        return moved + self.flops / machine.device.gemm_rate

    def __str__(self) -> str:
        lines = [f"{' . '.join(map(str, self.inputs))} -> {self.result}"]
        if len(self.inputs) == 1:
            lines += [f"  {move}{told(move)}" for move in self.moves]
        else:
            lines += [f"  {move}{told(move)}" for way in self.before for move in way]
            lines.append(
                f"  local: {' . '.join(map(str, self.local.inputs))} -> {self.local.result}"
            )
            lines += [f"  {move}{told(move)}" for move in self.after]
        lines.append(f"  {self.sent:,} bytes by all ranks")
        return "\n".join(lines)


def told(move: Move) -> str:
    return f"  ({move.nbytes:,} bytes, {move.sent:,} sent)" if move.sent else ""


@checks_kinds
def product(
    expression: str, mesh: Mapping[str, int], itemsize: int = 4, share: bool = False, **sizes: int
) -> ProductPlan:
    """Plan `A[I_X, J] . B[J, K] -> C[I, K]`, or `A[I_X, J] -> A[I, J]`, which only moves.

    mesh: sizes of the axes; the last axis joins neighbors. itemsize: bytes per number. share:
    along each axis ranks must multiply different data, so that no work is repeated.
    sizes: of the dims.  Raises ValueError with one sentence for an impossible expression.
    """
    check_numbers({**mesh, "itemsize": itemsize, **sizes})
    inputs, result = parse(expression, mesh)
    sizes = check_sizes([*inputs, result], sizes, mesh)
    if len(inputs) == 1:
        return rearranged(inputs[0], result, sizes, mesh, itemsize)
    plans = candidates(inputs, result, sizes, mesh, itemsize, share)
    best = min(plans, key=by_bytes, default=None)
    if best is None:
        dims = ", ".join(f"{dim}={size}" for dim, size in sizes.items())
        axes = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
        raise ValueError(
            f"{expression}: no product of pieces gives this with {dims} on {axes}; make a dim a "
            "multiple of its axes, or leave out share"
        )
    return best


def by_bytes(plan: ProductPlan) -> tuple[int, int, int, int]:
    """Sort by bytes; of equals by number of collectives, then by the local product's size."""
    return plan.sent, len(plan.collectives), plan.flops, len(plan.moves)


def rearranged(
    start: Placed, end: Placed, sizes: dict, mesh: Mapping, itemsize: int
) -> ProductPlan:
    if {*start.dims} != {*end.dims} or start.dims != end.dims:
        raise ValueError(
            f"{start} -> {end}: a tensor that only moves keeps its dims in their order"
        )
    end = Placed(start.name, end.cuts, end.due)
    way = cheapest_way(start, end, sizes, mesh, itemsize)
    return ProductPlan((start,), end, (way,), Local((end,), end), (), frozen(sizes), frozen(mesh))


def candidates(
    inputs: list[Placed],
    result: Placed,
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
    itemsize: int = 4,
    share: bool = False,
) -> Iterator[ProductPlan]:
    """Yield every plan: one for each choice of what ranks differ in along each axis."""
    dims, axes = frozen(sizes), frozen(mesh)
    from_inputs = [ways_from(each, dims, axes, itemsize) for each in inputs]
    for local in locals_of(inputs, result, sizes, mesh, share):
        before = [ways.get(at) for ways, at in zip(from_inputs, local.inputs)]
        after = ways_from(local.result, dims, axes, itemsize).get(result)
        if after is not None and None not in before:
            yield ProductPlan(tuple(inputs), result, tuple(before), local, after, dims, axes)


def locals_of(inputs, result, sizes, mesh, share) -> tuple[Local, ...]:
    """Return every product of pieces: what the ranks differ in, axis by axis, by the rules
    above."""
    wholes = [
        Placed(each.name, tuple((dim, ()) for dim in each.dims)) for each in (*inputs, result)
    ]
    summands = tuple(each.due for each in inputs)
    return products_of_pieces(tuple(wholes), summands, frozen(sizes), frozen(mesh), share)


@cache
def products_of_pieces(wholes, summands, sizes, mesh, share) -> tuple[Local, ...]:
    """Return the products for all tensors of these dims. summands: axes with terms of an input."""
    sizes, mesh, (*inputs, result) = dict(sizes), dict(mesh), wholes
    axes = [axis for axis, size in mesh.items() if size > 1]
    found = []
    for choice in itertools.product(
        *(
            [*sizes, *(n for n, due in enumerate(summands) if axis in due), *[None] * (not share)]
            for axis in axes
        )
    ):
        role = dict(zip(axes, choice))  # axis -> a dim, which input has terms, or nothing
        cut_by = [[axis for axis in axes if role[axis] == dim] for dim in sizes]
        for orders in itertools.product(*map(itertools.permutations, cut_by)):
            order = dict(zip(sizes, orders))
            if any(sizes[dim] % ways(order[dim], mesh) for dim in sizes):
                continue
            pieces = tuple(
                Placed(
                    each.name,
                    tuple((dim, order[dim]) for dim in each.dims),
                    frozenset(axis for axis in axes if role[axis] == number),
                )
                for number, each in enumerate(inputs)
            )
            summed = [axis for dim in sizes if dim not in result.dims for axis in order[dim]]
            out = tuple((dim, order[dim]) for dim in result.dims)
            due = frozenset(summed).union(*(piece.due for piece in pieces))
            found.append(Local(pieces, Placed(result.name, out, due)))
    return tuple(found)


def flops_of(local: Local, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> int:
    if len(local.inputs) < 2:
        return 0
    cuts = {dim: axes for piece in local.inputs for dim, axes in piece.cuts}
    return 2 * math.prod(sizes[dim] // ways(axes, mesh) for dim, axes in cuts.items())
