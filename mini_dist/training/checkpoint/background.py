"""A save in a separate thread, during training; a program waits for it at its end."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor

from .files import write
from .lock import Lock


class Background:
    """A save in progress. If nobody has waited for it when the rank's function returns or the
    program ends, the exit waits for it, and fails if the save failed."""

    def __init__(self, job: tuple, lock: Lock | None):
        def write_locked():
            held = lock  # held until the save is written, even if the Training is gone
            write(*job)
            return held

        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.future = thread.submit(write_locked)
        thread.shutdown(wait=False)  # it ends when it has written
        recorder = getattr(job[4], "recorder", None)
        self.unfinished = recorder.unfinished if recorder else []  # a program waits at its exit
        self.unfinished.append(self.result)
        atexit.register(self.at_exit)

    def result(self) -> None:
        """Wait for the save; raise its error."""
        if self.result in self.unfinished:
            self.unfinished.remove(self.result)
        atexit.unregister(self.at_exit)
        self.future.result()

    def at_exit(self) -> None:
        try:
            self.result()
        except Exception:
            traceback.print_exc()
            sys.stdout.flush()
            os._exit(1)  # an exception alone would not change the status of a program that ends
