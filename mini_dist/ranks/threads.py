"""Which core a rank's threads run on, and which of them may take a core from another.

Several ranks share a core of a laptop. The kernel's default scheduling is meant for programs that
do not wait for each other all the time.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress


def stay_on_a_core(rank: int, size: int) -> None:
    """Assign cores to the ranks if each core gets the same number of them, two or more.

    By default the kernel moves a rank to any core that is idle for a moment. There its data
    is in no cache, and soon two ranks wait for one core while the other idles. (Not before there is
    a job: until then a rank only starts, and it starts faster with free choice.)

    The order goes forth and back, 0 1 1 0 on two cores: of a rank's two neighbors in a ring, one is
    on its own core, whose cache has the neighbor's data, and one on another, so that pipeline
    stages that compute one after the other do not both wait for one core. (A ring of 64 MB on four
    ranks takes 87 ms this way and 148 with 0 1 0 1; GPipe's step 165 ms, and 183 with 0 0 1 1.)
    """
    if sys.platform != "linux":  # macOS offers no choice
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
    """Make threads that start inside `with` wait for a core instead of preempting another thread.

    gloo's thread is woken by the answers to what the main thread is just sending. If it takes that
    thread's core while the connection's lock is held, it asks for the lock over and over for
    its whole time slice, 3 ms, and nobody sends. (gloo/transport/tcp/pair.cc, handleEvents:
    try_to_lock, on events that stay until they are handled.)
    """
    changed = False
    with suppress(OSError):  # a sandbox may refuse it
        if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:  # Linux
            # of this thread, and of threads that it starts
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            changed = True
    try:
        yield
    finally:
        if changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
