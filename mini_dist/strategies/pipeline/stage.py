"""One stage of the model with autograd: forward of a micro-batch now, its backward later.

A stage here is any callable of tensors, often a Module. `execute.py` calls

    y = stage.forward(micro, inputs, split=..., version=...)
    stage.run_again(micro)                   # only with recomputation, before backward
    gradient_of_input = stage.backward(micro, gradient_of_y)
    stage.weight(micro)                      # only if the backward is split
    stage.step(keep)                         # only in asynchronous schedules

An object with its own `backward` is called in the same way instead of a Stage: it needs
all of these methods but run_again (emulate.EmulatedStage is an example).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from mini_dist.plan.fields import checks_kinds
from mini_dist.ranks.older_torch import gradient_edge

from .split_backward import PutOff, WeightGradient
from .weight_versions import Versions


class Held(NamedTuple):
    """What a stage holds of a micro-batch from its forward to its backward, besides the tensors
    that autograd saves."""

    inputs: tuple[Tensor, ...]
    output: GradientEdge  # the output's node in the graph: its values may be freed once sent
    later: list[WeightGradient]  # of a split backward: backward fills it, `weight` empties it
    version: int | None


class InputsOnly(NamedTuple):
    """What a stage holds with recomputation: what it needs to run the forward again."""

    inputs: tuple[Tensor, ...]
    random_state: Tensor
    split: bool
    version: int | None


@checks_kinds
class Stage:
    """Run `function` for each micro-batch and hold what each backward needs.

    recompute: save only the inputs; `run_again` must be called before the backward.
    optimizer: of the stage's parameters; needed only for asynchronous schedules.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        *,
        recompute: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.function, self.recompute, self.optimizer = function, recompute, optimizer
        self.held: dict[int, Held | InputsOnly] = {}
        self.later: dict[int, list[WeightGradient]] = {}
        self.versions = Versions(function) if optimizer is not None else None

    def forward(
        self, micro: int, inputs: Sequence[Tensor], *, split: bool, version: int | None
    ) -> Tensor:
        """Return the output, detached from its graph; with gradients disabled nothing is saved."""
        inputs = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in inputs)
        if not torch.is_grad_enabled():
            return self.function(*inputs)
        if self.recompute:
            self.held[micro] = InputsOnly(inputs, random_state(inputs[0]), split, version)
            with torch.no_grad():
                return self._function(version)(*inputs)
        output, self.held[micro] = self._run(inputs, split, version)
        return output

    def _function(self, version: int | None) -> Callable[..., Tensor]:
        return self.function if version is None else self.versions.at(version)

    def _run(self, inputs, split: bool, version: int | None) -> tuple[Tensor, Held]:
        later: list[WeightGradient] = []
        with PutOff(later) if split else nullcontext():
            output = self._function(version)(*inputs)
        return output.detach(), Held(inputs, gradient_edge(output), later, version)

    def run_again(self, micro: int) -> None:
        """Run a forward again, before `backward`, if `recompute` dropped its graph."""
        kept = self.held.pop(micro)
        with random_state_set_to(kept.random_state, kept.inputs[0]):  # the same dropout
            _, self.held[micro] = self._run(kept.inputs, kept.split, kept.version)

    def backward(self, micro: int, gradient: Tensor) -> Tensor | None:
        """Accumulate the parameters' .grad and return the first input's gradient. If the backward
        is split, the weight gradients of linears are left to `weight`."""
        held = self.held.pop(micro)
        torch.autograd.backward(held.output, gradient)
        if held.later:
            self.later[micro] = held.later
        if held.version is not None:
            self.versions.collect(held.version)
        return held.inputs[0].grad

    def weight(self, micro: int) -> None:
        """Run the second half of a split backward."""
        for gradient in self.later.pop(micro, []):
            gradient.add()

    def step(self, keep: set[int]) -> None:
        """Take an optimizer step; `keep` are the versions that are still needed."""
        self.versions.step(self.optimizer, keep)


def random_state(like: Tensor) -> Tensor:
    """Return the state of the random generator of this tensor's device."""
    return torch.cuda.get_rng_state(like.device) if like.is_cuda else torch.get_rng_state()


@contextmanager
def random_state_set_to(state: Tensor, like: Tensor) -> Iterator[None]:
    with torch.random.fork_rng(devices=[like.device] if like.is_cuda else []):
        torch.cuda.set_rng_state(state, like.device) if like.is_cuda else torch.set_rng_state(state)
        yield


class WithLoss(nn.Module):
    """Combine the last stage and the loss into one function of (x, target)."""

    def __init__(self, function: Callable, loss_fn: Callable) -> None:
        super().__init__()
        self.function, self.loss_fn = function, loss_fn

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss_fn(self.function(x), target)
