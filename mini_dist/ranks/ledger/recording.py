"""The rank's side of the ledger: every communication is recorded where it starts.

A message or a native collective is noted by the process group that carries it (group.py), a
collective of our own by the decorator `recorded`: it is the parent of its sends.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from ..cables import is_on_a_host
from ..hosts import uplink_counters
from .memory import MemoryRecorder
from .phases import Phases
from .wire import wire_bytes


class Recorder:
    """One rank's record: every communication, and its phase of training."""

    def __init__(self, flight=None):
        self.flight = flight
        self.groups: dict[str, list[int]] = {}  # group name -> world ranks
        self.axes: dict[str, str] = {}  # group name -> axis of a mesh
        self.comms: list[list] = []  # rows of FIELDS
        self.phases = Phases()
        self.started = self.stopped = self._wire = self.memory = self.counter = None
        self.hosts: list[int] | None = None  # of every rank in the world, if there are several
        self._uplink = None
        self.thread, self.main = Thread(), threading.get_ident()
        self.membership = None  # of an elastic run (ranks/membership.py)
        self.shortcut: Callable | None = None  # of a large simulated world (simulation/shortcut.py)
        self._watching = ExitStack()
        self.is_simulated = False  # the rank's tensors have no storage (ranks/without_storage.py)
        self.unfinished: list[Callable] = []  # work that outlives the rank's function, to wait for

    def start(self, memory: bool, count: bool = False, hosts: list[int] | None = None) -> None:
        """Begin an empty record: torch's own messages during set-up are not the learner's."""
        self.comms, self.phases, self.memory = [], Phases(), None
        self.main = threading.get_ident()
        self.phases.watch()
        enter = self._watching.enter_context
        if memory:
            self.memory = MemoryRecorder(self.phases, self.is_simulated)
            enter(self.memory.hooks())
        if memory and not self.is_simulated:
            enter(self.memory)
        if count:
            from .counting import Counter, KernelMode

            self.counter = Counter(self.phases, times_host=not self.is_simulated)
            enter(self.counter.hooks())
            if not self.is_simulated:
                enter(KernelMode(self.counter))
        self._wire, self.hosts = wire_bytes(), hosts
        # An emulated host's eth0, if there is one, is the real machine's.
        self._uplink = uplink_counters() if hosts and is_on_a_host() else None
        self.started = time.time()

    def stop(self) -> None:
        """End the record after all communication has ended. Raises what that raises."""
        while self.unfinished:
            self.unfinished.pop()()
        self.stopped = time.time()
        self._watching.close()
        now = wire_bytes()
        self._wire = now and (now[0] - self._wire[0], now[1] - self._wire[1])
        if self._uplink:
            self._uplink = self._uplink, uplink_counters()
        self.phases.unwatch()

    def export(self) -> dict:
        """Return everything recorded, as plain data."""
        return {
            "comms": self.comms,
            "groups": self.groups,
            "axes": self.axes,
            "phases": self.phases.changes,
            "started": self.started,
            "stopped": self.stopped,
            "wire_bytes": self._wire,
            "hosts": self.hosts,
            "uplink": self._uplink,
            "memory": self.memory and self.memory.export(),
            "program": self.counter and self.counter.export(self.comms),
        }

    def begin(
        self, op: str, group: str, tensors, detail=None, tag: int = 0, filled=(), carrier=None
    ) -> list:
        """Record a communication as it starts. `detail`: peer, root or splits, as `op` needs.

        carrier: the library that moves its bytes; None for a collective made of messages.
        """
        nbytes = sum(tensor.nbytes for tensor in tensors)
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        now, parent = self.phases.now, self.thread.parent
        own = threading.get_ident() == self.main
        row = [op, group, dtype, nbytes, detail, time.time(), None, now, parent, own, carrier]
        self.comms.append(row)
        if self.counter and detail != "collective":
            self.counter.begin(row, tag, filled)
        return row

    def waits(self, row: list) -> None:
        """Note that the rank continues only when this communication is over."""
        if self.counter:
            self.counter.wait(row)


class Thread(threading.local):
    """State of each thread of a rank: autograd's hooks may communicate from other threads."""

    parent = None  # the row of the collective of ours that contains it


FIELDS = (
    *("op", "group", "dtype", "nbytes", "detail", "start", "end", "phase", "parent"),
    *("own_thread", "carrier"),
)


def end(row: list) -> None:
    if row[6] is None:
        row[6] = time.time()


def recorded(function, alike: bool = False):
    """Decorator: record `function(..., group, ...)` as one collective, the parent of its sends.

    With a group that does not record, such as torch's own, just call the function.
    alike: all ranks must call it with equal shapes of the first argument, unless they give sizes.
    The messages are cut from it, so only the shapes distinguish [2, 4] on one rank from [4, 2] on
    another.
    """
    name, names = function.__name__, list(inspect.signature(function).parameters)
    place = names.index("group")
    sizes = [names.index(each) for each in ("sizes", "input_splits") if each in names]

    @functools.wraps(function)
    def call(*args, **kwargs):
        group = args[place] if place < len(args) else kwargs["group"]
        recorder = getattr(group, "recorder", None)
        if recorder is None:
            if isinstance(group, torch.Tensor):
                usage = f"{name}({', '.join(names)})"
                raise TypeError(f"{usage}: group is a process group, but a tensor was given for it")
            return function(*args, **kwargs)
        if alike and recorder.shortcut:
            result = recorder.shortcut(function, args, kwargs, group)
            if result is not NotImplemented:
                return result
        first = args[0] if args else kwargs[names[0]]
        inputs = first if isinstance(first, (list, tuple)) else [first]
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        thread, row = recorder.thread, recorder.begin(name, group.name, tensors, "collective")
        if alike and recorder.flight and tensors and thread.parent is None:
            if not any(args[n] if n < len(args) else kwargs.get(names[n]) for n in sizes):
                words = call_in_words(name, group, row[2], tensors[0].shape)
                recorder.flight.begin(*words, waits=False)
        outer, thread.parent = thread.parent, len(recorder.comms) - 1
        marks = alike and recorder.is_simulated and recorder.counter
        if marks:
            recorder.counter.enter(row)
        try:
            return function(*args, **kwargs)
        finally:
            if marks:
                recorder.counter.leave(row)
            thread.parent = outer
            end(row)

    return call


def call_in_words(name: str, group, dtype: str, shape: torch.Size) -> tuple[str, str, str]:
    """Return channel, signature and text for the flight recorder. (Other names and lengths show in
    the messages, so the signature is empty.)"""
    ranks = "-".join(map(str, ranks_in_whole(group))) if hasattr(group, "whole") else "all"
    return f"call {group.name} {ranks}", "", f"{name}({dtype}{list(shape)})"


def ranks_in_whole(group) -> list[int]:
    """Return the ranks of Members, perhaps nested, in the outermost group."""
    if not hasattr(group.whole, "whole"):
        return group.ranks
    outer = ranks_in_whole(group.whole)
    return [outer[rank] for rank in group.ranks]
