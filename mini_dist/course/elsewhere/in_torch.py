"""The run in PyTorch's own wrappers: DDP, FSDP2, and FSDP2 on a mesh of two dims (HSDP)."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mini_dist.collectives.mesh import Mesh
from mini_dist.model.gpt import GPT
from mini_dist.model.loss import token_loss

from .run import CONFIG, adamw, measure


def ddp(batches, group):
    model = DistributedDataParallel(GPT(CONFIG), process_group=group)
    optimizer = adamw(model.parameters())
    losses = []
    for inputs, targets in batches(group.rank(), group.size()):
        loss = token_loss(model(inputs), targets).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fsdp2(mesh_of, batches, group):
    gpt = GPT(CONFIG)
    for module in (*gpt.blocks, gpt):
        # the root, wrapped last, is not freed after forward, as nothing is said of it (nor is ours)
        fully_shard(module, mesh=mesh_of(group))
    optimizer = adamw(gpt.parameters())
    losses = []
    for inputs, targets in batches(group.rank(), group.size()):
        loss = token_loss(gpt(inputs), targets).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def one_axis(group) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


def two_axes(group) -> DeviceMesh:
    """Sharded inside, replicated across: a mesh of our groups, so that the ledger has names."""
    grid = Mesh(group, across=2, inside=2)
    ranks, names = torch.arange(4).view(2, 2), ("replicate", "shard")
    groups = [grid["across"], grid["inside"]]
    return DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=names)


def runs() -> list[dict]:
    return measure(
        {
            "DDP": (ddp,),
            "FSDP2": (fsdp2, one_axis),
            "HSDP 2 x 2": (fsdp2, two_axes),
        }
    )
