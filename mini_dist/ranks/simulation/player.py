"""How a run goes on a machine: its events, line by line, each as soon as it can."""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import NamedTuple

from ..ledger import Comm, Ledger
from ..ledger.counting import (
    Begin,
    Done,
    Give,
    Host,
    Join,
    Kernel,
    Phase,
    Stated,
    Take,
    Updated,
    Wait,
)
from .native import native_op


class Span(NamedTuple):
    """Something in replayed time, in seconds. kind: product, attention, stream, wait or message."""

    rank: int
    kind: str
    name: str
    start: float
    end: float
    peer: int | None = None  # of a message, which stands in its sender's row


class Line(NamedTuple):
    """One line of execution: a rank's main thread (0), or another thread that works for it."""

    rank: int
    thread: int


class Player:
    """Runs every line of every rank in replayed time, the earliest first.

    A line stops where it has to wait for something with an unknown end: a message whose other
    side is not there, a task. The line that determines the end wakes it.
    """

    def __init__(self, ledger: Ledger, machine) -> None:
        self.machine = machine
        # How much of a collective's time the device loses for the kernels beside it.
        self.slowed = getattr(machine, "slowed", 0.0)
        self.launch_seconds = getattr(machine, "launch_seconds", 0.0)
        self.stragglers = getattr(machine, "stragglers", {})
        self.launched: dict[Line, float] = defaultdict(float)  # when the host is done with the last
        self.events: dict[Line, list] = {Line(rank, 0): [] for rank in range(len(ledger.programs))}
        for rank, program in enumerate(ledger.programs):
            for thread, event in program:
                self.events.setdefault(Line(rank, thread), []).append(event)
        self.comms: list[list] = [[] for _ in ledger.programs]
        for comm in ledger.comms:
            self.comms[comm.rank].append(comm)
        self.place = dict.fromkeys(self.events, 0)  # in a line's events
        self.clock = dict.fromkeys(self.events, 0.0)
        self.ends: dict[tuple, float] = {}  # when something was over, as far as that is known
        self.waiting: dict[tuple, list[Line]] = defaultdict(list)
        self.starts: dict[tuple[int, int], float] = {}  # (rank, comm) -> when its bytes start
        self.sides: dict[tuple, dict] = defaultdict(dict)  # begun so far: rank -> (comm, moment)
        self.numbers: dict[tuple, int] = defaultdict(int)
        self.unwaited: dict[int, list] = defaultdict(list)  # native collectives of a rank
        self.device_free = [0.0] * len(ledger.programs)
        self.carried: list[list] = [[] for _ in ledger.programs]  # messages' begin, device's work
        self.way_free: dict[tuple, float] = defaultdict(float)
        self.begins = [begins(self.events[Line(rank, 0)]) for rank in range(len(ledger.programs))]
        self.phases: list[list[tuple[float, bool, str]]] = [[] for _ in ledger.programs]
        self.spans: list[Span] = []
        self.ready: list[tuple[float, Line]] = []

    def play(self) -> None:
        for line in self.events:
            self.wake(line)
        while self.ready:  # one event, then it is another line's turn, if that is earlier
            _, line = heapq.heappop(self.ready)
            events, place = self.events[line], self.place[line]
            if place < len(events) and self.goes_on(line, events[place]):
                self.place[line] += 1
                self.wake(line)
        for line, place in self.place.items():
            if place < len(self.events[line]):
                raise ValueError(
                    f"rank {line.rank} waits for ever at {self.events[line][place]}: its other "
                    "side is not in the ledger."
                )

    def wake(self, line: Line) -> None:
        heapq.heappush(self.ready, (self.clock[line], line))

    def over(self, what: tuple, end: float) -> None:
        self.ends[what] = end
        for line in self.waiting.pop(what, ()):
            self.wake(line)

    def goes_on(self, line: Line, event) -> bool:
        """Play one event; False if the line has to wait, for what it will be woken by."""
        rank = line.rank
        if isinstance(event, Host):
            if seconds := self.machine.host_seconds(event):
                self.compute(line, seconds)
        elif isinstance(event, (Kernel, Stated)):
            if self.launch_seconds:  # a kernel starts when the host has launched it
                self.launched[line] += self.launch_seconds
                self.clock[line] = max(self.clock[line], self.launched[line])
            stated = isinstance(event, Stated)
            seconds = event.seconds if stated else self.machine.kernel_seconds(event)
            if self.stragglers:
                seconds *= self.stragglers.get(self.world_rank(rank), 1.0)
            start = self.compute(line, seconds)
            kind = "stated" if stated else event.kind
            self.spans.append(Span(rank, kind, event.name, start, self.clock[line]))
        elif isinstance(event, Begin):
            self.begin(line, event)
        elif isinstance(event, Wait):
            return self.wait(line, (rank, event.comm))
        elif isinstance(event, Give):
            self.over(("given", rank, event.task), self.clock[line])
        elif isinstance(event, Take):
            return self.wait(line, ("given", rank, event.task))
        elif isinstance(event, Done):
            self.over(("done", rank, event.task), self.clock[line])
        elif isinstance(event, Join):
            return self.wait(line, ("done", rank, event.task))
        elif isinstance(event, Phase):
            # whatever C++ waited for and nobody read: over when backward is
            if event.name == "step":
                for comm in self.unwaited[rank]:
                    if not self.wait(line, (rank, comm)):
                        return False
                self.unwaited[rank].clear()
            is_first = self.begins[rank][self.place[line]]
            self.phases[rank].append((self.clock[line], is_first, event.name))
        return True

    def world_rank(self, rank: int) -> int:
        return rank

    def compute(self, line: Line, seconds: float) -> float:
        """Move this line on by that much work of its device, and return when it began.

        Messages that the device itself carries interrupt it, and delay it if it had been idle.
        """
        carried, free, longer = self.carried[line.rank], self.device_free[line.rank], 0.0
        start = max(self.clock[line], free)
        while carried and carried[0][0] < start + seconds + longer:
            begun, busy = heapq.heappop(carried)
            if begun <= start:
                free = max(free, begun) + busy
                start = max(self.clock[line], free)
            else:
                longer += busy
        self.clock[line] = self.device_free[line.rank] = start + seconds + longer
        return start

    def wait(self, line: Line, what: tuple) -> bool:
        if what not in self.ends:
            self.waiting[what].append(line)
            return False
        end = self.ends[what]
        if end > self.clock[line]:
            if line.thread == 0:
                self.spans.append(Span(line.rank, "wait", str(what[0]), self.clock[line], end))
            self.clock[line] = end
        return True

    def begin(self, line: Line, event: Begin) -> None:
        """Note this side of a message or collective; when all sides are there it takes place."""
        rank, comm = line.rank, self.comms[line.rank][event.comm]
        if comm.op == "recv_anysource":
            raise ValueError("a receive from any source has no other side that replay could know.")
        if comm.op not in ("send", "recv"):
            self.unwaited[rank].append(event.comm)
        name, ends, needed = self.sides_of(rank, comm, event.tag)
        # between two ranks those with the same name stay in order, and so do a group's collectives
        side = (rank, comm.op == "recv")
        key = (*name, self.numbers[side, name])
        self.numbers[side, name] += 1
        sides = self.sides[key]
        sides[side] = (event.comm, self.clock[line])
        if len(sides) == needed:
            self.takes_place(comm, ends, self.sides.pop(key))

    def sides_of(self, rank: int, comm: Comm, tag: int) -> tuple[tuple, tuple | None, int]:
        """The name under which the sides of a communication meet, (sender, receiver) of a message,
        and how many sides there are."""
        if comm.op not in ("send", "recv"):
            return (comm.group,), None, len(comm.group)
        (peer,) = comm.peers
        ends = (rank, peer) if comm.op == "send" else (peer, rank)
        return (comm.group, ends, tag), ends, 2

    def link_of(self, comm: Comm, source: int, target: int) -> tuple[object, float]:
        """The link that carries a message, and for how long."""
        seconds = self.machine.message_seconds(comm.nbytes, source, target)
        return self.machine.link(source, target), seconds

    def takes_place(self, comm, ends: tuple[int, int] | None, sides: dict) -> None:
        begun = max(moment for _, moment in sides.values())
        if ends:
            source, target = ends
            busy = self.machine.busy_seconds("message", comm.nbytes)
            link, seconds = self.link_of(comm, source, target)
            ways = [("out", source, link), ("in", target, link)]
        else:
            # Each group has a stream of its own, as NCCL's communicators have.
            ways = [("collective", rank, comm.group) for rank, _ in sides]
            op = native_op(comm.op) or comm.op
            gathered = comm.op != "begin_all_gather_" and op in ("all_gather", "gather", "scatter")
            nbytes = comm.nbytes * (len(comm.group) if gathered else 1)
            seconds = self.machine.collective_seconds(op, nbytes, comm.group)
            busy = self.machine.busy_seconds(op, nbytes) + self.slowed * seconds
        start = max(begun, *(self.way_free[way] for way in ways))
        for way in ways:
            self.way_free[way] = start + seconds
        for rank, _ in sides if busy else ():
            heapq.heappush(self.carried[rank], (start, busy))
        for (rank, _), (number, _) in sides.items():
            self.starts[rank, number] = start
            self.over((rank, number), start + seconds)
        row, peer = (ends[0], ends[1]) if ends else (min(sides)[0], None)
        self.spans.append(Span(row, "message", comm.op, start, start + seconds, peer))

    # -- what came of it --

    def end(self) -> float:
        return max(self.clock.values())

    def steps(self) -> list[tuple[float, float]]:
        """Rank 0's steps, each up to what follows its optimizer; what went before has none."""
        starts = [moment for moment, is_first, _ in self.phases[0] if is_first] or [0.0]
        return list(zip(starts, [*starts[1:], self.end()]))

    def phase_changes(self) -> list[list[tuple[float, str]]]:
        """For each rank, when which phase began."""
        return [[(moment, name) for moment, _, name in phases] for phases in self.phases]

    def flops_of_a_step(self) -> float:
        """Counted FLOPs of the last step, all ranks together."""
        total = 0.0
        for line, events in self.events.items():
            flops = 0.0
            for event, is_first in zip(events, begins(events)):
                flops = 0.0 if is_first else flops
                flops += event.flops if isinstance(event, Kernel) else 0.0
            total += flops if line.thread == 0 else 0.0
        return total


def begins(events: list) -> list[bool]:
    """Of each event whether it begins a step: a phase of training after setup, or after the
    optimizer and what belongs to it (the gathering of ZeRO-1)."""
    found, between = [], True
    for event in events:
        is_first = between and isinstance(event, Phase) and event.name not in ("setup", "step")
        between = isinstance(event, Updated) or (between and not is_first)
        found.append(is_first)
    return found
