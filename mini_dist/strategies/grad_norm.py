"""One gradient norm for the whole model, whatever part of it a rank holds.

A parameter is either replicated (every rank has its whole gradient: count it once) or sharded over
a group (every rank has a part: sum the parts). If ranks clipped by the norm of only a part of the
model, they would take different steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mini_dist.collectives import all_reduce, device_of
from mini_dist.plan.fields import checks_kinds


def grad_norm(replicated: Iterable[Tensor] = (), sharded: dict | None = None) -> Tensor:
    """Return the 2-norm of all gradients, equal on all ranks: a scalar in float32 or better.

    replicated: parameters whose whole `.grad` is on every rank, with equal values.
    sharded: group -> parameters (or shards) of which each rank of the group holds a different part.
    Parameters without a gradient count as zero.
    """
    total = sum_of_squares(replicated)
    for group, parameters in (sharded or {}).items():
        squares = sum_of_squares(parameters).to(device_of(group))  # on the host if offloaded
        total = total + all_reduce(squares, group)
    return total.sqrt()


@checks_kinds(infinite=("max_norm",))
def clip_(parameters: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients so that their norm, which is `norm` now, is at most `max_norm`.

    The factor is max_norm / (norm + 1e-6) if that is below 1, as in torch.nn.utils.clip_grad_norm_.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} would clip everything: give a number above 0")
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad))


def sum_of_squares(parameters: Iterable[Tensor]) -> Tensor:
    """Sum in float32 or better, because squares of bfloat16 have too few digits."""
    total = torch.zeros(())
    for parameter in parameters:
        if parameter.grad is not None:
            grad = parameter.grad.detach()
            wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
            total = total.to(wide) + wide.pow(2).sum()
    return total
