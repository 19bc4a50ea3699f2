"""Which core a rank's threads run on, and which of them may take a core from another.

Several ranks share a core of a laptop. The kernel's default scheduling is meant for programs that
do not wait for each other all the time.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress


def stay_on_a_core(rank: int, size: int) -> None:
    """Deal the cores out to the ranks, where each core gets the same number of them, two or more.

    Left to itself, the kernel moves a rank to whichever core is idle for a moment. There its data
    is in no cache, and soon two ranks wait for one core while the other idles. (Not before there is
    a job: until then a rank only starts, and it does so faster where there is room.)

    Dealt there and back again, 0 1 1 0 on two cores: of a rank's two neighbours in a ring one is
    on its own core, whose cache has what comes from there, and one on another, so that stages of a
    pipeline that compute one after the other do not both wait for one core. (A ring of 64 MB on
    four ranks takes 87 ms so, with 0 1 0 1 148; GPipe's step 165 ms, with 0 0 1 1 183.)
    """
    if sys.platform != "linux":  # macOS lets nobody choose
        return
    cores = sorted(os.sched_getaffinity(0))
    if size > len(cores) and size % len(cores) == 0:
        lap, place = divmod(rank, len(cores))
        core = cores[place if lap % 2 == 0 else -1 - place]
        for thread in os.listdir("/proc/self/task"):  # including gloo's; later ones inherit it
            with suppress(OSError):  # a sandbox may refuse it, or the thread has ended
                os.sched_setaffinity(int(thread), {core})


@contextmanager
def threads_that_do_not_interrupt():
    """Threads that start in here wait for a core, instead of taking it from whoever computes there.

    gloo's thread is woken by the answers to what the main thread is just sending. If it takes that
    thread's core, while the lock of the connection is held, it asks for the lock over and over for
    its whole slice of time, 3 ms, and nobody sends. (gloo/transport/tcp/pair.cc, handleEvents:
    try_to_lock, on events that stay until they are handled.)
    """
    changed = False
    with suppress(OSError):  # a sandbox may refuse it
        if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:  # Linux
            # of this thread, and of those that it starts
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            changed = True
    try:
        yield
    finally:
        if changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
