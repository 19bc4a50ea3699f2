"""Explorer of lesson 17: published runs, what the calculators say, and what would improve it."""

from __future__ import annotations

from functools import lru_cache

from mini_dist.plan.calculators import StepTime, framework, hardware, readable, step_time
from mini_dist.plan.calculators.layouts import short
from mini_dist.plan.calculators.published import (
    PublishedRun,
    korthikanti_2022,
    later,
    megatron_2021,
)

from ..draw.svg import FAINT, INK, Drawing, Panel, numbered
from ..lab import choice, real
from . import page
from .explorer import Explorer

SETS = {  # where each run comes from, and its color
    "Narayanan et al. 2021": (megatron_2021, "#3182bd"),
    "Korthikanti et al. 2022": (korthikanti_2022, "#756bb1"),
    "later: Llama 3, BLOOM, MPT": (later, "#e6550d"),
}
RUNS: dict[str, tuple[PublishedRun, str]] = {
    run.name: (run, color) for runs, color in SETS.values() for run in runs()
}


def render(
    run: str = "Llama 3 405B, 8,192 GPUs",
    straggler: float = 1.0,
    network: float = 1.0,
    kernels: float = 1.0,
) -> tuple[Drawing, str]:
    """Draw predicted / measured for every run, and the chosen run's step line by line.

    straggler: the slowest device's time over the others'. network, kernels: the share of their
    machine's rates that the links between nodes and the matrix kernels reach, in every run.
    """
    predicted = {name: predict(name, straggler, network, kernels) for name in RUNS}
    return draw(run, predicted), words(run, predicted)


@lru_cache(maxsize=4096)
def predict(name: str, straggler: float, network: float, kernels: float) -> StepTime:
    run, _ = RUNS[name]
    machine = hardware(run.machine)
    slower = machine.replace(
        network_bandwidth=network * machine.network_bandwidth,
        device={"sustained_flops": kernels * machine.device.gemm_rate},
    )
    return step_time(run.config, run.layout, slower, run.how, straggler=straggler)


def errors(predicted: dict[str, StepTime]) -> list[float]:
    """Return predicted / measured - 1 for each run."""
    return [each.seconds / RUNS[name][0].seconds - 1 for name, each in predicted.items()]


def words(name: str, predicted: dict[str, StepTime]) -> str:
    run, time = RUNS[name][0], predicted[name]
    inside = "inside" if time.low <= run.seconds <= time.high else "outside"
    off = errors(predicted)
    rows = [
        ("layout", short(run.layout)),
        ("framework", framework(run.how).name),
        ("measured", f"{readable(run.seconds, 's')} ({run.source})"),
        (
            "predicted",
            f"{readable(time.seconds, 's')}, {time.seconds / run.seconds - 1:+.1%}; measured lies "
            f"{inside} {readable(time.low, 's')} ... {readable(time.high, 's')}",
        ),
        ("MFU", f"measured {time.mfu * time.seconds / run.seconds:.1%}, predicted {time.mfu:.1%}"),
        (
            f"all {len(off)} runs",
            f"mean error {sum(map(abs, off)) / len(off):.1%}, signed {sum(off) / len(off):+.1%}, "
            f"largest {max(off, key=abs):+.1%}",
        ),
    ]
    return page.table(rows, caption=name) + page.breakdown(time.breakdown)


def draw(name: str, predicted: dict[str, StepTime]) -> Drawing:
    names = list(RUNS)
    left = Panel(
        370, 300, (-1, len(names)), (0.6, 1.6), xlabel="runs",
        yticks=numbered([0.8, 0.9, 1, 1.1, 1.2]),
        legend={label: color for label, (_, color) in SETS.items()},
        title="step time, predicted / measured (bars: the stated interval)",
    )  # fmt: skip
    left.box(-1, 0.9, len(names), 1.1, INK, FAINT / 2)
    left.guide(y=1, dash="", alpha=0.4)
    for place, (each, error) in enumerate(zip(names, errors(predicted))):
        run, color = RUNS[each]
        interval = [
            (place, end / run.seconds) for end in (predicted[each].low, predicted[each].high)
        ]
        left.line(interval, color, 2.5, alpha=0.4)
        left.dot(place, 1 + error, color, 3)
        if each == name:
            left.dot(place, 1 + error, INK, 7, filled=False)

    run, time = RUNS[name][0], predicted[name]
    lines = sorted(time.breakdown, key=lambda line: -line.value)[:8]
    labels = [*(line.name for line in lines), "predicted", "measured"]
    right = Panel(
        345, 300, (0, 1.05 * max(time.seconds, run.seconds)), (len(labels) - 0.4, -0.6),
        title=name, yticks=dict(enumerate(labels)), xlabel=f"measured {readable(run.seconds, 's')}",
    )  # fmt: skip
    start = 0.0
    for row, line in enumerate(lines):
        right.box(start, row - 0.37, start + line.value, row + 0.37, "#74c476")
        start += line.value
    right.box(0, len(lines) - 0.37, time.seconds, len(lines) + 0.37, "#31a354")
    right.box(0, len(lines) + 0.63, run.seconds, len(lines) + 1.37, "#969696")
    off = time.seconds / run.seconds - 1
    return Drawing([left, right], f"{name}: predicted {off:+.1%} of measured")


def compare_with_published(**start) -> Explorer:
    """Return the explorer; `start` sets controls: compare_with_published(run="BLOOM-176B")."""
    explorer = Explorer(
        render,
        run=choice(*RUNS),
        straggler=real(1.0, 1.5),
        network=real(0.1, 1.0),
        kernels=real(0.5, 1.2),
    )
    explorer.change(**start)
    return explorer
