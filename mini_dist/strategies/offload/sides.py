"""Which memory belongs to the device and which to the host, on a laptop where both are one.

lanes = Sides(speeds, group)                  # inside launch(..., memory=True)
...                                           # train with offload=OverlappedOffload(lanes)
lanes.peaks()                                 # {"device": bytes, "host": bytes}
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager

from mini_dist.plan.calculators.links import Link as Speed
from mini_dist.ranks.ledger.memory import memory_of

from .emulated import EmulatedLanes

OF_THE_HOST = ("host", "read", "write")


class Sides(EmulatedLanes):
    """Emulated lanes that track the host's memory: what was requested as host memory, and what is
    allocated while the host computes, reads or writes. Raises ValueError without memory records."""

    def __init__(self, speeds: Mapping[str, Speed], group):
        super().__init__(speeds)
        self.memory = memory_of(group)
        self.of_host: set[int] = set()  # serials of storages

    @contextmanager
    def noted(self):
        begin = len(self.memory.events)
        yield
        self.of_host |= {serial for _, _, serial, more in self.memory.events[begin:] if more > 0}

    def begin(self, lane, work, nbytes, after=()):
        def noting():
            with self.noted():
                work()

        return super().begin(lane, noting if lane in OF_THE_HOST else work, nbytes, after)

    def empty(self, like, dtype):
        with self.noted():
            return super().empty(like, dtype)

    def peaks(self) -> dict[str, int]:
        """Return the peak bytes of device and host so far."""
        now, most = {"device": 0, "host": 0}, {"device": 0, "host": 0}
        for _, _, serial, change in self.memory.events:
            side = "host" if serial in self.of_host else "device"
            now[side] += change
            most[side] = max(most[side], now[side])
        return most
