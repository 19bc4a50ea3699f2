"""A parameter server in virtual time: workers that take stated times, in the same order everywhere.

    arrivals = Arrivals(group, workers, lambda worker: 0.010)
    applied = serve(table, update, num_workers, bound, arrivals)
    arrivals.pushed                     # seconds, when each of these updates was made

Real workers on a shared laptop arrive as its scheduler likes. Here a worker's step, from the answer
to its pull until its push, takes what `seconds` says; messages and updates take nothing. The server
listens to the worker whose time is the earliest, though another may have spoken before. So it needs
no sleep: the workers compute real gradients as fast as they can, and the order is that of the clock
which they would have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from .ideas import LEAVE, PULL, PUSH


class Arrivals:
    """The group of a server, as `serve` sees it. seconds: of a worker's next step; where there are
    several servers, each has arrivals of its own, with the same seconds."""

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
        """The request of the worker whose time has come; of several, that of the lowest rank."""
        worker = min(self.speaks, key=lambda each: (self.speaks[each], each))
        if self.speaks[worker] == math.inf:
            raise RuntimeError("every worker waits for an answer to its pull, and none is given")
        self.whole.recv(tensors, worker, tag).wait()
        self.now = self.speaks[worker]
        kind = tensors[0][0].item()
        if kind == PULL:
            self.speaks[worker] = math.inf  # until it has its answer
        elif kind == PUSH:
            self.pushed.append(self.now)
        elif kind == LEAVE:
            del self.speaks[worker]
        return Spoken(worker)

    def recv(self, tensors, source, tag):
        return self.whole.recv(tensors, source, tag)

    def send(self, tensors, to, tag):
        """An answer: the worker's next step begins now."""
        self.speaks[to] = self.now + self.seconds(to)
        return self.whole.send(tensors, to, tag)


class Spoken:
    """The handle of a message that is there already."""

    def __init__(self, worker: int):
        self.worker = worker

    def wait(self) -> None: ...

    def _source_rank(self) -> int:
        return self.worker
