"""Replicas, the ranks that hold the same parameters, start equal and average all gradients."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from .collectives import broadcast


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
