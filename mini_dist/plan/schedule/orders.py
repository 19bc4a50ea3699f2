"""The synchronous schedules, from one micro-batch at a time to interleaved 1F1B.

All of them do the same work, m forwards and m backwards a stage, and add up the same gradients;
they differ in the order alone, and with it in who waits and in what is held.

Sources: GPipe, Huang et al. 2019 (arXiv:1811.06965); PipeDream-flush, Narayanan et al. 2021
(arXiv:2006.09503) section 3.2; interleaved, Narayanan et al. 2021 (arXiv:2104.04473) section 2.2.
"""

from __future__ import annotations

from ..fields import checks_kinds
from .action import Action, Schedule, ScheduleError
from .sizes import check_rounds, check_sizes, round_size


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
def interleaved(
    num_ranks: int, num_micro_batches: int, chunks: int = 2, per_round: int | None = None
) -> Schedule:
    """Return 1F1B with v thin stages per rank, stage c·p + r on rank r: the bubble shrinks v times.

    It costs (vp-1)/(p-1) times the messages, which is more than v, and more activations in flight.
    The micro-batches pass the chunks in rounds of at least p (fewer only if m is less). `per_round`
    is the size of a round; the last round may be smaller (Llama 3, section 3.3.2: N; Megatron-core:
    microbatch_group_size_per_vp_stage). Without it the rounds are equal, as in PyTorch: m has to be
    a multiple of their number, max(1, m // p). With p = 4, m = 10 is two rounds of 5, and m = 9 is
    refused; with per_round=5 it is a round of 5 and one of 4. Raises ScheduleError.
    """
    check_sizes(num_ranks, num_micro_batches, chunks)
    if per_round is None:
        size = round_size(num_ranks, num_micro_batches)
    else:
        size = check_rounds(num_ranks, num_micro_batches, per_round)
    ranks = []
    for rank in range(num_ranks):
        forwards, backwards = looped(rank, num_ranks, num_micro_batches, chunks, size)
        warmup = (chunks - 1) * size + 2 * (num_ranks - 1 - rank)
        ranks.append(in_turn(forwards, backwards, warmup))
    return Schedule(f"interleaved 1F1B, v={chunks}", ranks)


def looped(
    rank: int, num_ranks: int, num_micro_batches: int, chunks: int, size: int
) -> tuple[list[Action], list[Action]]:
    """Return the order in which a rank's chunks see the micro-batches: rounds, chunk by chunk.

    Forwards take the chunks upwards, backwards downwards.
    """
    forwards, backwards = [], []
    for start in range(0, num_micro_batches, size):
        for chunk in range(chunks):
            up, down = chunk * num_ranks + rank, (chunks - 1 - chunk) * num_ranks + rank
            for micro in range(start, min(start + size, num_micro_batches)):
                forwards.append(Action(up, "F", micro))
                backwards.append(Action(down, "B", micro))
    return forwards, backwards
