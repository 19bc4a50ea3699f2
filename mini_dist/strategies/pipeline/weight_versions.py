"""The weights at several optimizer steps, for asynchronous schedules (PipeDream; lesson 13).

A micro-batch's backward needs the weights of its forward, but a step in between may have changed
them. The versions of the schedule's actions (`1F4@2`) say which weights each action uses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mini_dist.plan.schedule import ScheduleError

from .split_backward import accumulate


class Versions:
    """A Module's weights at several optimizer steps.

    Version v is a separate set of tensors, and the Module is called with them. The newest version
    shares its memory with the Module's parameters. Before a step, the parameters get new memory if
    the version that they leave is still needed.
    """

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise ScheduleError(
                "an asynchronous schedule needs a Module as stage, to stash weights"
            )
        self.module, self.newest = module, 0
        self.stash = {0: self._leaves()}

    def _leaves(self) -> dict[str, Tensor]:
        """Return the Module's current weights: the same memory, separate gradients."""
        return {
            n: p.data.requires_grad_(p.requires_grad) for n, p in self.module.named_parameters()
        }

    def at(self, version: int) -> Callable[..., Tensor]:
        """Return the Module as a function that uses the weights of this version."""
        return lambda *inputs: functional_call(self.module, self.stash[version], inputs)

    def collect(self, version: int) -> None:
        """Move the gradients computed at that version to the Module's parameters."""
        for name, parameter in self.module.named_parameters():
            leaf = self.stash[version][name]
            if leaf.grad is not None:
                accumulate(parameter, leaf.grad)
                leaf.grad = None

    def step(self, optimizer: torch.optim.Optimizer, keep: set[int]) -> None:
        """Step from the newest version to the next; drop versions that are not in `keep`."""
        self.stash = {v: weights for v, weights in self.stash.items() if v in keep}
        if self.newest in keep:
            for parameter in self.module.parameters():
                parameter.data = parameter.data.clone()
        optimizer.step()
        optimizer.zero_grad()
        self.newest += 1
        self.stash[self.newest] = self._leaves()
