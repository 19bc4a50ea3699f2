"""What ranks have to agree on when their number has changed: where to go on, and who takes what.

    furthest, rebuild   one may have finished a step that the others have not: its state is taken
    shares, rows_of     a batch stays as large as it was, and is cut for those who are there

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
    """The rank that has done the most steps (of several the first), and how many.

    When a rank dies, some may have the sum of all gradients already and step, while others wait for
    it in vain. Who has stepped has done so with everybody's gradient, that of the dead, too.
    """
    steps = all_gather(torch.tensor([step]), group)
    return int(steps.argmax()), int(steps.max())


def rebuild(state: Tensor, step: int, dead: Collection[int], group):
    """After some ranks died: those who are left as a group, the state, and how many steps it has.

    Every rank that is not dead calls it. Of the old group's connections those among the living are
    used, as MPI's MPIX_Comm_shrink does (where they cannot be, `regroup` makes new ones).
    """
    alive = [rank for rank in range(group.size()) if rank not in dead]
    there = Members(group, alive)
    steps = all_gather(torch.tensor([step]), there)
    root = int(steps.argmax())
    return there, broadcast(state, root, there), int(steps[root])


def shares(batch_size: int, seconds: Sequence[float]) -> list[int]:
    """How many samples each device takes, so that the slowest is done as early as can be.

    seconds: what one sample takes on each device. Sample after sample goes to the device that would
    be done with it first (of several the first), which is optimal for samples that are alike.
    Raises ValueError for a time that is not above 0, and for no device.
    """
    check_seconds(seconds)
    taken = [0] * len(seconds)
    done = [(each, device) for device, each in enumerate(seconds)]  # with one sample more
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
    """Which rows of the batch are this rank's, if each takes so many: one after the other."""
    first = sum(taken[:rank])
    return slice(first, first + taken[rank])
