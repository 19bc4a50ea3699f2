"""One-byte weights: decode reads every weight for every token, so fewer bytes take less time.

Legend: F features out, D features in.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from mini_dist.strategies.tensor_parallel.layers import HoldsPieces, VocabParallelEmbedding


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a weight [F, D] -> int8 [F, D] and one scale per row [F]: w ~ scale * q, |q| <=
    127."""
    scale = weight.abs().amax(1).clamp(min=1e-12) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


class Int8Linear(nn.Module):
    """A linear whose weight [F, D] is int8 times one scale per row: w ~ scale * q, |q| <= 127.

    Activations are not quantized ("weight-only"; Dettmers et al. 2022, LLM.int8(), section 2.1, has
    one scale per row). An element is off by at most half a scale: its row's largest / 254.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight, scale = quantized(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., F]; the scale is applied after the product, F numbers and not F D."""
        y = (x @ self.weight.to(x.dtype).T) * self.scale
        return y if self.bias is None else y + self.bias


class Int8Piece(nn.Module):
    """The weight of a tensor-parallel layer: kept as `quantized` gives it, multiplied out in use.

    A piece that is cut by its outputs has the rows of the whole matrix, and so their scales. One
    that is cut by its inputs has a scale for its part of each row, never a larger one.
    """

    def forward(self, weight: Tensor, scale: Tensor) -> Tensor:
        return weight * scale[:, None]

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return quantized(weight)


def with_int8_weights(model: nn.Module) -> nn.Module:
    """A copy of a model, whole or after `shard_model`, its linears in int8; embeddings and norms
    stay."""
    group = model.sharding.group if hasattr(model, "sharding") else None
    model = copy.deepcopy(model, {id(group): group}).requires_grad_(False)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, Int8Linear(child))
            elif isinstance(child, HoldsPieces) and not isinstance(child, VocabParallelEmbedding):
                register_parametrization(child, "weight", Int8Piece())
    return model


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, each counted once: what a decode step reads of them."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({each.data_ptr(): each.nbytes for each in tensors}.values())
