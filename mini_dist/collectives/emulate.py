"""Devices and links that take a given time, so that four ranks on two cores act as four devices.

Real arithmetic on a shared laptop says little about schedules: the ranks compete for the cores.
Here a rank that computes for 10 ms sleeps for 10 ms. Virtual time makes this exact: every result
carries the time at which it was ready, an operation starts at max(device free, inputs ready), and
the rank sleeps until its end. A rank that wakes up late does not delay the others: its next
operation still starts when it should have started, so lateness does not add up. The wall clock then
shows the time that these devices would need, including a wrong order or a wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from mini_dist.plan.calculators.costs import all_reduce as cost_of_all_reduce
from mini_dist.plan.calculators.links import Link as LinkSpeed
from mini_dist.plan.fields import checks_kinds
from mini_dist.plan.schedule import Schedule, Span, Times

from . import all_reduce


class BusyInterval(NamedTuple):
    """One piece of a device's work: virtual start and end, and the wall clock's end, in seconds."""

    name: object
    start: float
    end: float
    woke: float


class Clock:
    """Seconds since a time that all ranks of a machine agree on: the last `start`."""

    def __init__(self) -> None:
        self.origin = time.monotonic()

    def start(self, group, in_seconds: float = 0.02) -> None:
        """Show 0 on every rank of the group at once, shortly after this call.

        Call it when everything is set up: a rank that is late does not get a later
        start. It needs a monotonic clock common to all processes, as on Linux and macOS.
        """
        size = group.size()
        ready = torch.zeros(1)
        if group.rank() == 0:
            for peer in range(1, size):
                group.recv([ready], peer, 0).wait()
            origin = torch.tensor([time.monotonic() + in_seconds], dtype=torch.float64)
            for send in [group.send([origin], peer, 1) for peer in range(1, size)]:
                send.wait()
        else:
            origin = torch.empty(1, dtype=torch.float64)
            receive = group.recv([origin], 0, 1)
            group.send([ready], 0, 0).wait()
            receive.wait()
        self.origin = origin.item()

    def now(self) -> float:
        return time.monotonic() - self.origin

    def sleep_until(self, moment: float) -> float:
        """Return at `moment`, or at once if it has passed; return the time of waking up."""
        while (left := moment - self.now()) > 0:
            time.sleep(left)
        return self.now()


class EmulatedDevice:
    """A device that does one piece of work at a time; `run` sleeps for the work's duration."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.free = 0.0  # virtual time from which it can start new work
        self.done: list[BusyInterval] = []

    def run(self, seconds: float, ready: float = 0.0, name: object = "") -> float:
        """Work this long, once the device is free and the inputs are `ready`; return the end."""
        start = max(self.free, ready)
        self.free = start + seconds
        self.done.append(BusyInterval(name, start, self.free, self.clock.sleep_until(self.free)))
        return self.free


@checks_kinds(infinite=("bytes_per_second",))
class EmulatedLink:
    """A link for one message at a time while devices compute: latency + bytes / bandwidth."""

    def __init__(self, latency: float = 0.0, bytes_per_second: float = float("inf")) -> None:
        self.latency, self.bytes_per_second = latency, bytes_per_second
        self.free = 0.0

    def send(self, nbytes: float, ready: float) -> float:
        """Return when a message that is ready to leave at `ready` arrives; no rank sleeps for it.

        The link is busy for bytes / bandwidth; latency delays the message but not the next one.
        """
        self.free = max(self.free, ready) + nbytes / self.bytes_per_second
        return self.free + self.latency


@checks_kinds
class EmulatedStage:
    """A stand-in for a pipeline stage: computes nothing, takes the time that `times` gives.

    The messages to its neighbors contain the time at which they arrive.
    """

    def __init__(
        self, stage: int, schedule: Schedule, times: Times, device: EmulatedDevice
    ) -> None:
        self.stage, self.schedule, self.device = stage, schedule, device
        self.durations = times.durations(schedule)
        self.actions = {action.key: action for action in schedule.all_actions}
        comm = times.per_stage("comm", schedule.num_stages)[stage]
        self.forward_link = EmulatedLink(comm if schedule.crosses(stage) else 0.0)
        self.backward_link = EmulatedLink(comm if schedule.crosses(stage - 1) else 0.0)
        self.steps = 0

    def _run(self, kind: str, micro: int, ready: float = 0.0) -> float:
        key = (self.stage, kind, micro)
        return self.device.run(self.durations[key], ready, self.actions[key])

    def forward(self, micro, inputs, *, split, version) -> torch.Tensor:
        end = self._run("F", micro, inputs[0].item() if self.stage > 0 else 0.0)
        return torch.tensor([self.forward_link.send(0, end)], dtype=torch.float64)

    def backward(self, micro, gradient) -> torch.Tensor:
        is_last = self.stage == self.schedule.num_stages - 1
        end = self._run("B", micro, 0.0 if is_last else gradient.item())
        return torch.tensor([self.backward_link.send(0, end)], dtype=torch.float64)

    def weight(self, micro) -> None:
        self._run("W", micro)

    def step(self, keep) -> None:
        self._run("S", self.steps)
        self.steps += 1


@checks_kinds
class EmulatedModel(nn.Module):
    """A stand-in for a model: layer i has `sizes[i]` parameters and takes the given seconds.

    Its gradients are filled with the time at which they were ready.
    """

    def __init__(self, sizes: list[int], forward: float, backward: float, device: EmulatedDevice):
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(n, dtype=torch.float64) for n in sizes)
        self.seconds, self.device = (forward, backward), device

    def forward(self) -> torch.Tensor:
        x = torch.zeros((), dtype=torch.float64)
        for number, weight in enumerate(self.layers):
            x = EmulatedLayer.apply(x, weight, number, self)
        return x


class EmulatedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, number, model):
        ctx.number, ctx.model, ctx.size = number, model, len(weight)
        model.device.run(model.seconds[0], name=f"F{number}")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        end = ctx.model.device.run(ctx.model.seconds[1], name=f"B{ctx.number}")
        return gradient, torch.full((ctx.size,), end, dtype=torch.float64), None, None


class EmulatedAllReduce:
    """A stand-in for the all-reduce of gradients: takes as long as a ring over links of this speed.

    It begins when the last rank's gradients are ready and the previous all-reduce is over, and
    fills the gradients with the time of its own end. In the device's thread it makes the device
    wait; in another thread the device continues. `seconds`, (bytes, ranks) -> duration, replaces
    the ring's duration, for other collectives, for several, or to add computing.
    """

    def __init__(
        self,
        device: EmulatedDevice,
        speed: LinkSpeed,
        seconds: Callable[[int, int], float] | None = None,
    ):
        self.device, self.network, self.speed = device, EmulatedDevice(device.clock), speed
        self.seconds = seconds or self.of_a_ring
        self.thread = threading.get_ident()

    def __call__(self, x: torch.Tensor, group) -> torch.Tensor:
        waits = threading.get_ident() == self.thread
        ready = max(x.max().item(), self.device.free if waits else 0.0)
        begin = all_reduce(torch.tensor(ready, dtype=torch.float64), group, op="max").item()
        seconds = self.seconds(x.nbytes, group.size())
        end = self.network.run(seconds, begin, f"R{len(self.network.done)}")
        if waits:
            self.device.free = end
        return torch.full_like(x, end)

    def of_a_ring(self, num_bytes: int, size: int) -> float:
        return cost_of_all_reduce(num_bytes, size, "ring", self.speed).seconds


def wall_spans(device: EmulatedDevice) -> list[Span]:
    """Return a device's work, each piece with its given length and its end on the wall clock."""
    return [Span(d.name, d.woke - (d.end - d.start), d.woke) for d in device.done]
