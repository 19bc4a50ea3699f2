"""How long a training step takes, and what it waits for.

    one layer  = matrices (roofline on measured GEMM ceilings) + attention + elementwise passes
                 + the collectives of tp, cp, ep that nothing hides, or the host if it is slower
    pipeline   = m micro-batches on the slowest stage + the bubble of the schedule
    step       = pipeline + gradients that backward does not hide + optimizer

All constants are in devices.py, machines.py and frameworks.py, with their sources.  The constants
of kernels and links come from timings of single kernels and collectives; chosen.py lists the
exceptions.  `step_time` gives low ... high as well as its best guess (intervals.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..config import Layout, ModelConfig
from ..fields import at_least, checks_kinds
from .bubble import pipeline_lines
from .compression import Compression
from .flops import model_flops, step_flops
from .frameworks import Framework
from .intervals import interval_of
from .kernels import COMMUNICATION
from .lines import Breakdown, Line, readable
from .machines import Hardware
from .optimizer_time import optimizer_line
from .parameters import every_second
from .replica_traffic import replica_lines
from .stage_time import StageTime, stages_of_pipeline
from .timed_step import TimedStep, timed_step

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
    """Compute the seconds of one optimizer step on all ranks, and what it waits for.

    straggler: how many times as long the slowest device computes; every rank waits for it.
    simulate: take the pipeline's makespan from mini_dist.plan.schedule, not from a closed form.
    local_steps: the ranks of dp average their parameters once in this many steps (local SGD,
    DiLoCo); 1 averages gradients at every step. clusters: the dp / clusters ranks of each cluster
    train as one, with ZeRO if the layout says so, and the clusters average.
    compression: what replicas send instead of gradients, or of averages if local_steps is above 1,
    and the memory passes that it costs. "int8" is for ZeRO too, and sends its parameters (ZeRO++).
    Raises ValueError if the layout cannot cut the model, if ZeRO would shard over ranks that step
    by themselves, or if the compression does not fit.
    """
    at_least("straggler", straggler, 1, "the slowest device is not faster than the others")
    step = timed_step(config, layout, machine, how, local_steps, clusters, compression)
    stages = stages_of_pipeline(step)
    slowest = max(stages, key=lambda stage: stage.total)  # it idles in the bubble only
    lines = [
        *_computing(step, slowest, straggler),
        *pipeline_lines(step, stages, simulate),
        *replica_lines(step, slowest.forward, slowest.backward),
    ]
    # The optimizer may run behind the last micro-batch's backward, or behind all of the step.
    behind = slowest.backward, sum(line.value for line in lines)
    lines.append(optimizer_line(step, behind))
    return _with_utilization(step, Breakdown("step time", tuple(lines)))


def _computing(step: TimedStep, slowest: StageTime, straggler: float) -> list[Line]:
    """The slowest stage's micro-batches, part by part, and how much longer a straggler takes."""
    m = step.layout.num_micro_batches
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
    if straggler > 1:
        compute = sum(line.value for line in lines if line.name not in COMMUNICATION)
        said = f"{straggler - 1:.0%} of the computation", "assumed"
        lines.append(Line("straggler", (straggler - 1) * compute, "s", *said))
    return lines


def _with_utilization(step: TimedStep, breakdown: Breakdown) -> StepTime:
    """The lines with their interval, and how much of the devices' peak they use."""
    config, seconds = step.config, breakdown.total
    messages = (*COMMUNICATION, "pipeline messages", *OVER_DP)
    waits = sum(line.value for line in breakdown if line.name in messages) / seconds
    interval = interval_of(step.num_devices / step.machine.devices_per_node, waits)
    once = _model_flops(config, step.num_sequences)
    again = _recomputed_flops(step)
    peak = seconds * step.num_devices * step.machine.device.peak_flops
    return StepTime(
        breakdown,
        interval.low * seconds,
        interval.high * seconds,
        step.num_sequences * config.seq_len,
        once / peak,
        (once + again) / peak,
    )


def _recomputed_flops(step: TimedStep) -> float:
    """FLOPs of a step, over all ranks, that recompute adds and whose time is counted."""
    config, layout, how, sequences = step.config, step.layout, step.how, step.num_sequences
    if layout.recompute == "none":
        return 0.0
    layers = [(moe, layout.num_recomputed(n)) for stage in step.stages for moe, n in stage]
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
}
