"""Which numbers of ranks and micro-batches a schedule can run, asked without building its lists."""

from __future__ import annotations

from ..fields import whole
from .action import ScheduleError


def check_sizes(num_ranks: int, num_micro_batches: int, chunks: int = 1) -> None:
    whole("num_ranks", num_ranks, error=ScheduleError)
    whole("num_micro_batches", num_micro_batches, error=ScheduleError)
    whole("chunks", chunks, error=ScheduleError)


def check_micro_batches(name: str, num_ranks: int, num_micro_batches: int) -> None:
    """Raise ScheduleError if the schedule `name` cannot run this many micro-batches."""
    if name == "interleaved":
        round_size(num_ranks, num_micro_batches)
    if name == "dualpipe_v":
        enough_for_dualpipe(num_ranks, num_micro_batches)


def round_size(num_ranks: int, num_micro_batches: int) -> int:
    """How many micro-batches a chunk takes before the next chunk's turn."""
    rounds = max(1, num_micro_batches // num_ranks)
    if num_micro_batches % rounds:
        works = [m for m in range(1, 2 * num_micro_batches) if m % max(1, m // num_ranks) == 0]
        below = max(m for m in works if m < num_micro_batches)
        above = min(m for m in works if m > num_micro_batches)
        raise ScheduleError(
            f"interleaved 1F1B on {num_ranks} ranks runs {num_micro_batches} micro-batches in "
            f"{rounds} rounds, and that does not divide evenly; {below} or {above} would work"
        )
    return num_micro_batches // rounds


def check_rounds(num_ranks: int, num_micro_batches: int, per_round: int) -> int:
    """Return `per_round` if every round has at least as many micro-batches as there are ranks."""
    whole("per_round", per_round, error=ScheduleError)
    fewest = min(num_ranks, num_micro_batches)

    def smallest_round(size: int) -> int:
        return min(size, num_micro_batches % size or size)

    if per_round > num_micro_batches or smallest_round(per_round) < fewest:
        works = [n for n in range(1, num_micro_batches + 1) if smallest_round(n) >= fewest]
        nearest = min(works, key=lambda n: abs(n - per_round))
        raise ScheduleError(
            f"per_round={per_round}: each round of interleaved 1F1B on {num_ranks} ranks needs at "
            f"least {fewest} of the {num_micro_batches} micro-batches, the last round as well; "
            f"per_round={nearest} would work"
        )
    return per_round


def enough_for_dualpipe(num_ranks: int, num_micro_batches: int) -> None:
    if num_micro_batches < 2 * num_ranks:
        raise ScheduleError(
            f"DualPipeV on {num_ranks} ranks has {2 * num_ranks} stages and needs as many "
            f"micro-batches: {num_micro_batches} is too few, {2 * num_ranks} or more would work"
        )
