"""What the executor looks up while it executes a list, computed once per list."""

from __future__ import annotations

from mini_dist.plan.schedule import (
    Action,
    Schedule,
    add_communication,
    fuse_communication,
    validate,
)
from mini_dist.plan.schedule.action import members
from mini_dist.plan.schedule.communication import EARLY


class RankPlan:
    """A schedule that can run, and what one rank needs to know about it.

    schedule: with its sends and receives. items: this rank's list; an entry is one action, or the
    communications that are started together. place: the index of an action in its rank's list, for
    all ranks. loss_weight: of each micro-batch's loss in the mean of its optimizer step.
    versions_needed: for each optimizer step in the list, see below.

    Raises ScheduleError for a schedule that cannot run.
    """

    def __init__(self, schedule: Schedule, rank: int, on_nccl: bool) -> None:
        if not schedule.has_communication:
            schedule = add_communication(schedule, early=EARLY)
        if on_nccl:  # it runs messages in list order, one after the other
            schedule = fuse_communication(schedule)
        validate(schedule, rendezvous=on_nccl)
        self.schedule = schedule
        self.items = [members(item) for item in schedule.ranks[rank]]
        self.place = {
            action.key: place
            for peer in range(schedule.num_ranks)
            for place, action in enumerate(schedule.actions(peer))
        }
        self.loss_weight = loss_weights(schedule)
        self.versions_needed = versions_needed_after_steps(schedule, rank)


def loss_weights(schedule: Schedule) -> dict[int, float]:
    """Return 1 / (number of micro-batches in its optimizer step) for each micro-batch."""
    last = schedule.num_stages - 1
    weights, batch = {}, []
    for stage, kind, micro, _ in schedule.actions(schedule.rank_of[last]):
        if stage == last and kind == "B":
            batch.append(micro)
        if stage == last and kind == "S":
            weights |= dict.fromkeys(batch, 1 / len(batch))
            batch = []
    return weights | dict.fromkeys(batch, 1 / max(1, len(batch)))


def versions_needed_after_steps(schedule: Schedule, rank: int) -> dict[Action, set[int]]:
    """Return, for each optimizer step, the weight versions that the list still needs after it."""
    named: dict[int, set[int]] = {}
    needed = {}
    for action in reversed(list(schedule.actions(rank))):
        if action.kind == "S":
            needed[action] = set(named.get(action.stage, ()))
        elif action.version is not None:
            named.setdefault(action.stage, set()).add(action.version)
    return needed
