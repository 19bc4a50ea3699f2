"""One gradient norm for the whole model, whatever part of it a rank holds.

A parameter may be replicated (every rank has its whole gradient: count it once) or sharded over a
group (every rank has a part: add the parts up). Clipping by anything less than the norm of the
whole would make ranks take different steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mini_dist.collectives import all_reduce, device_of
from mini_dist.plan.fields import checks_kinds


def grad_norm(replicated: Iterable[Tensor] = (), sharded: dict | None = None) -> Tensor:
    """The 2-norm of all gradients together, equal on all ranks; a scalar in at least float32.

    replicated: parameters whose `.grad` every rank has in full, with equal values.
    sharded: group -> parameters (or shards) of which each rank of the group has another part.
    Parameters without a gradient count as zero.
    """
    total = sum_of_squares(replicated)
    for group, parameters in (sharded or {}).items():
        squares = sum_of_squares(parameters).to(device_of(group))  # (offloaded ones: on the host)
        total = total + all_reduce(squares, group)
    return total.sqrt()


@checks_kinds(infinite=("max_norm",))
def clip_(parameters: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients so that their norm, which is `norm` now, is at most `max_norm`.

    As torch.nn.utils.clip_grad_norm_ does: by max_norm / (norm + 1e-6) where that is below 1.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} would clip everything: give a number above 0")
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad))


def sum_of_squares(parameters: Iterable[Tensor]) -> Tensor:
    """In float32 at least: squares of bfloat16 lose what little they have."""
    total = torch.zeros(())
    for parameter in parameters:
        if parameter.grad is not None:
            grad = parameter.grad.detach()
            wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
            total = total.to(wide) + wide.pow(2).sum()
    return total
