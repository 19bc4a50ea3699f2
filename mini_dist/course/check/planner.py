"""Exercise of lesson 17: choose a layout for Llama 3 70B on 512 H100s, scored by regret.

Regret is how much longer a step takes than with the planner's best layout. No ranks are needed:
the calculators judge. Within 10 % is right, for no plan is known better than that: it is about the
error of predicted step times (benchmarks/planner.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mini_dist.plan import calculators
from mini_dist.plan.calculators import (
    Candidate,
    Plan,
    device_memory,
    peak_memory,
    readable,
    step_time,
)
from mini_dist.plan.config import Layout, ModelConfig

from . import answers
from .engine import Exercise, Line, Measured, line

REGRET = 0.10


@dataclass(frozen=True)
class Task:
    """A job to be planned."""

    model: str
    machine: str
    num_devices: int
    tokens: int  # of a step

    @property
    def config(self) -> ModelConfig:
        return calculators.model(self.model)

    @property
    def sequences(self) -> int:
        return self.tokens // self.config.seq_len

    def __str__(self) -> str:
        return f"{self.model} on {self.num_devices} {self.machine}"


def trial(fn, task: Task, group):
    return fn()


@lru_cache
def best_of(task: Task) -> Plan:
    return calculators.plan(task.model, task.machine, task.num_devices, task.tokens)


def memory_of(task: Task, layout: Layout) -> Line:
    """Does it fit?"""
    has = calculators.hardware(task.machine).device.memory_bytes
    needed = device_memory(peak_memory(task.config, layout).total)
    told = readable(needed, "bytes"), f"<= {readable(has, 'bytes')}"
    return Line("memory of a device", *told, needed <= has)


class Choice(Measured):
    """Each line only if those before are right: what is cut wrongly has no memory and no time."""

    def measure(self):
        self.task, self.layout = self.case, self.results[0]
        if isinstance(self.layout, Layout):
            self.devices = line("devices", self.layout.world_size, self.task.num_devices)
            self.batch = line(
                "sequences a step", self.layout.global_batch_size, self.task.sequences
            )
            self.cannot_cut = ""
            try:
                self.layout.check(self.task.config)
            except ValueError as error:
                self.cannot_cut = str(error)

    def lines(self) -> list[Line]:
        task, layout = self.task, self.layout
        if not isinstance(layout, Layout):
            return [line("returns", type(layout).__name__, "Layout")]
        lines = [self.devices, self.batch]
        if not all(each.ok for each in lines):
            return lines
        if self.cannot_cut:
            return [*lines, Line("the model can be cut so", "no", "yes", False)]
        lines.append(memory_of(task, layout))
        if not lines[-1].ok:
            return lines
        best = best_of(task).best
        self.time = step_time(task.config, layout, task.machine, simulate=True)
        regret = self.time.seconds / best.time.seconds - 1
        told = f"{regret:.1%}"
        if regret < 0:
            told += ": faster than all that the planner tried"
        if layout == best.layout:
            told += ": the planner's own best, now defend it"
        return [*lines, Line("regret", told, f"<= {REGRET:.0%}", regret <= REGRET)]

    def mistake(self) -> str:
        task, layout = self.task, self.layout
        if not isinstance(layout, Layout):
            return (
                f"A {type(layout).__name__} came back. Return a Layout(...), such as "
                "Layout(dp=64, tp=8, sequence_parallel=True, zero=1, num_micro_batches=8)."
            )
        if not self.devices.ok:
            others = layout.world_size // layout.dp
            dp, left = divmod(task.num_devices, others)
            return (
                f"pp * dp * cp * tp = {layout.pp} * {layout.dp} * {layout.cp} * {layout.tp} = "
                f"{layout.world_size}, and there are {task.num_devices} devices. "
                + (
                    f"{others} does not divide that, so no dp will do: change another axis."
                    if left
                    else f"With the other axes as they are dp would be {dp}."
                )
            )
        if not self.batch.ok:
            return (
                f"dp * micro_batch_size * num_micro_batches = {layout.dp} * "
                f"{layout.micro_batch_size} * {layout.num_micro_batches} = "
                f"{layout.global_batch_size} sequences of {task.config.seq_len} tokens. A step has "
                f"{task.sequences}."
            )
        if self.cannot_cut:
            return self.cannot_cut
        if not memory_of(task, layout).ok:
            largest = max(peak_memory(task.config, layout), key=lambda each: each.value)
            return (
                f"It does not fit. Most of it is {largest.name}: "
                f"{readable(largest.value, 'bytes')} = {largest.formula}. {remedy(largest.name)}"
            )
        return self.what_costs_most()

    def what_costs_most(self) -> str:
        best, time = best_of(self.task).best, self.time
        mine = {each.name: each.value for each in time.breakdown}
        theirs = {each.name: each.value for each in best.time.breakdown}
        worst = max(mine, key=lambda name: mine[name] - theirs.get(name, 0.0))
        more = readable(mine[worst] - theirs.get(worst, 0.0), "s")
        return (
            f"It fits, but a step takes {readable(time.seconds, 's')}, and "
            f"{readable(best.time.seconds, 's')} can be had. What costs you most is {worst}: "
            f"{more} more than in the best layout. {advice(worst, self.task, self.layout)}"
            + " The two intervals overlap: only a measurement could be sure."
            * (time.low < best.time.high)
        )


def remedy(name: str) -> str:
    """What makes that line of the waterfall smaller."""
    if name == "activations":
        return "Smaller micro-batches, tp with sequence parallel, or recompute make them fewer."
    if name.startswith("gradients"):
        return "ZeRO-2 cuts them over dp, tp and pp over their ranks."
    if name.startswith("optimizer"):
        return "ZeRO-1 cuts them over dp: it costs no more bytes than an all-reduce."
    return "ZeRO-3 cuts them over dp, tp and pp over their ranks."


def advice(name: str, task: Task, layout: Layout) -> str:
    """What the usual costs mean."""
    if name == "pipeline bubble":
        return (
            f"A pipeline of {layout.pp} with {layout.num_micro_batches} micro-batches stands still "
            "(pp - 1) / micro-batches of its time; chunks divide that, and no pipeline has none."
        )
    if name == "tp collectives":
        size = calculators.hardware(task.machine).devices_per_node
        if layout.tp > size:
            return f"A node has {size} devices: tp={layout.tp} sends activations over the network."
        return "Its bytes grow with (tp - 1)/tp and with every token of a replica: try less of it."
    if name == "recomputed":
        return "A whole forward more: is there memory left to keep activations instead?"
    if name == "zero traffic":
        return (
            "Gathering the parameters takes longer than what hides it: larger micro-batches, or "
            "fewer of them, or tp, so that there is less to gather."
        )
    return "Look at both breakdowns: print(step_time(config, layout, 'h100', simulate=True))."


EXERCISES = [
    Exercise(
        "layout_for_70b",
        calculators.plan,
        trial,
        [(1, Task("llama3-70b", "h100", 512, 4 * 2**20))],
        Choice,
        refuses={best_of},
        makes=(Layout, Candidate, Plan),
        hints=[
            "Start from what must fit: 16 to 18 bytes a parameter, over tp * pp * (dp with ZeRO). "
            "Then the batch: 4 Mi tokens are 512 sequences, one for each device.",
            "tp stays inside a node of 8, and costs bytes for every token. A pipeline wants many "
            "micro-batches a replica, so few replicas: with dp=16 there are 32. Chunks "
            "(schedule='interleaved', num_chunks=...) divide its bubble. ZeRO-3 needs enough work "
            "behind which to gather.",
            "Compare step_time(config, layout, 'h100', simulate=True) of a few: dp=512 with ZeRO-3 "
            "and full recompute; pp=4, tp=8; pp=8, tp=4, with more and more chunks.",
        ],
        skeleton="""def layout_for_70b():
    return Layout(
        pp=..., dp=..., tp=...,               # 512 devices
        sequence_parallel=..., zero=..., recompute=...,
        micro_batch_size=..., num_micro_batches=...,     # times dp: 512 sequences
        schedule=..., num_chunks=...,         # of a pipeline
    )""",
        answer=(answers.layout_for_70b,),
    )
]
