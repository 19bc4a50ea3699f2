"""One stage of the model with autograd: forward a micro-batch now, its backward later.

A stage here is any callable of tensors, often a Module. `execute.py` calls

    y = stage.forward(micro, inputs, split=..., version=...)
    stage.run_again(micro)                   # only with recompute, in front of backward
    gradient_of_input = stage.backward(micro, gradient_of_y)
    stage.weight(micro)                      # only where the backward is split
    stage.step(keep)                         # only in asynchronous schedules

and whatever has the other four can stand in for it (EmulatedStage does).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mini_dist.schedule import ScheduleError


class Held(NamedTuple):
    """What a micro-batch in flight leaves behind, besides what autograd saved."""

    inputs: tuple[Tensor, ...]
    output: GradientEdge  # the output's place in the graph: its values may go once they are sent
    later: list[WeightGradient]
    version: int | None


class Waiting(NamedTuple):
    """The same with recomputation: all that is needed to make a Held of it."""

    inputs: tuple[Tensor, ...]
    random_state: Tensor
    split: bool
    version: int | None


class Stage:
    """Runs `function` for each micro-batch and keeps apart what their backwards need.

    recompute: keep only the inputs; `run_again` has to come in front of the backward.
    optimizer: of the stage's parameters; needed for asynchronous schedules only.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        *,
        recompute: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.function, self.recompute, self.optimizer = function, recompute, optimizer
        self.held: dict[int, Held | Waiting] = {}
        self.later: dict[int, list[WeightGradient]] = {}
        self.versions = Versions(function) if optimizer is not None else None

    def forward(
        self, micro: int, inputs: Sequence[Tensor], *, split: bool, version: int | None
    ) -> Tensor:
        """The output, cut off from its graph; with gradients disabled nothing is kept."""
        inputs = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in inputs)
        if not torch.is_grad_enabled():
            return self.function(*inputs)
        if self.recompute:
            self.held[micro] = Waiting(inputs, random_state(inputs[0]), split, version)
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
        return output.detach(), Held(inputs, get_gradient_edge(output), later, version)

    def run_again(self, micro: int) -> None:
        """With `recompute`, in front of `backward`: the forward, whose graph had been dropped."""
        waiting = self.held.pop(micro)
        with random_state_set_to(waiting.random_state, waiting.inputs[0]):  # dropout as before
            _, self.held[micro] = self._run(waiting.inputs, waiting.split, waiting.version)

    def backward(self, micro: int, gradient: Tensor) -> Tensor | None:
        """Add to the parameters' .grad and return the first input's; a split one leaves some."""
        held = self.held.pop(micro)
        torch.autograd.backward(held.output, gradient)
        if held.later:
            self.later[micro] = held.later
        if held.version is not None:
            self.versions.collect(held.version)
        return held.inputs[0].grad

    def weight(self, micro: int) -> None:
        for gradient in self.later.pop(micro, []):
            gradient.add()

    def step(self, keep: set[int]) -> None:
        """Take an optimizer step; `keep` are the versions that will still be asked for."""
        self.versions.step(self.optimizer, keep)


def random_state(like: Tensor) -> Tensor:
    """The state of the generator that operations on this tensor's device draw from."""
    return torch.cuda.get_rng_state(like.device) if like.is_cuda else torch.get_rng_state()


@contextmanager
def random_state_set_to(state: Tensor, like: Tensor) -> Iterator[None]:
    with torch.random.fork_rng(devices=[like.device] if like.is_cuda else []):
        torch.cuda.set_rng_state(state, like.device) if like.is_cuda else torch.set_rng_state(state)
        yield


# --- splitting the backward ----------------------------------------------------------------------


class WeightGradient(NamedTuple):
    """The half of a linear's backward that nobody waits for: dW = dyᵀ x, db = sum of dy."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]
    x: Tensor  # [..., in]
    dy: Tensor  # [..., out]

    def add(self) -> None:
        x, dy = self.x.flatten(0, -2), self.dy.flatten(0, -2)  # [tokens, in], [tokens, out]
        _accumulate(self.weight, dy.T @ x)
        if self.bias is not None:
            _accumulate(self.bias, dy.sum(0))


class PutOff(TorchFunctionMode):
    """Within it, linears leave their weight gradients in `later` instead of computing them.

    Linears are nearly all of a transformer's weight gradients; the rest (norms, embeddings, the
    weights of other operations) stays in the first half of the backward. The way of DeepSeek's
    DualPipe (WeightGradStore); PyTorch cuts the graph itself, for operations of any kind.
    """

    def __init__(self, later: list[WeightGradient]) -> None:
        super().__init__()
        self.later = later

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is functional.linear:
            x, weight, bias = _linear_arguments(*args, **(kwargs or {}))
            if weight.is_leaf and weight.requires_grad and (bias is None or bias.is_leaf):
                return LinearWithoutWeightGradient.apply(x, weight, bias, self.later)
        return function(*args, **(kwargs or {}))


def _linear_arguments(input, weight, bias=None):
    return input, weight, bias


class LinearWithoutWeightGradient(torch.autograd.Function):
    """functional.linear, whose backward computes dx = dy W only."""

    @staticmethod
    def forward(ctx, x, weight, bias, later):
        ctx.save_for_backward(x)
        # the parameters themselves: checkpointing inside a stage gives back copies of what is saved
        ctx.weight, ctx.bias, ctx.later = weight, bias, later
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        # detached: x would keep its whole graph, this list included, alive for ever
        ctx.later.append(WeightGradient(ctx.weight, ctx.bias, x.detach(), dy))
        return dy @ ctx.weight if ctx.needs_input_grad[0] else None, None, None, None


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


# --- weight versions -----------------------------------------------------------------------------


class Versions:
    """The weights at several optimizer steps, as asynchronous schedules stash them.

    Version v is a set of tensors of its own, with which the Module is called. The newest one shares
    its memory with the Module's parameters; before a step these get new memory, if the version that
    they leave is still needed.
    """

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise ScheduleError(
                "an asynchronous schedule needs a Module as stage, to stash weights"
            )
        self.module, self.newest = module, 0
        self.stash = {0: self._leaves()}

    def _leaves(self) -> dict[str, Tensor]:
        """The Module's weights as they are now: same memory, gradients apart."""
        return {
            n: p.data.requires_grad_(p.requires_grad) for n, p in self.module.named_parameters()
        }

    def at(self, version: int) -> Callable[..., Tensor]:
        return lambda *inputs: functional_call(self.module, self.stash[version], inputs)

    def collect(self, version: int) -> None:
        """Hand the gradients taken at that version to the Module's parameters."""
        for name, parameter in self.module.named_parameters():
            leaf = self.stash[version][name]
            if leaf.grad is not None:
                _accumulate(parameter, leaf.grad)
                leaf.grad = None

    def step(self, optimizer: torch.optim.Optimizer, keep: set[int]) -> None:
        self.stash = {v: weights for v, weights in self.stash.items() if v in keep}
        if self.newest in keep:
            for parameter in self.module.parameters():
                parameter.data = parameter.data.clone()
        optimizer.step()
        optimizer.zero_grad()
        self.newest += 1
        self.stash[self.newest] = self._leaves()
