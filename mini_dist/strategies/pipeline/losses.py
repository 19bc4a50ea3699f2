"""The losses of a batch: the last stage's rank computes them and sends them to all others.

On gloo it sends them as soon as it has the last one, while the others are busy with backwards. They
started the receive at the beginning of the list, so the losses are there when they finish. On NCCL,
a receive that is started first would block all later ones, so there the losses are sent at the end
of the list.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mini_dist.collectives.messages import runs_in_order

from .plan import RankPlan


class Losses:
    """The losses of one run of a list, on one rank."""

    def __init__(
        self, plan: RankPlan, group, device: torch.device, activation: Tensor | None
    ) -> None:
        schedule = plan.schedule
        # All ranks must know the dtype: float64 if the activations are float64, else float32.
        like = torch.float32 if activation is None else activation.dtype
        dtype = torch.promote_types(torch.float32, like)
        self.source, self.m = schedule.rank_of[schedule.num_stages - 1], schedule.num_micro_batches
        self.tag = 1 + 2 * schedule.num_stages * self.m  # above the tags of Messages
        self.group, self.early = group, not runs_in_order(group)
        self.computed: dict[int, Tensor] = {}  # by micro-batch, on the last stage's rank only
        self.of_all = torch.empty(self.m, dtype=dtype, device=device)  # [m]
        self.works: list = []
        if self.early and group.rank() != self.source:
            self._start_receive()

    def add(self, micro: int, loss: Tensor) -> None:
        self.computed[micro] = loss
        if self.early and len(self.computed) == self.m:
            self._start_sends()

    def on_all_ranks(self) -> Tensor:
        """Return the losses of all micro-batches, in order. [m]"""
        if not self.early:
            self._start_sends() if self.computed else self._start_receive()
        for work in self.works:
            work.wait()
        return self.of_all

    def _start_sends(self) -> None:
        losses = [self.computed[micro].detach().reshape(()) for micro in range(self.m)]
        self.of_all = torch.stack(losses).to(self.of_all.dtype)
        peers = [peer for peer in range(self.group.size()) if peer != self.source]
        self.works = [self.group.send([self.of_all], peer, self.tag) for peer in peers]

    def _start_receive(self) -> None:
        self.works = [self.group.recv([self.of_all], self.source, self.tag)]
