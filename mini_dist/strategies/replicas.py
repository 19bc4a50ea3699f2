"""Replicas, the ranks that hold the same parameters, start equal and average all gradients."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from mini_dist.collectives import all_reduce, broadcast, device_of

CALL_ZERO_GRAD = (
    "the last forward or backward ended in an exception, so the gradients are those of a part of "
    "the model: call zero_grad() on all ranks, and repeat the step"
)


@torch.no_grad()
def broadcast_state(module: nn.Module, group, ignored: Collection[Tensor] = ()) -> None:
    """Give every rank rank 0's parameters and buffers: averaged gradients keep equal ranks equal,
    they do not make them so."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor not in ignored:
            tensor.copy_(broadcast(tensor, 0, group))


def gradient(parameter: Tensor) -> Tensor:
    """Its gradient, zeros if this rank did not use it: other ranks may have."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def meet(group) -> None:
    """Go on when all ranks are here, after an exception in the middle of a step.

    A rank that did not raise is still in that step and waits for one of its messages. The message
    of this call is of another size, so it ends such a rank's wait in an error; without it, the next
    step's message of the same size would count as the missing one.
    """
    all_reduce(torch.zeros(1, dtype=torch.int64, device=device_of(group)), group)
