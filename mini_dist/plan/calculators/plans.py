"""The planner's answer: layouts ranked, how many each step dropped, and in words why one won."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from dataclasses import dataclass

from ..config import Layout, ModelConfig
from . import published
from .bubble import num_simulated_actions
from .export import (
    deepspeed_json,
    layout_source,
    megatron_arguments,
    torchrun_line,
    torchtitan_config,
)
from .frameworks import Framework
from .layouts import short
from .lines import Breakdown, readable
from .machines import Hardware
from .offload import borrowed
from .step_time import StepTime, step_time

NEARLY_FULL = 0.95  # of a device's memory, or of a prediction: those are off by some percent
CLOSE = 1.05  # a step at most this much longer is as good: the time model is no better
# A simulation of this many actions takes about 0.1 s; for longer ones the closed form is as good.
MOST_ACTIONS = 10_000
NOT_MODELLED = (
    "uneven experts, memory in fp8, messages of ep behind computation, other traffic on the "
    "network, stragglers beyond some percent, failures"
)
NOT_SEARCHED = (
    "zero-bubble schedules (Search(schedules=...)), messages of tp behind matrices and fp8 "
    "(framework(...).replace(...))"
)


def worth_simulating(layout: Layout) -> bool:
    """Tell whether the planner simulates the pipeline of a layout that is near the top."""
    return layout.pp > 1 and num_simulated_actions(layout) <= MOST_ACTIONS


@dataclass(frozen=True)
class Candidate:
    """One layout with what it needs and what it gives."""

    layout: Layout
    memory: Breakdown  # the fullest rank's waterfall
    device_bytes: float  # that, with what lies outside the allocator
    time: StepTime

    def __str__(self):
        return (
            f"{short(self.layout)}: {readable(self.time.seconds, 's')} a step "
            f"({readable(self.time.low, 's')} to {readable(self.time.high, 's')}), "
            f"{readable(self.device_bytes, 'bytes')}, MFU {self.time.mfu:.1%}"
        )


@dataclass(frozen=True)
class Dropped:
    """A layout that was not ranked, and why."""

    layout: Layout
    reason: str  # "memory", or what the layout cannot cut
    detail: str


@dataclass(frozen=True)
class Plan:
    """The ranked answer; `best` is the first candidate."""

    model: ModelConfig
    machine: Hardware
    how: Framework
    num_devices: int
    candidates: tuple[Candidate, ...]
    dropped: tuple[Dropped, ...]
    num_simulated: int  # pipelines
    nearly: Candidate | None = None  # clearly faster than the best, and by some percent too large

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def runner_up(self) -> Candidate | None:
        """The fastest candidate that cuts the model in another way."""
        axes = self.best.layout.axes
        return next((c for c in self.candidates[1:] if c.layout.axes != axes), None)

    def seconds_on(self, machine: Hardware) -> float:
        """Seconds per step of the best layout on another machine, timed as this plan was: with the
        model's states where `how` keeps them, and with the pipeline simulated if it was here."""
        layout = self.best.layout
        simulate = worth_simulating(layout) and self.num_simulated > 0
        return step_time(self.model, layout, machine, self.how, simulate=simulate).seconds

    def funnel(self) -> str:
        """Fit -> batch -> throughput: how many layouts each step left, and why."""
        total = len(self.candidates) + len(self.dropped)
        counts = Counter(drop.reason for drop in self.dropped)
        left = total
        lines = [f"{total} layouts of {self.num_devices} devices"]
        for reason, count in counts.most_common():
            left -= count
            example = next(d for d in self.dropped if d.reason == reason)
            lines.append(
                f"  - {count} dropped: {reason}, e.g. {short(example.layout)}: {example.detail}"
            )
        sizes = Counter(c.layout.micro_batch_size for c in self.candidates)
        lines += [
            f"  = {left} fit; by micro-batch size: "
            + ", ".join(f"{size}: {sizes[size]}" for size in sorted(sizes)),
            f"  = {self.num_simulated} pipelines simulated; the fastest layout does "
            f"{self.best.time.tokens_per_second:,.0f} tokens/s, the slowest that fits "
            f"{min(c.time.tokens_per_second for c in self.candidates):,.0f}",
        ]
        return "\n".join(lines)

    def explain(self) -> str:
        """Why the winner beats the runner-up, in words: what it saves, what it pays."""
        best, other = self.best, self.runner_up
        cautions = "".join(f" {caution}" for caution in self.cautions())
        if other is None:
            return f"{short(best.layout)} is the only way to cut the model that fits.{cautions}"
        mine = {line.name: line.value for line in best.time.breakdown}
        theirs = {line.name: line.value for line in other.time.breakdown}
        gains = {name: theirs.get(name, 0.0) - mine.get(name, 0.0) for name in {*mine, *theirs}}
        worth = 0.001 * best.time.seconds  # no word on less
        gains = {name: gain for name, gain in gains.items() if abs(gain) > worth}
        saved = sorted((name for name in gains if gains[name] > 0), key=lambda n: -gains[n])[:2]
        paid = sorted((name for name in gains if gains[name] < 0), key=lambda n: gains[n])[:2]

        def list_of(names: list[str]) -> str:
            return " and ".join(f"{readable(abs(gains[name]), 's')} of {name}" for name in names)

        faster = other.time.seconds / best.time.seconds - 1
        words = f"{short(best.layout)} is {faster:.1%} faster than {short(other.layout)}"
        if saved:
            words += f": it saves {list_of(saved)}"
        if paid:
            words += f"{' and' if saved else ':'} pays {list_of(paid)}"
        full = [c.device_bytes / self.machine.device.memory_bytes for c in (best, other)]
        words += f". It fills {full[0]:.0%} of a device's memory, the other {full[1]:.0%}."
        if other.time.low < best.time.high:
            words += " Their intervals overlap: measure both."
        return words + cautions

    def cautions(self) -> list[str]:
        """Say where the best layout's numbers go beyond what measurements have confirmed."""
        best, machine, said = self.best, self.machine, []
        if self.how.offload_optimizer:
            said.append(
                f"Nothing fits into the devices alone: {borrowed(self.how)}. Its time was "
                "compared with little: one published rate (10 billion parameters on one V100), and "
                "the CPU's Adam on a DGX-2, on which the model was chosen."
            )
        if best.device_bytes > NEARLY_FULL * machine.device.memory_bytes:
            said.append(
                f"{readable(best.device_bytes, 'bytes')} of "
                f"{readable(machine.device.memory_bytes, 'bytes')} may be too full: measure it "
                "before you count on it."
            )
        if self.nearly:
            faster = best.time.seconds / self.nearly.time.seconds - 1
            said.append(
                f"{short(self.nearly.layout)} would be {faster:.1%} faster and needs "
                f"{readable(self.nearly.device_bytes, 'bytes')}, above "
                f"{readable(machine.device.memory_bytes, 'bytes')} by no more than predictions of "
                "memory are off: it may fit."
            )
        nodes = math.ceil(self.num_devices / machine.devices_per_node)
        measured = max((count for count, *_ in machine.by_nodes), default=2)
        if nodes > measured:
            said.append(
                f"How {nodes:,} nodes share the network of {machine.name} was not measured: its "
                f"bandwidth is taken as that of {measured} nodes."
            )
        runs = [run.layout for run in published.alike(best.layout, machine)]
        largest = max((layout.world_size for layout in runs), default=0)
        most_shards = max((layout.dp * layout.cp for layout in runs), default=0)
        shards = best.layout.dp * best.layout.cp
        if best.layout.zero == 3 and shards > 2 * most_shards > 0:
            said.append(
                f"It shards parameters over {shards:,} ranks. No published run that shards them "
                f"over more than {most_shards:,} ranks on {machine.device.name} confirms this "
                "model: it is an extrapolation."
            )
        elif self.num_devices > 2 * largest:
            kind = "with" if best.layout.zero == 3 else "without"
            above = f" above {largest:,} devices" if largest else ""
            said.append(
                f"No published run {kind} sharded parameters on {machine.device.name}{above} "
                "confirms this model: it is an extrapolation."
            )
        else:
            return said
        return said + [_of_zero_3()] * (best.layout.zero == 3)

    def table(self, rows: int = 10) -> str:
        shown = self.candidates[:rows]
        wide = max([len("layout"), *(len(short(c.layout)) for c in shown)])
        lines = [f"{'layout':<{wide}} {'step':>9} {'low':>9} {'high':>9} {'memory':>10} {'MFU':>6}"]
        for c in shown:
            lines.append(
                f"{short(c.layout):<{wide}} {readable(c.time.seconds, 's'):>9} "
                f"{readable(c.time.low, 's'):>9} {readable(c.time.high, 's'):>9} "
                f"{readable(c.device_bytes, 'bytes'):>10} {c.time.mfu:>6.1%}"
            )
        return "\n".join(lines)

    def exports(self, candidate: Candidate | None = None) -> dict[str, str]:
        """A layout (the best) for each framework; where one cannot say it, the reason."""
        config, layout = self.model, (candidate or self.best).layout
        makers = {
            "Megatron-LM": lambda: shlex.join(megatron_arguments(config, layout)),
            "DeepSpeed": lambda: deepspeed_json(layout),
            "torchtitan": lambda: torchtitan_config(config, layout),
            "torchrun": lambda: torchrun_line(layout, self.machine.devices_per_node),
            "mini_dist": lambda: layout_source(layout),
        }
        said = {}
        for name, make in makers.items():
            try:
                said[name] = make()
            except ValueError as error:
                said[name] = f"not for {name}: {error}"
        return said

    def __str__(self):
        run = published.nearest(self.model, self.machine, self.num_devices)
        return (
            f"{self.funnel()}\n\n{self.table()}\n\n{self.explain()}\n\nNearest published run: {run}"
            f"\nNot searched unless asked: {NOT_SEARCHED}.\nNot modelled: {NOT_MODELLED}."
        )


def _of_zero_3() -> str:
    """Say what the one published table shows about parameters sharded over hundreds of devices."""
    _, runs = published.megatron_2021_against_zero_3()
    sizes = [run.layout.world_size for run in runs]
    slower = [run.seconds / run.predicted().seconds for run in runs]
    return (
        f"On {min(sizes)} to {max(sizes):,} A100s with the DeepSpeed of 2021 (Narayanan et al. "
        f"2021, table 2), ZeRO-3 took {min(slower):.1f} to {max(slower):.1f} times as long as this "
        "model predicts; pipelines took as long as predicted."
    )
