"""How long a training step takes, and what it waits for.

    one layer  = matrices (roofline on measured GEMM ceilings) + attention + elementwise passes
                 + the collectives of tp, cp, ep that nothing hides, or the host if it is slower
    pipeline   = m micro-batches on the slowest stage + the bubble of the schedule
    step       = pipeline + gradients that backward does not hide + optimizer

All constants stand in machines.py and frameworks.py, with their sources.  Those of kernels and
links come from timings of single kernels and collectives; chosen.py lists those that do not.
`step_time` says low ... high besides its best guess (intervals.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..config import Layout, ModelConfig
from ..fields import checks_kinds
from .bubble import bubble_seconds, hop_seconds, message_line, simulated
from .compression import Compression
from .flops import model_flops, step_flops
from .frameworks import Framework, framework
from .intervals import Interval, interval_of
from .kernels import COMMUNICATION, stream_seconds
from .lines import Breakdown, Line, readable
from .machines import Hardware, hardware
from .models import model
from .numbers import at_least, cut_by, whole
from .optimizer_time import optimizer_line
from .parameters import every_second, layers_of_stages, parameters_of_rank
from .replica_traffic import (
    average_seconds,
    averaged,
    checked,
    cluster_of,
    compressed_units,
    gradient_seconds,
)
from .stage_time import stages_of_pipeline

OVER_DP = ("gradients over dp", "average over dp")


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step: the lines, the interval, and what follows from them."""

    breakdown: Breakdown
    low: float  # four of five published runs of its kind lie between these two
    high: float
    tokens: int  # in a step, over all ranks
    mfu: float  # model FLOPs / (time * bf16 peak), all scores counted (PaLM appendix B)
    # Hardware FLOPs: with what is recomputed. All scores are counted as in MFU, and a causal kernel
    # computes half of them: on very long sequences this may exceed 1.
    hfu: float

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
        at_least("tokens", tokens, 0)
        at_least("num_devices", num_devices, 1)
        at_least("dollars_per_hour", dollars_per_hour or 0, 0)
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


@checks_kinds
def step_time(
    config: ModelConfig | str,
    layout: Layout,
    machine: Hardware | str = "h100",
    how: str | Framework = "megatron-core",
    straggler: float = 1.0,
    simulate: bool = False,
    local_steps: int = 1,
    clusters: int | None = None,
    compression: Compression | str | None = None,
) -> StepTime:
    """Seconds of one optimizer step on all ranks.

    `straggler` is how much longer the slowest device computes (everyone waits for it);
    `simulate=True` takes the pipeline's makespan from mini_dist.plan.schedule instead of the closed
    form.  `local_steps` is how many steps the ranks of dp take by themselves before they average
    their parameters (local SGD, DiLoCo); 1 averages gradients at every step.  With `clusters`, the
    dp / clusters ranks of each train as one, with ZeRO if the layout says so, and the clusters
    average.  `compression`, of gradients between replicas, or of averages where `local_steps` is
    above 1, or its name: what is sent instead, and the memory that is passed over for it; in ZeRO's
    stages "int8", of parameters, too, as ZeRO++ does.
    Raises ValueError when the layout cannot cut the model, or shards over ranks that part, or the
    method does not fit.
    """
    config, machine, how = model(config), hardware(machine), framework(how)
    cut_by(layout, config)
    at_least("straggler", straggler, 1, "the slowest device is not faster than the others")
    whole("local_steps", local_steps, "1 averages gradients at every step")
    compression = checked(compression, config, layout, local_steps)
    inside = cluster_of(layout, clusters, local_steps)
    if local_steps == 1:
        how = compressed_units(how, layout, compression)
    device, m = machine.device, layout.num_micro_batches
    stages = stages_of_pipeline(config, inside, machine, how)

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
    hops = hop_seconds(config, inside, machine, how)
    if simulate and layout.pp > 1:
        idle = simulated(layout, stages, hops) - m * slowest.total
        formula = "makespan - slowest stage's work"
        lines.append(
            Line(
                "pipeline bubble", max(0.0, idle), "s", formula, "mini_dist.plan.schedule.simulate"
            )
        )
    elif layout.pp > 1:
        bubble, formula = bubble_seconds(
            layout,
            [s.forward for s in stages],
            [s.backward for s in stages],
            [s.weight for s in stages],
        )
        lines.append(Line("pipeline bubble", bubble, "s", formula, _SOURCES["pipeline bubble"]))
        messages = message_line(layout, hops)
        lines.append(Line("pipeline messages", messages[0], "s", messages[1], _SOURCES["messages"]))
    gradients, formula = gradient_seconds(
        config, inside, machine, how, slowest, compression if local_steps == 1 else None
    )
    if gradients:
        lines.append(Line("gradients over dp", gradients, "s", formula, "ZeRO section 7"))
    if local_steps > 1:
        average, formula = average_seconds(
            config, layout, inside, machine, how, local_steps, compression
        )
        lines.append(Line("average over dp", average, "s", formula, "Stich 2019"))
    if compression and local_steps > 1:
        each = compression.touched(0, m) / local_steps
        numel = sum(numel for numel, _, _ in averaged(config, layout, inside))
    elif compression:
        each = compression.touched(layout.zero, m)
        numel = float(parameters_of_rank(config, layout, 0).total)
    if compression:
        seconds = stream_seconds(device, each * numel)
        formula = f"{each:g} bytes * {numel:.3g} parameters / bandwidth"
        lines.append(Line("compressing", seconds, "s", formula, "passes over memory, counted"))
    # the last micro-batch's backward; all that the device does
    behind = slowest.backward, sum(line.value for line in lines)
    lines.append(optimizer_line(config, inside, machine, how, behind))

    breakdown = Breakdown("step time", tuple(lines))
    interval = _interval(breakdown, layout, machine)
    sequences, devices = layout.global_batch_size, layout.world_size
    once = _model_flops(config, sequences)
    again = _recomputed_flops(config, layout, how)
    peak = breakdown.total * devices * device.peak_flops
    return StepTime(
        breakdown,
        interval.low * breakdown.total,
        interval.high * breakdown.total,
        sequences * config.seq_len,
        once / peak,
        (once + again) / peak,
    )


def _recomputed_flops(config: ModelConfig, layout: Layout, how: Framework) -> float:
    """FLOPs of a step, over all ranks, that recompute adds and whose time is counted."""
    if layout.recompute == "none":
        return 0.0
    sequences, stages = layout.global_batch_size, layers_of_stages(config, layout)
    layers = [(moe, layout.num_recomputed(n)) for stage in stages for moe, n in stage]
    if layout.recompute == "selective" and how.selective == "operators":
        matrices = sum(
            count * weight.numel_visited
            for moe, count in layers
            for weight in every_second(config, moe)
        )
        return 2 * sequences * config.seq_len * matrices
    if layout.recompute == "selective" and how.flash_attention:
        return 0.0  # it computes its scores again in any case, and its own time has them
    again = _hardware_flops(config, sequences, layout.recompute) - _model_flops(config, sequences)
    return again * sum(count for _, count in layers) / config.num_layers


@lru_cache(maxsize=256)  # the same for all layouts of a batch
def _hardware_flops(config: ModelConfig, sequences: int, recompute: str) -> float:
    return step_flops(config, sequences, recompute).total


@lru_cache(maxsize=256)
def _model_flops(config: ModelConfig, sequences: int) -> float:
    return model_flops(config, sequences)


def _interval(breakdown: Breakdown, layout: Layout, machine: Hardware) -> Interval:
    """How far a step of this kind may be from the best guess."""
    messages = (*COMMUNICATION, "pipeline messages", *OVER_DP)
    waits = sum(line.value for line in breakdown if line.name in messages) / breakdown.total
    return interval_of(layout.world_size / machine.devices_per_node, waits)


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
    "waiting for offloads": "the way to the host",
    "zero copies": "_fsdp_collectives.py [code]",
    "messages": "Narayanan et al. 2021 s2.2",
    "pipeline bubble": "Narayanan et al. 2021 s2.2; Qi et al. 2023",
}
