"""Which gradients are averaged over which ranks, and by which strategy.

A stage's dense parameters are the same on its dp*cp ranks. Its experts are the same on edp ranks
only, so they are wrapped separately. With ZeRO these ranks also shard the optimizer's states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from mini_dist.collectives.mesh import Mesh
from mini_dist.plan.config import Layout
from mini_dist.strategies.data_parallel import Bucketed, Naive, Overlapped
from mini_dist.strategies.expert_parallel import layers_with_experts
from mini_dist.strategies.pipeline import GPTStage
from mini_dist.strategies.trainable import Trainable
from mini_dist.strategies.zero import ZeRO1, ZeRO2, ZeRO3


def average_gradients(
    stages: dict[int, GPTStage], layout: Layout, mesh: Mesh, make_optimizer: Callable
) -> tuple[list[Trainable], Optimizers]:
    """Wrap each stage and its experts by a data-parallel strategy; also return their optimizers.

    If both ends of a tied embedding are on this rank, the first stage handles it.
    """
    parts: list[Trainable] = []
    wrapped_already: set[Tensor] = set()
    for stage in stages.values():
        layers = layers_with_experts(stage)
        experts = nn.ModuleList(expert for layer in layers for expert in layer.experts.values())
        others = wrapped_already | set(experts.parameters())
        units = list(stage.blocks.values())
        if layout.pp > 1:
            # Micro-batches overlap in a stage, so nothing can stay whole from the start of a
            # forward to the end of its backward: embedding and head are also units, and there is no
            # root.
            units = [unit for unit in (stage.embed, *units, stage.head) if unit is not None]
        parts.append(wrap(stage, mesh["dp", "cp"], layout, make_optimizer, units, ignored=others))
        if len(experts):
            parts.append(wrap(experts, mesh["edp"], layout, make_optimizer, experts, ignored=()))
        wrapped_already |= set(stage.parameters())
    optimizers = [
        part.optimizer if isinstance(part, ZeRO1) else make_optimizer(part.tensors_to_step())
        for part in parts
    ]
    return parts, Optimizers(optimizers)


def wrap(module, group, layout: Layout, make_optimizer, units, ignored) -> Trainable:
    if layout.zero:
        stage = {1: ZeRO1, 2: ZeRO2, 3: ZeRO3}[layout.zero]
        return stage(module, group, make_optimizer, units=units, ignored=ignored)
    if group.size() == 1:
        return Naive(module, group, ignored=ignored)  # sends nothing: no buckets, no copies
    if layout.pp > 1:  # the last backward of one micro-batch is not the last of the step
        return Bucketed(module, group, ignored=ignored)
    return Overlapped(module, group, ignored=ignored)


class Optimizers:
    """Several optimizers as one, for train.update."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def set_learning_rate(self, rate: float) -> None:
        for optimizer in self.optimizers:
            for parameters in optimizer.param_groups:
                parameters["lr"] = rate
