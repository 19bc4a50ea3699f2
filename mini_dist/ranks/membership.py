"""The rank's side of an elastic run: who has died, who has joined, and a new group of the rest.

    def train(group):
        while not done:
            try:
                ...                                # steps, with any collectives
            except RanksChanged as news:           # raised wherever this rank uses the group
                group = regroup(group)             # of the ranks that are there now
                ...                                # agree on where to continue

A rank that waits in gloo for a dead rank would wait forever, and so would those that wait for it: a
ring breaks in one place and stops everywhere. So a thread listens to the parent, which notices
every death. On bad news it shuts this rank's connections, so that everything that waits on them
fails; a call that still waits is abandoned (`Membership.call`). gloo takes no new work on such a
group, so `regroup` makes another, with its own store.
"""

from __future__ import annotations

import _thread
import contextlib
import pickle
import queue
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

from .connections import shut_connections
from .transport import receive, send

LOOK = 0.05  # seconds between two looks, for news and whether a group is there
LONGER_THAN_ANY_RUN = timedelta(days=30)  # The parent's deadline must come first.
PATIENCE = 10.0  # seconds for the parent to say why a connection has broken


@dataclass(frozen=True)
class Lost:
    """A dead rank. rank: its number in the run, which is not used again; host: where it
    ran; how it ended; doing: its last communication."""

    rank: int
    host: str
    how: str
    doing: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} {self.how}; {self.doing}"


@dataclass(frozen=True)
class News:
    """From the parent: the group of this generation is over. joining: ranks that want to
    join."""

    generation: int
    lost: tuple[Lost, ...]
    joining: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """From the parent: the members of the next group, in order."""

    generation: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Ask:
    """To the parent: "ready" for the next group, "invite" another rank, or "beat", alive."""

    what: str


class RanksChanged(ConnectionError):
    """Ranks have died or want to join: this group is over. `lost`: a Lost for each dead rank;
    `joining`: the numbers of new ranks."""

    def __init__(self, lost: list[Lost], joining: list[int]):
        self.lost, self.joining = lost, joining
        told = [str(each) for each in lost]
        told += [f"rank {rank} wants to join" for rank in joining]
        super().__init__(". ".join(told) + ". Call regroup(group) and go on with those there.")


class Membership:
    """What a rank knows about the others, and its connection to the parent."""

    def __init__(self, parent: socket.socket, recorder, directory: str, number: int):
        self.parent, self.recorder, self.directory = parent, recorder, directory
        self.number, self.generation, self.members = number, 0, ()
        self.broken = False  # whether the present group is over
        self.lost: list[Lost] = []
        self.joining: list[int] = []
        self.told = 0  # how many of the lost ranks the program knows about
        self.groups: queue.SimpleQueue[Group] = queue.SimpleQueue()
        self.here = threading.local()  # per thread: the place where others wait for it
        self.speaking = _thread.allocate_lock()
        self.dismissed = _thread.allocate_lock()
        self.dismissed.acquire()

    def start(self, members: tuple[int, ...], beat: float | None) -> None:
        self.members = members
        # (No threading.Thread: the number of those shows whether a rank waits alone.)
        _thread.start_new_thread(self.listen, ())
        if beat:
            self.ask("beat")  # now: a rank that stops before its first beat would never be missed
            _thread.start_new_thread(self.beat, (beat,))

    # -- the wire -----------------------------------------------------------------------------

    def ask(self, what: str) -> None:
        with self.speaking, contextlib.suppress(OSError):  # (without a parent this rank ends)
            send(self.parent, [pickle.dumps(Ask(what))])

    def beat(self, seconds: float) -> None:
        while True:
            time.sleep(seconds)
            self.ask("beat")

    def listen(self) -> None:
        """Read the parent's messages in order: a group, then perhaps that it is over."""
        while True:
            try:
                message = pickle.loads(receive(self.parent)[0])
            except (EOFError, OSError):
                self.dismissed.release()
                return
            if isinstance(message, Group):
                self.generation, self.members = message.generation, message.members
                self.broken, self.joining = False, []
                self.groups.put(message)
            else:
                self.lost += message.lost
                self.joining += message.joining
                if message.generation == self.generation:
                    self.broken = True
                    shut_connections()

    # -- what a program sees ------------------------------------------------------------------

    def changed(self) -> RanksChanged:
        news, self.told = self.lost[self.told :], len(self.lost)
        return RanksChanged(news, list(self.joining))

    def check(self) -> None:
        """Raise RanksChanged if the present group is over."""
        if self.broken:
            raise self.changed()

    def explain(self, error: Exception) -> Exception:
        """Explain a failed communication: the parent may be about to report a death."""
        deadline = time.monotonic() + PATIENCE
        while not self.broken and time.monotonic() < deadline:
            time.sleep(LOOK / 10)
        return self.changed() if self.broken else error

    def regroup(self):
        """Return a group of the ranks that are there now, once all of them ask for it."""
        import torch.distributed as dist

        from .ledger.group import BACKEND

        while True:
            self.recorder.flight.idle()
            if dist.is_initialized():
                dist.destroy_process_group()
            self.ask("ready")
            group = self.groups.get()
            # torch names groups by counting them, including failed ones; a new process counts from
            # 0.
            dist.distributed_c10d._world.group_count = 0
            path = f"{self.directory}/store-{group.generation}"
            try:
                dist.init_process_group(
                    BACKEND,
                    store=dist.FileStore(path, -1),
                    rank=group.members.index(self.number),
                    world_size=len(group.members),
                    timeout=LONGER_THAN_ANY_RUN,
                )
                return dist.group.WORLD
            except Exception:
                if not self.broken:
                    raise

    def call(self, blocking):
        """Call `blocking()`; abandon its thread if the group is over before it returns.

        A rank that waits in gloo cannot be interrupted, and closing connections does not wake all:
        a rank that was about to send stays, and so does one that waits for an unconnected rank.
        """
        if not hasattr(self.here, "jobs"):
            self.here.jobs = queue.SimpleQueue()
            _thread.start_new_thread(serve, (self.here.jobs,))
        answer: queue.SimpleQueue = queue.SimpleQueue()
        self.here.jobs.put((blocking, answer))
        while True:
            try:
                value, error = answer.get(timeout=LOOK)
            except queue.Empty:
                if self.broken:
                    del self.here.jobs
                    raise self.changed() from None
                continue
            if error:
                raise self.explain(error) from error
            return value


def serve(jobs: queue.SimpleQueue) -> None:
    while True:
        blocking, answer = jobs.get()
        try:
            answer.put((blocking(), None))
        except Exception as error:
            answer.put((None, error))


def regroup(group):
    """Return a group of all ranks that are there now; call it on each of them after RanksChanged.

    Old ranks keep their order; new ranks come after them. The old group, and everything made from
    it, can no longer be used. Raises RuntimeError if the run is not elastic.
    """
    return membership(group).regroup()


def invite(group) -> None:
    """Ask for one more rank. It starts in the background, and once it is there, all ranks get
    RanksChanged. Raises RuntimeError if the run is not elastic."""
    membership(group).ask("invite")


def check_members(group) -> None:
    """Raise RanksChanged now, if there is news: for a rank that computes long without a message.
    Do nothing if the run is not elastic."""
    if is_elastic(group):
        membership(group).check()


def numbers(group) -> tuple[int, ...]:
    """Return the group's ranks by their permanent numbers in the run."""
    return membership(group).members


def is_elastic(group) -> bool:
    return getattr(getattr(group, "recorder", None), "membership", None) is not None


def membership(group) -> Membership:
    found = getattr(getattr(group, "recorder", None), "membership", None)
    if found is None:
        raise RuntimeError(
            "this run is not elastic: its ranks live and die together. Start it by "
            "launch(..., elastic=True)"
        )
    return found
