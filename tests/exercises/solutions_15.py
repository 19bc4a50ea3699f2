"""Lesson 15's exercises, solved as a learner would."""

import torch

from mini_dist import context_parallel as cp
from mini_dist.collectives import all_reduce
from mini_dist.data_parallel import Bucketed
from mini_dist.mesh import Mesh
from mini_dist.model import IGNORE_INDEX, token_loss
from mini_dist.pipeline import Pipeline, cut_gpt
from mini_dist.schedule import build
from mini_dist.tensor_parallel import (
    GPT_PLAN,
    SEQUENCE,
    TENSOR,
    finish_gradients,
    for_grad_norm,
    shard_model,
    vocab_parallel_cross_entropy,
)

__all__ = ["compose", "groups_of_ranks"]


def groups_of_ranks(pp, dp, cp, tp):
    sizes = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
    groups = {}
    for axis in sizes:
        lists = {}
        for rank in range(pp * dp * cp * tp):
            place, left = {}, rank
            for name in ("tp", "cp", "dp", "pp"):
                place[name] = left % sizes[name]
                left //= sizes[name]
            key = tuple(place[name] for name in sizes if name != axis)
            lists.setdefault(key, []).append(rank)
        groups[axis] = list(lists.values())
    return groups


def compose(config, layout, group):
    mesh = Mesh(group, **layout.axes)
    schedule = build(layout.schedule, layout.pp, layout.num_micro_batches)
    number = mesh.index("pp")
    sequence = {}
    if layout.cp > 1:
        sequence = {
            "attention": cp.make_attention(mesh["cp"]),
            "positions": cp.positions_here(config.seq_len, mesh["cp"]),
        }
    stage = cut_gpt(config, [number], layout.pp, **sequence)[number]
    if layout.tp > 1:
        shard_model(
            stage, GPT_PLAN, mesh["tp"], pair=SEQUENCE if layout.sequence_parallel else TENSOR
        )
    replica = Bucketed(stage, mesh["dp", "cp"])
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.5)
    weight = [1.0]

    def loss_fn(logits, targets):
        if layout.tp > 1:
            return weight[0] * vocab_parallel_cross_entropy(logits, targets, mesh["tp"]).total
        return weight[0] * token_loss(logits, targets).total

    cut = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    shape = layout.micro_batch_size, config.seq_len // cut, config.d_model
    pipeline = Pipeline(
        schedule, replica, mesh["pp"], loss_fn=loss_fn, activation=torch.empty(shape)
    )

    def step(inputs, targets):
        if layout.cp > 1:
            inputs, targets = (cp.shard(x, mesh["cp"]) for x in (inputs, targets))
        tokens = all_reduce((targets != IGNORE_INDEX).sum(), mesh["dp", "cp"])
        n = layout.dp * layout.cp
        weight[0] = n * layout.num_micro_batches / tokens
        replica.zero_grad()
        loss = all_reduce(pipeline.step(inputs, targets), mesh["dp", "cp"]) / n
        replica.finish()
        squares = 0.0
        if layout.tp > 1:
            finish_gradients(stage)
            whole, cut_by = for_grad_norm(stage)
            mine = sum(p.grad.pow(2).sum() for p in cut_by[mesh["tp"]])
            squares = all_reduce(mine, mesh["tp"])
        else:
            whole = list(stage.parameters())
        squares = squares + sum(p.grad.pow(2).sum() for p in whole)
        norm = all_reduce(squares, mesh["pp"]).sqrt()
        for p in stage.parameters():
            p.grad *= min(1.0, 0.5 / (norm.item() + 1e-6))
        optimizer.step()
        return loss, norm

    return step
