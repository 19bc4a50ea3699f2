"""Exponentials and their sums need more digits than bf16 and fp16 have."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Convert bf16 and fp16 to float32; leave float32 and float64 unchanged."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
