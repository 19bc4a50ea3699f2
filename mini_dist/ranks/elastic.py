"""The parent's side of an elastic run: it reports a rank's end to the others, and they continue.

It does what a scheduler does for a cluster (torchrun's rendezvous, torchft's lighthouse): it
notices every end, decides who forms the next group, and starts ranks that join. It does not know
what they compute.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import platform
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mini_dist.plan.fields import checks_kinds, of_kind, whole_number

from . import flight
from .diagnose import describe_status, described
from .membership import Group, Lost, News
from .rank import Job
from .rank_handle import RankHandle
from .transport import Frames, send
from .world import World
from .zygote_handle import LOOK


class Detector(Protocol):
    """Decide from a rank's silences whether it lives
    (mini_dist/training/elastic/detectors.py)."""

    def heard(self, silence: float) -> None:
        """Note a heartbeat, this many seconds after the last."""

    def timeout(self) -> float:
        """Return the seconds of silence after which it suspects the rank."""


@checks_kinds
@dataclass(frozen=True)
class Elastic:
    """How a run continues when ranks die.

    min_ranks: with fewer the run fails. replace: how many dead ranks are replaced by new ones.
    beat: seconds between two heartbeats of a rank; silence: seconds without one after which it
    counts as dead, and is killed, so that it cannot come back; or a function that makes a detector
    for a rank, `lambda: PhiAccrual(8, first=0.1)`. None: only its process's end counts. watch: is
    called during the run with a sentence when a rank is lost and when a new group continues.
    Raises ValueError for invalid values.
    """

    min_ranks: int = 1
    replace: int = 0
    beat: float = 0.05
    silence: float | Callable[[], Detector] | None = None
    watch: Callable[[str], object] | None = None

    def __post_init__(self):
        for name, least in (("min_ranks", 1), ("replace", 0)):
            whole_number(self, name, least)
        if not self.beat > 0:
            raise ValueError(f"beat={self.beat!r}: give seconds above 0")
        if self.watch is not None and not callable(self.watch):
            raise ValueError(f"watch={self.watch!r}: give a function of a sentence, such as print")
        if self.silence is None or callable(self.silence):
            return
        of_kind("silence", self.silence, ("float", "None"))
        if not self.silence > self.beat:
            raise ValueError(
                f"silence={self.silence!r}: give more seconds than beat={self.beat:g}, or every "
                "rank is silent for as long between two beats; or a function that makes a detector"
            )


class ElasticRun:
    """A job on a world whose ranks come and go."""

    def __init__(self, world: World, elastic: Elastic):
        self.world, self.elastic = world, elastic
        self.generation = 0
        self.members = [rank.number for rank in world.ranks]
        self.ready: set[int] = set()
        self.lost: list[Lost] = []
        self.heard: dict[int, float] = {}  # rank -> its last heartbeat
        self.detectors: dict[int, Detector] = {}
        self.silent: dict[int, float] = {}  # rank -> seconds, for those killed because of it
        self.replaced = 0

    def run(self, job: Job, call: Frames, timeout: float) -> str:
        """Run as World.run does: done, failed, mismatch, stuck, timeout."""
        self.message = [pickle.dumps(job), *call]
        self.deadline = time.monotonic() + timeout
        heads = analysed = None
        next_look = time.monotonic()
        with selectors.DefaultSelector() as self.selector:
            self.selector.register(self.world.keeper.control, selectors.EVENT_READ)
            for rank in self.world.ranks:
                self.begin(rank)
            while True:
                for key, _ in self.selector.select(LOOK):
                    if key.data is None:
                        self.world.keeper.read_answers()
                    elif not key.data():
                        self.selector.unregister(key.fileobj)
                self.hear()
                self.bury()
                left = [rank for rank in self.world.ranks if not rank.failed]
                if len(left) < self.elastic.min_ranks:
                    return "failed"
                if all(rank.returned for rank in left):
                    return "done"
                self.form(left)
                now = time.monotonic()
                if now > self.deadline:
                    return "timeout"
                if now > next_look:
                    next_look = now + LOOK
                    heads, before = self.world.heads(), heads
                    if heads == before and heads != analysed and not self.ready:
                        analysed, flights = heads, self.world.flights()
                        if flight.mismatch(flights):
                            return "mismatch"
                        if flight.stuck(flights, {r.number for r in left if r.returned}):
                            return "stuck"

    def begin(self, rank: RankHandle) -> None:
        """Send a rank its job, and listen to it."""
        rest = max(LOOK, self.deadline - time.monotonic())
        rank.socket.settimeout(min(rest, 3600))
        with contextlib.suppress(OSError):
            send(rank.socket, self.message)
        rank.socket.setblocking(False)
        self.selector.register(rank.socket, selectors.EVENT_READ, rank.read_report)
        self.selector.register(rank.output_fd, selectors.EVENT_READ, rank.read_output)

    def hear(self) -> None:
        """Read the ranks' requests, and check whether one has been silent for too long."""
        now = time.monotonic()
        for rank in list(self.world.ranks):
            if rank.asked:
                self.note_life(rank.number, now)
            asked, rank.asked = rank.asked, []
            for ask in asked:
                if ask.what == "invite":
                    self.begin(self.world.add())
                elif ask.what == "ready" and not rank.failed:
                    self.ready.add(rank.number)
                    if rank.number not in self.members:
                        self.tell(joining=(rank.number,))
            quiet = now - self.heard.get(rank.number, now)
            if quiet > self.patience(rank.number) and rank.pid:
                if not rank.report and not rank.gone and rank.number not in self.silent:
                    self.silent[rank.number] = quiet
                    os.kill(rank.pid, signal.SIGKILL)

    def note_life(self, number: int, now: float) -> None:
        """Report a heartbeat to the rank's detector if there is one."""
        if callable(self.elastic.silence):
            if number not in self.heard:
                self.detectors[number] = self.elastic.silence()
            else:
                self.detectors[number].heard(now - self.heard[number])
        self.heard[number] = now

    def patience(self, number: int) -> float:
        """Return how many seconds a rank may be silent now."""
        if number in self.detectors:
            return self.detectors[number].timeout()
        silence = self.elastic.silence
        return math.inf if silence is None or callable(silence) else silence

    def bury(self) -> None:
        """Tell the survivors about each rank that has failed since the last look."""
        known = {each.rank for each in self.lost}
        for rank in self.world.ranks:
            if not rank.failed or rank.number in known:
                continue
            self.ready.discard(rank.number)
            self.lost.append(self.describe(rank))
            self.tell(lost=(self.lost[-1],))
            self.show(f"rank {rank.number} {self.lost[-1].how}")
            if self.replaced < self.elastic.replace:
                self.replaced += 1
                self.begin(self.world.add())

    def describe(self, rank: RankHandle) -> Lost:
        seen = flight.read(f"{self.world.directory}/flight-{rank.number}")
        if rank.number in self.silent:
            how = f"was silent for {self.silent[rank.number]:.1f} s, and was killed for it"
        elif rank.report:
            how = f"raised {described(rank.report.error)}"
        elif rank.refused is not None:
            how = f"could not be started: {os.strerror(rank.refused)}"
        else:
            how = describe_status(rank.status).splitlines()[0].partition(" (")[0].rstrip(".")
        if seen.waiting:
            doing = f"it was waiting in {seen.waiting.text}"
        elif seen.entries:
            doing = f"its last communication was {seen.entries[-1].text}"
        else:
            doing = "it had not communicated yet"
        return Lost(rank.number, platform.node(), how, doing)

    def tell(self, lost: tuple[Lost, ...] = (), joining: tuple[int, ...] = ()) -> None:
        self.say(News(self.generation, lost, joining), self.world.ranks)

    def say(self, message, ranks: list[RankHandle]) -> None:
        for rank in ranks:
            if not rank.failed and not rank.returned:
                rank.socket.setblocking(True)
                with contextlib.suppress(OSError):  # its end will be seen
                    send(rank.socket, [pickle.dumps(message)])
                rank.socket.setblocking(False)

    def form(self, left: list[RankHandle]) -> None:
        """Form the next group once all its members are ready: the old ranks in their order."""
        at_work = [rank.number for rank in left if not rank.returned]
        if self.ready and set(self.members) & set(at_work) <= self.ready:
            old = [number for number in self.members if number in self.ready]
            new = sorted(self.ready - set(old))
            self.generation, self.members, self.ready = self.generation + 1, old + new, set()
            group = Group(self.generation, tuple(self.members))
            self.say(group, [rank for rank in left if rank.number in self.members])
            self.show(f"the group is now {self.members}")

    def show(self, sentence: str) -> None:
        if self.elastic.watch:
            self.elastic.watch(sentence)


def as_elastic(elastic: Elastic | bool) -> Elastic | None:
    if isinstance(elastic, bool):
        return Elastic() if elastic else None
    if not isinstance(elastic, Elastic):
        raise TypeError(f"elastic must be True, False or an Elastic, not {elastic!r}")
    return elastic
