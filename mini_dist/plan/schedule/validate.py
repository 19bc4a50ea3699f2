"""Refuse a schedule that cannot run, and show the place."""

from __future__ import annotations

from collections import Counter

from ..fields import checks_kinds
from .action import (
    COMMUNICATION,
    Action,
    Fused,
    Schedule,
    ScheduleError,
    Stuck,
    members,
    needs,
    receive_of,
    send_of,
    timetable,
    walk,
)


@checks_kinds(error=ScheduleError)
def validate(schedule: Schedule, *, rendezvous: bool = False) -> None:
    """Raise ScheduleError unless the lists do everything once and in an order that can run.

    Checked: each stage on one rank; each stage has each micro-batch's F and B exactly once (B for
    none: forward only), W for all or none unless the schedule is `mixed`; an asynchronous backward
    uses its forward's version; every message has its other end; no deadlock. `rendezvous=True`
    asks in addition that the communications can run in list order, each to its end, as on NCCL.
    The message holds the timetable with the place marked.
    """
    if schedule.num_stages == 0:
        raise ScheduleError(f"schedule {schedule.name!r} has no actions")
    _each_stage_on_one_rank(schedule)
    _each_action_once(schedule)
    if schedule.asynchronous:
        _backward_uses_the_version_of_its_forward(schedule)
    if schedule.has_communication:
        _each_message_has_two_ends(schedule)
    _no_deadlock(schedule, rendezvous)


def _refuse(schedule: Schedule, problem: str, marks: list[tuple[int, int]]) -> None:
    raise ScheduleError(f"{schedule.name}: {problem}\n{timetable(schedule, marks)}")


def _places(schedule: Schedule, wanted) -> list[tuple[int, int]]:
    return [
        (rank, place)
        for rank, items in enumerate(schedule.ranks)
        for place, item in enumerate(items)
        if any(wanted(rank, action) for action in members(item))
    ]


def _each_stage_on_one_rank(schedule: Schedule) -> None:
    strays = _places(schedule, lambda rank, a: schedule.rank_of[a.stage] != rank)
    if strays:
        rank, place = strays[0]
        action = members(schedule.ranks[rank][place])[0]
        home = schedule.rank_of[action.stage]
        _refuse(
            schedule,
            f"{action} is on rank {rank}, but stage {action.stage} lives on rank {home}",
            strays,
        )


def _each_action_once(schedule: Schedule) -> None:
    count = Counter(action.key for action in schedule.all_actions)
    for key, times in count.items():
        if times > 1:
            places = _places(schedule, lambda _, a, key=key: a.key == key)
            _refuse(schedule, f"{Action(*key)} stands {times} times, should be once", places)
    kinds = ["F"] if schedule.forward_only else ["F", "B"]
    if schedule.split and not schedule.mixed:
        kinds.append("W")
    for stage in range(schedule.num_stages):
        for micro in range(schedule.num_micro_batches):
            for kind in kinds:
                if not count[stage, kind, micro]:
                    _missing(schedule, Action(stage, kind, micro))
    if schedule.mixed:
        for stage, micro in schedule.split:
            if not count[stage, "B", micro]:
                _missing(schedule, Action(stage, "B", micro))


def _missing(schedule: Schedule, action: Action) -> None:
    """The mark stands where the action's nearest kin is: same stage and kind, or same stage."""
    same_kind = lambda _, a: a.stage == action.stage and a.kind == action.kind  # noqa: E731
    same_stage = lambda _, a: a.stage == action.stage  # noqa: E731
    places = _places(schedule, same_kind) or _places(schedule, same_stage)
    before = [
        (rank, place)
        for rank, place in places
        if any(a.micro < action.micro for a in members(schedule.ranks[rank][place]))
    ]
    hint = ""
    if action.kind == "W":
        hint = " (others are split; say mixed=True if this B is meant to be a full backward)"
    _refuse(schedule, f"{action} is missing{hint}", before[-1:] or places[:1])


def _backward_uses_the_version_of_its_forward(schedule: Schedule) -> None:
    version = {a.key: a.version for a in schedule.all_actions}
    for (stage, kind, micro), used in version.items():
        if kind in ("B", "W") and used != version[stage, "F", micro]:
            forward = Action(stage, "F", micro, version[stage, "F", micro])
            _refuse(
                schedule,
                f"{Action(stage, kind, micro, used)} uses other weights than {forward} did: "
                "its gradient would belong to no weights at all (stash the version)",
                _places(schedule, lambda _, a, k=(stage, micro): (a.stage, a.micro) == k),
            )


def _each_message_has_two_ends(schedule: Schedule) -> None:
    present = {action.key for action in schedule.all_actions}
    expected = set()
    for stage in range(schedule.num_stages - 1):
        if schedule.crosses(stage):
            for micro in range(schedule.num_micro_batches):
                sends = [Action(stage, "SEND_F", micro)]
                if not schedule.forward_only:
                    sends.append(Action(stage + 1, "SEND_B", micro))
                for send in sends:
                    expected |= {send.key, receive_of(send).key}
    for key in sorted(expected - present):
        _missing(schedule, Action(*key))
    surplus = {key for key in present if key[1] in COMMUNICATION} - expected
    if surplus:
        key = min(surplus)
        _refuse(
            schedule,
            f"{Action(*key)} has no other end: no border between two ranks is there",
            _places(schedule, lambda _, a: a.key == key),
        )


def _no_deadlock(schedule: Schedule, rendezvous: bool) -> None:
    done, places = set(), None
    try:
        for _, _, action in walk(schedule, rendezvous=rendezvous):
            done.add(action.key)
    except Stuck as stuck:
        places = stuck.places
    if places is None:
        return
    waits, marks = [], []
    for rank, place in enumerate(places):
        if place < len(schedule.ranks[rank]):
            item = schedule.ranks[rank][place]
            marks.append((rank, place))
            waits.append(f"rank {rank} at {item} waits for {_cause(schedule, item, done)}")
    _refuse(schedule, "deadlock: " + "; ".join(waits), marks)


def _cause(schedule: Schedule, item: Action | Fused, done: set) -> str:
    causes = []
    for action in members(item):
        if action.key not in done:
            absent = [Action(*key) for key in needs(schedule, action) if key not in done]
            other_end = receive_of if action.kind.startswith("SEND") else send_of
            causes += absent or [other_end(action)]
    return ", ".join(map(str, dict.fromkeys(causes)))
