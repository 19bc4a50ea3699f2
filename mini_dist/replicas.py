"""What data-parallel strategies share: ranks that start equal, gradients that may be missing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .collectives import broadcast


@torch.no_grad()
def broadcast_state(module: nn.Module, group) -> None:
    """Give every rank rank 0's parameters and buffers: averaged gradients keep equal ranks equal,
    they do not make them so."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.copy_(broadcast(tensor, 0, group))


def gradient(parameter: Tensor) -> Tensor:
    """Its gradient, zeros if this rank did not use it: other ranks may have."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
