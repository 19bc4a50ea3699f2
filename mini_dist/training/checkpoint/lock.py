"""Only one training at a time saves into a directory: a second one would overwrite its files.

The kernel holds the lock (fcntl's, on the file `lock`), and releases it when the process ends,
however it ends: a killed training does not block its successor.
"""

from __future__ import annotations

import fcntl
import os
import platform
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

from .manifest import CheckpointError

FLOCK = "hhqqi4x"  # struct flock of Linux (fcntl.h): type, whence, start, length, pid
PATIENCE = 5.0  # seconds: the last processes of a killed training may still be ending


class Lock:
    """The right of this process to save into a directory, from `take` until this object is gone.

    The lock belongs to the process: all code in it may hold it, one after the other, and when one
    holder releases it, the others have to `take` it again. If nothing can be written, or the file
    system has no locks, there is no lock. The file belongs to the owner alone (0600), and so does a
    directory that the lock creates (0700): anyone who can open the file, even for reading only,
    could lock it and keep the owner from training.
    """

    def __init__(self, directory: Path):
        self.directory, self.handle = directory, None
        self.not_ours = ""  # the lock's owner, if this user may save here but not lock
        path = directory / "lock"
        try:
            directory.mkdir(0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            self.handle = os.open(path, flags, 0o600)
        except PermissionError:
            with suppress(OSError):
                if os.access(directory, os.W_OK):
                    self.not_ours = f"user {path.lstat().st_uid}"
        except OSError:
            pass
        with suppress(OSError):  # (an earlier version made it readable)
            if self.handle is not None and os.fstat(self.handle).st_mode & 0o077:
                os.fchmod(self.handle, 0o600)

    def take(self) -> None:
        """Take the lock. Raises CheckpointError, which names the holder."""
        if self.not_ours:
            raise CheckpointError(
                f"the lock of {self.directory} belongs to {self.not_ours}: give this training "
                "another directory, or let that user remove the file `lock`"
            )
        until = time.monotonic() + PATIENCE
        while self.handle is not None:
            try:
                fcntl.lockf(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                if time.monotonic() > until:
                    raise CheckpointError(self.refusal()) from None
                time.sleep(0.05)
            except OSError:  # the file system has no locks
                return
            else:
                with suppress(OSError):  # a full disk: then the holder is not named
                    os.ftruncate(self.handle, 0)
                    os.pwrite(
                        self.handle, f"process {os.getpid()} on {platform.node()}".encode(), 0
                    )
                return

    def refusal(self) -> str:
        kind, pid = holder(self.handle)
        if kind == fcntl.F_RDLCK:  # a training locks for writing
            return (
                f"{self.directory} cannot be saved to: process {pid or 'of another machine'} only "
                f"reads there and has locked {self.directory / 'lock'}. End that process, or give "
                "this training another directory"
            )
        said = os.pread(self.handle, 200, 0).decode(errors="replace") or "another process"
        return (
            f"{self.directory} is in use by another training, {said}: give this one another "
            "directory, or end that one"
        )

    def __del__(self):
        if self.handle is not None:
            os.close(self.handle)


def holder(handle: int) -> tuple[int, int]:
    """Return how another process locks the file, F_RDLCK or F_WRLCK (F_UNLCK: no longer), and that
    process (0 if the kernel does not know it)."""
    if sys.platform != "linux":
        return fcntl.F_UNLCK, 0
    asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        kind, _, _, _, pid = struct.unpack(FLOCK, fcntl.fcntl(handle, fcntl.F_GETLK, asked))
    except OSError:
        return fcntl.F_UNLCK, 0
    return kind, max(pid, 0)
