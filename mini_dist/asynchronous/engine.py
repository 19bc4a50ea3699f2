"""Steps between two averages for any model that trains, and for groups of ranks that are one.

    model = ZeRO3(gpt, inside, adamw, units=gpt.blocks)     # `inside`: the ranks of one cluster
    diloco = DiLoCo(model, across, every=50)                # `across`: one rank of each cluster
    for inputs, targets in batches:
        ...
        model.step()
        diloco.step()

Each rank averages the tensors that it steps with the ranks that have the same ones elsewhere: what
is cut inside a cluster stays cut. It holds two more copies of them, those of the last average and
the momentum. The numbers are those of `outer_step` in ideas.py.
"""

from __future__ import annotations

import torch

from ..trainable import Trainable
from .ideas import outer_step


class DiLoCo:
    """Average after `every` steps what they have changed (Douillard et al. 2023).

    lr and beta are those of the outer step; lr=1 and beta=0 make it local SGD. Raises ValueError
    where they cannot be, or if `every` is below 1.
    """

    def __init__(self, model: Trainable, group, every: int, lr: float = 0.7, beta: float = 0.9):
        if every < 1:
            raise ValueError(f"every={every}: there is at least 1 step between two averages")
        if lr <= 0 or not 0 <= beta < 1:
            raise ValueError(f"lr={lr}, beta={beta}: give lr above 0, and beta from 0 to below 1")
        self.model, self.group, self.every, self.lr, self.beta = model, group, every, lr, beta
        self.steps = 0
        self.tensors = model.tensors_to_step()
        self.before = [tensor.detach().clone() for tensor in self.tensors]
        self.momentum = [torch.zeros_like(tensor) for tensor in self.before]

    @torch.no_grad()
    def step(self) -> None:
        """To be called after each step of the optimizer."""
        self.steps += 1
        if self.steps % self.every:
            return
        for i, now in enumerate(self.tensors):
            self.before[i], self.momentum[i] = outer_step(
                self.before[i], now, self.momentum[i], self.lr, self.beta, self.group
            )
            now.copy_(self.before[i])
        self.model.refresh_parameters()
