"""What a rank of a pipeline has in flight while it computes a backward: micro-batches, messages.

All of it follows from the schedule's lists of actions, so it is read off them, one by one.
"""

from __future__ import annotations

from typing import NamedTuple

from ..config import Layout
from ..schedule import Schedule, add_communication, build
from ..schedule.action import receive_of, send_of
from ..schedule.communication import EARLY


class HeldAtBackward(NamedTuple):
    """What a rank holds besides, when it computes a backward (or weight gradients)."""

    stage: int
    again: bool  # the stage has gradients of an earlier micro-batch
    forwards: tuple[int, ...]  # of other micro-batches, by this rank's stages
    put_off: tuple[int, ...]  # whose weight gradients are still to come
    messages: int  # buffers of an activation's size


def flights(schedule: Schedule, rank: int) -> set[HeldAtBackward]:
    """The different situations in which this rank's backwards run."""
    schedule = add_communication(schedule, early=EARLY)
    mine, last = schedule.stages_of[rank], schedule.num_stages - 1
    place = {
        action.key: i
        for peer in range(schedule.num_ranks)
        for i, action in enumerate(schedule.actions(peer))
    }
    forwards, put_off = dict.fromkeys(mine, 0), dict.fromkeys(mine, 0)
    had_backward, arriving, sent, local = set(), 0, {}, 0
    found = set()
    for action in schedule.actions(rank):
        stage, kind, micro = action.key
        if kind.startswith("RECV"):
            arriving += 1
        elif kind.startswith("SEND"):
            receive = receive_of(action)
            local -= 1  # it was kept as a value until now
            used = place[receive.stage, kind[-1], micro]
            sent.setdefault(schedule.rank_of[receive.stage], []).append(used)
        elif kind in "FB":
            source = stage - 1 if kind == "F" else stage + 1
            if source in mine:
                local -= 1
            elif 0 <= source <= last:
                arriving -= 1
                send = send_of(action._replace(kind=f"RECV_{kind}"))
                now, peer = place[send.key], schedule.rank_of[source]
                sent[peer] = [used for used in sent.get(peer, []) if used >= now]
            if kind == "B":
                forwards[stage] -= 1
                messages = arriving + local + sum(map(len, sent.values()))
                again = stage in had_backward
                held = tuple(forwards.values()), tuple(put_off.values())
                found.add(HeldAtBackward(stage, again, *held, messages))
                had_backward.add(stage)
                put_off[stage] += (stage, micro) in schedule.split
                local += stage > 0
            else:
                forwards[stage] += 1
                local += stage < last
        elif kind == "W":
            put_off[stage] -= 1
    return found


def flights_of(layout: Layout, pp_rank: int) -> set[HeldAtBackward]:
    """The same for a layout, which may have no pipeline."""
    if layout.pp == 1:
        both = {False, layout.num_micro_batches > 1}
        return {HeldAtBackward(0, again, (0,), (0,), 0) for again in both}
    options = {"chunks": layout.num_chunks} if layout.schedule == "interleaved" else {}
    schedule = build(layout.schedule, layout.pp, layout.num_micro_batches, **options)
    return flights(schedule, pp_rank)
