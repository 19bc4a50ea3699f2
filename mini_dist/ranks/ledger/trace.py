"""A run as a file for https://ui.perfetto.dev: what each rank did when, and an arrow a message.

The format is Chrome's (Duan and others, "Trace Event Format", 2016): a process a rank; in it lanes,
on which slices lie one after another or inside each other, never across. So what overlaps, such as
a send and a receive under way together, gets a lane of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from . import Comm, Ledger
from .steps import messages

PHASES, OPERATORS, COLLECTIVES, MESSAGES = 0, 100, 200, 300  # the first lane of each kind
NAMES = {PHASES: "phase", OPERATORS: "program", COLLECTIVES: "collectives", MESSAGES: "messages"}


def chrome_trace(ledger: Ledger, spans: Sequence[Iterable] = ()) -> dict:
    """Return the whole file as a dict. spans: for each rank, other things with a name, a start and
    an end, as `profile.profiled` finds them with torch.profiler."""
    began = min(start for start, _ in ledger.span)
    events, places = [], {}  # id of a Comm -> (rank, its lane)

    def put(rank: int, lane: int, name: str, start: float, end: float, **args) -> None:
        place = dict(ph="X", pid=rank, tid=lane, name=name, cat=NAMES[lane // 100 * 100], args=args)
        events.append(place | dict(ts=1e6 * (start - began), dur=1e6 * max(0.0, end - start)))

    for rank, changes in enumerate(ledger.phases):
        ends = [time for time, _ in changes[1:]] + [ledger.span[rank][1]]
        for (start, phase), end in zip(changes, ends):
            put(rank, PHASES, phase, max(start, began), max(end, began))
    for rank, seen in enumerate(spans):
        for span in nested(seen):
            put(rank, OPERATORS + span.thread, span.name, span.start, span.end)
    for rank in range(len(ledger.span)):
        for kind, leaves in ((COLLECTIVES, False), (MESSAGES, True)):
            mine = [c for c in ledger.comms if c.rank == rank and c.is_leaf == leaves]
            for comm, lane in in_lanes(mine):
                places[id(comm)] = kind + lane
                sizes = dict(axis=comm.axis, dtype=comm.dtype, bytes=comm.nbytes)
                put(rank, kind + lane, comm.op, comm.start, comm.end, **sizes)
    for number, message in enumerate(messages(ledger)):
        ends = (("s", message.send, 0.0), ("f", message.recv, 0.999))
        for ph, comm, part in ends:  # an arrow belongs to the slice that is there at its moment
            moment = comm.start + part * (comm.end - comm.start)
            if ph == "f":
                moment = max(moment, message.send.start)  # (two hosts' clocks may differ)
            where = dict(ph=ph, pid=comm.rank, tid=places[id(comm)], ts=1e6 * (moment - began))
            arrow = dict(name="message", cat="message", id=number)
            events.append(where | arrow | (dict(bp="e") if ph == "f" else {}))
    return {"traceEvents": [*titles(events), *events], "displayTimeUnit": "ms"}


def titles(events: list[dict]) -> list[dict]:
    """Names for the processes and lanes that there are."""
    lanes = sorted({(event["pid"], event["tid"]) for event in events})
    found = []
    for rank in sorted({rank for rank, _ in lanes}):
        found.append(
            dict(ph="M", pid=rank, tid=0, name="process_name", args={"name": f"rank {rank}"})
        )
    for rank, lane in lanes:
        args = {"name": f"{NAMES[lane // 100 * 100]} {lane % 100 or ''}".strip()}
        found.append(dict(ph="M", pid=rank, tid=lane, name="thread_name", args=args))
    return found


def in_lanes(comms: list[Comm]) -> Iterable[tuple[Comm, int]]:
    """Each with the first lane in which it is alone, or wholly inside of what it is part of."""
    lanes: list[list[tuple[float, float]]] = []  # of each: what is open, the innermost last
    for comm in sorted(comms, key=lambda comm: (comm.start, -comm.end)):
        for opened in lanes:
            while opened and opened[-1][1] <= comm.start:
                opened.pop()
        fits = (i for i, opened in enumerate(lanes) if not opened or comm.end <= opened[-1][1])
        number = next(fits, len(lanes))
        lanes[number:] = lanes[number:] or [[]]
        lanes[number].append((comm.start, comm.end))
        yield comm, number


def nested(spans: Iterable) -> list:
    """In the order in which a viewer reads them: the outer before what is in it."""
    return sorted(spans, key=lambda span: (span.start, -span.end))
