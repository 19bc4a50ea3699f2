"""Exercise of lesson 17: choose a layout for Llama 3 70B on 512 H100s, scored by regret.

Regret is how much longer a step takes than with the planner's best layout on the same network. A
right layout has at most 10 % regret on both networks of the task: an undisturbed one, and one whose
rings over many nodes were measured to be slow. The bar is 10 % because predicted step times are
about that far off (benchmarks/planner.py). The calculators judge; no ranks are needed.
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
from .watch import made_before

REGRET = 0.10


@dataclass(frozen=True)
class Task:
    """A job to be planned."""

    model: str
    machines: tuple[str, ...]  # the same devices on different networks
    num_devices: int
    tokens: int  # per step

    @property
    def config(self) -> ModelConfig:
        return calculators.model(self.model)

    @property
    def sequences(self) -> int:
        return self.tokens // self.config.seq_len

    def __str__(self) -> str:
        return f"{self.model} on {self.num_devices} {self.machines[0]}"


def trial(fn, task: Task, group):
    return fn()


@lru_cache
def best_of(task: Task, machine: str) -> Plan:
    return calculators.plan(task.model, machine, task.num_devices, task.tokens)


def memory_of(task: Task, layout: Layout) -> Line:
    """Compare what a device needs with what it has."""
    has = calculators.hardware(task.machines[0]).device.memory_bytes
    needed = device_memory(peak_memory(task.config, layout).total)
    told = readable(needed, "bytes"), f"<= {readable(has, 'bytes')}"
    return Line("memory of a device", *told, needed <= has)


class Choice(Measured):
    """A line is judged only if the lines before it are right: a layout that cannot cut the model
    has no memory and no time."""

    def measure(self):
        self.task, self.layout = self.case, self.results[0]
        if isinstance(self.layout, Layout):
            self.devices = line("devices", self.layout.world_size, self.task.num_devices)
            self.batch = line(
                "sequences per step", self.layout.global_batch_size, self.task.sequences
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
        self.times = {
            machine: step_time(task.config, layout, machine, simulate=True)
            for machine in task.machines
        }
        self.regrets = {}
        for machine, time in self.times.items():
            best = best_of(task, machine).best
            regret = self.regrets[machine] = time.seconds / best.time.seconds - 1
            told = f"{regret:.1%}"
            if regret < 0:
                told += ": faster than every layout the planner tried"
            if layout == best.layout:
                told += ": the planner's own best, now defend it"
            limit = f"<= {REGRET:.0%}"
            lines.append(Line(f"regret on {machine}", told, limit, regret <= REGRET))
        return lines

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
                    f"{others} does not divide {task.num_devices}: change another axis."
                    if left
                    else f"With the other axes as they are, dp would be {dp}."
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
                f"It does not fit. The largest part is {largest.name}: "
                f"{readable(largest.value, 'bytes')} = {largest.formula}. {remedy(largest.name)}"
            )
        return self.what_costs_most()

    def what_costs_most(self) -> str:
        machine = max(self.regrets, key=self.regrets.get)
        best, time = best_of(self.task, machine).best, self.times[machine]
        mine = {each.name: each.value for each in time.breakdown}
        theirs = {each.name: each.value for each in best.time.breakdown}
        worst = max(mine, key=lambda name: mine[name] - theirs.get(name, 0.0))
        more = readable(mine[worst] - theirs.get(worst, 0.0), "s")
        return (
            f"It fits, but on {machine} a step takes {readable(time.seconds, 's')} and the best "
            f"layout takes {readable(best.time.seconds, 's')}. Your largest extra cost is {worst}: "
            f"{more} more than in the best layout. {advice(worst, self.task, self.layout)}"
            + " The two intervals overlap: only a measurement could be sure."
            * (time.low < best.time.high)
        )


def remedy(name: str) -> str:
    """Say what makes this line of the waterfall smaller."""
    if name == "activations":
        return "Smaller micro-batches, tp with sequence parallel, or recompute reduce them."
    if name.startswith("gradients"):
        return "ZeRO-2 shards them over dp; tp and pp shard them over their ranks."
    if name.startswith("optimizer"):
        return "ZeRO-1 shards them over dp and sends no more bytes than an all-reduce."
    return "ZeRO-3 shards them over dp; tp and pp shard them over their ranks."


def advice(name: str, task: Task, layout: Layout) -> str:
    """Say what causes a cost and what reduces it."""
    if name == "pipeline bubble":
        return (
            f"A pipeline of {layout.pp} with {layout.num_micro_batches} micro-batches idles for "
            "(pp - 1) / micro-batches of its working time. Chunks divide that share."
        )
    if name == "tp collectives":
        size = calculators.hardware(task.machines[0]).devices_per_node
        if layout.tp > size:
            return f"A node has {size} devices: tp={layout.tp} sends activations over the network."
        return (
            "Their bytes grow with (tp - 1)/tp and with the tokens per replica: try a smaller tp."
        )
    if name == "recomputed":
        return "Recompute repeats a forward: is there memory to save the activations instead?"
    if name == "zero traffic":
        return (
            "Gathering the parameters takes longer than the computation that could hide it. Its "
            f"ring has {layout.dp} ranks; a pipeline with ZeRO-1 sends far less over the network."
        )
    return "Look at both networks: print(step_time(config, layout, 'h100-hf', simulate=True))."


class OwnLayout(Exercise):
    """Accepts a Layout from an earlier cell unless it is one of the planner's objects."""

    def made_before(self, fn):
        plans = [each for each in getattr(fn, "__globals__", {}).values() if isinstance(each, Plan)]
        planned = {id(candidate.layout) for each in plans for candidate in each.candidates}
        name = made_before(fn, (Candidate, Plan)) or made_before(
            fn, (Layout,), counts=lambda layout: id(layout) in planned
        )
        return self.told_made_before(name) if name else None


EXERCISES = [
    OwnLayout(
        "layout_for_70b",
        calculators.plan,
        trial,
        [(1, Task("llama3-70b", ("h100", "h100-hf"), 512, 4 * 2**20))],
        Choice,
        refuses={best_of},
        hints=[
            "Start with memory: 18 bytes per parameter, divided by tp * pp; ZeRO-1 divides 12 of "
            "them by dp as well. Then the batch: 4 Mi tokens are 512 sequences, one per device.",
            "tp stays inside a node of 8 and costs bytes for every token. A pipeline wants many "
            "micro-batches per replica, so few replicas: dp=16 leaves 32 of them. Chunks "
            "(schedule='interleaved', num_chunks=...) divide its bubble. ZeRO-3 gathers over dp "
            "ranks, and a ring of hundreds of ranks is slow on h100-hf.",
            "Compare step_time(config, layout, machine, simulate=True) on both networks for a few "
            "layouts: dp=512 with ZeRO-3 and full recompute; pp=4, tp=8; pp=8, tp=4. Give each "
            "pipeline 1, 2, 5 and 10 chunks and see which of them still fit.",
        ],
        skeleton="""def layout_for_70b():
    return Layout(
        pp=..., dp=..., tp=...,               # 512 devices
        sequence_parallel=..., zero=..., recompute=...,
        micro_batch_size=..., num_micro_batches=...,  # times dp: 512 sequences
        schedule=..., num_chunks=...,         # of the pipeline
    )""",
        answer=(answers.layout_for_70b,),
    )
]
