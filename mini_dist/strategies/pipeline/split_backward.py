"""The backward of linears in two halves: the input's gradient now, the weight's later.

The previous rank waits for the first half only. So a schedule may put the second half (W) where the
rank would otherwise idle (Qi et al. 2023, zero bubble). We do it as DeepSeek's DualPipe does
(WeightGradStore); PyTorch splits the graph itself, for any operations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class WeightGradient(NamedTuple):
    """The half of a linear's backward that no rank waits for: dW = dyᵀ x, db = sum of dy."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]
    x: Tensor  # [..., in]
    dy: Tensor  # [..., out]

    def add(self) -> None:
        x, dy = self.x.flatten(0, -2), self.dy.flatten(0, -2)  # [tokens, in], [tokens, out]
        accumulate(self.weight, dy.T @ x)
        if self.bias is not None:
            accumulate(self.bias, dy.sum(0))


class PutOff(TorchFunctionMode):
    """Make linears put their weight gradients into `later` inside `with`, to be computed later.

    Linears have almost all of a transformer's weight gradients; the rest (norms, embeddings, the
    weights of other operations) stays in the first half of the backward.
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
    """Compute functional.linear; its backward computes only dx = dy W."""

    @staticmethod
    def forward(ctx, x, weight, bias, later):
        ctx.save_for_backward(x)
        # the parameters themselves: checkpointing inside a stage returns copies of saved tensors
        ctx.weight, ctx.bias, ctx.later = weight, bias, later
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        # detached: otherwise x would keep its whole graph, with this list, alive forever
        ctx.later.append(WeightGradient(ctx.weight, ctx.bias, x.detach(), dy))
        return dy @ ctx.weight if ctx.needs_input_grad[0] else None, None, None, None


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Accumulate as autograd does: store the first gradient, add later ones."""
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
