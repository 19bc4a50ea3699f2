"""When does each action run? Play the lists against stated times and read off what one asks.

The model: a rank does one computation at a time, in its list's order, as early as the list and its
inputs allow. A message takes `comm` from one rank to the next, keeps no rank busy and overtakes
nobody. So the timeline is what devices with these times would do, and emulate.py runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .action import (
    COMMUNICATION,
    COMPUTE,
    Action,
    Key,
    Schedule,
    ScheduleError,
    needs,
    walk,
)
from .validate import validate


@dataclass(frozen=True)
class Times:
    """How long the parts last, in any one unit: a number, or one for each stage.

    forward   F.
    backward  B alone, the gradient of the input. A full backward lasts backward + weight.
    weight    W, the gradient of the weights.
    comm      a message between a stage and its neighbour on another rank, given by its sender.
    step      S, an optimizer step inside an asynchronous schedule.
    """

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 1.0
    weight: float | Sequence[float] = 1.0
    comm: float | Sequence[float] = 0.0
    step: float | Sequence[float] = 0.0

    def per_stage(self, field: str, num_stages: int) -> list[float]:
        value = getattr(self, field)
        values = [value] * num_stages if isinstance(value, (int, float)) else list(value)
        if len(values) != num_stages:
            raise ScheduleError(
                f"Times.{field} has {len(values)} values and the schedule {num_stages} stages: "
                "give one number, or one a stage"
            )
        if any(not v >= 0 for v in values):
            raise ScheduleError(f"Times.{field}={value}: a time is zero or more")
        return values

    def durations(self, schedule: Schedule) -> dict[Key, float]:
        """How long each computation of the schedule lasts; here an unsplit B gets its W's time."""
        stages = schedule.num_stages
        names = {"F": "forward", "B": "backward", "W": "weight", "S": "step"}
        lasts = {kind: self.per_stage(name, stages) for kind, name in names.items()}
        durations = {}
        for action in schedule.all_actions:
            stage, kind, micro = action.key
            if kind in COMPUTE:
                durations[action.key] = lasts[kind][stage]
                if kind == "B" and (stage, micro) not in schedule.split:
                    durations[action.key] += lasts["W"][stage]
        return durations


class Span(NamedTuple):
    """One action on the timeline."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What ran when: `spans[rank]` in order of time. Print it for the picture in text."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """From time 0 to the end of the last action."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank, how long it computes."""
        return tuple(sum(s.end - s.start for s in spans) for spans in self.spans)

    @property
    def _mean_busy(self) -> float:
        return sum(self.busy) / len(self.busy)

    @property
    def bubble(self) -> float:
        """Idle / makespan, the mean over ranks; even stages, GPipe or 1F1B: (p-1)/(m+p-1)."""
        return 1 - self._mean_busy / self.makespan if self.makespan else 0.0

    @property
    def bubble_over_ideal(self) -> float:
        """Idle / computing, as the Megatron-LM papers print it: (p-1)/m for GPipe and 1F1B."""
        return self.makespan / self._mean_busy - 1 if self._mean_busy else 0.0

    @property
    def bubble_over_longest_span(self) -> float:
        """As the zero-bubble tables have it: 1 - computing / the longest single rank's span.

        A rank's span runs from its first start to its last end. It is shorter than the makespan
        where ranks start and end one after the other and the next iteration closes up (ZB-H2).
        """
        spans = [spans[-1].end - spans[0].start for spans in self.spans if spans]
        return 1 - self._mean_busy / max(spans) if spans and max(spans) else 0.0

    @property
    def peak_in_flight(self) -> list[int]:
        """Activations each rank holds at most, in micro-batches of one chunk."""
        return peak_in_flight(self.schedule)

    def in_flight(self, rank: int) -> list[tuple[float, int]]:
        """The memory profile: (time, activations held from then on), a step function."""
        held = in_flight(self.schedule)[rank]
        steps = [(0.0, 0)]
        for span, before, after in zip(self.spans[rank], [0, *held], held, strict=False):
            if after != before:  # a forward's activations exist from its start on
                steps.append((span.start if after > before else span.end, after))
        return steps

    @classmethod
    def of_run(cls, schedule: Schedule, spans: Sequence[Sequence[Span]]) -> Timeline:
        """The timeline that was measured: each rank's spans by one clock; the first start is 0."""
        origin = min(span.start for rank in spans for span in rank)
        shifted = [[Span(s.action, s.start - origin, s.end - origin) for s in r] for r in spans]
        return cls(schedule, tuple(map(tuple, shifted)))

    def __str__(self) -> str:
        return text(self)


def simulate(schedule: Schedule, times: Times | None = None) -> Timeline:
    """Run the lists against the times (all F, B, W last 1 and messages nothing, if not given).

    Raises ScheduleError where the lists cannot run, or the times do not fit the stages.
    """
    validate(schedule)
    times = times or Times()
    durations, comm = times.durations(schedule), times.per_stage("comm", schedule.num_stages)
    rank_of = schedule.rank_of
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    free = [0.0] * schedule.num_ranks
    ends: dict[Key, float] = {}
    for rank, _, action in walk(schedule):
        start = 0.0
        for key in needs(schedule, action):
            away = rank_of[key[0]] != rank
            start = max(start, ends[key] + (comm[key[0]] if away else 0.0))
        if action.kind in COMMUNICATION:  # nobody is kept busy: it is over when its input is there
            ends[action.key] = start
            continue
        start = max(start, free[rank])
        ends[action.key] = free[rank] = start + durations[action.key]
        spans[rank].append(Span(action, start, free[rank]))
    return Timeline(schedule, tuple(map(tuple, spans)))


def in_flight(schedule: Schedule) -> list[list[int]]:
    """For each rank the activations it holds after each of its computations.

    F takes one; the last part of its backward (B, or W where it is split) gives it back.
    """
    profiles = []
    for rank in range(schedule.num_ranks):
        held, profile = 0, []
        for stage, kind, micro, _ in schedule.actions(rank):
            if kind in COMMUNICATION:
                continue
            held += kind == "F"
            held -= kind == "W" or (kind == "B" and (stage, micro) not in schedule.split)
            profile.append(held)
        profiles.append(profile)
    return profiles


def peak_in_flight(schedule: Schedule) -> list[int]:
    """The most activations each rank holds at once, in micro-batches of one chunk."""
    return [max(profile, default=0) for profile in in_flight(schedule)]


def text(timeline: Timeline) -> str:
    """The timeline as text: a row a rank, time to the right, a column for the shortest action.

    An action is written where it starts (without its stage, where each rank has just one), then
    `-` while it lasts; a dot is an idle moment.
    """
    schedule = timeline.schedule
    one_stage_a_rank = schedule.num_stages == schedule.num_ranks
    labels = [
        [f"{s.action.kind}{s.action.micro}" if one_stage_a_rank else str(s.action) for s in spans]
        for spans in timeline.spans
    ]
    lengths = [s.end - s.start for spans in timeline.spans for s in spans if s.end > s.start]
    unit = min(lengths, default=1.0)
    width = max(len(label) for row in labels for label in row) + 1
    lines = [
        f"{schedule.name}: makespan {timeline.makespan:g}, bubble {timeline.bubble:.1%}, "
        f"in flight {timeline.peak_in_flight}"
    ]
    for rank, (row, spans) in enumerate(zip(labels, timeline.spans, strict=True)):
        cells = ["."] * round(timeline.makespan / unit)
        for label, span in zip(row, spans, strict=True):
            first, last = round(span.start / unit), round(span.end / unit)
            cells[first:last] = [label, *["-" * (width - 1)] * (last - first - 1)][: last - first]
        lines.append(f"rank {rank} |" + "".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)
