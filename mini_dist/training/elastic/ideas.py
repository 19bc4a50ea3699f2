"""What ranks must agree on after their number has changed: which state, and who takes which rows.

    furthest, rebuild   a rank may have finished a step that others have not: copy its state
    shares, rows_of     the batch keeps its size and is split among the ranks that are left

Legend: B samples of a batch, n ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from mini_dist.collectives import all_gather, broadcast
from mini_dist.collectives.messages import Members


def furthest(step: int, group) -> tuple[int, int]:
    """Return the rank that has completed the most steps (the first of equals), and its step count.

    When a rank dies, some ranks may already have the sum of all gradients and take the step, while
    others wait for it in vain. A rank that took the step used every gradient, the dead rank's
    included.
    """
    steps = all_gather(torch.tensor([step]), group)
    return int(steps.argmax()), int(steps.max())


def rebuild(state: Tensor, step: int, dead: Collection[int], group):
    """Return the surviving ranks as a group, the state, and the number of steps it has taken.

    Call it on every surviving rank. It reuses the old group's connections between them,
    as MPI's MPIX_Comm_shrink does (where that is impossible, `regroup` opens new ones).
    """
    alive = [rank for rank in range(group.size()) if rank not in dead]
    there = Members(group, alive)
    steps = all_gather(torch.tensor([step]), there)
    root = int(steps.argmax())
    return there, broadcast(state, root, there), int(steps[root])


def shares(batch_size: int, seconds: Sequence[float]) -> list[int]:
    """Return how many samples each device takes so that the slowest finishes as early as possible.

    seconds: time per sample on each device. Each sample goes to the device that would finish it
    first (the first of equals), which is optimal for samples of equal cost.
    Raises ValueError for a time that is not above 0, and for an empty list.
    """
    check_seconds(seconds)
    taken = [0] * len(seconds)
    done = [(each, device) for device, each in enumerate(seconds)]  # after one more sample
    heapq.heapify(done)
    for _ in range(batch_size):
        _, device = done[0]
        taken[device] += 1
        heapq.heapreplace(done, ((taken[device] + 1) * seconds[device], device))
    return taken


def check_seconds(seconds: Sequence[float]) -> None:
    if not seconds or min(seconds) <= 0:
        raise ValueError(
            f"seconds={list(seconds)}: give, for each device, how long a sample takes, above 0"
        )


def rows_of(rank: int, taken: Sequence[int]) -> slice:
    """Return this rank's rows of the batch, if rank i takes the next `taken[i]` rows."""
    first = sum(taken[:rank])
    return slice(first, first + taken[rank])
