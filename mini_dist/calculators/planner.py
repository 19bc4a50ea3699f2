"""Which layout: every way to put a model on n devices, those that fit, and the fastest of them.

    plan("llama3-70b", "h100", 1024, global_batch_tokens=4 * 2**20)

Four steps, each of them visible in the answer: enumerate the layouts; drop those that do not fit,
with the reason; rank the rest by the closed form of step_time; simulate the pipeline of the first
50 and rank these again.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ..config import Layout, ModelConfig
from . import published
from .export import (
    deepspeed_json,
    layout_source,
    megatron_arguments,
    torchrun_line,
    torchtitan_config,
)
from .frameworks import Framework, framework
from .lines import Breakdown, readable
from .machines import Hardware, hardware
from .memory import device_memory, peak_memory, states_of_all
from .models import model as model_preset
from .step_time import StepTime, step_time

NEARLY_FULL = 0.95  # of a device's memory: predictions of it are off by some percent
NOT_MODELLED = (
    "uneven experts, fp8, messages of tp and ep behind computation, other traffic on the network, "
    "stragglers beyond some percent, zero-bubble schedules, failures"
)


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

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def runner_up(self) -> Candidate | None:
        """The fastest candidate that cuts the model in another way."""
        axes = self.best.layout.axes
        return next((c for c in self.candidates[1:] if c.layout.axes != axes), None)

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
        if other is None:
            return f"{short(best.layout)} is the only way to cut the model that fits."
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
        if full[0] > NEARLY_FULL:
            words += " That may be too full: measure it before you count on it."
        if other.time.low < best.time.high:
            words += " Their intervals overlap: measure both."
        return words

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
            f"\nNot modelled: {NOT_MODELLED}."
        )


def plan(
    model: ModelConfig | str,
    machine: Hardware | str,
    num_devices: int,
    global_batch_tokens: float,
    *,
    how: str | Framework = "megatron-core",
    micro_batch_sizes: tuple[int, ...] = (1, 2, 4, 8),
    recompute: tuple[str, ...] = ("none", "full"),
    zero: tuple[int, ...] = (0, 1, 2, 3),
    max_tp: int | None = None,
    max_pp: int | None = None,
    max_cp: int | None = None,
    num_simulated: int = 50,
) -> Plan:
    """The fastest layouts of `model` on `num_devices` of `machine`.

    `global_batch_tokens` is one optimizer step's batch; it must be a whole number of sequences.
    tp stays inside a node unless `max_tp` says otherwise; cp is tried for sequences of 16k on
    (`max_cp` tries it for shorter ones, too). zero: stages to try; (0, 1) is what Megatron-LM's
    distributed optimizer does. Raises ValueError when an argument is impossible, or when nothing
    fits (with the nearest miss).
    """
    config = model_preset(model) if isinstance(model, str) else model
    machine = hardware(machine) if isinstance(machine, str) else machine
    how = framework(how)
    if isinstance(num_devices, bool) or not isinstance(num_devices, int) or num_devices < 1:
        raise ValueError(f"num_devices={num_devices!r} is not a number of devices: give 1 or more.")
    sequences = global_batch_tokens / config.seq_len
    if sequences < 1 or sequences != int(sequences):
        raise ValueError(
            f"global_batch_tokens={global_batch_tokens!r} is not a whole number of sequences of "
            f"seq_len={config.seq_len}: {max(1, round(sequences)) * config.seq_len} would be."
        )
    max_tp = machine.devices_per_node if max_tp is None else max_tp
    max_cp = (1 if config.seq_len < 16384 else 64) if max_cp is None else max_cp

    tried = list(
        layouts(
            config,
            num_devices,
            int(sequences),
            micro_batch_sizes,
            recompute,
            zero,
            max_tp,
            max_pp or config.num_layers,
            max_cp,
        )
    )
    fitting, dropped = _fit(config, tried, machine, how)
    if not fitting:
        raise ValueError(_nothing_fits(config, machine, how, num_devices, dropped))

    ranked = sorted(
        (
            Candidate(layout, waterfall, needed, step_time(config, layout, machine, how))
            for layout, waterfall, needed in fitting
        ),
        key=lambda c: c.time.seconds,
    )
    top = [
        Candidate(
            c.layout,
            c.memory,
            c.device_bytes,
            step_time(config, c.layout, machine, how, simulate=True),
        )
        if c.layout.pp > 1
        else c
        for c in ranked[:num_simulated]
    ]
    top.sort(key=lambda c: c.time.seconds)
    return Plan(
        config,
        machine,
        how,
        num_devices,
        tuple(top + ranked[num_simulated:]),
        tuple(dropped),
        sum(c.layout.pp > 1 for c in top),
    )


def _fit(
    config: ModelConfig, tried: list[Layout], machine: Hardware, how: Framework
) -> tuple[list[tuple[Layout, Breakdown, float]], list[Dropped]]:
    """(layout, waterfall, device bytes) of what fits, and the rest with the reason."""
    fitting: list[tuple[Layout, Breakdown, float]] = []
    dropped: list[Dropped] = []
    limit = machine.device.memory_bytes
    can_cut = []
    for layout in tried:
        try:
            can_cut.append(layout.check(config))
        except ValueError as error:
            dropped.append(Dropped(layout, "the model cannot be cut so", str(error)))
    at_least = states_of_all(config, can_cut, how) if can_cut else []
    for layout, states in zip(can_cut, at_least):
        if device_memory(states, how) > limit:
            what = f"{readable(states, 'bytes')} of model states alone"
            dropped.append(Dropped(layout, "memory", f"{what}, for {readable(limit, 'bytes')}"))
            continue
        waterfall = peak_memory(config, layout, how)
        needed = device_memory(waterfall.total, how)
        if needed > limit:
            largest = max(waterfall, key=lambda line: line.value)
            what = f"{readable(needed, 'bytes')} of {readable(limit, 'bytes')}"
            dropped.append(Dropped(layout, "memory", f"{what}, most of it {largest.name}"))
        else:
            fitting.append((layout, waterfall, needed))
    return fitting, dropped


def layouts(
    config: ModelConfig,
    num_devices: int,
    sequences: int,
    micro_batch_sizes: tuple[int, ...],
    recompute: tuple[str, ...],
    zero: tuple[int, ...],
    max_tp: int,
    max_pp: int,
    max_cp: int,
) -> Iterator[Layout]:
    """The layouts that are tried.

    Not among them: replicas that keep whole optimizer states (ZeRO-1 costs no more traffic); tp
    without a cut sequence; ZeRO-2 and 3 in a pipeline (they gather and reduce in each of its many
    micro-batches, and Megatron-LM and DeepSpeed refuse them), though 3 can fit where 1 does not;
    uneven chunks (frameworks refuse them).
    """
    for tp in _divisors(num_devices, max_tp):
        for pp in _divisors(num_devices // tp, min(max_pp, config.num_layers)):
            for cp in _divisors(num_devices // tp // pp, max_cp):
                dp = num_devices // tp // pp // cp
                zeros = (0,) if dp * cp == 1 else (1,) if pp > 1 else (1, 2, 3)
                for size in micro_batch_sizes:
                    if sequences % (dp * size):
                        continue
                    m = sequences // (dp * size)
                    for ep in _divisors(dp * cp, config.num_experts or 1):
                        for again in recompute:
                            for stage in (z for z in zeros if z in zero or dp * cp == 1):
                                base = Layout(pp, dp, cp, tp, ep, tp > 1, stage, size, m, again)
                                yield base
                                if pp > 1 and m % pp == 0:
                                    for chunks in (2, 4, 8):
                                        if config.num_layers % (pp * chunks) == 0:
                                            yield base.replace(
                                                schedule="interleaved", num_chunks=chunks
                                            )


def short(layout: Layout) -> str:
    """A layout in one line: the axes that cut something, then the rest that matters."""
    axes = [f"{axis}={size}" for axis, size in {**layout.axes, "ep": layout.ep}.items() if size > 1]
    rest = [f"micro-batch {layout.micro_batch_size} x {layout.num_micro_batches}"]
    if layout.zero:
        rest.append(f"ZeRO-{layout.zero}")
    if layout.num_chunks > 1:
        rest.append(f"{layout.num_chunks} chunks")
    if layout.recompute != "none":
        rest.append(f"recompute {layout.recompute}")
    return " ".join(axes or ["one device"]) + ", " + ", ".join(rest)


def _divisors(number: int, at_most: int) -> list[int]:
    return [d for d in range(1, min(number, at_most) + 1) if number % d == 0]


def _nothing_fits(config, machine, how, num_devices, dropped) -> str:
    if not dropped:
        return (
            f"num_devices={num_devices} leaves no layout whose replicas share the batch evenly:"
            " give more sequences in a batch, or a number of devices with more divisors."
        )
    needs = {
        drop.layout: device_memory(peak_memory(config, drop.layout, how).total, how)
        for drop in dropped
        if drop.reason == "memory"
    }
    if not needs:
        ((why, count),) = Counter(drop.detail for drop in dropped).most_common(1)
        return (
            f"No layout of num_devices={num_devices} cuts the model. Of {len(dropped)} tried, "
            f"{count} fail because {why}"
        )
    best = min(needs, key=needs.__getitem__)
    return (
        f"num_devices={num_devices} of {machine.name} is too few: the nearest layout, "
        f"{short(best)}, needs {readable(needs[best], 'bytes')} of "
        f"{readable(machine.device.memory_bytes, 'bytes')}; give more devices or larger ones."
    )
