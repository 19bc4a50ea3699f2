"""PyTorch's DTensor: what it issues for the shardings of lesson 23, read from the ledger.

DTensor decides when an operation is called, from the placements of its inputs. The result gets the
placement that follows, and is redistributed if the caller asks for another one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from mini_dist.collectives.mesh import Mesh
from mini_dist.collectives.sharding.notation import Placed, parse
from mini_dist.collectives.sharding.on_ranks import piece
from mini_dist.ranks.launch import launch


@dataclass
class Issued:
    """calls: the collectives of rank 0, each as "op axis". sent: bytes sent by all ranks together.
    right: whether every rank has its piece of what one process computes."""

    calls: list[str]
    sent: int
    right: bool


def issued(expressions: list[str], axes: dict[str, int], sizes: dict[str, int]) -> list[Issued]:
    """Run expressions in DTensor on the ranks of the mesh `axes` and return what each one sent."""
    run = launch(compute, math.prod(axes.values()), (expressions, axes, sizes), quiet=True)
    found = [Issued([], 0, all(each)) for each in zip(*(right for _, right in run.results))]
    for rank, (bounds, _) in enumerate(run.results):
        rows = [comm for comm in run.ledger.comms if comm.rank == rank]
        for each, start, end in zip(found, bounds, bounds[1:]):
            each.sent += sum(comm.sent for comm in rows[start:end] if comm.is_leaf)
            if rank == 0:
                each.calls = [f"{comm.op} {comm.axis}" for comm in rows[start:end]]
    return found


def compute(
    expressions: list[str], axes: dict[str, int], sizes: dict[str, int], group
) -> tuple[list[int], list[bool]]:
    """Return, on a rank, how many communications came before each expression and in total, and
    whether this rank's piece of each result is right."""
    mesh = Mesh(group, **axes)
    ranks = torch.arange(group.size()).view(*axes.values())
    groups = [mesh[axis] for axis in axes]
    device_mesh = DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=tuple(axes))
    bounds, right, dice = [len(group.recorder.comms)], [], torch.Generator().manual_seed(0)
    for text in expressions:
        inputs, result = parse(text, axes)
        wholes = [  # integers: sums are exact
            torch.randint(-8, 9, [sizes[dim] for dim in each.dims], generator=dice).float()
            for each in inputs
        ]
        tensors = [
            DTensor.from_local(piece(x, each, mesh), device_mesh, placements_of(each, axes))
            for x, each in zip(wholes, inputs)
        ]
        letters = ",".join("".join(each.dims) for each in inputs) + "->" + "".join(result.dims)
        product = torch.einsum(letters, *tensors) if len(tensors) > 1 else tensors[0]
        mine = product.redistribute(placements=placements_of(result, axes)).to_local()
        right.append(torch.equal(mine, piece(torch.einsum(letters, *wholes), result, mesh)))
        bounds.append(len(group.recorder.comms))
    return bounds, right


def placements_of(placed: Placed, axes: dict[str, int]) -> list[Placement]:
    """Return one placement per axis of the mesh: Shard(dim), Partial() or Replicate().

    A list of placements shards in the order of the mesh. Where a dim is sharded in another order
    (`F_z_x`), an axis that comes later than its place in the mesh becomes a `_StridedShard`, which
    torch 2.13 has for FSDP2 over tensor parallelism: `split_factor` shards were made before it.
    """
    found: list[Placement] = [Partial() if axis in placed.due else Replicate() for axis in axes]
    names = list(axes)
    for dim, (_, its) in enumerate(placed.cuts):
        order = [names.index(axis) for axis in its]
        for step, place in enumerate(order):
            before = [axes[names[other]] for other in order[:step] if other > place]
            strided = _StridedShard(dim, split_factor=math.prod(before))
            found[place] = strided if before else Shard(dim)
    return found
