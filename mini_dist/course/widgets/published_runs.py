"""Explorer of lesson 17: published runs beside what the calculators say, and what would mend it."""

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

from ..draw.labels import numbered, ticks
from ..draw.picture import INK, Picture
from ..lab import choice, real
from . import page
from .explorer import Explorer

SETS = {  # where each run comes from, and its colour
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
) -> tuple[Picture, str]:
    """Every run's predicted / measured, and the chosen one's step, line by line.

    straggler: the slowest device's time over the others'.  network, kernels: what part of their
    measured rates the links between nodes and the matrix kernels reach in this run.
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
    """predicted / measured - 1 of each run."""
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


def draw(name: str, predicted: dict[str, StepTime]) -> Picture:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.4, 3.7), dpi=100)
    left, right = (
        figure.add_axes((0.06, 0.13, 0.46, 0.76)),
        figure.add_axes((0.72, 0.13, 0.26, 0.76)),
    )

    left.axhline(1, color="#bdbdbd", linewidth=1)
    left.axhspan(0.9, 1.1, color="#f0f0f0", zorder=0)
    names = list(RUNS)
    ratios = [1 + error for error in errors(predicted)]
    lows = [predicted[each].low / RUNS[each][0].seconds for each in names]
    highs = [predicted[each].high / RUNS[each][0].seconds for each in names]
    colors = [color for _, color in RUNS.values()]
    left.vlines(range(len(names)), lows, highs, colors=colors, linewidth=2, alpha=0.4)
    left.scatter(range(len(names)), ratios, c=colors, s=22, zorder=3)
    chosen = names.index(name)
    left.plot(
        chosen, ratios[chosen], "o", markersize=12, markerfacecolor="none", markeredgecolor=INK
    )
    for row, (label, (_, color)) in enumerate(SETS.items()):
        left.text(0.02, 0.95 - 0.07 * row, label, color=color, fontsize=8, transform=left.transAxes)
    left.set(ylim=(0.6, 1.6), xlim=(-1, len(names)), xlabel="runs")
    ticks(left, y=numbered([0.8, 0.9, 1, 1.1, 1.2]))
    left.set_title("step time, predicted / measured (bars: the stated interval)", fontsize=9)

    run, time = RUNS[name][0], predicted[name]
    lines = sorted(time.breakdown, key=lambda line: -line.value)[:8]
    start, starts = 0.0, []
    for line in lines:
        starts.append(start)
        start += line.value
    rows = range(len(lines))
    right.barh(rows, [line.value for line in lines], 0.75, starts, color="#74c476")
    right.barh(len(lines), time.seconds, 0.75, color="#31a354")
    right.barh(len(lines) + 1, run.seconds, 0.75, color="#636363")
    right.invert_yaxis()
    ticks(right, y=dict(enumerate([*(line.name for line in lines), "predicted", "measured"])))
    right.set_xlabel(f"measured {readable(run.seconds, 's')}", fontsize=8)
    right.set_title(name, fontsize=9)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    off = time.seconds / run.seconds - 1
    return Picture(figure, f"{name}: predicted {off:+.1%} of measured")


def compare_with_published(**start) -> Explorer:
    """The explorer; `start` sets some controls, as in compare_with_published(run="BLOOM-176B")."""
    explorer = Explorer(
        render,
        run=choice(*RUNS),
        straggler=real(1.0, 1.5),
        network=real(0.1, 1.0),
        kernels=real(0.5, 1.2),
    )
    explorer.change(**start)
    return explorer
