"""Lanes: copies, reads, writes and host arithmetic that overlap with the device's computation.

    lanes = Lanes()                                   # threads; CudaLanes() has streams
    arrival = lanes.begin("to_device", lambda: flat.copy_(pinned), flat.nbytes)
    ...                                               # compute something else
    arrival.wait()                                    # from here on the device may use it

A lane does one piece of work after the other, in the order in which they were begun; different
lanes overlap. `after` names the arrivals that a piece of work waits for.

    to_host, to_device   the two directions of the link, for example PCIe
    host                 the host's processors: the optimizer's step
    read, write          files

emulated.py is the same in virtual time, for a laptop without such a link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_dist.ranks.devices import HOST
from mini_dist.ranks.ledger.recording import recorded

LANES = ("to_host", "to_device", "host", "read", "write")


class Lanes:
    """Each lane is a thread. On a CPU, torch's copies and arithmetic release Python's lock, so
    lanes really overlap with the device's computation if there is a core for them."""

    pins = False  # whether host memory is to be pinned

    def __init__(self):
        self.threads = {lane: ThreadPoolExecutor(1, f"lane {lane}") for lane in LANES}

    def begin(self, lane: str, work: Callable, nbytes: int, after: Iterable = ()) -> Arrival:
        """Run `work()` in this lane, once everything in `after` has ended. nbytes: the bytes that
        move, or, for "host", that it reads and writes in memory."""
        before = list(after)

        def when_ready():
            for arrival in before:
                arrival.on_host()
            with torch.no_grad():
                work()

        return Arrival(self.threads[lane].submit(when_ready))

    def empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return host memory for a temporary tensor; none if the tensor has no storage."""
        if like.is_meta:
            return torch.empty_like(like, dtype=dtype)
        return torch.empty(like.shape, dtype=dtype, device=HOST, pin_memory=self.pins)


@dataclass
class Arrival:
    """The end of a piece of work in a lane."""

    future: Future

    def wait(self) -> None:
        """Make the device's later work wait for this. Raises what the work raised."""
        self.future.result()

    on_host = wait  # the same for the host's later work

    def before(self, stream) -> None:
        """Make a CUDA stream's later work wait for this."""
        self.wait()


class CudaLanes(Lanes):
    """Both directions of the link are CUDA streams, the rest are threads. (Its tests passed on
    an H100 with torch 2.11.)

    A copy between pinned memory and the device with `non_blocking=True` is executed by the GPU's
    copy engines, which overlap with its kernels, in the order of its stream. Two things could go
    wrong; here is why they do not.

    Order: a copy comes after all earlier work of the stream that requests it, so it sees what was
    computed. Waiting for an arrival blocks the waiting stream, not the host.
    Memory: the device's allocator reuses freed memory for the next request on the same stream, and
    does not know of other streams (`record_stream` would tell it). So nobody here releases a tensor
    in a copy before its own stream has waited for the arrival. PyTorch's allocator for pinned host
    memory waits by itself until the copies out of freed memory have ended.
    """

    pins = True

    def __init__(self):
        super().__init__()
        self.streams = {lane: torch.cuda.Stream() for lane in ("to_host", "to_device")}

    def begin(self, lane, work, nbytes, after=()):
        if lane not in self.streams:
            return super().begin(lane, work, nbytes, after)
        stream, before = self.streams[lane], list(after)
        computed = torch.cuda.current_stream().record_event()
        if all(isinstance(arrival, CudaArrival) for arrival in before):
            return CudaArrival(self.copy(stream, work, computed, before))
        # The copy may be requested only after the host's work has ended: a thread waits for it.
        return LateArrival(self.threads[lane].submit(self.copy, stream, work, computed, before))

    @staticmethod
    def copy(stream, work, computed, before):
        """Request the copy; return the event at its end."""
        for arrival in before:
            arrival.before(stream)
        with torch.cuda.stream(stream), torch.no_grad():
            stream.wait_event(computed)
            work()
            return stream.record_event()


@dataclass
class CudaArrival:
    """A requested copy; `event` marks its end."""

    event: torch.cuda.Event

    def wait(self) -> None:
        self.before(torch.cuda.current_stream())

    def before(self, stream) -> None:
        """Make the stream's later work wait for this; the host continues at once."""
        stream.wait_event(self.event)

    def on_host(self) -> None:
        self.event.synchronize()


class LateArrival(Arrival):
    """A copy that a thread requests as soon as the host's work has ended."""

    def wait(self):
        self.before(torch.cuda.current_stream())

    def before(self, stream):
        stream.wait_event(self.future.result())

    def on_host(self):
        self.future.result().synchronize()


# The ledger records what moves, with its bytes.


@recorded
def to_host_(host: Tensor, part: Tensor, group) -> None:
    host.copy_(part, non_blocking=True)


@recorded
def to_device_(mine: Tensor, shard: Tensor, group) -> None:
    mine.copy_(shard, non_blocking=True)
