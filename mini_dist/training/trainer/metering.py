"""The result of a step, read from the clock, the ledger and the memory around it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from torch import Tensor

from .recipe import Recipe


@dataclass(frozen=True)
class Metrics:
    """The result of one step. bytes_sent: by this rank, over each axis of the mesh; empty in a
    group that records nothing."""

    step: int
    loss: float
    norm: float | None
    skipped: bool
    seconds: float
    tokens_per_second: float  # of the whole job
    mfu: float | None  # None where the machine's peak is not known
    bytes_sent: dict[str, int]
    held_bytes: int | None  # by this rank after the step; None without launch(memory=True)


def number(value: Tensor) -> float:
    """Return the value of a tensor [], nan if it has no storage."""
    return math.nan if value.is_meta else value.item()


class Meter:
    """Reads the clock, the ledger and the memory around a step."""

    def __init__(self, recipe: Recipe, group):
        self.recipe, self.recorder = recipe, getattr(group, "recorder", None)
        self.size = group.size()
        self.noted = len(self.recorder.comms) if self.recorder else 0
        self.began = time.perf_counter()

    def read(self, step: int, done) -> Metrics:
        seconds = time.perf_counter() - self.began
        tokens = self.recipe.layout.global_batch_size * self.recipe.model.seq_len
        memory = self.recorder and self.recorder.memory
        held = memory.export().live() if memory else None
        return Metrics(
            step,
            number(done.loss),
            None if done.norm is None else number(done.norm),
            done.skipped,
            seconds,
            tokens / seconds,
            self.mfu(seconds),
            self.bytes_sent(),
            sum(held.values()) if held else None,
        )

    def mfu(self, seconds: float) -> float | None:
        if self.recipe.machine is None:
            return None
        from mini_dist.plan.calculators import hardware
        from mini_dist.plan.calculators.flops import model_flops

        peak = hardware(self.recipe.machine).device.peak_flops * self.size
        return model_flops(self.recipe.model, self.recipe.layout.global_batch_size) / seconds / peak

    def bytes_sent(self) -> dict[str, int]:
        """Count sent bytes: every message of our strategies is a send, one row in the rank's
        ledger."""
        sent: dict[str, int] = {}
        noted = self.recorder.comms[self.noted :] if self.recorder else ()
        for op, group, _, nbytes, *_ in noted:
            if op == "send":
                axis = self.recorder.axes.get(group, "world")
                sent[axis] = sent.get(axis, 0) + nbytes
        return sent
