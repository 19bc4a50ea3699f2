"""The private folder of a zygote and its worlds: created with a marker, never removed without it.

    /dev/shm/ranks-of-mini_dist-x1y2z3w4/  in memory, or where temporary files go
        made-by-mini_dist                  the marker; locked as long as a process uses the folder
        zygote.log
        7/                                 a world: the file store of its rendezvous (store-1 and
            store flight-0 stack-0 ...     so on of later groups), and of each rank the flight
                                           recorder and the stack

A killed process leaves its folder, and the next process removes it. It removes only folders with
this name, this owner, this marker and no files with other names; anything else belongs to
someone.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "ranks-of-mini_dist-"  # (an earlier version sweeps away all mini_dist-* it can)
NAME = re.compile(re.escape(PREFIX) + r"[a-z0-9_]{8}")  # as mkdtemp fills it up
MARKER, LOG = "made-by-mini_dist", "zygote.log"
TEXT = b"A folder of mini_dist's ranks. Nobody uses it any more if this file is not locked.\n"
WORLD = re.compile(r"[0-9]+")
IN_A_WORLD = re.compile(r"store(-[0-9]+)?|(flight|stack)-[0-9]+")
ROOM = 32 << 20  # bytes: for the recorders of as many ranks as a laptop can run


def base_directory() -> str:
    """Return a directory in memory if the system has one with room: disk is slower."""
    with suppress(OSError):
        if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > ROOM:
            return "/dev/shm"
    return tempfile.gettempdir()


def make_directory() -> tuple[str, int]:
    """Create a folder and the lock on its marker: a file that stays open during use."""
    directory = tempfile.mkdtemp(prefix=PREFIX, dir=base_directory())
    early = f"{directory}/{MARKER}.new"
    try:
        lock = os.open(early, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, TEXT)
        os.rename(early, f"{directory}/{MARKER}")  # there is no marker without a lock on it
    except OSError:
        with suppress(OSError):
            os.unlink(early)
        os.rmdir(directory)
        raise
    return directory, lock


def sweep() -> None:
    """Remove folders of this user that a killed process and its killed zygote have left."""
    for path in Path(base_directory()).glob(PREFIX + "*"):
        with suppress(OSError):
            about = path.lstat()
            mine = about.st_uid == os.getuid() and stat.S_IMODE(about.st_mode) == 0o700
            if not NAME.fullmatch(path.name) or not stat.S_ISDIR(about.st_mode) or not mine:
                continue
            with closing_fd(os.open(path / MARKER, os.O_RDONLY | os.O_NOFOLLOW)) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # (BlockingIOError: it is in use)
                remove_directory(path)


def remove_directory(path: str | Path) -> None:
    """Remove the folder if it and all its contents are ours; else touch nothing."""
    with suppress(OSError), opened(path) as folder:
        names = set(os.listdir(folder))
        worlds = {name for name in names if WORLD.fullmatch(name)}
        if not is_marked(folder) or names - worlds - {MARKER, LOG}:
            return
        for world in worlds:
            remove_world(f"{path}/{world}")
        if set(os.listdir(folder)) <= {MARKER, LOG}:
            for name in (LOG, MARKER):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
            os.rmdir(path)


def remove_world(path: str | Path) -> None:
    with suppress(OSError), opened(path) as folder:
        names = os.listdir(folder)
        if all(IN_A_WORLD.fullmatch(name) for name in names):
            for name in names:
                os.unlink(name, dir_fd=folder)  # (which leaves a directory of such a name alone)
            os.rmdir(path)


def is_marked(folder: int) -> bool:
    with closing_fd(os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)) as marker:
        mine = os.fstat(marker).st_uid == os.getuid()
        return mine and os.read(marker, len(TEXT) + 1) == TEXT


@contextmanager
def opened(path: str | Path):
    with closing_fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)) as folder:
        yield folder


@contextmanager
def closing_fd(fd: int):
    try:
        yield fd
    finally:
        os.close(fd)
