"""The parent's side: keep a zygote, keep a world of ranks on standby, run one job on it.

Everything a run leaves on the machine lives in one private directory in memory, which belongs
to the zygote: the file store of the rendezvous, the flight recorders, the stacks. No port is
opened on any interface but loopback.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import flight, zygote
from .rank import Job, Report
from .transport import Inbox, send

PACKAGE = Path(__file__).parent.parent
GRACE = 0.4  # seconds for others to fail too: the first failure is not always the cause
LOOK = 0.1  # seconds between two looks at the flight recorders
KEEP_OUTPUT = 1 << 20  # bytes of a rank's prints
ZYGOTE_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # no helper threads: only a single-threaded process forks safely
    "OMP_NUM_THREADS": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # larger pages: a fork copies fewer entries
}
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Rank:
    """What the parent knows of one rank of a world."""

    def __init__(self, number: int):
        self.number = number
        self.socket, self.far_socket = socket.socketpair()
        self.output_fd, self.far_output_fd = os.pipe()
        os.set_blocking(self.output_fd, False)
        self.inbox = Inbox()
        self.output = bytearray()
        self.dropped = 0  # bytes of output beyond KEEP_OUTPUT
        self.pid: int | None = None
        self.report: Report | None = None
        self.status: int | None = None  # set when the process has ended

    @property
    def returned(self) -> bool:
        return self.report is not None and self.report.outcome == "returned"

    @property
    def failed(self) -> bool:
        return not self.returned and (self.report is not None or self.status is not None)

    def read_report(self) -> bool:
        """Take in what has arrived; False when nothing more can come."""
        try:
            data = self.socket.recv(1 << 20)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        for message in self.inbox.feed(data):
            self.report = pickle.loads(message)
        return bool(data)

    def read_output(self) -> bool:
        while True:
            try:
                data = os.read(self.output_fd, 1 << 16)
            except BlockingIOError:
                return True
            room = max(0, KEEP_OUTPUT - len(self.output))
            self.output += data[:room]
            self.dropped += len(data) - len(data[:room])
            if not data:
                return False

    def close(self) -> None:
        self.socket.close()
        os.close(self.output_fd)

    def text(self) -> str:
        text = self.output.decode(errors="replace")
        return text + f"\n[... {self.dropped} more bytes]" if self.dropped else text


class ZygoteDied(RuntimeError):
    """The process that starts ranks could not start, or was killed."""


class Zygote:
    """Handle of the zygote process and of the world it holds on standby."""

    def __init__(self, mode: str):
        sweep()
        self.mode = mode
        self.owner = os.getpid()  # a fork of this process must not use it
        self.directory = tempfile.mkdtemp(prefix=PREFIX, dir=base_directory())
        self.lock = os.open(self.directory, os.O_RDONLY)
        fcntl.flock(self.lock, fcntl.LOCK_EX)  # held by us and the zygote: see sweep()
        self.control, far = socket.socketpair()
        self.log = open(f"{self.directory}/zygote.log", "w+")
        self.process = subprocess.Popen(
            [
                sys.executable,
                zygote.__file__,
                mode,
                str(far.fileno()),
                self.directory,
                str(PACKAGE.parent),
            ],
            pass_fds=[far.fileno(), self.lock],
            env=rank_environment() | ZYGOTE_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )
        far.close()
        self.inbox = b""
        self.worlds: dict[int, World] = {}
        self.started = 0
        self.standby: World | None = None
        self.answered = True
        self.edits = last_edits()

    def alive(self) -> bool:
        return self.control.fileno() != -1 and self.process.poll() is None

    def current(self) -> bool:
        """Whether the code that the zygote has loaded is still what is on disk."""
        return self.edits == last_edits()

    def request(self, fds=(), **request) -> None:
        data = json.dumps(request).encode().ljust(zygote.REQUEST_BYTES)
        try:
            socket.send_fds(self.control, [data], list(fds))
        except OSError:
            raise self.died() from None

    def read_answers(self) -> None:
        """Take note of ranks started and ended; blocks until there is something to read."""
        data = self.control.recv(1 << 16)
        if not data:
            raise self.died()
        *lines, self.inbox = (self.inbox + data).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            self.answered = answer.get("pong", self.answered)
            world = self.worlds.get(answer.get("world"))
            if world is not None:
                world.note(answer)

    def died(self) -> ZygoteDied:
        self.process.wait()
        self.log.seek(0)
        last = self.log.read().strip().splitlines()[-3:]
        self.close()
        return ZygoteDied(
            f"the process that starts ranks ended with status {self.process.returncode}"
            + (": " + " | ".join(last) if last else "")
            + ". The next launch starts a new one."
        )

    def close(self) -> None:
        """End the zygote, if it is not dead yet, and its ranks: it takes its leave at EOF."""
        if self.control.fileno() == -1:
            return
        self.control.close()
        os.close(self.lock)
        self.log.close()
        for world in self.worlds.values():
            for rank in world.ranks:
                rank.close()
        if self.owner == os.getpid():
            shutil.rmtree(self.directory, ignore_errors=True)

    def take(self, size: int, device: str, patient: bool) -> World:
        """The world on standby if it fits, else a new one; `patient`: with everything loaded."""
        if self.standby:  # what has died of it is told before the answer to this
            self.request(ping=True)
            self.answered = False
            while not self.answered:
                self.read_answers()
        world, self.standby = self.standby, None
        whole = world and all(rank.status is None for rank in world.ranks)
        if whole and (world.size, world.device) == (size, device):
            return world
        if world:
            world.end(wait=False)
        return World(self, size, device, patient)

    def prepare(self, size: int, device: str) -> None:
        """Put a world on standby for the next launch, which is likely to want the same."""
        self.standby = World(self, size, device, patient=True)


class World:
    """n ranks that have joined each other, or are about to."""

    def __init__(self, keeper: Zygote, size: int, device: str, patient: bool):
        self.keeper, self.size, self.device = keeper, size, device
        self.number = keeper.started = keeper.started + 1
        keeper.worlds[self.number] = self
        self.directory = f"{keeper.directory}/{self.number}"
        os.mkdir(self.directory)
        self.ranks = [Rank(number) for number in range(size)]
        for rank in self.ranks:
            keeper.request(
                [rank.far_socket.fileno(), rank.far_output_fd],
                **dict(start=rank.number, size=size, device=device),
                **dict(world=self.number, directory=self.directory, patient=patient),
            )
            rank.far_socket.close()
            os.close(rank.far_output_fd)

    def note(self, answer: dict) -> None:
        rank = self.ranks[answer["rank"]]
        if "started" in answer:
            rank.pid = answer["started"]
        else:
            rank.status = answer["status"]

    def run(self, job: Job, timeout: float) -> str:
        """Run the job on all ranks; say how it ended: done, failed, mismatch, stuck, timeout."""
        blob = pickle.dumps(job)
        for rank in self.ranks:
            rank.socket.settimeout(min(timeout, 3600))  # (it refuses infinity)
            with contextlib.suppress(OSError):  # it died on standby: the loop will see its end
                send(rank.socket, blob)
            rank.socket.setblocking(False)
        started = next_look = time.monotonic()
        failed_at = heads = analysed = None
        with selectors.DefaultSelector() as selector:
            selector.register(self.keeper.control, selectors.EVENT_READ)
            for rank in self.ranks:
                selector.register(rank.socket, selectors.EVENT_READ, rank.read_report)
                selector.register(rank.output_fd, selectors.EVENT_READ, rank.read_output)
            while True:
                for key, _ in selector.select(LOOK):
                    if key.data is None:
                        self.keeper.read_answers()
                    elif not key.data():
                        selector.unregister(key.fileobj)
                if all(rank.returned for rank in self.ranks):
                    # Some disagreements pass through gloo: half a buffer filled, sum against max.
                    return "mismatch" if flight.mismatch(self.flights()) else "done"
                now = time.monotonic()
                if any(rank.failed for rank in self.ranks):
                    failed_at = failed_at or now
                    over = all(rank.returned or rank.failed for rank in self.ranks)
                    if over or now > failed_at + GRACE:
                        return "failed"
                elif now > started + timeout:
                    return "timeout"
                elif now > next_look:
                    next_look = now + LOOK
                    heads, before = self.heads(), heads
                    # While something moves there is nothing to find, and what one would read may
                    # be two ranks at different moments. When all is quiet, one analysis is enough.
                    if heads == before and heads != analysed:
                        analysed, flights = heads, self.flights()
                        if flight.mismatch(flights):
                            return "mismatch"
                        if flight.stuck(flights, {r.number for r in self.ranks if r.returned}):
                            return "stuck"

    def heads(self) -> list:
        """How far each rank has come; unchanged while it computes, waits, or is done."""
        paths = [f"{self.directory}/flight-{rank.number}" for rank in self.ranks]
        return [(flight.head(path), rank.returned) for path, rank in zip(paths, self.ranks)]

    def flights(self) -> list[flight.Flight]:
        return [flight.read(f"{self.directory}/flight-{rank.number}") for rank in self.ranks]

    def stacks(self) -> list[str]:
        """Where every live rank is just now, as faulthandler writes it."""
        paths = [Path(f"{self.directory}/stack-{rank.number}") for rank in self.ranks]
        alive = [rank for rank in self.ranks if rank.pid and rank.status is None]
        for rank in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:  # a rank writes its stack at once, if it is scheduled
            if all("File" in text(paths[rank.number]) for rank in alive):
                time.sleep(0.01)  # for the rest of the last one's lines
                break
            time.sleep(0.005)
        return [text(path) for path in paths]

    def end(self, wait: bool) -> None:
        """End every rank and remove what it left; `wait` until the processes are gone."""
        self.keeper.request(kill=self.number, directory=self.directory)
        while wait and any(rank.status is None for rank in self.ranks):
            self.keeper.read_answers()
        for rank in self.ranks:
            rank.read_output()
            rank.close()
        del self.keeper.worlds[self.number]


def text(path: Path) -> str:
    """What the file says; nothing, if its rank has not come so far as to make it."""
    return path.read_text() if path.exists() else ""


PREFIX = "mini_dist-"


def base_directory() -> str:
    """In memory where the system has such a place: a file store on disk is slower."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def sweep() -> None:
    """Remove directories whose zygote was killed together with its parent.

    A live directory is locked. A very young one may not be locked yet.
    """
    for path in Path(base_directory()).glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid != os.getuid() or time.time() - path.stat().st_mtime < 60:
                continue
            fd = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)


def rank_environment() -> dict[str, str]:
    """The parent's environment; gloo is held to the loopback interface."""
    return {**os.environ, "GLOO_SOCKET_IFNAME": LOOPBACK}


def last_edits() -> list[int]:
    """When the files that the zygote loads were last changed."""
    files = [PACKAGE / "__init__.py", PACKAGE / "launch.py"]
    files += [*PACKAGE.glob("ranks/*.py"), *PACKAGE.glob("ledger/*.py")]
    return sorted(file.stat().st_mtime_ns for file in files)
