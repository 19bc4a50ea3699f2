"""fp8: eight bits per number for matrix products, and the scales without which it does not work.

    y = fp8_matmul(x, w, rounded=per_block)       # inputs as fp8 would hold them, sum in float32

The two formats (Micikevicius et al. 2022, "FP8 Formats for Deep Learning", table 1):

    format   digits   smallest   largest
    E4M3     4        2e-3       448       weights and activations
    E5M2     3        1.5e-5     57344     gradients: more range, fewer digits

A tensor is multiplied by a scale before it is rounded, so that its largest number meets the
format's largest; the product is divided by both scales. What is computed here in float32 on rounded
inputs is what a tensor core computes, up to the precision of its sum. It is not faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from mini_dist.plan.fields import checks_kinds, whole

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@checks_kinds
def as_fp8(x: Tensor, scale: Tensor | float = 1.0, dtype: torch.dtype = E4M3) -> Tensor:
    """Return x as fp8 holds it: times scale, rounded, divided by scale. Same shape, float32.

    Numbers that do not fit become the largest of the format. (A plain cast in PyTorch 2.13 makes
    them inf in E5M2.)
    """
    most = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-most, most).to(dtype).float() / scale


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale that brings `largest` to the largest number of the format. A power of two,
    so that scaling itself rounds nothing; 1 where all numbers are 0."""
    exponent = torch.floor(torch.log2(torch.finfo(dtype).max / largest.float()))
    return torch.where(largest > 0, torch.exp2(exponent), torch.ones_like(exponent))


@checks_kinds
def unscaled(x: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """Round to fp8 without a scale."""
    return as_fp8(x, 1.0, dtype)


@checks_kinds
def per_tensor(x: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """Round to fp8 with one scale for the tensor, from its own largest number."""
    return as_fp8(x, scale_for(x.abs().amax(), dtype), dtype)


@checks_kinds
def per_block(x: Tensor, dtype: torch.dtype = E4M3, block: int = 128) -> Tensor:
    """Round to fp8 with one scale for every `block` numbers of a row, [..., block * any].

    DeepSeek-V3 (2024, section 3.3.2) uses 128 for activations. Raises ValueError if the last dim
    is no multiple of block.
    """
    whole("block", block)
    if x.shape[-1] % block:
        raise ValueError(f"rows of {x.shape[-1]} numbers are no whole blocks of {block}.")
    blocks = x.unflatten(-1, (-1, block))
    return as_fp8(blocks, scale_for(blocks.abs().amax(-1, keepdim=True), dtype), dtype).flatten(-2)


@checks_kinds
class DelayedScale:
    """Round to fp8 with a scale from earlier steps, so that x is read only once.

    The scale of a step comes from the largest number of the last `history` steps (NVIDIA's
    Transformer Engine calls it delayed scaling). The first call uses its own largest number.
    """

    def __init__(self, dtype: torch.dtype = E4M3, history: int = 16) -> None:
        whole("history", history)
        self.dtype, self.seen = dtype, deque(maxlen=history)

    def __call__(self, x: Tensor) -> Tensor:
        now = x.abs().amax()
        largest = torch.stack([*self.seen]).amax() if self.seen else now
        self.seen.append(now)
        return as_fp8(x, scale_for(largest, self.dtype), self.dtype)


@checks_kinds
def fp8_matmul(x: Tensor, w: Tensor, rounded: Callable[[Tensor], Tensor] = per_tensor) -> Tensor:
    """Multiply x [..., K] by w [N, K], both rounded along K, the dim that is summed.

    Returns [..., N] float32.
    """
    return rounded(x) @ rounded(w).T
