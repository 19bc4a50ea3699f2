"""The notation: `A[I_X, J_Y]{Z}`, a tensor of dims I and J on a mesh with axes X, Y and Z.

A[I, J]        every rank has all of A
A[I_X, J]      dim I is cut into as many pieces as axis X has ranks, in the order of the axis
A[I_X_Y, J]    cut over X, and each piece once more over Y
A[I, J]{X}     each rank along X has a term of A: the sum over X is still due
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mini_dist.plan.fields import whole

from ..divides import check_divides

Axes = tuple[str, ...]
TENSOR = re.compile(r"\s*(\w+)\s*\[([^\]]*)\]\s*(?:\{([^}]*)\})?\s*")
EXAMPLE = "write A[I_X, J] . B[J, K] -> C[I_X, K], or A[I_X, J] -> A[I, J]"


@dataclass(frozen=True)
class Placed:
    """How the ranks of a mesh hold a tensor. cuts: a pair (dim, axes that cut it) for each dim, in
    order. due: the axes along which each rank has only a term of a sum."""

    name: str
    cuts: tuple[tuple[str, Axes], ...]
    due: frozenset[str] = frozenset()

    @property
    def dims(self) -> tuple[str, ...]:
        return tuple(dim for dim, _ in self.cuts)

    def axes_of(self, dim: str) -> Axes:
        return dict(self.cuts)[dim]

    @property
    def used(self) -> frozenset[str]:
        """Return the axes along which ranks hold different data."""
        return self.due.union(*(axes for _, axes in self.cuts))

    def with_cut(self, dim: str, axes: Axes) -> Placed:
        """Return the same placement with other axes for one dim."""
        return Placed(
            self.name,
            tuple((d, axes if d == dim else its) for d, its in self.cuts),
            self.due,
        )

    def with_due(self, due) -> Placed:
        return Placed(self.name, self.cuts, frozenset(due))

    def local_shape(self, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of a rank's piece. sizes: of the dims; mesh: of the axes."""
        return tuple(sizes[dim] // ways(axes, mesh) for dim, axes in self.cuts)

    def __str__(self) -> str:
        dims = ", ".join("_".join((dim, *axes)) for dim, axes in self.cuts)
        due = "{" + ", ".join(sorted(self.due)) + "}" if self.due else ""
        return f"{self.name}[{dims}]{due}"


def ways(axes: Axes, mesh: Mapping[str, int]) -> int:
    """Return the number of pieces into which these axes cut."""
    number = 1
    for axis in axes:
        number *= mesh[axis]
    return number


def parse(text: str, mesh: Mapping[str, int]) -> tuple[list[Placed], Placed]:
    """Parse `A[I_X, J] . B[J, K] -> C[I_X, K]` -> (the input tensors, the output tensor).

    One input tensor is moved to another placement. Two are multiplied and summed over the dims
    that the result does not have; `.`, `@` and `·` mean the same.  Raises
    ValueError with one sentence for an impossible expression.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError(f"{text!r} has no ->: {EXAMPLE}")
    inputs = [one_tensor(part, mesh) for part in re.split(r"[.@·]", left)]
    if len(inputs) > 2:
        raise ValueError(f"{left.strip()!r} has {len(inputs)} tensors, 1 or 2 can go in: {EXAMPLE}")
    result = one_tensor(right, mesh)
    check_dims(inputs, result)
    return inputs, result


def one_tensor(text: str, mesh: Mapping[str, int]) -> Placed:
    """Read `A[I_X, J]{Y}`."""
    found = TENSOR.fullmatch(text)
    if not found:
        raise ValueError(f"{text.strip()!r} is no tensor with its dims in brackets: {EXAMPLE}")
    name, dims, due = found.groups()
    cuts = []
    for word in dims.split(","):
        dim, *axes = word.strip().split("_")
        if not dim or "" in axes:
            raise ValueError(f"{word.strip()!r} in {text.strip()!r} is no dim: {EXAMPLE}")
        cuts.append((dim, tuple(axes)))
    summed = [axis.strip() for axis in due.split(",")] if due else []
    check_axes(text.strip(), cuts, summed, mesh)
    wide = [axis for axis, size in mesh.items() if size > 1]  # an axis of one rank cuts nothing
    cuts = [(dim, tuple(axis for axis in axes if axis in wide)) for dim, axes in cuts]
    return Placed(name, tuple(cuts), frozenset(axis for axis in summed if axis in wide))


def check_axes(text: str, cuts: list, summed: list[str], mesh: Mapping[str, int]) -> None:
    """Raise ValueError for a dim or an axis that appears twice, or is not in the mesh."""
    dims = [dim for dim, _ in cuts]
    for dim in dims:
        if dims.count(dim) > 1:
            raise ValueError(f"{text}: dim {dim} stands there twice; give each dim its own letter")
    used = [axis for _, axes in cuts for axis in axes] + summed
    for axis in used:
        if axis not in mesh:
            known = ", ".join(f"{name}={size}" for name, size in mesh.items())
            both = f"; for both axes write _{'_'.join(axis)}" * (
                len(axis) > 1 and {*axis} <= {*mesh}
            )
            raise ValueError(f"{text}: the mesh has no axis {axis!r}, it has {known}{both}")
        if used.count(axis) > 1:
            raise ValueError(
                f"{text}: axis {axis} is used twice; along one axis a tensor can be cut in one dim "
                "only, or be a summand"
            )


def check_dims(inputs: list[Placed], result: Placed) -> None:
    """Raise ValueError for dims that only the result or only one input has."""
    known = {dim for each in inputs for dim in each.dims}
    if new := [dim for dim in result.dims if dim not in known]:
        raise ValueError(f"{result} has a dim {new[0]} that is in none of {listed(inputs)}")
    for each in inputs:
        for dim in each.dims:
            alone = sum(dim in other.dims for other in inputs) == 1
            if alone and dim not in result.dims:
                raise ValueError(
                    f"dim {dim} is in {each} only, and not in {result}: a dim that is summed over "
                    "has to be in both tensors"
                )


def check_sizes(
    tensors: list[Placed], sizes: Mapping[str, int], mesh: Mapping[str, int]
) -> dict[str, int]:
    """Return the sizes of these dims; ValueError if one is missing, or its axes do not divide
    it."""
    for each in tensors:
        for dim, axes in each.cuts:
            if dim not in sizes:
                raise ValueError(f"{each}: how long is dim {dim}? Give {dim}=... as well")
            if axes:
                by = f"{each}: {' * '.join(axes)} = {ways(axes, mesh)}"
                check_divides(ways(axes, mesh), sizes[dim], dim, by)
    return {dim: sizes[dim] for each in tensors for dim in each.dims}


def check_numbers(numbers: Mapping[str, int]) -> None:
    """Raise ValueError for a size of a dim, an axis or a number that is not an integer >= 1."""
    for name, value in numbers.items():
        whole(name, value)


def listed(tensors: list[Placed]) -> str:
    return " and ".join(map(str, tensors))


def placements(
    name: str, dims: tuple[str, ...], mesh: Mapping[str, int], sizes: Mapping[str, int]
) -> Iterator[Placed]:
    """Yield every way to cut a tensor over the axes of a mesh that divide its dims."""
    axes = [axis for axis, size in mesh.items() if size > 1]
    for choice in itertools.product((None, *dims), repeat=len(axes)):
        chosen = [[a for a, c in zip(axes, choice) if c == dim] for dim in dims]
        for orders in itertools.product(*map(itertools.permutations, chosen)):
            if all(sizes[dim] % ways(order, mesh) == 0 for dim, order in zip(dims, orders)):
                yield Placed(name, tuple(zip(dims, orders)))
