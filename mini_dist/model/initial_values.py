"""Values of parameters and buffers before training, which depend on a seed and their names."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mini_dist.plan.config import ModelConfig


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield everything that needs a value when a module gets new memory: parameters and buffers.

    A tensor on the meta device has no memory, so it needs no value.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not tensor.is_meta:
            yield name, tensor


def initial_value(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int) -> Tensor:
    """Draw the initial value of one whole parameter or buffer from (seed, its name in GPT) alone.

    However a strategy shards the model, a rank's shard is a slice of this. Weights are normal with
    standard deviation 0.02, or 0.02 / √(2L) if they write into the residual stream (GPT-2:
    Radford et al. 2019, section 2.3). Norms start at 1. Biases and the one
    buffer, `balance_bias`, start at 0. Returns float32 on the CPU.
    """
    generator = torch.Generator()  # on the CPU: the same values on every device
    how = dict(dtype=torch.float32, device=generator.device)
    if name.endswith("bias"):
        return torch.zeros(shape, **how)
    if name.endswith("norm.weight"):
        return torch.ones(shape, **how)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator.manual_seed(int.from_bytes(digest[:8], "little"))
    writes_to_residual = name.endswith(("attn.o.weight", ".down.weight"))
    std = 0.02 / math.sqrt(2 * config.num_layers) if writes_to_residual else 0.02
    return torch.empty(shape, **how).normal_(0.0, std, generator=generator)
