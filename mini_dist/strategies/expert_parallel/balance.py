"""How evenly experts are loaded, and a way for a layer to add its own loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Load(NamedTuple):
    """How busy the experts of a layer were, over all ranks of its balance group."""

    visits: Tensor  # [E] copies that tokens wanted to send to each expert
    kept: Tensor  # [E] copies that went

    @property
    def drop_rate(self) -> float:
        """Share of the copies that were dropped."""
        return 1 - self.kept.sum().item() / self.visits.sum().item()

    @property
    def imbalance(self) -> float:
        """Return the busiest expert's copies divided by the mean: 1 if all are equal. The others
        wait for the busiest, so this is how much longer the experts take than with an even load."""
        return self.kept.max().item() / self.kept.double().mean().item()


class AttachLoss(torch.autograd.Function):
    """Return x unchanged; in backward, act as if `loss` times `scale` were part of the total loss.

    So a layer deep in a pipeline can have its own loss (Megatron-core's
    MoEAuxLossAutoScaler does the same)."""

    @staticmethod
    def forward(ctx, x, loss, scale):
        ctx.gradient = torch.full_like(loss, scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx, ctx.gradient, None
