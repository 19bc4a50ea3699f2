"""How evenly experts are loaded, and a loss that a layer adds by itself."""

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
        """The busiest expert's copies, in units of the mean: 1 if all are alike. The others wait
        for it, so this is how much longer the experts take than they need."""
        return self.kept.max().item() / self.kept.double().mean().item()


class AttachLoss(torch.autograd.Function):
    """x as it is; in backward, `loss` times `scale` counts as if it had been added to the total.

    So that a layer deep in a pipeline can have a loss of its own (Megatron-core's
    MoEAuxLossAutoScaler does the same)."""

    @staticmethod
    def forward(ctx, x, loss, scale):
        ctx.gradient = torch.full_like(loss, scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx, ctx.gradient, None
