"""One gradient norm for the whole model on the whole grid: each element counts once.

Some elements are on one rank only, others on several. So a rank divides each square by the number
of ranks that have the same element, and the sum over all ranks counts it once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mini_dist.collectives import all_reduce, device_of
from mini_dist.collectives.mesh import Mesh
from mini_dist.plan.config import Layout
from mini_dist.strategies.pipeline import GPTStage, shared_parameter
from mini_dist.strategies.trainable import Trainable


def norm_over_grid(
    gradients: Iterable[tuple[Tensor, Tensor]], holders: dict[Tensor, int], mesh: Mesh
) -> Tensor:
    """Return the 2-norm of all gradients, equal on all ranks. gradients: (parameter, this rank's
    part of its gradient). holders: for each parameter, how many ranks have the same part."""
    squares = torch.zeros(())
    for parameter, gradient in gradients:
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        squares = squares.to(wide) + wide.pow(2).sum() / holders[parameter]
    return all_reduce(squares.to(device_of(mesh.group)), mesh.group).sqrt()


def count_holders(
    stages: dict[int, GPTStage], parts: list[Trainable], layout: Layout
) -> dict[Tensor, int]:
    """Count, for each parameter, the ranks of the whole job that step the same elements as this
    one."""
    holders: dict[Tensor, int] = {}
    for part in parts:  # averaged over a group: equal on all its ranks, unless ZeRO shards it
        alike = 1 if layout.zero else part.group.size()
        holders |= dict.fromkeys(part.module.parameters(), alike)
    if layout.tp > 1:  # a matrix that tp shards over all its ranks is on one of them only
        for stage in stages.values():
            for name, parameter in stage.named_parameters():
                cut, size = stage.sharding.cuts.get(name), stage.sharding.group_of(name).size()
                holders[parameter] *= size // cut.parts if cut else size
    tied = shared_parameter(stages, layout.num_stages)
    if tied is not None:  # the first and the last stage have it
        holders[tied] *= 2
    return holders
