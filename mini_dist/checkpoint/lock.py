"""One training at a time saves into a directory: a second one would overwrite what it saves.

The kernel keeps the lock (fcntl's, on the file `lock`), and takes it back when the process ends,
however it ends: what a killed training leaves does not shut its successor out.
"""

from __future__ import annotations

import fcntl
import os
import platform
import time
from contextlib import suppress
from pathlib import Path

from .manifest import CheckpointError

PATIENCE = 5.0  # seconds: of a training that was killed the last processes may still be ending


class Lock:
    """The right of this process to save into a directory, from `take` until this object is gone.

    It belongs to the process: all in it may have it, one after the other, and when one of them
    lets go of it the others have to `take` it again. Where nothing can be written, and on a file
    system without locks, there is none.
    """

    def __init__(self, directory: Path):
        self.directory, self.handle = directory, None
        with suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            self.handle = os.open(directory / "lock", flags, 0o666)

    def take(self) -> None:
        """Raises CheckpointError that says who has it."""
        until = time.monotonic() + PATIENCE
        while self.handle is not None:
            try:
                fcntl.lockf(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                if time.monotonic() > until:
                    raise CheckpointError(self.refusal()) from None
                time.sleep(0.05)
            except OSError:  # there are none here
                return
            else:
                with suppress(OSError):  # a full disk: then it is not said who
                    os.ftruncate(self.handle, 0)
                    os.pwrite(
                        self.handle, f"process {os.getpid()} on {platform.node()}".encode(), 0
                    )
                return

    def refusal(self) -> str:
        holder = os.pread(self.handle, 200, 0).decode(errors="replace") or "another process"
        return (
            f"{self.directory} is in use by another training, {holder}: give this one another "
            "directory, or end that one"
        )

    def __del__(self):
        if self.handle is not None:
            os.close(self.handle)
