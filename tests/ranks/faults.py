"""Programs that each fail in a different way; tests run them here and in notebook cells.

The error has to name each program's own reason. Two ranks are enough for all of them.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def raises(group):
    if group.rank() == 1:
        raise ValueError("on purpose")
    dist.all_reduce(torch.ones(2), group=group)


def raises_while_handling(group):
    try:
        {}["absent"]
    except KeyError:
        raise ValueError("on purpose") from None if group.rank() else ZeroDivisionError("first")


def raises_what_cannot_be_printed(group):
    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError

    one, other = Unprintable(), Unprintable()
    one.__cause__, other.__cause__ = other, one
    raise one


def never_returns_from_itself(group):
    never_returns_from_itself(group)


def is_killed(group):
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(2), group=group)


def exits(group):
    if group.rank() == 1:
        sys.exit(3)
    dist.all_reduce(torch.ones(2), group=group)


def exits_at_once(group):
    if group.rank() == 1:
        os._exit(0)
    dist.all_reduce(torch.ones(2), group=group)


def exits_and_leaves_a_child(group):
    subprocess.Popen(["sleep", "1000"])
    os._exit(5)


def leaves_others_in_an_asynchronous_wait(group):
    if group.rank() == 0:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        work.wait()


def returns_early(group):
    if group.rank() == 1:
        return
    dist.all_reduce(torch.ones(2), group=group)


def skips_one(group):
    if group.rank() == 0:
        dist.all_reduce(torch.ones(2), group=group)
    dist.broadcast(torch.ones(2), 0, group=group)


def skips_the_last(group):
    dist.all_reduce(torch.ones(2), group=group)
    if group.rank() == 0:
        dist.all_reduce(torch.ones(2), group=group)
    dist.recv(torch.ones(3), 1 - group.rank(), group=group)


def disagrees_on_the_operation(group):
    if group.rank() == 0:
        dist.all_reduce(torch.ones(2), group=group)
    else:
        dist.barrier(group=group)


def disagrees_on_the_shape(group):
    dist.all_reduce(torch.ones(2 + group.rank()), group=group)


def disagrees_on_the_dtype(group):
    dtype = torch.float64 if group.rank() else torch.float32
    dist.all_reduce(torch.ones(2, dtype=dtype), group=group)


def disagrees_on_the_reduction(group):
    reduction = dist.ReduceOp.MAX if group.rank() else dist.ReduceOp.SUM
    dist.all_reduce(torch.ones(2), op=reduction, group=group)


def disagrees_on_the_root(group):
    dist.reduce(torch.ones(2), group.rank(), group=group)


def receives_less_than_is_sent(group):
    if group.rank() == 0:
        dist.send(torch.ones(4), 1, group=group)
    else:
        dist.recv(torch.ones(2), 0, group=group)


def everyone_sends_first(group):
    peer = 1 - group.rank()
    dist.send(torch.ones(2), peer, group=group)
    dist.recv(torch.ones(2), peer, group=group)


def serves_one_request_too_many(group):
    """Rank 0 waits for a message from any rank, but no rank has one left to send."""
    if group.rank() == 0:
        for _ in range(2):
            dist.recv(torch.ones(2), group=group)
    else:
        dist.send(torch.ones(2), 0, group=group)
        dist.recv(torch.ones(2), 0, group=group)


def overflows_native_memory(group):
    import ctypes

    ctypes.string_at(0)


def returns_what_cannot_travel(group):
    return (i for i in range(3))


def launches_again(group):
    from mini_dist import launch

    return launch(dist.get_rank, world_size=2)


def hangs(group):
    while True:
        signal.pause()


def hangs_and_tells(path, group):
    """Write the process id to a file, then wait forever: rank 0 in barrier, rank 1 in hangs."""
    Path(f"{path}-{group.rank()}").write_text(str(os.getpid()))
    if group.rank() == 0:
        dist.barrier(group=group)
    hangs(group)
