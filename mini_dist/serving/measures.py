"""Measure a list of steps: tokens produced, how long each waited, how full the memory was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .actions import Request, ServerStep, ServingError
from .memory import Memory


def replayed(steps: Iterable[ServerStep], memory: Memory) -> Iterator[tuple[ServerStep, Memory]]:
    """Yield each step with the memory after it. memory: only its sizes are read.

    Raises ServingError if the steps could not have run.
    """
    book = Memory(memory.num_blocks, memory.block_size, memory.host_blocks)
    for step in steps:
        book.step(step.actions)
        yield step, book


def token_times(steps: Iterable[ServerStep], requests: Iterable[Request]) -> dict[str, list[float]]:
    """Return sequence -> the time of each of its new tokens."""
    known = {name: len(r.prompt) for r in requests for name in r.sequences}
    times: dict[str, list[float]] = {name: [] for name in known}
    for step in steps:
        for name, kind, first, last in step.actions:
            if kind == "RUN" and last == known[name]:
                known[name] += 1
                times[name].append(step.end)
            elif kind == "FORK":
                known[first] = known[name]
                times[first].append(step.end)
    return times


class Result(NamedTuple):
    """The measures of a whole run. Times in the unit of its clock."""

    seconds: float
    tokens: int  # new ones
    tokens_a_second: float
    first_token: float  # mean time from arrival to the first token
    next_token: float  # mean time from a token to the next one
    slowest_next: float
    used: float  # mean share of blocks in a table, weighted by time
    wasted: float  # mean share of slots in used blocks without a token
    batch: float  # mean number of sequences in a step

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens in {self.seconds:g}: {self.tokens_a_second:.3g} each; first "
            f"after {self.first_token:.3g}, next after {self.next_token:.3g}; blocks used "
            f"{self.used:.0%}, of that empty {self.wasted:.1%}"
        )


def measure(steps: list[ServerStep], requests: Iterable[Request], memory: Memory) -> Result:
    """Measure a run; sequences without a token do not count. Raises ServingError if
    there are no steps."""
    if not steps:
        raise ServingError("there are no steps to measure: give a run's steps.")
    requests = list(requests)
    times = token_times(steps, requests)
    arrival = {name: r.arrival for r in requests for name in r.sequences}
    firsts = [each[0] - arrival[name] for name, each in times.items() if each]
    gaps = [b - a for each in times.values() for a, b in zip(each, each[1:])]
    lasting = used = wasted = sequences = 0.0
    for step, book in replayed(steps, memory):
        seconds = step.end - step.start
        if book.used:
            lasting += seconds
            used += seconds * book.used / book.num_blocks
            wasted += seconds * book.unused_share
            sequences += seconds * len(book.ran)
    tokens, total = sum(map(len, times.values())), steps[-1].end - steps[0].start
    return Result(
        seconds=total,
        tokens=tokens,
        tokens_a_second=tokens / total,
        first_token=sum(firsts) / max(1, len(firsts)),
        next_token=sum(gaps) / max(1, len(gaps)),
        slowest_next=max(gaps, default=0.0),
        used=used / lasting,
        wasted=wasted / lasting,
        batch=sequences / lasting,
    )
