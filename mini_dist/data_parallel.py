"""Data parallelism: the same model everywhere, a part of the batch each, gradients averaged.

Lesson 02 begins with the most direct way, through one rank. Its cost is why the rest exists.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .collectives import gather, star_broadcast
from .ledger.recording import recorded


@recorded
def average_through_rank_0(parameters: Iterable[Tensor], group) -> None:
    """Replace each gradient by its mean over the ranks: gather on rank 0, average, broadcast.

    Parameters without a gradient (frozen, or unused on all ranks) are left alone. For N bytes of
    gradients rank 0 receives (n-1) N and sends (n-1) N, every other rank N and N. This is a
    parameter server with one server and synchronous workers (Li et al. 2014, section 2).
    """
    for parameter in parameters:
        if parameter.grad is None:
            continue
        everyones = gather(parameter.grad.unsqueeze(0), 0, group)  # [n, ...] on rank 0
        mean = parameter.grad if everyones is None else everyones.mean(0)
        parameter.grad = star_broadcast(mean, 0, group)  # elsewhere the values are not read
