"""On a rank: what torch.profiler sees, the steps, and the regions that have been given a name.

torch.profiler and the ledger use the same clock, the host's time since 1970, so both fit on one
timeline. (Clocks of different hosts differ: `python -m mini_dist.training.preflight`
says by how much.) On a GPU, its kernels count as computing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from mini_dist.collectives import device_of

from .spans import Span

STEP = "a step"


class Profile:
    """What `profiled` gives: names for parts of the program, and at the end its `spans`."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.kinds = {STEP: "step", "data": "data"}  # (gloo and others also give names: not ours)

    def step(self) -> AbstractContextManager:
        """All of one training step."""
        return record_function(STEP)

    def region(self, name: str) -> AbstractContextManager:
        """A part of it. "data" is the one whose time counts as waiting for data."""
        self.kinds.setdefault(name, "region")
        return record_function(name)


@contextmanager
def profiled(group) -> Iterator[Profile]:
    """Record all that torch does in here; `group` says where tensors are.

    Raises RuntimeError if another profiler of torch is at work in this process.
    """
    found = Profile()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it tells stderr that it begins, and ends
    wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
    with profile(activities=wanted & supported_activities()) as seen:
        yield found
    on_a_gpu = device_of(group).type == "cuda"
    read = span_of(found.kinds, on_a_gpu)
    found.spans = [span for span in map(read, seen.profiler.kineto_results.events()) if span]


def span_of(kinds: dict[str, str], on_a_gpu: bool):
    """From an event of the profiler to a Span; None for what is neither named nor an operator."""

    def span(event) -> Span | None:
        start, end = 1e-9 * event.start_ns(), 1e-9 * (event.start_ns() + event.duration_ns())
        place = start, end, 0 if on_a_gpu else event.start_thread_id() - 1
        is_kernel = event.device_type().name == "CUDA"
        if event.is_user_annotation():  # a GPU repeats each around its kernels
            kind = None if is_kernel else kinds.get(event.name())
            return kind and Span(event.name(), kind, *place)
        if is_kernel if on_a_gpu else event.name().startswith("aten::"):
            return Span(event.name(), "compute", *place)
        return None

    return span
