"""The parent's side of the zygote: start it, ask it for ranks, hear of their ends, end it.

Everything a run leaves on the machine lives in one private directory (folder.py), which belongs to
the zygote: the file store of the rendezvous, the flight recorders, the stacks.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from . import zygote
from .folder import LOG, make_directory, remove_directory, sweep

PACKAGE = Path(__file__).parent.parent
ROOTS = [PACKAGE / name for name in ("__init__.py", "plan/__init__.py", "plan/fields.py")]
LOOK = 0.1  # seconds between two looks, at answers or at flight recorders
ZYGOTE_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # no helper threads: only a single-threaded process forks safely
    "OMP_NUM_THREADS": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # larger pages: a fork copies fewer entries
}
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class ZygoteDied(RuntimeError):
    """The process that starts ranks could not start, or was killed."""


class ZygoteHandle:
    """Handle of the zygote process and of the world it holds on standby."""

    def __init__(self, mode: str, network: bool):
        sweep()
        self.owner = os.getpid()  # a fork of this process must not use it
        self.worlds = {}  # number -> World, which is told of its ranks' starts and ends
        self.started = 0
        self.standby = None  # the World that waits for a launch, see standby.py
        self.inbox = b""
        self.answered = True
        self.open: str | None = None  # why others on the host could reach its ranks
        self.has_told = False  # whether it is known if they could
        self.forks = mode == "fork"
        self.secluded = sys.platform == "linux" and not network
        self.edits = {file: last_edit(file) for file in (*ROOTS, *PACKAGE.glob("ranks/**/*.py"))}
        with contextlib.ExitStack() as if_it_fails:
            self.directory, self.lock = make_directory()  # The zygote also holds the lock.
            if_it_fails.callback(remove_directory, self.directory)
            if_it_fails.callback(os.close, self.lock)
            self.log = if_it_fails.enter_context(open(f"{self.directory}/{LOG}", "w+"))
            self.control, far = socket.socketpair()
            if_it_fails.callback(self.control.close)
            with far:
                self.process = subprocess.Popen(
                    [
                        *(sys.executable, zygote.__file__, mode, str(far.fileno())),
                        *(self.directory, "the host's" if network else "own"),
                    ],
                    pass_fds=[far.fileno(), self.lock],
                    env=rank_environment() | ZYGOTE_ENVIRONMENT,
                    stdin=subprocess.DEVNULL,
                    stdout=self.log,
                    stderr=self.log,
                    start_new_session=True,
                )
            if_it_fails.pop_all()

    def alive(self) -> bool:
        return self.control.fileno() != -1 and self.process.poll() is None

    def current(self) -> bool:
        """Whether the files that the zygote has loaded are unchanged and its folder still exists (a
        rank may have removed it)."""
        edited = any(last_edit(file) != when for file, when in self.edits.items())
        return not edited and os.path.isdir(self.directory)

    def load(self, modules: dict[str, str]) -> None:
        """Load what ranks have imported, {name: file}, so that the next ranks find it."""
        for name, file in modules.items() if self.forks else ():
            file = Path(file)
            if file not in self.edits:  # noted before it is loaded, or an edit could be missed
                self.edits[file] = last_edit(file)
                self.request(load=name)

    def request(self, fds=(), **request) -> None:
        data = json.dumps(request).encode().ljust(zygote.REQUEST_BYTES)
        try:
            socket.send_fds(self.control, [data], list(fds))
        except OSError:
            raise self.died() from None

    def read_answers(self) -> None:
        """Take note of ranks started and ended. Waits a moment for something to read; raises
        ZygoteDied if it is dead, or somebody has stopped it."""
        self.control.settimeout(LOOK)
        try:
            data = self.control.recv(1 << 16)
        except TimeoutError:
            if self.is_stopped():
                raise self.died("had been stopped (SIGSTOP)") from None
            data = None
        except ConnectionResetError:
            data = b""
        self.control.settimeout(None)
        if data is None:
            return
        if not data:
            raise self.died()
        *lines, self.inbox = (self.inbox + data).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            self.open = answer.get("open", self.open)
            self.has_told = self.has_told or "open" in answer
            self.secluded = self.secluded and not self.open
            self.answered = answer.get("pong", self.answered)
            world = self.worlds.get(answer.get("world"))
            if world is not None:
                world.note(answer)

    def is_stopped(self) -> bool:
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return state in "Tt"
        return False

    def died(self, how: str = "") -> ZygoteDied:
        if how:
            self.process.kill()  # the system ends its ranks with it
        status, last = self.process.wait(), []
        if not self.log.closed:
            self.log.seek(0)
            last = self.log.read().strip().splitlines()[-3:]
        self.close()
        return ZygoteDied(
            f"the process that starts ranks {how or f'ended with status {status}'}"
            + (": " + " | ".join(last) if last else "")
            + ". The next launch starts a new one."
        )

    def close(self) -> None:
        """End the zygote, if it is still alive, and its ranks: it leaves at EOF."""
        if self.control.fileno() == -1:
            return
        if self.owner == os.getpid() and self.is_stopped():
            self.process.kill()
        self.control.close()
        os.close(self.lock)
        self.log.close()
        for world in self.worlds.values():
            for rank in world.ranks:
                rank.close()
        if self.owner == os.getpid():
            remove_directory(self.directory)


def rank_environment() -> dict[str, str]:
    """Return the parent's environment, with gloo restricted to the loopback interface."""
    return {**os.environ, "GLOO_SOCKET_IFNAME": LOOPBACK}


def last_edit(file: Path) -> int | None:
    """Return when a file was last changed, in ns; None if it is gone."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None
