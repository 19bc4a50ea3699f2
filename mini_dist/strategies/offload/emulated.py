"""Lanes in virtual time, for a machine that has no link to a device.

    lanes = EmulatedLanes({"to_host": Link(1e-5, 16e9), "to_device": Link(1e-5, 16e9)})
    lanes.computes(gpt.blocks, 1e-3, 2e-3)      # seconds of each block's forward and backward
    ...                                         # train with offload=OverlappedOffload(lanes)
    lanes.now, lanes.log                        # the device's clock, and what ran when

Work in a lane is executed at once, in program order, and takes bytes / bandwidth seconds of virtual
time. So its numbers are real, and its seconds are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mini_dist.collectives.emulate import EmulatedLink
from mini_dist.plan.calculators.links import Link as Speed
from mini_dist.plan.fields import checks_kinds
from mini_dist.ranks.devices import HOST

from .lanes import LANES


@dataclass(frozen=True)
class Took:
    """One piece of work: its lane, start and end, in virtual seconds."""

    lane: str
    start: float
    end: float
    nbytes: int
    name: str = ""


@checks_kinds
class EmulatedLanes:
    """Lanes with given speeds, and a device whose computing time is given.

    speeds: lane -> Link(latency, bytes/s); a lane without a speed takes no time. `now` is the
    device's clock, `log` what ran when. in_order: the device waits for everything that it has
    started, as a program without lanes does. `computes(units, forward, backward)` sets the seconds
    of a model's units.
    """

    pins = False

    def __init__(self, speeds: Mapping[str, Speed], in_order: bool = False):
        unknown = set(speeds) - set(LANES)
        if unknown:
            raise ValueError(f"{min(unknown)!r} is no lane: there are {', '.join(LANES)}")
        self.links = {lane: EmulatedLink() for lane in LANES}
        for lane, speed in speeds.items():
            self.links[lane] = EmulatedLink(speed.latency, speed.bandwidth)
        self.in_order, self.now = in_order, 0.0
        self.log: list[Took] = []

    def begin(self, lane, work, nbytes, after=()):
        after = list(after)
        ready = max([self.now, *(arrival.moment for arrival in after)])
        link = self.links[lane]
        start = max(ready, link.free)
        try:  # as in a thread, wait() raises what the work raised
            for arrival in after:
                arrival.on_host()
            with torch.no_grad():
                work()
            error = None
        except Exception as raised:
            error = raised
        arrival = VirtualArrival(self, link.send(nbytes, ready), error)
        self.log.append(Took(lane, start, arrival.moment, nbytes))
        if self.in_order:
            self.now = max(self.now, arrival.moment)
        return arrival

    def empty(self, like, dtype):
        return torch.empty(like.shape, dtype=dtype, device=HOST)

    def compute(self, seconds: float, name: str = "") -> None:
        """The device computes."""
        self.log.append(Took("device", self.now, self.now + seconds, 0, name))
        self.now += seconds

    def computes(self, units: Iterable[nn.Module], forward: float, backward: float) -> None:
        """Set the seconds that each unit takes. Call it before the model is wrapped: then this time
        ends before the wrapper's own hooks free and send."""
        for number, unit in enumerate(units):
            unit.register_forward_hook(lambda *_, n=number: self.compute(forward, f"F{n}"))
            parameters = [p for p in unit.parameters() if p.requires_grad]
            missing: list[Tensor] = []

            def is_ready(parameter, missing=missing, parameters=parameters, number=number):
                if not missing:
                    missing.extend(parameters)
                missing.pop()
                if not missing:
                    self.compute(backward, f"B{number}")

            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(is_ready)

    def exposed(self) -> float:
        """Return the seconds so far in which the device did not compute."""
        return self.now - sum(each.end - each.start for each in self.log if each.lane == "device")


@dataclass
class VirtualArrival:
    """An arrival in virtual time."""

    lanes: EmulatedLanes = field(repr=False)
    moment: float
    error: Exception | None = None

    def wait(self) -> None:
        self.lanes.now = max(self.lanes.now, self.moment)
        self.on_host()

    def on_host(self) -> None:
        if self.error:
            raise self.error
