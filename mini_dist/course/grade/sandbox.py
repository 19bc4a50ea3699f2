"""Run a worker where it can do no harm beyond its limits, and hear what it says.

The sandbox is Linux's namespaces, made by `unshare` of util-linux (inside.py says what is in one).
Its first process enforces the limits and reads nothing that the worker says. This process reads:
messages, each a line of JSON of the form {"bytes": n, ...} and n bytes of payload. Both are cut
while they are read, and nothing is done with a payload but to pass it on.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from . import cgroups, usage
from .inside import BEYOND, LENGTH

UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child")
UNSHARE += ("--net", "--ipc", "--uts", "--")
LOOK = 0.25  # seconds between two looks at whether it is to be stopped
PATIENCE = 5  # seconds for what is ended to be gone
# Bytes of all messages of a worker, each of which takes up to some 25 once it is read as JSON, and
# of all payloads, which nobody reads.
MOST_TOLD, MOST_CARRIED = 1 << 20, 128 << 20
BEYOND_ITS_GROUP = "it took more than {:g} GB of memory, with what the kernel holds for it"
COURSE = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Limits:
    """Limits of one worker and all that it starts: seconds in total and per cell, bytes of memory
    and of files, processes."""

    seconds: float = 600.0
    cell: float = 60.0
    memory: int = 6 << 30
    disk: int = 512 << 20
    processes: int = 400


@dataclass
class Said:
    """The messages of a worker, and why it ended before it was done, or "". A message that came
    with a payload has it as its "payload", in bytes."""

    messages: list[dict] = field(default_factory=list)
    cut_short: str = ""


@functools.cache
def why_not_apart() -> str:
    """Why this system lets us make no sandbox; "" if it does."""
    if sys.platform != "linux":
        return f"{sys.platform} has no namespaces"
    if not shutil.which("unshare"):
        return "the program unshare is not there (util-linux has it)"
    found = run("probe", {}, Limits(seconds=60), apart=True)
    return "" if found.messages == [{"apart": True}] else found.cut_short or "no sandbox came up"


def limited_without_one() -> str:
    """What holds without a sandbox on this system, in a sentence."""
    if sys.platform == "linux":
        return "Only time, memory, the number of processes and the size of a file are limited."
    return (
        "Only time and the size of a file are limited: how much memory and how many processes a "
        f"notebook has is not seen on {sys.platform}, and what leaves its group of processes lives "
        "on."
    )


class Sandbox:
    """A worker that has been started and waits for its one job.

    `apart`: in a sandbox of its own; else only what `limited_without_one` says is limited. `cores`
    (Linux): those it may use, none for all.
    """

    def __init__(self, worker: str, limits: Limits, *, apart: bool, cores: Iterable[int] = ()):
        told = dict(worker=worker, apart=apart, cores=list(cores), memory=limits.memory)
        told |= dict(disk=limits.disk, processes=limits.processes, seconds=limits.seconds)
        command = [sys.executable, "-m", "mini_dist.course.grade.inside", json.dumps(told)]
        self.limits, self.said = limits, Said()
        self.errors: list[bytes] = []
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [*UNSHARE, *command] if apart else command
        # The files of a sandbox are in memory, and a cgroup counts them.
        self.group = cgroups.group_of(limits.memory + limits.disk * apart)
        self.process = subprocess.Popen(
            self.group.entered(command) if self.group else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.folder.name,
            env=environment(self.folder.name),
            start_new_session=True,
        )
        told, failed = self.process.stdout, self.process.stderr
        self.readers = [
            threading.Thread(target=listen, args=(told, self.said), daemon=True),
            threading.Thread(target=keep_last, args=(failed, self.errors), daemon=True),
        ]
        for reader in self.readers:
            reader.start()

    def run(self, job: dict, stop: threading.Event | None = None) -> Said:
        """Give it the job, and wait until it is done. `stop`: ends it when it is set."""
        try:
            with suppress(BrokenPipeError):  # then its status tells
                data = json.dumps(job).encode()
                self.process.stdin.write(LENGTH.pack(len(data)) + data)
                self.process.stdin.flush()
            self.said.cut_short = wait(self.process, self.limits, stop, self.group)
        finally:
            beyond = self.group is not None and self.group.went_beyond()
            self.close()
        if beyond:
            self.said.cut_short = BEYOND_ITS_GROUP.format(self.limits.memory / 2**30)
        if not self.said.cut_short and self.process.returncode:
            last = b"".join(self.errors).decode(errors="replace").strip().splitlines()[-1:]
            how = [f"it ended with status {self.process.returncode}"]
            how *= self.process.returncode != BEYOND
            self.said.cut_short = " ".join([*how, *last])
        return self.said

    def close(self) -> None:
        end(self.process)
        for reader in self.readers:
            reader.join(5)
        self.folder.cleanup()
        if self.group:
            self.group.remove()


def run(worker: str, job: dict, limits: Limits, *, apart: bool) -> Said:
    """Run `mini_dist.course.grade.WORKER` with this job in a sandbox, or under these limits."""
    return Sandbox(worker, limits, apart=apart).run(job)


class Slot:
    """Where one notebook is graded at a time, each time in new sandboxes.

    The sandbox that will be needed next is started early: until its job comes it holds nothing but
    the course, Python and torch, and to load these takes a third of the time of a short notebook.

    Notebooks do not share loading. For lesson 02 with one exercise (November 2026, on two busy
    cores) a notebook took 26 s of CPU time; 12 s of these were imports: papermill 2.1, the
    kernel's 3.2, the judge's 2.9, torch for the ranks of each 1.9. A process that has imported all
    this and is forked into new namespaces would save most of it, and would keep files, processes
    and network separate. But papermill starts its kernel and `launch` its ranks as new programs, so
    all three starts would have to be replaced, and every notebook would get the same addresses and
    the same hash seed.
    """

    def __init__(self, limits: Limits, *, apart: bool, cores: Iterable[int] = (), stop=None):
        self.limits, self.stop = limits, stop
        self.how = dict(apart=apart, cores=list(cores))
        self.ahead: dict[str, Sandbox] = {}

    def run(self, worker: str, job: dict, then: str = "") -> Said:
        """Run this worker, and meanwhile start the one that comes after it."""
        mine = self.ahead.pop(worker, None)
        if mine is not None and mine.process.poll() is not None:
            mine.close()
            mine = None
        if mine is None:
            mine = Sandbox(worker, self.limits, **self.how)
        if then and then not in self.ahead:
            self.ahead[then] = Sandbox(then, self.limits, **self.how)
        return mine.run(job, self.stop)

    def close(self) -> None:
        while self.ahead:
            self.ahead.popitem()[1].close()


def environment(folder: str) -> dict[str, str]:
    """Nothing of the teacher's but where programs and languages are."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    kept |= {"PYTHONPATH": str(COURSE), "PYTHONDONTWRITEBYTECODE": "1", "MPLBACKEND": "agg"}
    return kept | {"PATH": f"{Path(sys.executable).parent}:{kept.get('PATH', os.defpath)}"}


def listen(pipe, said: Said) -> None:
    """Take in messages, up to MOST_TOLD bytes of them and MOST_CARRIED of payload."""
    told, carried = MOST_TOLD, MOST_CARRIED
    while told > 0 and (line := pipe.readline(told)):
        told -= len(line)
        with suppress(ValueError, RecursionError):
            message = json.loads(line)
            if not isinstance(message, dict):
                continue
            size = message.get("bytes", 0)
            if type(size) is not int or not 0 <= size <= carried:
                break
            carried -= size
            if size:
                message["payload"] = pipe.read(size)
            said.messages.append(message)
    while pipe.read1(1 << 16):  # what nobody listens to any more, so that it does not block
        pass


def keep_last(pipe, errors: list[bytes]) -> None:
    while data := pipe.read1(1 << 12):
        errors[:] = [*errors[-3:], data]


def wait(
    process: subprocess.Popen,
    limits: Limits,
    stop: threading.Event | None,
    group: cgroups.Group | None,
) -> str:
    """Wait for its end; why it has to be ended before that, or ""."""
    late = time.monotonic() + limits.seconds + PATIENCE  # its first process should have ended it
    while True:
        if stop and stop.is_set():
            return "interrupted"
        if time.monotonic() > late:
            return f"it took longer than {limits.seconds:g} s"
        if group and group.went_beyond():  # the kernel killed one process; the others would go on
            return BEYOND_ITS_GROUP.format(limits.memory / 2**30)
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK)
            return ""


def end(process: subprocess.Popen) -> None:
    """End all of it: with the first process of a sandbox the system ends all others, and without
    one the first process ends all that it knows of."""
    pids = usage.family(process.pid) if process.poll() is None else set()
    with suppress(BrokenPipeError):  # (it has ended before it had read its job)
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)
    process.kill()
    process.wait()
    deadline = time.monotonic() + PATIENCE
    while any(os.path.isdir(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
