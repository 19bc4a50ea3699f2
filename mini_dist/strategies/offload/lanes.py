"""Lanes: copies, reads, writes and the host's arithmetic go on while the device computes.

    lanes = Lanes()                                   # threads; CudaLanes() has streams
    arrival = lanes.begin("to_device", lambda: flat.copy_(pinned), flat.nbytes)
    ...                                               # compute something else
    arrival.wait()                                    # from here on the device may use it

A lane does one thing after the other, in the order in which they were begun; lanes go on beside
each other. `after` names arrivals that a thing needs.

    to_host, to_device   the two directions of the link, PCIe say
    host                 the host's processors: the optimizer's step
    read, write          files

emulated.py is the same in virtual time, for a laptop that has no such link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_dist.ranks.ledger.recording import recorded

LANES = ("to_host", "to_device", "host", "read", "write")


class Lanes:
    """Each lane is a thread. On a CPU, where torch's copies and arithmetic let go of Python's lock,
    they really go on beside the device's computing, if there is a core for them."""

    pins = False  # whether host memory is to be pinned

    def __init__(self):
        self.threads = {lane: ThreadPoolExecutor(1, f"lane {lane}") for lane in LANES}

    def begin(self, lane: str, work: Callable, nbytes: int, after: Iterable = ()) -> Arrival:
        """Do `work()` in this lane, when all that it comes `after` is over. nbytes: what moves, or
        for "host" what is passed over in its memory."""
        before = list(after)

        def when_ready():
            for arrival in before:
                arrival.on_host()
            with torch.no_grad():
                work()

        return Arrival(self.threads[lane].submit(when_ready))

    def empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Host memory for a tensor that comes and goes; none for one without storage."""
        if like.is_meta:
            return torch.empty_like(like, dtype=dtype)
        return torch.empty(like.shape, dtype=dtype, pin_memory=self.pins)


@dataclass
class Arrival:
    """Something that was begun in a lane."""

    future: Future

    def wait(self) -> None:
        """What the device does from now on comes after it. Raises what the work raised."""
        self.future.result()

    on_host = wait  # the same for what the host does

    def before(self, stream) -> None:
        """The same for what a CUDA stream is given from now on."""
        self.wait()


class CudaLanes(Lanes):
    """Both directions of the link are CUDA streams, the rest are threads. (Written with care and
    never run: the course's machines have no GPU.)

    A copy between pinned memory and the device that is asked for with `non_blocking=True` is
    carried out by the GPU's copy engines beside its kernels, in the order of its stream. Two things
    could go wrong there, and this is why they do not.

    Order: a copy comes after all that the stream which asks for it has been given until then, so
    it sees what was computed; and who waits for an arrival makes its own stream wait, not the host.
    Memory: the device's allocator gives freed memory to the next who asks on the same stream, and
    knows nothing of others (`record_stream` would tell it). So nobody here lets go of a tensor that
    is copied before its own stream has waited for the arrival. For pinned memory that is given back
    PyTorch's host allocator waits by itself, until the copies that it was asked for are over.
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
        # The host has to be done before the copy may be asked for: a thread waits for it.
        return LateArrival(self.threads[lane].submit(self.copy, stream, work, computed, before))

    @staticmethod
    def copy(stream, work, computed, before):
        """Ask for the copy; returns the event that is over when it is."""
        for arrival in before:
            arrival.before(stream)
        with torch.cuda.stream(stream), torch.no_grad():
            stream.wait_event(computed)
            work()
            return stream.record_event()


@dataclass
class CudaArrival:
    """A copy that was asked for. `event` is over when it is."""

    event: torch.cuda.Event

    def wait(self) -> None:
        self.before(torch.cuda.current_stream())

    def before(self, stream) -> None:
        """What the stream is given from now on comes after it; the host goes on at once."""
        stream.wait_event(self.event)

    def on_host(self) -> None:
        self.event.synchronize()


class LateArrival(Arrival):
    """A copy that a thread asks for as soon as the host is done."""

    def wait(self):
        self.before(torch.cuda.current_stream())

    def before(self, stream):
        stream.wait_event(self.future.result())

    def on_host(self):
        self.future.result().synchronize()


# What moves is in the ledger, with its bytes.


@recorded
def to_host_(host: Tensor, part: Tensor, group) -> None:
    host.copy_(part, non_blocking=True)


@recorded
def to_device_(mine: Tensor, shard: Tensor, group) -> None:
    mine.copy_(shard, non_blocking=True)
