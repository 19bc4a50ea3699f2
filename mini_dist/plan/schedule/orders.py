"""The synchronous schedules, from one micro-batch at a time to interleaved 1F1B.

All of them do the same work, m forwards and m backwards a stage, and add up the same gradients;
they differ in the order alone, and with it in who waits and in what is held.

Sources: GPipe, Huang et al. 2019 (arXiv:1811.06965); PipeDream-flush, Narayanan et al. 2021
(arXiv:2006.09503) section 3.2; interleaved, Narayanan et al. 2021 (arXiv:2104.04473) section 2.2.
"""

from __future__ import annotations

from ..fields import checks_kinds
from .action import Action, Schedule, ScheduleError
from .sizes import check_sizes, round_size


@checks_kinds(error=ScheduleError)
def naive(num_ranks: int, num_micro_batches: int) -> Schedule:
    """One micro-batch goes all the way down and back before the next one starts."""
    check_sizes(num_ranks, num_micro_batches)
    ranks = []
    for rank in range(num_ranks):
        actions = []
        for micro in range(num_micro_batches):
            actions += [Action(rank, "F", micro), Action(rank, "B", micro)]
        ranks.append(actions)
    return Schedule("naive", ranks)


@checks_kinds(error=ScheduleError)
def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards: everyone holds all m micro-batches at once."""
    check_sizes(num_ranks, num_micro_batches)
    ranks = []
    for rank in range(num_ranks):
        forwards = [Action(rank, "F", micro) for micro in range(num_micro_batches)]
        backwards = [Action(rank, "B", micro) for micro in range(num_micro_batches)]
        ranks.append(forwards + backwards)
    return Schedule("GPipe", ranks)


@checks_kinds(error=ScheduleError)
def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Start each backward as soon as it can: rank r never holds more than p - r micro-batches.

    The bubble is GPipe's, (p-1)/(m+p-1) of the makespan; what shrinks is the memory.
    """
    check_sizes(num_ranks, num_micro_batches)
    ranks = []
    for rank in range(num_ranks):
        warmup = min(num_ranks - 1 - rank, num_micro_batches)
        actions = [Action(rank, "F", micro) for micro in range(warmup)]
        for micro in range(num_micro_batches):
            if warmup + micro < num_micro_batches:
                actions.append(Action(rank, "F", warmup + micro))
            actions.append(Action(rank, "B", micro))
        ranks.append(actions)
    return Schedule("1F1B", ranks)


def in_turn(
    forwards: list[Action],
    backwards: list[Action],
    warmup: int,
    weight_delay: int | None = None,
) -> list[Action]:
    """1F1B of any two lists: warm up with `warmup` forwards, then one forward and one backward in
    turn, then cool down.

    With a `weight_delay` each backward is split, and the W of a B comes that many Bs later.
    """
    actions = forwards[:warmup]
    weights = [backward._replace(kind="W") for backward in backwards]
    for i, backward in enumerate(backwards):
        actions += forwards[warmup + i : warmup + i + 1]
        actions.append(backward)
        if weight_delay is not None and i >= weight_delay:
            actions.append(weights[i - weight_delay])
    if weight_delay is not None:
        actions += weights[max(0, len(weights) - weight_delay) :]
    return actions


@checks_kinds(error=ScheduleError)
def interleaved(num_ranks: int, num_micro_batches: int, chunks: int = 2) -> Schedule:
    """1F1B with v thin stages a rank, stage c·p + r on rank r: the bubble shrinks v times.

    It costs (vp-1)/(p-1) times the messages, which is more than v, and more activations in flight.
    Its demand on m: the micro-batches pass the chunks in rounds of at least p (fewer only if m is
    less). Megatron-LM wants m to be a multiple of p; here, as in PyTorch, m has to be a multiple of
    its number of rounds, max(1, m // p). So any m <= p + p - 1 is fine, and any multiple of p; with
    p = 4, m = 10 is two rounds of 5, m = 9 is refused.
    """
    check_sizes(num_ranks, num_micro_batches, chunks)
    size = round_size(num_ranks, num_micro_batches)
    ranks = []
    for rank in range(num_ranks):
        forwards, backwards = looped(rank, num_ranks, num_micro_batches, chunks, size)
        warmup = (chunks - 1) * size + 2 * (num_ranks - 1 - rank)
        ranks.append(in_turn(forwards, backwards, warmup))
    return Schedule(f"interleaved 1F1B, v={chunks}", ranks)


def looped(
    rank: int, num_ranks: int, num_micro_batches: int, chunks: int, size: int
) -> tuple[list[Action], list[Action]]:
    """The order in which a rank's chunks see the micro-batches: a round of `size`, chunk by chunk.

    Forwards take the chunks upwards, backwards downwards.
    """
    forwards, backwards = [], []
    for start in range(0, num_micro_batches, size):
        for chunk in range(chunks):
            up, down = chunk * num_ranks + rank, (chunks - 1 - chunk) * num_ranks + rank
            for micro in range(start, start + size):
                forwards.append(Action(up, "F", micro))
                backwards.append(Action(down, "B", micro))
    return forwards, backwards
