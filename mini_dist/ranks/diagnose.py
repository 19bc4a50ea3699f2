"""Turn the facts about a failed run into one error that names the rank, the line and the reason."""

from __future__ import annotations

import errno
import itertools
import linecache
import os
import re
import reprlib
import signal
import sys
import sysconfig
import time
from contextlib import suppress

from . import flight
from .hosts import UPLINK, ranks_of
from .limits import full_disks, more_of_ulimit_t, seconds_of_cpu, what_ran_out
from .rank import Failure
from .world import World
from .zygote_handle import PACKAGE


class RankError(RuntimeError):
    """A run on ranks failed; the message names the rank, the line and the cause.

    `rank`: the rank at fault (None if it is not one rank's); `failures`: rank -> what it raised;
    `outputs`: what each rank had printed; `flights`: each rank's last operations, and the one that
    it waited in (flight.py); `idle`: for how many seconds no rank had begun an operation or a wait
    for one, 0 if one that has not returned had begun none. (Elastic runs: since their start.)
    """

    rank: int | None = None
    failures: dict[int, Failure] = {}
    outputs: list[str] = []
    flights: list[flight.FlightRecord] = []
    idle: float = 0.0

    def _render_traceback_(self) -> list[str]:
        # IPython calls this: the frames between the cell and its ranks help nobody.
        return [f"{type(self).__name__}: {self}"]


class RankTimeout(RankError, TimeoutError):
    """A run on ranks did not end within its deadline."""


class RankInterrupt(RankError, KeyboardInterrupt):
    """A run on ranks was interrupted by the user."""


def explain(outcome: str, world: World, timeout: float) -> RankError:
    """Return the error for a run that ended as `outcome` (see World.run).

    Causes come before consequences: an operation that the ranks do not agree on, a rank that died,
    an exception in the learner's code; only then a lost connection, a deadlock, the deadline.
    """
    scene = Scene(world)
    refused = {r.number: r.refused for r in world.ranks if r.refused is not None}
    absent = {r.number: r.report.error for r in world.ranks if outcome_of(r) == "absent"}
    raised = {r.number: r.report.error for r in world.ranks if outcome_of(r) == "raised"}
    kept_out = {rank: failure for rank, failure in absent.items() if not failure.is_connection}
    genuine = {rank: failure for rank, failure in raised.items() if not failure.is_connection}
    died = {r.number: r.status for r in world.ranks if r.status is not None and not r.report}
    unplugged = world.unplugged()
    unlike = flight.mismatch(scene.flights)
    stuck = flight.stuck(scene.flights, scene.returned)
    kind, culprit = RankError, None
    if refused:
        culprit = min(refused)
        why = os.strerror(refused[culprit])
        lines = [f"rank {culprit} of {world.size} could not be started: {why}."]
        lines += what_ran_out(refused[culprit])
    elif kept_out or absent and not died:
        culprit = min(kept_out or absent)
        lines = [f"rank {culprit} of {world.size} could not join the others:"]
        lines += [f"  {described(absent[culprit])}", *hints(absent[culprit], world)]
    elif unlike:
        lines = ["the ranks do not agree on an operation that they enter together:"]
        lines += scene.compare(unlike)
    elif died:
        culprit = min(died, key=lambda rank: (died[rank] >= 0, rank))  # first those killed
        lines = [f"rank {culprit} of {world.size} {describe_status(died[culprit])}"]
        lines += hosts_that_are_gone(world, died)
        lines += words_of_the_system(world.ranks[culprit].text())
        lines += scene.tell([culprit, *sorted([*scene.waiting, *({*raised} - {*genuine})])])
    elif raised:
        culprit = min(genuine or raised)
        lines = describe_exception(culprit, world.size, raised[culprit])
        if world.has_hosts:
            lines[0] += f"\n  (rank {culprit} is on host {world.places[culprit]})"
        lines += hints(raised[culprit], world)
        alike = [rank for rank in genuine if same(genuine[rank], raised[culprit])]
        if len(alike) > 1:
            lines.append(f"{ranks_text(set(alike) - {culprit})} raised the same.")
        lines += scene.tell(scene.waiting)
    elif unplugged and outcome in ("unplugged", "timeout"):
        cut_off = [
            f"host {host} ({ranks_text(ranks_of(host, world.places))})" for host in unplugged
        ]
        lines = [
            f"{' and '.join(cut_off)}: the cable is pulled. {UPLINK} is down there, so nothing "
            "comes or goes, and TCP alone would wait for a quarter of an hour."
        ]
        lines += scene.tell(range(world.size))
    elif outcome == "stuck":
        # (Nothing moves any more; if a rank has died since, the others are still named.)
        lines = [f"deadlock: {waits(stuck or scene.waiting)} for what can no longer happen."]
        lines += scene.tell(range(world.size))
    elif outcome == "interrupt":
        kind, lines = RankInterrupt, ["interrupted.", *scene.tell(range(world.size))]
    else:
        kind, lines = RankTimeout, [f"not done after {timeout:g} s, the timeout of this launch."]
        if world.keeper.is_stopped():
            lines.append("Somebody has stopped the process that starts ranks (SIGSTOP).")
        elif not any(rank.pid for rank in world.ranks):
            lines.append("No rank has started: torch is loaded first, which goes on meanwhile.")
        lines += scene.tell(range(world.size))
    error = kind("\n".join(lines))
    error.rank, error.failures = culprit, raised | absent
    error.idle = scene.idle()
    error.outputs, error.flights = [rank.text() for rank in world.ranks], scene.flights
    return error


def hosts_that_are_gone(world: World, died: dict[int, int]) -> list[str]:
    """Return a line for each host that has no rank left."""
    if not world.places or not world.hosts or world.hosts.number == 1:
        return []
    homes = {host: ranks_of(host, world.places) for host in range(world.hosts.number)}
    gone = {host: ranks for host, ranks in homes.items() if {*ranks} <= {*died}}
    return [f"host {host} is gone: so ended {ranks_text(ranks)}." for host, ranks in gone.items()]


def cannot_run(error: OSError, size: int) -> RankError:
    """Return the error for a run that the parent itself had to give up."""
    lines = [f"this process could not run {plural(size, 'rank')}: {error}."]
    return RankError("\n".join(lines + what_ran_out(error.errno)))


def outcome_of(rank) -> str | None:
    return rank.report and rank.report.outcome


class Scene:
    """Where every rank was when the run ended."""

    def __init__(self, world: World):
        self.world, self.time = world, time.time()
        self.stacks = world.stacks()
        self.flights = world.flights()
        self.returned = {rank.number for rank in world.ranks if rank.returned}
        self.waiting = [rank.number for rank in world.ranks if not rank.report and not rank.gone]

    def idle(self) -> float:
        """For how many seconds no rank has begun an operation, 0 if one has begun none at all: it
        may compute. (Waiting for an operation's future leaves no record.)"""
        began = all(self.flights[number].entries for number in self.waiting)
        return self.time - self.world.moved if began else 0.0

    def tell(self, ranks) -> list[str]:
        """Return one line per rank: what it is doing, since when, which rank it waits for, which
        line."""
        return [f"  rank {rank} {self.state(rank)}{self.place(rank)}" for rank in ranks]

    def state(self, number: int) -> str:
        rank, seen = self.world.ranks[number], self.flights[number]
        if rank.returned:
            counted = (e for e in seen.entries if not e.is_message and e.k != flight.UNKNOWN)
            last = {entry.channel: entry.k for entry in counted}
            return f"has returned, after {plural(sum(last.values()), 'collective')}"
        if rank.report:
            error = rank.report.error
            return "has lost a connection" if error.is_connection else f"raised {error.type}"
        if rank.gone:
            return "is gone"
        if rank.pid is None:
            return "has not started yet"
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
                f"message number {entry.k} on this route"
                if entry.is_message
                else f"collective number {entry.k}"
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
    lines += what_is_known_of(failure)
    nearest = len(failure.because) // 2
    for number, because in enumerate(failure.because):
        if failure.more and number == nearest:
            lines.append(f"[{failure.more} more]")
        lines += [f"while handling {described(because)}", *what_is_known_of(because)]
    return lines


def what_is_known_of(failure: Failure) -> list[str]:
    lines = [f"  {line}" for note in failure.notes for line in note.splitlines()]
    lines += traceback_lines(failure.frames)
    for number, member in enumerate(failure.members, 1):
        lines.append(f"  member {number}: {described(member)}")
        lines += [f"  {line}" for line in what_is_known_of(member)]
    return lines


def hints(failure: Failure, world: World) -> list[str]:
    """Return advice for an error of the system, or of memory."""
    chain = [failure, *failure.because]
    numbers = [each.errno for each in chain if each.errno is not None]
    if any(number in NO_WAY_OUT or number < 0 for number in numbers) and world.keeper.secluded:
        return [
            "(Ranks have a network of their own, which leads nowhere else. Fetch it before, "
            "or give launch network=True.)"
        ]
    said = " ".join(each.message for each in chain)
    if world.has_hosts and ("[127.0.0.1]" in said or "find address for" in said):
        return [
            f"(The way from one host to another is {UPLINK}. Here gloo took another: what is "
            "GLOO_SOCKET_IFNAME where the group is made?)"
        ]
    if any(each.type == "BdbQuit" or each.message == NO_INPUT for each in chain):
        return [
            "(A rank has no keyboard: print what you want to see, or return it and look at it in "
            "the cell.)"
        ]
    known = [what_ran_out(number) for number in numbers]
    known += [words_of_the_system(each.message) for each in chain]
    return next(filter(None, known), [])


def words_of_the_system(text: str) -> list[str]:
    """Find the system's error in a text: native code, say for threads, gives no error number."""
    numbers = (errno.EAGAIN, errno.ENOSPC, errno.EMFILE)
    said = [what_ran_out(number) for number in numbers if os.strerror(number) in text]
    return next(filter(None, said), [])


NO_INPUT = "EOF when reading a line"  # what input() says
NO_WAY_OUT = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ECONNREFUSED}  # and below 0: no name


def described(failure: Failure) -> str:
    return f"{failure.type}: {failure.message}" if failure.message else failure.type


def traceback_lines(frames) -> list[str]:
    """Return the learner's own frames; if there are none, the innermost one."""
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
    try:
        name = signal.Signals(-status).name
    except ValueError:  # (of the real-time signals only the first and the last have a name)
        name = f"signal {-status} ({signal.strsignal(-status)})"
    hint = {
        "SIGKILL": f" (by somebody, or by the system because memory ran out{more_of_ulimit_t()})",
        "SIGXCPU": f" (it had used all the processor time that ulimit -t allows{seconds_of_cpu()})",
        "SIGABRT": " (native code gave up; its last words are in the rank's output)",
        "SIGSEGV": " (native code touched memory that is not its own)",
        "SIGBUS": " (native code touched memory of a file that has no room on its disk, or was "
        "cut off)",
    }.get(name, "")
    full = full_disks() if name == "SIGBUS" else []
    return "\n  ".join([f"was killed by {name}{hint}.", *full])


FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')


def location(stack: str) -> str:
    """Return the learner's line in a stack written by faulthandler (innermost frame first)."""
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
    return filename.startswith((str(PACKAGE / "ranks"), str(PACKAGE / "ledger")))


def place(filename: str) -> str:
    """Return `Cell In[3]` for a cell of this notebook, else the file's shortest clear path."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell and (name := name_of_cell(shell, filename)):
        return name
    short = ".."
    with suppress(OSError, ValueError):  # the working directory is gone; another drive
        short = os.path.relpath(filename)
    return f'File "{filename if short.startswith("..") else short}"'


def name_of_cell(shell, filename: str) -> str:
    """Return `Cell In[3]` if IPython has compiled a cell under this name, else ""."""
    if hasattr(shell.compile, "format_code_name"):
        return " ".join(shell.compile.format_code_name(filename) or ())
    # IPython 7, which Colab has, keeps no such record, but it names a cell by its text or number.
    raw, parsed = shell.history_manager.input_hist_raw, shell.history_manager.input_hist_parsed
    for number in reversed(range(len(raw))):
        if shell.compile.get_code_name(raw[number], parsed[number], number) == filename:
            return f"Cell In[{number}]"
    return ""


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


def brief(value) -> str:
    """Shorten a wrong argument so that it fits into a sentence."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return f"a number of {value.bit_length()} bits"
    return reprlib.repr(value)
