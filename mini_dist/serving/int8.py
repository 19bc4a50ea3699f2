"""Weights of one byte: decode reads every weight for every token, so fewer bytes are less time.

Legend: F features out, D features in.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class Int8Linear(nn.Module):
    """A linear whose weight [F, D] is int8 times one scale a row: w ~ scale * q, |q| <= 127.

    Activations stay as they are ("weight-only"; Dettmers et al. 2022, LLM.int8(), section 2.1, has
    the scale a row). An element is off by half a scale at most: largest of its row / 254.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1).clamp(min=1e-12) / 127  # [F]
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., F]; the scale is applied after the product, F numbers and not F D."""
        y = (x @ self.weight.to(x.dtype).T) * self.scale
        return y if self.bias is None else y + self.bias


def with_int8_weights(model: nn.Module) -> nn.Module:
    """A copy of a model that is on one device, its linears in int8; embeddings and norms stay."""
    model = copy.deepcopy(model).requires_grad_(False)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, Int8Linear(child))
    return model


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, each counted once: what a decode step reads of them."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({each.data_ptr(): each.nbytes for each in tensors}.values())
