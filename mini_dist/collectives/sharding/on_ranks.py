"""Execute a plan on ranks with the course's own collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_dist import collectives

from ..mesh import Mesh
from .moves import Move
from .notation import Placed
from .products import ProductPlan


def run(
    plan: ProductPlan, tensors: Sequence[Tensor], mesh: Mesh, once: dict[Move, Tensor] | None = None
) -> Tensor:
    """Compute this rank's piece of the result from its input pieces; all ranks of the mesh call it.

    once: tensors that other plans have already moved; they are not moved again.
    Raises ValueError for a mesh or a piece that does not fit the plan.
    """
    check_pieces(plan, tensors, mesh)
    moved, once = [], {} if once is None else once
    for x, way in zip(tensors, plan.before):
        for move in way:
            if move not in once:
                once[move] = carry_out(move, x, mesh)
            x = once[move]
        moved.append(x)
    if len(moved) == 1:
        return moved[0]
    y = multiply(plan, *moved)
    for move in plan.after:
        y = carry_out(move, y, mesh)
    return y


def multiply(plan: ProductPlan, a: Tensor, b: Tensor) -> Tensor:
    """Compute the local product: sum over the dims that the result does not have."""
    number = {dim: place for place, (dim, _) in enumerate(plan.sizes)}
    places = [[number[dim] for dim in each.dims] for each in (*plan.inputs, plan.result)]
    return torch.einsum(a, places[0], b, places[1], places[2])


def carry_out(move: Move, x: Tensor, mesh: Mesh) -> Tensor:
    """Execute one move of this rank's piece."""
    group, before, after = mesh[move.axes], move.before.axes_of, move.after.axes_of
    fewer = [i for i, dim in enumerate(move.before.dims) if len(after(dim)) < len(before(dim))]
    more = [i for i, dim in enumerate(move.before.dims) if len(after(dim)) > len(before(dim))]
    if move.op == "slice":
        return x.chunk(group.size(), more[0])[group.rank()]
    if move.op == "all_gather":
        return collectives.all_gather(x, group, dim=fewer[0], algorithm="ring")
    if move.op == "reduce_scatter":
        return collectives.reduce_scatter(x, group, dim=more[0], algorithm="ring")
    if move.op == "all_reduce":
        return collectives.all_reduce(x, group, algorithm="ring")
    parts = torch.stack(x.chunk(group.size(), more[0]))  # one for each rank
    return torch.cat([*collectives.all_to_all(parts, group)], fewer[0])


def piece(whole: Tensor, placed: Placed, mesh: Mesh) -> Tensor:
    """Return this rank's piece of a tensor that all ranks have. Raises ValueError if a sum is due,
    because it can be split into terms in many ways."""
    if placed.due:
        raise ValueError(f"{placed} is not the piece of a tensor: give each rank its summand")
    for dim, (_, axes) in enumerate(placed.cuts):
        for axis in axes:
            whole = whole.chunk(mesh[axis].size(), dim)[mesh.index(axis)]
    return whole.contiguous()


def check_pieces(plan: ProductPlan, tensors: Sequence[Tensor], mesh: Mesh) -> None:
    if dict(plan.mesh) != dict(mesh.axes) or [*dict(plan.mesh)] != [*mesh.axes]:
        raise ValueError(f"the plan is for the mesh {dict(plan.mesh)}, and this is {mesh.axes}")
    if len(tensors) != len(plan.inputs):
        raise ValueError(f"{len(tensors)} tensors came for the {len(plan.inputs)} of {plan.inputs}")
    for x, placed in zip(tensors, plan.inputs):
        shape = placed.local_shape(dict(plan.sizes), dict(plan.mesh))
        if tuple(x.shape) != shape:
            raise ValueError(
                f"this rank's piece of {placed} has the shape {tuple(x.shape)}, and with "
                f"{dict(plan.sizes)} on {dict(plan.mesh)} it is {shape}"
            )
