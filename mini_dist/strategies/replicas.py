"""Replicas, the ranks that hold the same parameters, start equal and average all gradients."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from mini_dist.collectives import all_reduce, broadcast, device_of

CALL_ZERO_GRAD = (
    "the last forward or backward ended in an exception, so the gradients cover only a part of "
    "the model: call zero_grad() on all ranks, and repeat the step"
)


@torch.no_grad()
def broadcast_state(module: nn.Module, group, ignored: Collection[Tensor] = ()) -> None:
    """Copy rank 0's parameters and buffers to every rank. Averaging gradients keeps equal replicas
    equal, but it does not make them equal."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor not in ignored:
            tensor.copy_(broadcast(tensor, 0, group))


def gradient(parameter: Tensor) -> Tensor:
    """Return the gradient, or zeros if this rank did not use it, because other ranks may have."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def meet(group) -> None:
    """Wait until all ranks are here, after an exception in the middle of a step.

    A rank that did not raise is still in that step, waiting for a message. This call's message has
    a different size, so that rank's wait ends in an error. Without this call, the next step's
    message, which has the right size, would be taken for the missing one.
    """
    all_reduce(torch.zeros(1, dtype=torch.int64, device=device_of(group)), group)
