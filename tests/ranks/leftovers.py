"""What launches leave behind: nothing beyond a zygote, its ranks on standby and their directory."""

import os
import time
from pathlib import Path

from mini_dist.ranks.folder import LOG, MARKER
from mini_dist.ranks.launch import ZYGOTES

LIMIT = 10  # seconds that a process may take to end on a busy machine


def zygote(start: str = "fork", network: bool = False):
    """The zygote of this process, None before its first launch."""
    return ZYGOTES.get((start, network))


def processes(session: int) -> set[int]:
    """All that a zygote ever started, ranks and their children: they share its session."""
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
    """Processes end in their own time; what must come to pass has LIMIT seconds for it."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.01)


def assert_only_standby(start: str = "fork") -> None:
    """One zygote, its standby ranks, their directory, and nothing else of this process."""
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
