"""Parameters that all ranks of a machine share without a lock (Recht et al. 2011, Hogwild!).

    x = shared(torch.zeros(1000), group)          # one piece of memory, seen by every rank
    add_rows_(x, rows, -lr * gradients)           # read, add, write: others may write in between
    interleave(workers, Random(0))                # a race in one process, repeatable

An update is lost if two ranks read the same number before either has written it. That is rare if
an update touches few of many rows, and common if every update touches all rows.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from random import Random

import torch
from torch import Tensor

from mini_dist.collectives import barrier, broadcast


def shared(like: Tensor, group) -> Tensor:
    """Return a tensor with the values of rank 0's `like`, in memory that all ranks of the group
    share.

    All ranks must be on one machine, and `like` on its CPU. The memory is a file whose name is
    removed before this returns, so nothing is left behind. Raises ValueError for a tensor on
    another device.
    """
    if not like.is_cpu:
        raise ValueError(f"the tensor is on {like.device}: ranks can share the CPU's memory only")
    name = ""
    if group.rank() == 0:
        in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        file, name = tempfile.mkstemp(prefix="hogwild-", dir=in_memory)
        with os.fdopen(file, "wb") as open_file:
            open_file.truncate(max(1, like.nbytes))
    path = torch.zeros(1024, dtype=torch.uint8)
    path[: len(os.fsencode(name))] = torch.tensor(list(os.fsencode(name)), dtype=torch.uint8)
    name = os.fsdecode(bytes(broadcast(path, 0, group).tolist()).rstrip(b"\0"))
    mapped = torch.from_file(name, shared=True, size=like.numel(), dtype=like.dtype).view_as(like)
    if group.rank() == 0:
        mapped.copy_(like)
    barrier(group)
    if group.rank() == 0:
        os.unlink(name)  # processes that have mapped the file keep it
    return mapped


def add_rows_(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add values [l, D] to these rows of a shared table [L, D], without a lock."""
    table[rows] = table[rows] + values


def interleave(workers: Iterable[Iterator], lots: Random) -> None:
    """Let workers race until all are done. Each is a generator that yields where another worker may
    interrupt it; which worker runs on to its next `yield` is drawn at random.

    A real race depends on the cores and their load. This one can be repeated on any machine.
    """
    racing = list(workers)
    while racing:
        worker = lots.choice(racing)
        try:
            next(worker)
        except StopIteration:
            racing.remove(worker)
