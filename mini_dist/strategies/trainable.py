"""The interface of a model in a training step, whichever strategy wraps it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from .grad_norm import grad_norm


class Trainable(nn.Module):
    """A model as `train.train_step` uses it. This base class trains on one rank.

    A strategy wraps a module and overrides the methods that it needs. In the order of a step:

        forward(...)           as the module's
        no_sync()              inside `with`, backward only accumulates gradients and sends
                               nothing, if that saves bytes
        finish()               after the last backward: all gradients are means over the ranks
        grad_norm()            of the whole model's gradients: one number, equal on all ranks
        refresh_parameters()   after the optimizer's step: every rank gets the new values

    And for the optimizer:

        tensors_to_step()      the parameters, or this rank's shards of them
        gradients()            each parameter with the part of its gradient that this rank updates
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
        return grad_norm(self.tensors_to_step())

    def tensors_to_step(self) -> list[Tensor]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        for parameter in self.tensors_to_step():
            if parameter.grad is not None:
                yield parameter, parameter.grad

    def refresh_parameters(self) -> None: ...
