"""Check that launches leave behind only a zygote, its standby ranks and their directory."""

import os
import time
from pathlib import Path

from mini_dist.ranks.folder import LOG, MARKER
from mini_dist.ranks.launch import ZYGOTES

LIMIT = 10  # seconds that a process may take to end on a busy machine


def zygote(start: str = "fork", network: bool = False):
    """Return this process's zygote, or None before its first launch."""
    return ZYGOTES.get((start, network))


def processes(session: int) -> set[int]:
    """Return the process ids in a zygote's session: the zygote, its ranks and their children."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, session_of_this = fields[0], int(fields[3])
        if session_of_this == session and state != "Z":
            found.add(int(entry.name))
    return found


def wait_until(condition, what) -> None:
    """Wait up to LIMIT seconds for `condition`, because processes take some time to end."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.01)


def assert_only_standby(start: str = "fork") -> None:
    """Assert that only one zygote, its standby ranks and their directory are left."""
    keeper = zygote(start)
    session, expected = keeper.process.pid, 1 + keeper.standby.size
    wait_until(
        lambda: len(processes(session)) == expected,
        lambda: f"{len(processes(session))} processes are left, not {expected}",
    )
    wait_until(
        lambda: set(os.listdir(keeper.directory)) == {MARKER, LOG, str(keeper.standby.number)},
        lambda: f"left in {keeper.directory}: {os.listdir(keeper.directory)}",
    )


def assert_all_gone(session: int, directory) -> None:
    wait_until(lambda: not processes(session), lambda: f"still there: {processes(session)}")
    wait_until(lambda: not os.path.exists(directory), lambda: f"still there: {directory}")
