"""Gradients on their way from the device to the host, where the gradients of a step are summed.

A part leaves through one of two buffers on the host. The device holds at most two parts: one is
computed while the other is copied. So neither side grows with the model. With `in_files` the sum is
in a file between two micro-batches, and until it is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from .files import OffloadError
from .lanes import Arrival, Lanes, to_host_
from .shelf import Shelf, give_room_back_, make_room_

BUFFERS = 2


class Gradients:
    """The gradients of one rank's shards. under_way: shard -> arrivals that its next use waits
    for."""

    def __init__(self, lanes: Lanes, shelf: Shelf, under_way: dict, in_files: bool, group):
        self.lanes, self.shelf, self.under_way = lanes, shelf, under_way
        self.in_files, self.group = in_files, group
        self.sums: dict[Tensor, Tensor] = {}  # on the host
        self.count: dict[Tensor, int] = {}  # number of micro-batches in each sum
        self.leaving: deque[tuple[Arrival, Tensor]] = deque()  # parts that the device still holds
        self.buffers: dict[torch.dtype, deque] = {}  # (host memory, end of its last use)
        self.lost: OffloadError | None = None  # a part of this step's sums is gone

    # -- in flight ----------------------------------------------------------------------------

    def add(self, shard: Tensor, part: Tensor) -> None:
        """Begin to copy a part of the mean gradient to the host and to add it to the sum."""
        pool = self.buffers.setdefault(part.dtype, deque([(None, [])] * BUFFERS))
        buffer, free = pool.popleft()
        if buffer is None or buffer.numel() < part.numel():
            buffer = self.lanes.empty(part, part.dtype)
        host = buffer[: part.numel()]
        added = self.add_up(shard, host, after=self.leave(host, part, free))
        pool.append((buffer, [added]))
        self.under_way[shard] = [*self.under_way[shard], added]
        if self.in_files:
            self.put_away(shard)

    def leave(self, host: Tensor, part: Tensor, free: list) -> Arrival:
        """Begin the copy, and wait for older ones: with the next part, the device must hold at most
        two."""
        group = self.group
        arrival = self.lanes.begin(
            "to_host", lambda: to_host_(host, part, group), part.nbytes, free
        )
        self.leaving.append((arrival, part))
        self.let_go(BUFFERS - 1)
        return arrival

    def let_go(self, still_leaving: int = 0) -> None:
        """Wait until the device holds at most this many gradients."""
        while len(self.leaving) > still_leaving:
            self.leaving.popleft()[0].wait()

    def add_up(self, shard: Tensor, host: Tensor, after: Arrival) -> Arrival:
        first = shard not in self.sums
        if first:
            self.sums[shard], self.count[shard] = self.lanes.empty(shard, shard.dtype), 0
        self.count[shard] += 1
        total, before = self.sums[shard], [after]
        if self.in_files and not first:
            back = partial(self.back, total, self.name(shard))
            before.append(self.lanes.begin("read", back, total.nbytes, self.under_way[shard]))
        add = total.copy_ if first else total.add_
        passed = (2 if first else 3) * host.nbytes  # reads one or two, writes one
        return self.lanes.begin("host", lambda: add(host), passed, before)

    def back(self, total: Tensor, name: str) -> None:
        """Load a sum in backward, to add to it. Without its file the step cannot be completed."""
        try:
            self.shelf.get(total, name)
        except OffloadError as error:
            make_room_(total)  # so that backward can continue
            self.lost = error.but(
                "The sum of this step's gradients was in it. Parameters and states are as they "
                "were: zero_grad(), and repeat the step"
            )

    def put_away(self, shard: Tensor) -> None:
        """Begin to write the sum, after the last step has read the file that is overwritten."""
        total, after = self.sums[shard], self.under_way[shard]
        put = partial(self.shelf.put, total, self.name(shard))
        written = self.lanes.begin("write", put, total.nbytes, after)
        self.under_way[shard] = [*after, written]

    def name(self, shard: Tensor) -> str:
        return self.shelf.name(shard, "gradient")

    # -- on the host --------------------------------------------------------------------------

    def one_by_one(self, shards: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield each shard with its gradient, for clipping. A gradient in a file is loaded for that
        time, and written again if it was changed. Nothing may be in flight."""
        if self.lost:
            raise self.lost
        some_are_changed = False
        for shard in shards:
            shard.grad = total = self.sums.get(shard)
            was_away = self.name(shard) in self.shelf.away
            if was_away:
                self.fetch(total, self.name(shard), some_are_changed)
            version = None if total is None else total._version
            yield shard
            is_changed = total is not None and total._version != version
            some_are_changed |= is_changed
            if was_away:
                self.take_back(total, self.name(shard), is_changed)

    def fetch(self, total: Tensor, name: str, some_are_changed: bool) -> None:
        try:
            look = partial(self.shelf.look, total, name)
            self.lanes.begin("read", look, total.nbytes).wait()
        except OffloadError as error:
            if not some_are_changed:
                raise
            raise error.but(
                "Some gradients are clipped and some are not. Parameters and states are as they "
                "were: zero_grad(), and repeat the step"
            ) from error

    def take_back(self, total: Tensor, name: str, is_changed: bool) -> None:
        if is_changed:
            put = partial(self.shelf.put, total, name)
            self.lanes.begin("write", put, total.nbytes).wait()
        elif name in self.shelf.away:  # (`show` has put it into memory)
            give_room_back_(total)

    def show(self, shards: Iterable[Tensor]) -> None:
        """Put each shard's gradient into memory, to be read and changed."""
        for shard in self.one_by_one(shards):
            self.shelf.away.discard(self.name(shard))

    def forget(self, shard: Tensor) -> None:
        self.sums.pop(shard, None)
        self.shelf.away.discard(self.name(shard))
        self.lost = shard.grad = None
