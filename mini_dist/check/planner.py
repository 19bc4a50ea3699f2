"""Exercise of lesson 17: choose a layout for Llama 3 70B on 512 H100s, scored by regret.

Regret is how much longer a step takes than with the planner's best layout. No ranks are needed:
the calculators judge. Within 10 % is right, for no plan is known better than that: it is about the
error of predicted step times (benchmarks/planner.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .. import calculators
from ..calculators import Plan, device_memory, peak_memory, readable, step_time
from ..config import Layout, ModelConfig
from .exercise import Exercise, Line, Trial, calls_of

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


@dataclass
class Answer:
    """What the learner's function returned, and whether the library's planner was asked."""

    returned: Any
    used_planner: bool


def trial(fn: Callable, task: Task, group) -> Answer:
    with calls_of({"plan"}, calculators) as called:
        returned = fn()
    return Answer(returned, bool(called))


@lru_cache
def best_of(task: Task) -> Plan:
    return calculators.plan(task.model, task.machine, task.num_devices, task.tokens)


def judge(trials: list[Trial]) -> tuple[list[Line], str]:
    (trial_,) = trials
    task, layout = trial_.case, trial_.run.results[0].returned
    if not isinstance(layout, Layout):
        return [Line("returns", type(layout).__name__, "Layout", False)], (
            f"A {type(layout).__name__} came back. Return a Layout(...), such as "
            "Layout(dp=64, tp=8, sequence_parallel=True, zero=1, num_micro_batches=8)."
        )
    lines = [
        Line("devices", layout.world_size, task.num_devices, layout.world_size == task.num_devices),
        Line(
            "sequences a step",
            layout.global_batch_size,
            task.sequences,
            layout.global_batch_size == task.sequences,
        ),
    ]
    if not lines[0].ok:
        others = layout.world_size // layout.dp
        dp, left = divmod(task.num_devices, others)
        return lines, (
            f"pp * dp * cp * tp = {layout.pp} * {layout.dp} * {layout.cp} * {layout.tp} = "
            f"{layout.world_size}, and there are {task.num_devices} devices. "
            + (
                f"{others} does not divide that, so no dp will do: change another axis."
                if left
                else f"With the other axes as they are dp would be {dp}."
            )
        )
    if not lines[1].ok:
        return lines, (
            f"dp * micro_batch_size * num_micro_batches = {layout.dp} * {layout.micro_batch_size} "
            f"* {layout.num_micro_batches} = {layout.global_batch_size} sequences of "
            f"{task.config.seq_len} tokens. A step has {task.sequences}."
        )
    try:
        layout.check(task.config)
    except ValueError as error:
        return [*lines, Line("the model can be cut so", "no", "yes", False)], str(error)
    return score(task, layout, lines)


def score(task: Task, layout: Layout, lines: list[Line]) -> tuple[list[Line], str]:
    """Does it fit, and how far is it from the best?"""
    config, found = task.config, best_of(task)
    has = found.machine.device.memory_bytes
    waterfall = peak_memory(config, layout)
    needed = device_memory(waterfall.total)
    lines.append(
        Line(
            "memory of a device",
            readable(needed, "bytes"),
            f"<= {readable(has, 'bytes')}",
            needed <= has,
        )
    )
    if needed > has:
        largest = max(waterfall, key=lambda line: line.value)
        return lines, (
            f"It does not fit. Most of it is {largest.name}: {readable(largest.value, 'bytes')} = "
            f"{largest.formula}. {remedy(largest.name)}"
        )
    time = step_time(config, layout, task.machine, simulate=True)
    regret = time.seconds / found.best.time.seconds - 1
    lines.append(Line("regret", f"{regret:.1%}", f"<= {REGRET:.0%}", regret <= REGRET))
    if regret < 0:
        lines[-1].measured += ": faster than all that the planner tried"
    if layout == found.best.layout:
        lines[-1].measured += ": the planner's own best, now defend it"
    if regret <= REGRET:
        return lines, ""
    mine = {line.name: line.value for line in time.breakdown}
    theirs = {line.name: line.value for line in found.best.time.breakdown}
    worst = max(mine, key=lambda name: mine[name] - theirs.get(name, 0.0))
    more = readable(mine[worst] - theirs.get(worst, 0.0), "s")
    return lines, (
        f"It fits, but a step takes {readable(time.seconds, 's')}, and "
        f"{readable(found.best.time.seconds, 's')} can be had. What costs you most is {worst}: "
        f"{more} more than in the best layout. {advice(worst, task, layout)}"
        + " The two intervals overlap: only a measurement could be sure."
        * (time.low < found.best.time.high)
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


class PlannerExercise(Exercise):
    def used(self, trials: list[Trial]) -> set[str]:
        return {"plan"} if any(t.run.results[0].used_planner for t in trials) else set()


EXERCISES = [
    PlannerExercise(
        "layout_for_70b",
        calculators.plan,
        trial,
        [(1, Task("llama3-70b", "h100", 512, 4 * 2**20))],
        judge,
        hints=[
            "Start from what must fit: 16 to 18 bytes a parameter, over tp * pp * (dp with ZeRO). "
            "Then the batch: 4 Mi tokens are 512 sequences, one for each device.",
            "tp stays inside a node of 8, and costs bytes for every token. A pipeline wants many "
            "micro-batches a replica, and with 512 sequences there are few. ZeRO-3 needs no more "
            "than enough work behind which to gather.",
            "Compare step_time(config, layout, 'h100') of a few: dp=512 with ZeRO-3 and full "
            "recompute; tp=8 with ZeRO-2; pp=4, tp=8; and one in between the first two.",
        ],
        skeleton="""def layout_for_70b():
    return Layout(
        pp=..., dp=..., tp=...,               # 512 devices
        sequence_parallel=..., zero=..., recompute=...,
        micro_batch_size=..., num_micro_batches=...,     # times dp: 512 sequences
    )""",
    )
]
