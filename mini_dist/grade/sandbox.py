"""Run a worker where it can do no harm beyond its limits, and hear what it says.

The sandbox is Linux's namespaces, made by `unshare` of util-linux (inside.py says what is in one).
Over them this process looks at memory and processes, and ends a sandbox that has too much of
either. A worker says what it has to say in lines of JSON, which are read up to a limit.
"""

from __future__ import annotations

import functools
import json
import os
import re
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

from .inside import LENGTH, TOO_MANY

UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child")
UNSHARE += ("--net", "--ipc", "--uts", "--")
LOOK = 0.25  # seconds between two looks at memory and processes
PATIENCE = 5  # seconds for what is ended to be gone
MOST_SAID = 64 << 20  # bytes
MOST_AROUND = 1 << 20  # of a message, beside its texts: what is empty takes most room when read
TEXTS = re.compile(rb'"(?:[^"\\]|\\.)*"')
PAGE = os.sysconf("SC_PAGE_SIZE")
COURSE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Limits:
    """Of one worker and all that it starts: seconds, of which a cell may take some, bytes of memory
    and of files, processes."""

    seconds: float = 600.0
    cell: float = 60.0
    memory: int = 6 << 30
    disk: int = 512 << 20
    processes: int = 400


@dataclass
class Said:
    """The messages of a worker, and why it ended before it was done, or ""."""

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


def run(
    worker: str,
    job: dict,
    limits: Limits,
    *,
    apart: bool,
    cores: Iterable[int] = (),
    stop: threading.Event | None = None,
) -> Said:
    """Run `mini_dist.grade.WORKER` with this job. `apart`: in a sandbox of its own; else only what
    `limited_without_one` says is limited. `cores` (Linux): those it may use, none for all.
    `stop`: ends it when it is set."""
    told = dict(worker=worker, apart=apart, cores=list(cores), memory=limits.memory)
    told |= dict(disk=limits.disk, processes=limits.processes)
    command = [sys.executable, "-m", "mini_dist.grade.inside", json.dumps(told)]
    said = Said()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [*UNSHARE, *command] if apart else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environment(folder),
            start_new_session=True,
        )
        errors: list[bytes] = []
        readers = [
            threading.Thread(target=listen, args=(process.stdout, said), daemon=True),
            threading.Thread(target=keep_last, args=(process.stderr, errors), daemon=True),
        ]
        for reader in readers:
            reader.start()
        try:
            with suppress(BrokenPipeError):  # then its status tells
                data = json.dumps(job).encode()
                process.stdin.write(LENGTH.pack(len(data)) + data)
                process.stdin.flush()
            said.cut_short = watch(process, limits, stop)
        finally:
            end(process)
        for reader in readers:
            reader.join(5)
    if not said.cut_short and process.returncode:
        last = b"".join(errors).decode(errors="replace").strip().splitlines()[-1:]
        how = [f"it ended with status {process.returncode}"] * (process.returncode != TOO_MANY)
        said.cut_short = " ".join([*how, *last])
    return said


def environment(folder: str) -> dict[str, str]:
    """Nothing of the teacher's but where programs and languages are."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    kept |= {"PYTHONPATH": str(COURSE), "PYTHONDONTWRITEBYTECODE": "1", "MPLBACKEND": "agg"}
    return kept | {"PATH": f"{Path(sys.executable).parent}:{kept.get('PATH', os.defpath)}"}


def listen(pipe, said: Said) -> None:
    """Take in messages; of a worker that says too much, no more than MOST_SAID bytes."""
    left = MOST_SAID
    while left > 0 and (text := pipe.readline(left)):
        left -= len(text)
        with suppress(ValueError, RecursionError):
            if len(text) > MOST_AROUND and len(TEXTS.sub(b"''", text)) > MOST_AROUND:
                continue
            message = json.loads(text)
            if isinstance(message, dict):
                said.messages.append(message)
    while pipe.read(1 << 16):
        left = 0


def keep_last(pipe, errors: list[bytes]) -> None:
    while data := pipe.read1(1 << 12):
        errors[:] = [*errors[-3:], data]


def watch(process: subprocess.Popen, limits: Limits, stop: threading.Event | None) -> str:
    """Wait for its end; why it has to be ended before that, or ""."""
    deadline = time.monotonic() + limits.seconds
    while True:
        if stop and stop.is_set():
            return "interrupted"
        if time.monotonic() > deadline:
            return f"it took longer than {limits.seconds:g} s"
        pids = family(process.pid)
        if len(pids) > limits.processes:
            return f"it started more than {limits.processes} processes"
        if used(pids, limits.memory) > limits.memory:
            return f"it took more than {limits.memory / (1 << 30):g} GB of memory"
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK)
            return ""


def family(ancestor: int) -> set[int]:
    """A process and all that descend from it. In a sandbox orphans go to its first process, which
    is among them, so that nobody gets out of the family. Without /proc only the process itself."""
    parents = {}
    for entry in os.scandir("/proc") if os.path.isdir("/proc") else ():
        if entry.name.isdigit():
            with suppress(OSError):
                stat = Path(entry.path, "stat").read_text(errors="replace")
                parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found, new = set(), {ancestor}
    while new:
        found |= new
        new = {pid for pid, parent in parents.items() if parent in new} - found
    return found


def used(pids: set[int], limit: int) -> int:
    """Bytes of memory of these processes; 0 without /proc. Pages that forks share count once where
    that matters."""
    at_most = 0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            at_most += PAGE * int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    if at_most <= limit:
        return at_most
    total = 0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def end(process: subprocess.Popen) -> None:
    """End all of it: with the first process of a sandbox the system ends all others, and without
    one the first process ends all that it knows of."""
    pids = family(process.pid) if process.poll() is None else set()
    process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)
    process.kill()
    process.wait()
    deadline = time.monotonic() + PATIENCE
    while any(os.path.isdir(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
