"""Where the step went: every moment of a rank's step belongs to one part, and the parts add up.

    data            in a region "data"
    waiting         in a communication to which somebody had not come yet
    communication   in one, all there, and no operator of the rank at work meanwhile
    compute         in an operator
    host            in a named region and none of these: Python, autograd, the dispatcher
    unexplained     in none of all: what nobody has given a name to

A communication that runs while operators run is hidden, and costs nothing here. A communication in
the rank's own thread counts in full, including the additions of a ring.
"""

from __future__ import annotations

from dataclasses import dataclass

from mini_dist.plan.fields import checks_kinds
from mini_dist.plan.tables import Table

from .spans import Span, Timeline, length, union, within, without

PARTS = ("data", "waiting", "communication", "compute", "host", "unexplained")


@dataclass
class Went:
    """seconds: [rank][part], the mean over its steps; waited: [rank][other], seconds per step that
    one waited for the other; step: [rank], the mean length of a step."""

    seconds: list[dict[str, float]]
    waited: list[dict[int, float]]
    step: list[float]

    @property
    def unexplained(self) -> float:
        """Of all ranks' time, a share."""
        return sum(parts["unexplained"] for parts in self.seconds) / sum(self.step)

    def table(self) -> Table:
        rows = []
        for rank, (parts, whom) in enumerate(zip(self.seconds, self.waited)):
            most = max(whom, key=whom.get, default=None)
            ms = [f"{1e3 * parts[part]:.1f}" for part in PARTS]
            rows.append((rank, *ms, f"{1e3 * self.step[rank]:.1f}", "" if most is None else most))
        return Table(["rank", *PARTS, "step", "most time"], rows, "ms per step")

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


@checks_kinds
def where_it_went(timeline: Timeline, skip: int = 0) -> Went:
    """Return mean seconds per step of each part, for each rank. A rank's parts add up to its step.

    skip: how many steps at the beginning to ignore, in which everything starts.
    """
    went = Went([], [], [])
    for spans, steps in zip(timeline.spans, timeline.steps):
        steps = steps[skip:]
        parts, whom = dict.fromkeys(PARTS, 0.0), {}
        for start, end in steps:
            for part, seconds in parts_of(spans, start, end, whom).items():
                parts[part] += seconds / len(steps)
        went.seconds.append(parts)
        went.waited.append({rank: seconds / len(steps) for rank, seconds in whom.items()})
        went.step.append(sum(end - start for start, end in steps) / len(steps))
    return went


def parts_of(spans: list[Span], start: float, end: float, whom: dict[int, float]) -> dict:
    """Seconds of each part between two moments; adds to `whom` what was waited for each rank."""
    inside = [span for span in spans if span.end > start and span.start < end]

    def moments(kind: str, blocks: bool | None = None):
        chosen = [s for s in inside if s.kind == kind and blocks in (None, s.blocks)]
        return within([(s.start, s.end) for s in chosen], start, end)

    taken = moments("data")
    found = {"data": length(taken)}
    busy = without(moments("compute"), union(taken + moments("communication", True)))
    exposed = without(moments("communication"), union(taken + busy))
    waits = []
    for span in inside:
        if span.late and span.late[1] > span.start:
            wait = [(span.start, min(span.end, span.late[1]))]
            mine = without(within(wait, start, end), union(waits))
            mine = without(mine, without([(start, end)], exposed))  # of it what was exposed
            whom[span.late[0]] = whom.get(span.late[0], 0.0) + length(mine)
            waits += mine
    found["waiting"] = length(union(waits))
    found["communication"] = length(exposed) - found["waiting"]
    found["compute"] = length(busy)
    taken = union(taken + busy + exposed)
    hosted = without(moments("region"), taken)
    found["host"] = length(hosted)
    found["unexplained"] = length(without([(start, end)], union(taken + hosted)))
    return found
