"""How long a training step takes, and what it waits for.

    one layer  = matrices (roofline on measured GEMM ceilings) + attention + elementwise passes
                 + the collectives of tp, cp, ep that nothing hides, or the host if it is slower
    pipeline   = m micro-batches on the slowest stage + the bubble of the schedule
    step       = pipeline + gradients that backward does not hide + optimizer

All constants stand in machines.py and frameworks.py, with their sources.  Those of kernels
and links come from timings of single kernels and collectives; a framework's were chosen with whole
runs in view: the host's pace, what unfused kernels read again, the first FlashAttention's speed.
`step_time` says low ... high besides its best guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..config import Layout, ModelConfig
from ..schedule import SCHEDULES, Schedule, Times
from ..schedule import simulate as run_schedule
from .flops import model_flops, step_flops
from .frameworks import Framework, framework
from .kernels import COMMUNICATION, collective_seconds, head_seconds, layer_time, stream_seconds
from .lines import Breakdown, Line, readable
from .machines import Hardware, hardware
from .parameters import Held, held_by_layer, layers_of_stage, parameters_of_rank, stages_of_rank

# The interval: how far each part may be off.  A GEMM of an odd shape or a throttled chip; links
# shared with others; a host that is busy; the slowest of many devices (high end only).  Assumed;
# four of five published runs lie inside (benchmarks/planner.py counts them).
UNCERTAIN = {
    "compute": (0.94, 1.08),
    "communication": (0.7, 1.5),
    "host": (0.8, 1.3),
    "straggler": (1.0, 1.05),
}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step: the lines, the interval, and what follows from them."""

    breakdown: Breakdown
    low: float
    high: float
    tokens: int  # in a step, over all ranks
    mfu: float  # model FLOPs / (time * datasheet peak), all scores counted (PaLM appendix B)
    hfu: float  # hardware FLOPs: with what is recomputed

    @property
    def seconds(self) -> float:
        return self.breakdown.total

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def training(
        self, tokens: float, num_devices: int, dollars_per_hour: float | None = None
    ) -> Breakdown:
        """Days (and cost) of a run over `tokens` tokens at this pace, low to high."""
        lines = []
        for name, seconds in (("low", self.low), ("expected", self.seconds), ("high", self.high)):
            days = tokens / self.tokens * seconds / 86400
            lines.append(Line(f"days, {name}", days, "days", "tokens / tokens a step * step time"))
            if dollars_per_hour is not None:
                lines.append(
                    Line(
                        f"cost, {name}",
                        days * 24 * num_devices * dollars_per_hour,
                        "dollars",
                        "devices * hours * price",
                    )
                )
        return Breakdown(f"training on {readable(tokens, 'tokens')}", tuple(lines))

    def __str__(self):
        return (
            f"{self.breakdown.table()}\n  between {readable(self.low, 's')} and "
            f"{readable(self.high, 's')}; {self.tokens_per_second:,.0f} tokens/s, "
            f"MFU {self.mfu:.1%}, HFU {self.hfu:.1%}"
        )


def step_time(
    config: ModelConfig,
    layout: Layout,
    machine: Hardware | str = "h100",
    how: str | Framework = "megatron-core",
    straggler: float = 1.0,
    simulate: bool = False,
) -> StepTime:
    """Seconds of one optimizer step on all ranks.

    `straggler` is how much longer the slowest device computes (everyone waits for it);
    `simulate=True` takes the pipeline's makespan from mini_dist.schedule instead of the closed
    form.  Raises ValueError when the layout cannot cut the model.
    """
    machine = hardware(machine) if isinstance(machine, str) else machine
    how = framework(how)
    layout.check(config)
    if not straggler >= 1:
        raise ValueError(
            f"straggler={straggler!r} would make the slowest device faster than the "
            "others: give 1.0 or more."
        )
    device, m = machine.device, layout.num_micro_batches
    stages = _stages(config, layout, machine, how)

    # The slowest stage computes all the time but for the bubble.
    slowest = max(stages, key=lambda stage: stage.total)
    lines = [
        Line(
            name,
            m * seconds,
            "s",
            f"{m} micro-batches * {readable(seconds, 's')}",
            _SOURCES.get(name, ""),
        )
        for name, seconds in slowest.parts.items()
        if seconds
    ]
    compute = sum(line.value for line in lines if line.name not in COMMUNICATION)
    if straggler > 1:
        lines.append(
            Line(
                "straggler",
                (straggler - 1) * compute,
                "s",
                f"{straggler - 1:.0%} of the computation",
                "assumed",
            )
        )
    hop = _hop_seconds(config, layout, machine, how)
    if simulate and layout.pp > 1:
        makespan, formula = _simulated(layout, stages, hop), "makespan - slowest stage's work"
        lines.append(
            Line(
                "pipeline bubble",
                max(0.0, makespan - m * slowest.total),
                "s",
                formula,
                "mini_dist.schedule.simulate",
            )
        )
    elif layout.pp > 1:
        bubble, formula = bubble_seconds(
            layout,
            [s.forward for s in stages],
            [s.backward for s in stages],
            [s.weight for s in stages],
        )
        hops = 2 * (m * layout.num_chunks + layout.pp - 1)
        lines += [
            Line("pipeline bubble", bubble, "s", formula, _SOURCES["pipeline bubble"]),
            Line(
                "pipeline messages",
                hops * hop,
                "s",
                f"{hops} messages * {readable(hop, 's')}",
                "Narayanan et al. 2021 s2.2",
            ),
        ]
    gradients, formula = _gradient_seconds(config, layout, machine, how, slowest)
    if gradients:
        lines.append(Line("gradients over dp", gradients, "s", formula, "ZeRO section 7"))
    held = parameters_of_rank(config, layout, 0)
    updated = sum(numel / (size if layout.zero else 1) for numel, size, _ in _groups(held, layout))
    traffic = how.gradient_bytes + 2 * how.optimizer_bytes + how.parameter_bytes
    lines.append(
        Line(
            "optimizer",
            stream_seconds(device, traffic * updated),
            "s",
            f"{traffic:g} bytes * {updated:.3g} parameters / bandwidth",
            "states read and written once",
        )
    )

    breakdown = Breakdown("step time", tuple(lines))
    low, high = _interval(breakdown)
    sequences, devices = layout.global_batch_size, layout.world_size
    peak = breakdown.total * devices * device.peak_flops
    return StepTime(
        breakdown,
        low,
        high,
        sequences * config.seq_len,
        model_flops(config, sequences) / peak,
        step_flops(config, sequences, layout.recompute).total / peak,
    )


@dataclass(frozen=True)
class Stage:
    """One rank's work on one micro-batch."""

    parts: dict[str, float]
    forward: float
    backward: float  # with what it recomputes and the weights' gradients
    weight: float  # the part of backward that may wait (zero-bubble)

    @property
    def total(self) -> float:
        return self.forward + self.backward


def _stages(config, layout, machine, how) -> list[Stage]:
    """Each pipeline rank's work; equal ranks share one Stage."""
    kinds: dict[bool, Stage] = {}
    stages: list[Stage] = []
    seen: dict[tuple, Stage] = {}
    for rank in range(layout.pp):
        held = stages_of_rank(layout, rank)
        amounts = tuple(pair for stage in held for pair in layers_of_stage(config, layout, stage))
        is_last = layout.num_stages - 1 in held
        if (amounts, is_last) not in seen:
            parts: dict[str, float] = {}
            forward = backward = weight = 0.0
            for moe, layers in amounts:
                if moe not in kinds:
                    kinds[moe] = _layer_parts(config, layout, machine, how, moe)
                each = kinds[moe]
                for name, seconds in each.parts.items():
                    parts[name] = parts.get(name, 0.0) + layers * seconds
                forward += layers * each.forward
                backward += layers * each.backward
                weight += layers * each.weight
            if is_last:
                f, b = head_seconds(config, machine, how, layout)
                parts["head and loss"] = f + b
                forward, backward = forward + f, backward + b
            seen[amounts, is_last] = Stage(parts, forward, backward, weight)
        stages.append(seen[amounts, is_last])
    return stages


def _layer_parts(config, layout, machine, how, moe) -> Stage:
    """One layer with its recompute, and the host where the device waits for it."""
    time = layer_time(
        config,
        machine,
        how,
        moe,
        layout.tp,
        layout.cp,
        layout.ep,
        layout.micro_batch_size,
        layout.sequence_parallel,
    )
    forward, backward = sum(time.forward.values()), sum(time.backward.values())
    again = {
        "none": 0.0,
        "full": forward,
        "selective": 0.0 if how.flash_attention else time.forward["attention"],
    }[layout.recompute]
    parts = {name: time.forward[name] + time.backward[name] for name in time.forward}
    if layout.recompute != "none" and again:
        parts["recomputed"] = again
    gather, reduce = _sharded_seconds(config, layout, machine, how, moe)
    if reduce:  # ZeRO-2 and 3 do this in every micro-batch, behind the layer's own work
        wait_f = max(0.0, gather - forward)
        wait_b = max(0.0, gather + reduce - backward - again)
        parts["zero traffic"] = wait_f + wait_b
        forward, backward = forward + wait_f, backward + wait_b
    # Kernels are launched ahead; near the host's own pace neither hides the other altogether.
    passes = 1 if layout.recompute == "full" else 0
    host_f, host_b = how.host_seconds, (2 + passes) * how.host_seconds
    waits_f = _soft_max(forward, host_f) - forward
    waits_b = _soft_max(backward + again, host_b) - backward - again
    parts["waiting for the host"] = waits_f + waits_b
    weight = time.backward["matrices"] / 2
    return Stage(parts, forward + waits_f, backward + again + waits_b, weight)


def _soft_max(device: float, host: float) -> float:
    return (device**4 + host**4) ** 0.25


def _groups(held: Held, layout: Layout) -> list[tuple[float, int, int]]:
    """(numbers, ranks that hold copies of them, how far apart these stand).

    Those are all of dp * cp, and for experts every ep-th of them.
    """
    ways, tp, ep = layout.dp * layout.cp, layout.tp, layout.ep
    return [(float(held.dense), ways, tp), (float(held.experts), ways // ep, tp * ep)]


def _sharded_seconds(config, layout, machine, how, moe) -> tuple[float, float]:
    """One layer's all-gather of parameters (ZeRO-3) and reduce-scatter of gradients (ZeRO-2, 3)."""
    gather = reduce = 0.0
    if layout.zero >= 2:
        for numel, size, stride in _groups(held_by_layer(config, layout, moe), layout):
            reduce += collective_seconds(
                machine, "reduce_scatter", how.reduce_bytes * numel, size, stride
            )
            if layout.zero == 3:
                gather += collective_seconds(
                    machine, "all_gather", how.activation_bytes * numel, size, stride
                )
    return gather, reduce


def _hop_seconds(config, layout, machine, how) -> float:
    """One activation from a stage to the next."""
    if layout.pp == 1:
        return 0.0
    message = (
        how.activation_bytes * layout.micro_batch_size * config.seq_len / layout.cp * config.d_model
    )
    stride = layout.dp * layout.cp * layout.tp
    if layout.sequence_parallel or layout.tp == 1:
        return collective_seconds(machine, "send", 2 * message / layout.tp, 2, stride)
    # Scatter/gather (Narayanan et al. 2021 section 4.1): each tp rank sends a part of it.
    return collective_seconds(
        machine, "send", 2 * message / layout.tp, 2, stride
    ) + collective_seconds(machine, "all_gather", message, layout.tp)


def bubble_seconds(
    layout: Layout, forward: list[float], backward: list[float], weight: list[float]
) -> tuple[float, str]:
    """Idle seconds of the slowest stage in a step, and the formula.

    `forward`, `backward` (whole) and `weight` (the part of backward that a zero-bubble schedule
    puts off) are each rank's seconds a micro-batch.
    """
    work = [f + b for f, b in zip(forward, backward)]
    others = sum(work) - max(work)  # what must run before and after the slowest stage
    if layout.schedule == "naive":
        return layout.num_micro_batches * others, "m * the other stages' work"
    if layout.schedule == "interleaved":
        return others / layout.num_chunks, "(other stages' F + B) / chunks"
    if layout.schedule in ("zb_h1", "zb_h2", "zb_v", "dualpipe_v"):
        share = {"zb_h1": 2, "zb_h2": 3, "zb_v": 3, "dualpipe_v": 3}[layout.schedule]
        put_off = share * (sum(weight) - weight[work.index(max(work))])
        return max(0.0, others - put_off), f"other stages' F + B - {share} W"
    return others, "other stages' F + B"


def _simulated(layout, stages, hop) -> float:
    """The makespan of the schedule's own lists.  After the first 2 p micro-batches each further
    one adds the slowest stage's work, so long steps are cut there and extended."""
    p, v = layout.pp, layout.num_chunks
    m = min(layout.num_micro_batches, 2 * p + layout.num_micro_batches % p)
    schedule = _lists(layout.schedule, p, m, v)
    by_stage = [stages[schedule.rank_of[stage]] for stage in range(schedule.num_stages)]
    timeline = run_schedule(
        schedule,
        Times(
            forward=[stage.forward / v for stage in by_stage],
            backward=[(stage.backward - stage.weight) / v for stage in by_stage],
            weight=[stage.weight / v for stage in by_stage],
            comm=hop,
        ),
    )
    return timeline.makespan + (layout.num_micro_batches - m) * max(stage.total for stage in stages)


@lru_cache(maxsize=256)
def _lists(name: str, p: int, m: int, v: int) -> Schedule:
    return SCHEDULES[name](p, m, *((v,) if name == "interleaved" else ()))


def _gradient_seconds(config, layout, machine, how, slowest) -> tuple[float, str]:
    """Data-parallel traffic at the end of a step that nothing hides (ZeRO-3 has none there)."""
    g, e = how.reduce_bytes, how.activation_bytes
    ops = {
        0: [("all_reduce", g)],
        1: [("reduce_scatter", g), ("all_gather", e)],
        2: [("all_gather", e)],
        3: [],
    }[layout.zero]
    held = parameters_of_rank(config, layout, 0)
    seconds = sum(
        collective_seconds(machine, op, each * numel, size, stride)
        for op, each in ops
        for numel, size, stride in _groups(held, layout)
    )
    formula = " + ".join(f"{op.replace('_', '-')} of {each:g} P" for op, each in ops)
    if how.overlaps_gradients and seconds:  # behind the last micro-batch's backward
        seconds, formula = max(0.0, seconds - slowest.backward), formula + " - last backward"
    return seconds, formula


def _interval(breakdown: Breakdown) -> tuple[float, float]:
    low = high = 0.0
    for line in breakdown:
        kind = (
            "communication"
            if line.name in (*COMMUNICATION, "pipeline messages", "gradients over dp")
            else "host"
            if line.name == "waiting for the host"
            else "compute"
        )
        low += line.value * UNCERTAIN[kind][0]
        high += line.value * UNCERTAIN[kind][1] * UNCERTAIN["straggler"][1]
    return low, high


_SOURCES = {
    "matrices": "roofline, gemm_seconds",
    "attention": "Dao et al. 2022, or passes over scores",
    "elementwise": "passes over memory",
    "recomputed": "Korthikanti et al. 2022 section 5",
    "tp collectives": "Shoeybi et al. 2019 section 3",
    "cp exchange": "Liu et al. 2023",
    "ep all-to-all": "Lepikhin et al. 2020",
    "zero traffic": "ZeRO section 7.2",
    "waiting for the host": "host_seconds of the framework",
    "head and loss": "roofline",
    "pipeline bubble": "Narayanan et al. 2021 s2.2; Qi et al. 2023",
}
