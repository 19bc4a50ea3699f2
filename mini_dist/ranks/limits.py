"""Which of this machine's resources has run out, in words that say what to do about it."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from .network import name_of

LITTLE = 1 << 20  # bytes: a disk with less is full
MANY = 10_000  # files that are looked at


def what_ran_out(number: int | None) -> list[str]:
    """Explain the number of a system error; return nothing for other kinds."""
    if number == errno.ENOSPC:
        return full_disks()
    if number in (errno.EMFILE, errno.ENFILE):
        return [
            "(ulimit -n says how many files a process may have open, and raises it. A launch needs "
            "five for each rank; files that are closed make room.)"
        ]
    if number == errno.EAGAIN:
        return [
            f"({limits_of_processes()} A rank is one process with about four threads. Take fewer "
            "ranks, or raise the limit.)"
        ]
    if number == errno.ENOMEM:
        return ["(The system has no memory left for another process.)"]
    return []


def limits_of_processes() -> str:
    """Return how many processes the system allows, if that is known."""
    known = []
    for line in lines_of("/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        root = {"": "/sys/fs/cgroup", "pids": "/sys/fs/cgroup/pids"}.get(controllers)
        for folder in [Path(path), *Path(path).parents] if root else []:
            here = f"{root}{folder}"
            (most,) = lines_of(f"{here}/pids.max") or ["max"]
            (now,) = lines_of(f"{here}/pids.current") or ["?"]
            if most != "max":
                known.append(f"this container may have {most} processes and threads, and has {now}")
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most != resource.RLIM_INFINITY:
        known.append(f"this user may have {most:,} (ulimit -u)")
    text = "; ".join(known) or "a limit on processes, or memory for them, is reached"
    return f"{text[0].upper()}{text[1:]}."


def seconds_of_cpu() -> str:
    """Return how long a process may compute, if `ulimit -t` limits it: the rest of a sentence."""
    most, _ = resource.getrlimit(resource.RLIMIT_CPU)
    return "" if most == resource.RLIM_INFINITY else f", here {most:,} s for each process"


def more_of_ulimit_t() -> str:
    """Mention `ulimit -t`, because the hard limit ends a process by SIGKILL."""
    return f", or by ulimit -t{seconds_of_cpu()}" if seconds_of_cpu() else ""


def lines_of(path: str) -> list[str]:
    with suppress(OSError):
        return Path(path).read_text().splitlines()
    return []


def full_disks() -> list[str]:
    """Return the full disks where ranks write: their size, and whose files fill them."""
    places = dict.fromkeys(["/dev/shm", tempfile.gettempdir(), os.path.abspath(".")])
    told, devices = [], set()
    for place in places:
        with suppress(OSError):
            usage, device = shutil.disk_usage(place), os.stat(place).st_dev
            if usage.free < LITTLE and device not in devices:
                devices.add(device)
                told.append(f"({place} is full: {in_mb(usage.total)} in all{largest_in(place)}.)")
    return told


def largest_in(place: str) -> str:
    found, seen = [], 0
    for folder, _, names in os.walk(place):
        for name in names:
            with suppress(OSError):
                about = os.lstat(f"{folder}/{name}")
                found.append((about.st_blocks * 512, f"{folder}/{name}", about.st_uid))
        seen += len(names)
        if seen > MANY:
            break
    largest = [(size, path, user) for size, path, user in sorted(found)[-2:] if size > LITTLE]
    told = [f"{path} {in_mb(size)}, of {name_of(user)}" for size, path, user in largest[::-1]]
    return f"; the largest there: {'; '.join(told)}" if told else ""


def in_mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
