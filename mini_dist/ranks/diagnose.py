"""From what is known of a failed run to one error that says which rank, which line and why."""

from __future__ import annotations

import itertools
import linecache
import os
import re
import signal
import sys
import sysconfig
import time

from . import flight
from .rank import Failure
from .world import PACKAGE, World


class RankError(RuntimeError):
    """A run on ranks failed; the message names the rank, the line and the cause.

    `rank`: the rank at fault (None if it is not one rank's); `failures`: rank -> what it raised;
    `outputs`: what each rank had printed.
    """

    rank: int | None = None
    failures: dict[int, Failure] = {}
    outputs: list[str] = []

    def _render_traceback_(self) -> list[str]:
        # IPython asks for this: the frames between the cell and its ranks help nobody.
        return [f"{type(self).__name__}: {self}"]


class RankTimeout(RankError, TimeoutError):
    """A run on ranks did not end within its deadline."""


class RankInterrupt(RankError, KeyboardInterrupt):
    """A run on ranks was interrupted by the user."""


def explain(outcome: str, world: World, timeout: float) -> RankError:
    """The error for a run that ended as `outcome` (see World.run).

    Causes before consequences: an operation that the ranks do not agree on, a rank that died, an
    exception of the learner's code; only then a lost connection, a deadlock, the deadline.
    """
    scene = Scene(world)
    raised = {r.number: r.report.error for r in world.ranks if r.report and r.report.error}
    genuine = {rank: failure for rank, failure in raised.items() if not failure.is_connection}
    died = {r.number: r.status for r in world.ranks if r.status is not None and not r.report}
    unlike = flight.mismatch(scene.flights)
    stuck = flight.stuck(scene.flights, scene.returned)
    kind, culprit = RankError, None
    if unlike:
        lines = ["the ranks do not agree on an operation that they enter together:"]
        lines += scene.compare(unlike)
    elif died:
        culprit = min(died, key=lambda rank: (died[rank] >= 0, rank))  # first those killed
        lines = [f"rank {culprit} of {world.size} {describe_status(died[culprit])}"]
        lines += scene.tell([culprit, *scene.waiting])
    elif raised:
        culprit = min(genuine or raised)
        lines = describe_exception(culprit, world.size, raised[culprit])
        alike = [rank for rank in genuine if same(genuine[rank], raised[culprit])]
        if len(alike) > 1:
            lines.append(f"{ranks_text(set(alike) - {culprit})} raised the same.")
        lines += scene.tell(scene.waiting)
    elif outcome == "stuck":
        # (Nothing moves any more; should a rank have died since, the others are still named.)
        lines = [f"deadlock: {waits(stuck or scene.waiting)} for what can no longer happen."]
        lines += scene.tell(range(world.size))
    elif outcome == "interrupt":
        kind, lines = RankInterrupt, ["interrupted.", *scene.tell(range(world.size))]
    else:
        kind, lines = RankTimeout, [f"not done after {timeout:g} s, the timeout of this launch."]
        lines += scene.tell(range(world.size))
    error = kind("\n".join(lines))
    error.rank, error.failures = culprit, raised
    error.outputs = [rank.text() for rank in world.ranks]
    return error


class Scene:
    """Where every rank was when the run ended."""

    def __init__(self, world: World):
        self.world, self.time = world, time.time()
        self.stacks = world.stacks()
        self.flights = world.flights()
        self.returned = {rank.number for rank in world.ranks if rank.returned}
        self.waiting = [
            rank.number for rank in world.ranks if not rank.report and rank.status is None
        ]

    def tell(self, ranks) -> list[str]:
        """A line a rank: what it is doing, since when, waiting for whom, and on which line."""
        return [f"  rank {rank} {self.state(rank)}{self.place(rank)}" for rank in ranks]

    def state(self, number: int) -> str:
        rank, seen = self.world.ranks[number], self.flights[number]
        if rank.returned:
            collectives = sum(entry.is_collective for entry in seen.entries)
            return f"has returned, after {plural(collectives, 'collective')}"
        if rank.report:
            return f"raised {rank.report.error.type}"
        if rank.status is not None:
            return "is gone"
        if not seen.waiting:
            return "is running"
        for_whom = flight.absent(self.flights, number)
        for_whom = f" for {ranks_text(for_whom)}" if for_whom else ""
        return f"has waited {self.time - seen.waiting.time:.1f} s in {seen.waiting.text}{for_whom}"

    def place(self, number: int) -> str:
        here = location(self.stacks[number])
        return f"\n      {here}" if here else ""

    def compare(self, unlike: dict[int, flight.Entry]) -> list[str]:
        signatures = [entry.signature for entry in unlike.values()]
        alone = [s for s in signatures if signatures.count(s) == 1]
        lines = []
        for rank, entry in sorted(unlike.items()):
            which = (
                f"collective number {entry.k}"
                if entry.is_collective
                else f"message number {entry.k} on this route"
            )
            odd = len(unlike) > 2 and alone == [entry.signature]
            there = not entry.done and not self.world.ranks[rank].report
            lines.append(
                f"  rank {rank} calls {entry.text} as its {which}"
                + ("   <- the odd one out" if odd else "")
                + (self.place(rank) if there and entry is self.flights[rank].entries[-1] else "")
            )
        return lines


def describe_exception(rank: int, size: int, failure: Failure) -> list[str]:
    lines = [f"rank {rank} of {size} raised {described(failure)}"]
    lines += traceback_lines(failure.frames)
    because = failure.because
    while because:
        lines += [f"while handling {described(because)}"]
        lines += traceback_lines(because.frames)
        because = because.because
    return lines


def described(failure: Failure) -> str:
    return f"{failure.type}: {failure.message}" if failure.message else failure.type


def traceback_lines(frames) -> list[str]:
    """The learner's own frames; if there is none, the innermost one."""
    frames = [frame for frame in frames if not in_launcher(frame[0])]
    own = [frame for frame in frames if not in_library(frame[0])] or frames[-1:]
    lines = []
    for (filename, line, name), alike in itertools.groupby(own):
        times = len(list(alike))
        lines.append(f"  {place(filename)}, line {line}, in {name}")
        source = linecache.getline(filename, line).strip()
        if source:
            lines.append(f"    {source}")
        if times > 1:
            lines.append(f"    [{times} times in a row]")
    return lines


def describe_status(status: int) -> str:
    if status >= 0:
        return f"ended its process with exit code {status} instead of returning."
    name = signal.Signals(-status).name
    hint = {
        "SIGKILL": " (by somebody, or by the system because memory ran out)",
        "SIGABRT": " (native code gave up; its last words are in the rank's output)",
        "SIGSEGV": " (native code touched memory that is not its own)",
    }.get(name, "")
    return f"was killed by {name}{hint}."


FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')


def location(stack: str) -> str:
    """The learner's line in a stack written by faulthandler (innermost frame first)."""
    main_thread = stack.rpartition("(most recent call first):")[2]
    frames = [(f, int(n), name) for f, n, name in FRAME.findall(main_thread)]
    frames = [frame for frame in frames if not in_launcher(frame[0])]
    own = [frame for frame in frames if not in_library(frame[0])] or frames
    if not own:
        return ""
    filename, line, _ = own[0]
    source = linecache.getline(filename, line).strip()
    return f"{place(filename)}, line {line}" + (f": {source}" if source else "")


LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(PACKAGE), "<frozen")


def in_library(filename: str) -> bool:
    return filename.startswith(LIBRARIES)


def in_launcher(filename: str) -> bool:
    return filename.startswith(
        (str(PACKAGE / "ranks"), str(PACKAGE / "launch.py"), str(PACKAGE / "ledger"))
    )


def place(filename: str) -> str:
    """`Cell In[3]` for a cell of this notebook, else the file's path as short as it is clear."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell and (name := shell.compile.format_code_name(filename)):
        return " ".join(name)
    short = os.path.relpath(filename)
    return f'File "{filename if short.startswith("..") else short}"'


def same(one: Failure, other: Failure) -> bool:
    return (one.type, one.frames) == (other.type, other.frames)


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def ranks_text(ranks) -> str:
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def waits(ranks) -> str:
    return f"{ranks_text(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"
