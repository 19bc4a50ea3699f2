"""Two passes that make a schedule of computations runnable on ranks that can only send and receive.

A pass takes a schedule and returns a new one; the order of the computations stays as it is.
"""

from __future__ import annotations

from ..fields import checks_kinds
from .action import (
    COMMUNICATION,
    Action,
    Fused,
    Key,
    Schedule,
    ScheduleError,
    needs,
    send_of,
)
from .simulate import simulate

# What the executor gives to add_communication as `early`. Counted in tests/plan/test_schedule.py:
# 2 is the least with which under GPipe, 1F1B and ZB-H1 no message comes before its receive; it
# takes three receive buffers a rank.
EARLY = 2


@checks_kinds(error=ScheduleError)
def add_communication(schedule: Schedule, early: int = 0) -> Schedule:
    """A send right after each action that somebody on another rank waits for, a receive before.

    `early`: start each receive that many computations before the one that needs it, so that the
    message travels meanwhile. A border between two stages on the same rank (the bottom of a V)
    needs no message. The result runs where sends do not wait for their receives; where they do,
    fuse it.
    """
    if schedule.has_communication:
        raise ScheduleError(f"{schedule.name} has its sends and receives already")
    ranks = []
    for rank in range(schedule.num_ranks):
        computations = list(schedule.actions(rank))
        before: list[list[Action]] = [[] for _ in computations]
        after: list[list[Action]] = [[] for _ in computations]
        for i, action in enumerate(computations):
            stage, kind, micro = action.key
            for source, source_kind, _ in needs(schedule, action):
                if schedule.rank_of[source] != rank:
                    before[max(0, i - early)].append(Action(stage, f"RECV_{source_kind}", micro))
            target = {"F": stage + 1, "B": stage - 1}.get(kind)
            if target in schedule.rank_of and schedule.rank_of[target] != rank:
                after[i].append(Action(stage, f"SEND_{kind}", micro))
        parts = zip(before, [[action] for action in computations], after)
        ranks.append([action for part in parts for actions in part for action in actions])
    return Schedule(schedule.name, ranks, schedule.mixed)


def fuse_communication(schedule: Schedule) -> Schedule:
    """Put each rank's communications in one common order, and start neighbours together.

    NCCL runs a rank's communications one after the other, a send until its receive is there: two
    neighbours in 1F1B would each send first, one its forward, one its backward, and wait for ever.
    If all ranks go through their messages in the same order, the first one unfinished always has
    both its ranks ready, so nobody waits for ever. The order taken is that in which the messages
    come into being; a receive moves up in its rank's list where it has to. Then what stands between
    the same two computations becomes one Fused batch.
    """
    born = {
        (span.action.stage, f"SEND_{span.action.kind}", span.action.micro): span.end
        for spans in simulate(schedule).spans
        for span in spans
    }
    ranks = []
    for rank in range(schedule.num_ranks):
        computes: list[Action] = []
        slots: dict[Action, int] = {}  # the communication stands before computes[slot]
        for action in schedule.actions(rank):
            if action.kind in COMMUNICATION:
                slots[action] = len(computes)
            else:
                computes.append(action)
        in_order = sorted(slots, key=lambda a: (born[_message(a)], _message(a)))
        latest = len(computes)
        for action in reversed(in_order):
            latest = slots[action] = min(slots[action], latest)
        batches: list[list[Action]] = [[] for _ in range(len(computes) + 1)]
        for action in in_order:
            batches[slots[action]].append(action)
        out: list[Action | Fused] = []
        for batch, compute in zip(batches, [*computes, None], strict=True):
            out += [Fused(batch)] if len(batch) > 1 else batch
            out += [compute] if compute else []
        ranks.append(out)
    return Schedule(schedule.name, ranks, schedule.mixed)


def _message(action: Action) -> Key:
    """The message an action belongs to, named by its send."""
    return (action if action.kind.startswith("SEND") else send_of(action)).key


def forward_only(schedule: Schedule) -> Schedule:
    """Its forwards alone, for evaluation: stages stay where they are, all on the newest weights."""
    kinds = ("F", "SEND_F", "RECV_F")
    ranks = [
        [a._replace(version=None) for a in schedule.actions(rank) if a.kind in kinds]
        for rank in range(schedule.num_ranks)
    ]
    return Schedule(f"{schedule.name}, forward only", ranks)
