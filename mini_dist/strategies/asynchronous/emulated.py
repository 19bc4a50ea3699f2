"""A parameter server in virtual time: workers take given times, in the same order everywhere.

    arrivals = Arrivals(group, workers, lambda worker: 0.010)
    applied = serve(table, update, num_workers, bound, arrivals)
        arrivals.pushed                     # the time of each of these updates, in seconds

On a shared laptop the scheduler decides when real workers arrive. Here a worker's step, from the
answer to its pull until its push, takes the time that `seconds` returns; messages and updates take
no time. The server serves the worker with the earliest virtual time, even if another one's request
arrived before. This needs no sleep: workers compute real gradients as fast as they can, and
the order is the one that the virtual clock gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from .ideas import LEAVE, PULL, PUSH


class Arrivals:
    """The group of a server, for `serve`. seconds: worker -> duration of its next step. Several
    servers each need their own arrivals, with the same seconds."""

    def __init__(self, group, workers: Iterable[int], seconds: Callable[[int], float]):
        self.whole, self.seconds = group, seconds
        self.recorder, self.name = getattr(group, "recorder", None), group.name
        self.speaks = dict.fromkeys(workers, 0.0)  # when each worker's next request arrives
        self.now = 0.0
        self.pushed: list[float] = []

    def rank(self) -> int:
        return self.whole.rank()

    def size(self) -> int:
        return self.whole.size()

    def recv_anysource(self, tensors, tag):
        """Receive the request of the worker whose time is the earliest, the lowest rank of
        equals."""
        worker = min(self.speaks, key=lambda each: (self.speaks[each], each))
        if self.speaks[worker] == math.inf:
            raise RuntimeError("every worker waits for an answer to its pull, and none is given")
        self.whole.recv(tensors, worker, tag).wait()
        self.now = self.speaks[worker]
        kind = tensors[0][0].item()
        if kind == PULL:
            self.speaks[worker] = math.inf  # until it gets its answer
        elif kind == PUSH:
            self.pushed.append(self.now)
        elif kind == LEAVE:
            del self.speaks[worker]
        return Spoken(worker)

    def recv(self, tensors, source, tag):
        return self.whole.recv(tensors, source, tag)

    def send(self, tensors, to, tag):
        """Send an answer: the worker's next step begins now."""
        self.speaks[to] = self.now + self.seconds(to)
        return self.whole.send(tensors, to, tag)


class Spoken:
    """The handle of a message that has already arrived."""

    def __init__(self, worker: int):
        self.worker = worker

    def wait(self) -> None: ...

    def _source_rank(self) -> int:
        return self.worker
