"""A memory limit by the kernel: a cgroup for each sandbox, where this process may make one.

A cgroup counts what no look at /proc shows: measured on Linux 6.18 with cgroup v1, a queued Unix
socket, a pipe, a page table, a semaphore and a file in tmpfs each counted in full. TCP buffers have
a counter of their own in v1, which starts when it gets a limit, and yields late: 54 MB were queued
under a limit of 20 MB.

Groups are children of this process's own group, so its limits hold as well. In cgroup v1 the own
group has to be writable, which it is for root. In cgroup v2 it also has to hand the memory
controller to its children, which it may only if it holds no process itself. If this process is the
only one in it, as after `systemd-run --user --scope -p Delegate=yes`, this process moves into a
child first. The v2 half was never run: all machines we had were v1.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path

PREFIX = "mini_dist"  # of each group's name, followed by the process that made it and a number
NUMBERS = itertools.count()
PATIENCE = 5  # seconds for the last process of a group to be gone


@dataclass(frozen=True)
class Version:
    """The files of a cgroup that limit memory (one that is missing is not needed), and the file
    that counts the processes that the limit has killed."""

    limits: tuple[str, ...]
    killed: str
    others: tuple[tuple[str, str], ...] = ()


# In v1 memsw is memory and swap together, and may not be below memory: it comes second.
V1 = Version(
    ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.kmem.tcp.limit_in_bytes"),
    "memory.oom_control",
)
V2 = Version(
    ("memory.max",), "memory.events", (("memory.swap.max", "0"), ("memory.oom.group", "1"))
)


class Group:
    """A cgroup of at most `limit` bytes. Raises OSError if the system refuses to make it."""

    def __init__(self, parent: Path, version: Version, limit: int):
        self.version = version
        self.path = parent / f"{PREFIX}-{os.getpid()}-{next(NUMBERS)}"
        self.path.mkdir()
        settings = [*((name, str(limit)) for name in version.limits), *version.others]
        try:
            for name, value in settings:
                if (self.path / name).exists():
                    (self.path / name).write_text(value)
        except OSError:
            self.remove()
            raise

    def entered(self, command: list[str]) -> list[str]:
        """Return the command that runs `command` inside the group from its first instruction on."""
        enter = 'echo 0 > "$0" && exec "$@"'
        return ["sh", "-c", enter, str(self.path / "cgroup.procs"), *command]

    def went_beyond(self) -> bool:
        """Return whether the kernel has killed a process of the group for its memory."""
        with contextlib.suppress(OSError):
            words = (self.path / self.version.killed).read_text().split()
            return int(dict(zip(words[::2], words[1::2])).get("oom_kill", 0)) > 0
        return False

    def remove(self) -> None:
        """Remove the group as soon as its last process is gone."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                return self.path.rmdir()
            except FileNotFoundError:
                return
            except OSError:  # busy
                time.sleep(0.02)


def group_of(limit: int) -> Group | None:
    """Make a cgroup of at most `limit` bytes, or return None where that is not possible."""
    if (found := where_groups_go()) is None:
        return None
    try:
        return Group(*found, limit)
    except OSError:
        return None


@functools.cache
def where_groups_go() -> tuple[Path, Version] | None:
    """Return the group whose children this process may make and limit, with its version."""
    for version, folder in own_groups():
        with contextlib.suppress(OSError):
            if os.access(folder, os.W_OK) and (version is V1 or hands_down_memory(folder)):
                remove_left_over(folder)
                return folder, version
    return None


def own_groups(proc: Path = Path("/proc/self")):
    """Yield the group of this process in each hierarchy that has a memory controller or is v2."""
    try:
        own = [line.split(":", 2)[1:] for line in (proc / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
    except OSError:  # no Linux
        return
    paths = {name: path for names, path in own for name in names.split(",")}
    for mount in mounts:
        root, point, kind, options = mount[3], mount[4], *mount[mount.index("-") + 1 :: 2]
        version = {"cgroup": V1, "cgroup2": V2}.get(kind)
        path = paths.get("" if version is V2 else "memory")
        if version is None or path is None or version is V1 and "memory" not in options.split(","):
            continue
        below = os.path.relpath(path, root) if path.startswith(root) else "."
        yield version, Path(os.path.normpath(f"{point}/{below}"))


def hands_down_memory(folder: Path) -> bool:
    """Let the children of this v2 group limit memory, if they may; return whether they can."""
    if "memory" in (folder / "cgroup.subtree_control").read_text().split():
        return True
    alone = (folder / "cgroup.procs").read_text().split() == [str(os.getpid())]
    if not alone or "memory" not in (folder / "cgroup.controllers").read_text().split():
        return False
    inner = folder / f"{PREFIX}-grader"
    inner.mkdir(exist_ok=True)
    (inner / "cgroup.procs").write_text("0")
    (folder / "cgroup.subtree_control").write_text("+memory")
    return True


def remove_left_over(folder: Path) -> None:
    """Remove groups whose grader was killed: empty ones of processes that are gone."""
    for path in folder.glob(f"{PREFIX}-*-*"):
        maker = path.name.split("-")[1]
        if maker.isdigit() and not os.path.exists(f"/proc/{maker}"):
            with contextlib.suppress(OSError):
                path.rmdir()
