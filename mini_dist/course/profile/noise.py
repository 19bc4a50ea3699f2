"""The gradient noise scale, from two squares that data parallelism has anyway (lesson 05).

The gradient of b rows is the true one and noise: on average |g_b|^2 = |G|^2 + T/b. A rank knows it
for its own b rows and, after averaging, for all B. Two equations for T and |G|^2; their ratio
T / |G|^2 is a number of rows (McCandlish et al. 2018, appendix A.1).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mini_dist.collectives import all_reduce
from mini_dist.plan.fields import checks_kinds


@checks_kinds
class NoiseScale:
    """Adds up the two squares over many steps: the mean of ratios would be biased, the ratio of
    means is less so.

    rows: b, of this rank, the same on all; size: n ranks. Raises ValueError for one rank: there is
    nothing to compare.
    """

    def __init__(self, rows: int, size: int):
        if size < 2:
            raise ValueError(f"size={size}: the noise shows between ranks, 2 of them at least")
        self.few, self.many = rows, rows * size
        self.squares = [0.0, 0.0]
        self.steps = 0

    def add(self, before: Iterable[Tensor], after: Iterable[Tensor], group) -> None:
        """Gradients of this rank's rows, and their means over the ranks, of one step. Besides, the
        ranks average one number."""
        mine = all_reduce(square(before), group, op="mean")
        self.add_squares(float(mine), float(square(after)))

    def add_squares(self, few: float, many: float) -> None:
        """|g_b|^2, averaged over the ranks, and |g_B|^2."""
        self.squares = [total + new for total, new in zip(self.squares, (few, many))]
        self.steps += 1

    @property
    def variance(self) -> float:
        """T: of one row's gradient, all parameters together."""
        few, many = (total / self.steps for total in self.squares)
        return (few - many) / (1 / self.few - 1 / self.many)

    @property
    def signal(self) -> float:
        """|G|^2. With few steps it may come out at 0 or below: then it is lost in the noise."""
        few, many = (total / self.steps for total in self.squares)
        return (self.many * many - self.few * few) / (self.many - self.few)

    @property
    def rows(self) -> float:
        """T / |G|^2: the batch that has as much noise as gradient; inf if there is only noise."""
        return self.variance / self.signal if self.signal > 0 else float("inf")


def square(gradients: Iterable[Tensor]) -> Tensor:
    return torch.stack([gradient.detach().square().sum() for gradient in gradients]).sum()
