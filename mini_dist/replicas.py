"""What data-parallel strategies share: ranks that start equal, and what a training step asks of a
model, whoever has wrapped it."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .collectives import broadcast
from .grad_norm import grad_norm


class Replica(nn.Module):
    """A model as `train.train_step` sees it. As it stands: one that trains alone.

    A strategy wraps a module and overrides what it does otherwise. In the order of a step:

        forward(...)     as the module's
        no_sync()        inside, backward adds gradients up and tells nobody, where that saves bytes
        finish()         after the last backward: `.grad` of `trained()` is the mean over the ranks
        grad_norm()      of the whole model's gradients: one number, equal on all ranks
        trained()        what the optimizer steps: the parameters, or this rank's shards of them
        share()          after the optimizer's step: the parameters are whole again
    """

    group = None  # the ranks that share the batch

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self):
        yield

    def finish(self) -> None: ...

    def grad_norm(self) -> Tensor:
        return grad_norm(self.trained())

    def trained(self) -> list[Tensor]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def share(self) -> None: ...


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
