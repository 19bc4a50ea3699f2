"""The backward of linears in two halves: the input's gradient now, the weight's later.

The rank before waits for the first half only. So a schedule may put the second (W) where the rank
would otherwise be idle (Qi et al. 2023, zero bubble). The way of DeepSeek's DualPipe
(WeightGradStore); PyTorch cuts the graph itself, for operations of any kind.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class WeightGradient(NamedTuple):
    """The half of a linear's backward that nobody waits for: dW = dyᵀ x, db = sum of dy."""

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
    """Within it, linears leave their weight gradients in `later` instead of computing them.

    Linears are nearly all of a transformer's weight gradients; the rest (norms, embeddings, the
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


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """As autograd does it: the first gradient is taken as it is, later ones are added to it."""
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
