"""Asynchronous schedules: never empty the pipe, and live with weights that are behind.

An optimizer step S stands in the list. Each forward says which version of the weights it uses
(`1F4@2`), and its backward must use the same one, although the stage may have newer weights by
then: that is weight stashing, and it costs memory for each version that a micro-batch in flight
still needs. The bubble is only the first filling and the last draining.

Sources: PipeDream, Harlap et al. 2018 (arXiv:1806.03377) section 3.3; PipeDream-2BW, Narayanan et
al. 2021 (arXiv:2006.09503) section 3.1.
"""

from __future__ import annotations

from ..fields import checks_kinds
from .action import Action, Schedule, ScheduleError
from .orders import in_turn
from .sizes import check_sizes


@checks_kinds(error=ScheduleError)
def pipedream(num_ranks: int, num_micro_batches: int) -> Schedule:
    """1F1B with an optimizer step after every backward; a forward takes the newest weights.

    Each of the m micro-batches is a batch of its own. Rank r keeps up to p - r versions, and its
    gradients are up to p - 1 - r steps old: the first stage's the oldest, the last one's fresh.
    """
    check_sizes(num_ranks, num_micro_batches)
    ranks = []
    for rank in range(num_ranks):
        actions, steps, used = [], 0, {}
        for stage, kind, micro, _ in _one_f_one_b_list(rank, num_ranks, num_micro_batches):
            if kind == "F":
                used[micro] = steps
                actions.append(Action(stage, "F", micro, version=steps))
            else:
                actions.append(Action(stage, "B", micro, version=used[micro]))
                actions.append(Action(stage, "S", steps))
                steps += 1
        ranks.append(actions)
    return Schedule("PipeDream", ranks)


@checks_kinds(error=ScheduleError)
def pipedream_2bw(num_ranks: int, num_micro_batches: int, micro_batches_a_step: int) -> Schedule:
    """Two weight versions everywhere: batch b of gradients is taken at version b - 1.

    Gradients of `micro_batches_a_step` micro-batches add up to one step; a new version serves only
    micro-batches of the batch after the next one, so all stages use the same version for the same
    micro-batch and every gradient is one step old: w(t+1) = w(t) - lr * grad(w(t-1)).
    Needs micro_batches_a_step >= p, and whole batches.
    """
    check_sizes(num_ranks, num_micro_batches)
    size = micro_batches_a_step
    if size < num_ranks or num_micro_batches % size:
        batches = max(1, round(num_micro_batches / max(size, num_ranks)))
        raise ScheduleError(
            f"2BW on {num_ranks} ranks takes whole batches of at least {num_ranks} micro-batches a "
            f"step: {num_micro_batches} in batches of {size} are not, "
            f"{batches * max(size, num_ranks)} in batches of {max(size, num_ranks)} would work"
        )
    ranks = []
    for rank in range(num_ranks):
        actions = []
        for stage, kind, micro, _ in _one_f_one_b_list(rank, num_ranks, num_micro_batches):
            batch = micro // size
            actions.append(Action(stage, kind, micro, version=max(batch - 1, 0)))
            if kind == "B" and micro % size == size - 1:
                actions.append(Action(stage, "S", batch))
        ranks.append(actions)
    return Schedule("PipeDream-2BW", ranks)


def _one_f_one_b_list(rank: int, num_ranks: int, num_micro_batches: int) -> list[Action]:
    forwards = [Action(rank, "F", micro) for micro in range(num_micro_batches)]
    backwards = [Action(rank, "B", micro) for micro in range(num_micro_batches)]
    return in_turn(forwards, backwards, warmup=num_ranks - 1 - rank)


def versions_held(schedule: Schedule) -> list[int]:
    """The most versions of its weights that each rank keeps at once.

    That is the newest one, and each older one that an action further down its list still names.
    """
    return [max(held, default=0) for held, _ in map(_versions, _by_rank(schedule))]


def gradient_delay(schedule: Schedule) -> list[int]:
    """By how many optimizer steps each rank's gradients are behind its weights, at most."""
    return [max(delays, default=0) for _, delays in map(_versions, _by_rank(schedule))]


def _by_rank(schedule: Schedule) -> list[list[Action]]:
    return [list(schedule.actions(rank)) for rank in range(schedule.num_ranks)]


def _versions(actions: list[Action]) -> tuple[list[int], list[int]]:
    """After each action the versions held; for each gradient the steps that it came late."""
    newest, held, delays, waiting = 0, [], [], []
    last_use = {action.version or 0: i for i, action in enumerate(actions) if action.kind != "S"}
    for i, action in enumerate(actions):
        if action.kind == "S":
            delays += [newest - version for version in waiting]
            newest, waiting = newest + 1, []
        elif action.kind == "B":
            waiting.append(action.version or 0)
        held.append(1 + sum(version < newest and use > i for version, use in last_use.items()))
    return held, delays
