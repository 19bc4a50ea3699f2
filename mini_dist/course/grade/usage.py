"""What a group of processes holds: memory, files, threads and, for them, the kernel.

Everything comes from /proc, which shows nothing on macOS: there every count is 0. The kernel's
share is an upper bound where /proc gives no exact number, because a program that wants to hide
memory hides it exactly there.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# A socket queues messages until they take SO_SNDBUF, by default 212,992 bytes, and one more of that
# size: `ss -xm` showed 0.53 MB at most. inside.py takes care that no program raises SO_SNDBUF.
OF_A_SOCKET = 576 << 10
OF_A_FILE = 8 << 10  # a pipe, once its user has more than fs.pipe-user-pages-soft pages in pipes


def family(ancestor: int) -> set[int]:
    """Return this process and its descendants.

    The first process of a sandbox adopts orphans, so nobody can leave the family.
    """
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


def everybody() -> set[int]:
    """Return all processes that /proc shows: in a sandbox, only the sandbox's processes."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def threads(pids: set[int]) -> int:
    found = 0
    for pid in pids:
        with suppress(OSError):
            found += os.stat(f"/proc/{pid}/task").st_nlink - 2
    return found


@dataclass(frozen=True)
class Memory:
    """Bytes that processes hold themselves, and bytes that the kernel may hold for them."""

    own: int
    kernel: int

    @property
    def total(self) -> int:
        return self.own + self.kernel


def memory(pids: set[int], limit: int) -> Memory:
    """Measure what these processes hold; pages that forks share are told apart above the limit."""
    resident = tables = files = 0
    sockets: set[str] = set()
    for pid in pids:
        sizes = sizes_of(pid)
        resident, tables = resident + sizes["VmRSS"], tables + sizes["VmPTE"]
        with suppress(OSError):
            opened = os.listdir(f"/proc/{pid}/fd")
            files += len(opened)
            if OF_A_FILE * files > limit:  # (then there is no need to look at each of them)
                break
            for fd in opened:
                with suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{fd}")
                    if target.startswith("socket:"):
                        sockets.add(target)
    kernel = tables + OF_A_FILE * files + OF_A_SOCKET * len(sockets)
    if resident + kernel > limit:
        resident = sum(map(proportional, pids))
    return Memory(resident, kernel)


def sizes_of(pid: int) -> dict[str, int]:
    """Return the bytes of a process's pages in memory, and of its page tables."""
    found = {"VmRSS": 0, "VmPTE": 0}
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name in found:
                found[name] = 1024 * int(value.split()[0])
    return found


def proportional(pid: int) -> int:
    """Return the bytes of one process, with its part of the pages that it shares."""
    with suppress(OSError, ValueError, IndexError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return 0
