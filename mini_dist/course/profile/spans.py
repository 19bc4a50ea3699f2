"""What a rank did when, and the arithmetic of intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mini_dist.ranks.ledger import Comm, Ledger

Intervals = list[tuple[float, float]]  # sorted and apart, as `union` leaves them


class Span(NamedTuple):
    """Something that a rank did from `start` to `end`, seconds of a clock that all ranks share.

    kind: step; region (a part of the program that has a name, such as forward); data; compute (an
    operator); communication. blocks: the rank's own thread was in it and did nothing else that
    counts. late: of a communication, who came last, and when.
    """

    name: str
    kind: str
    start: float
    end: float
    thread: int = 0
    blocks: bool = False
    late: tuple[int, float] | None = None


@dataclass
class Timeline:
    """Of each rank: its steps, and all that it did in them."""

    steps: list[Intervals]
    spans: list[list[Span]]

    @classmethod
    def of(cls, ledger: Ledger, seen: Sequence[Iterable[Span]]) -> Timeline:
        """Put the ledger and what `profiled` saw on the ranks of the same run on one timeline.

        Raises ValueError if a rank has marked no step.
        """
        spans = [list(each) for each in seen]
        for rank, mine in enumerate(spans):
            if not any(span.kind == "step" for span in mine):
                raise ValueError(f"rank {rank} has no step: put one around each, profile.step()")
        for comm, late in arrivals(ledger):
            blocks = comm.own_thread and not comm.is_leaf
            span = Span(comm.op, "communication", comm.start, comm.end, 0, blocks, late)
            spans[comm.rank].append(span)
        steps = [[(s.start, s.end) for s in mine if s.kind == "step"] for mine in spans]
        return cls(steps, spans)


def arrivals(ledger: Ledger) -> Iterable[tuple[Comm, tuple[int, float] | None]]:
    """Every outermost communication, with (rank, when) of who came last to it; None if nobody had
    to come. The k-th collective of a name in a group is the same one on all of its ranks."""
    from mini_dist.ranks.ledger.steps import messages

    met: dict[tuple, list[Comm]] = defaultdict(list)
    counts: dict[tuple, int] = defaultdict(int)
    for comm in ledger.calls():
        if comm.op not in ("send", "recv", "recv_anysource"):
            key = comm.group, comm.axis, comm.op
            number = counts[comm.rank, key]
            counts[comm.rank, key] += 1
            met[key, number].append(comm)
    for comms in met.values():
        last = max(comms, key=lambda comm: comm.start)
        for comm in comms:
            yield comm, (last.rank, last.start)
    sender = {id(message.recv): message.send for message in messages(ledger)}
    for comm in ledger.calls():
        if comm.op in ("send", "recv", "recv_anysource"):
            send = sender.get(id(comm))
            yield comm, (send.rank, send.start) if send else None


# ---- intervals -----------------------------------------------------------------------------------


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """The moments that are in any of them."""
    found: Intervals = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def without(intervals: Intervals, others: Intervals) -> Intervals:
    """The moments of the first that are in none of the second. Both as `union` leaves them."""
    found: Intervals = []
    for start, end in intervals:
        for left, right in others:
            if right <= start:
                continue
            if left >= end:
                break
            if left > start:
                found.append((start, left))
            start = right
        if start < end:
            found.append((start, end))
    return found


def within(intervals: Iterable[tuple[float, float]], start: float, end: float) -> Intervals:
    """Their parts between two moments."""
    return union((max(start, a), min(end, b)) for a, b in intervals if b > start and a < end)


def length(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals)
