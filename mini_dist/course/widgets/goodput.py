"""Explorer of lesson 25: a simulated month on many devices, and what of it was progress."""

from __future__ import annotations

from mini_dist.plan.calculators.goodput import (
    DAY,
    LongJob,
    Month,
    daly,
    llama_3_device,
    mean_time_between_failures,
    simulated,
    young,
)

from ..draw.labels import numbered, ticks
from ..draw.picture import Picture
from ..lab import real, whole
from . import page
from .explorer import Explorer

YEAR = 365 * DAY
COLORS = {"progress": "#31a354", "saving": "#3182bd", "done again": "#fd8d3c", "waiting": "#de2d26"}


def render(
    devices: int = 16_384,
    years_of_one: float = round(llama_3_device() / YEAR, 1),
    save_seconds: float = 60.0,
    times_the_best: float = 1.0,
    noticed_minutes: float = 5.0,
    restart_minutes: float = 10.0,
    survives: float = 0.0,
    seed: int = 0,
) -> tuple[Picture, str]:
    """Where the seconds of a month went.

    years_of_one: between two failures of one device with its share of everything; 5.8 is Llama 3's.
    save_seconds: that training stands still for a save. times_the_best: the interval between two
    saves, of Daly's. survives: the share of failures after which the others go on in 30 s, at most
    a minute of work behind.
    """
    mtbf = mean_time_between_failures(devices, years_of_one * YEAR)
    best = daly(save_seconds, mtbf)
    away = 60 * noticed_minutes, 60 * restart_minutes
    interval = max(times_the_best * best, 1.0)
    job = LongJob(mtbf, save_seconds, interval, *away, survives, 30.0, 60.0)
    month = simulated(job, 30 * DAY, seed)
    said = (
        f"{month.failures:,} failures in 30 days, one every {minutes(mtbf)}; a save every "
        f"{minutes(interval)}. Goodput {month.goodput:.1%}."
    )
    rows = [
        (name, f"{seconds / DAY:.2f} days", f"{seconds / (30 * DAY):.1%}")
        for name, seconds in parts(month).items()
    ]
    html = page.paragraph(said) + page.table(rows, ("where it went", "", "of the month"))
    formulas = [
        ("Young's interval", minutes(young(save_seconds, mtbf))),
        ("Daly's interval", minutes(best)),
    ]
    if not survives:
        formulas.append(("goodput by Daly's formula", f"{job.expected():.1%}"))
    return draw(month), html + page.table(formulas, ("formula", ""))


def minutes(seconds: float) -> str:
    return f"{seconds / 60:,.1f} min"


def parts(month: Month) -> dict[str, float]:
    return dict(zip(COLORS, (month.progress, month.saving, month.lost, month.waiting)))


def draw(month: Month) -> Picture:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.4, 3.0), dpi=100)
    left, right = figure.add_axes((0.07, 0.18, 0.52, 0.7)), figure.add_axes((0.66, 0.36, 0.32, 0.3))
    days = [seconds / DAY for seconds, _ in month.points]
    done = [progress / DAY for _, progress in month.points]
    left.plot([0, days[-1]], [0, days[-1]], color="#bdbdbd", linewidth=1, label="without a failure")
    left.plot(days, done, color=COLORS["progress"], label="progress")
    left.set(xlabel="days", ylabel="days of work done", xlim=(0, 30), ylim=(0, 30))
    places = numbered(range(0, 31, 10))
    ticks(left, places, places)
    left.legend(frameon=False, fontsize=8)
    start = 0.0
    for name, seconds in parts(month).items():
        right.barh(0, seconds / DAY, 0.5, start, color=COLORS[name], label=name)
        start += seconds / DAY
    right.set(xlim=(0, 30), ylim=(-0.3, 0.3), yticks=[], xlabel="days")
    ticks(right, places)
    right.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8, frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return Picture(figure, f"{month.failures} failures, goodput {month.goodput:.1%}")


def goodput_of_a_month(**start) -> Explorer:
    """The explorer; `start` sets some controls, as in goodput_of_a_month(save_seconds=5)."""
    explorer = Explorer(
        render,
        devices=whole(8, 131_072, log=True),
        years_of_one=real(0.5, 50.0),
        save_seconds=real(0.1, 600.0, log=True),
        times_the_best=real(0.1, 10.0, log=True),
        noticed_minutes=real(0.0, 60.0),
        restart_minutes=real(0.0, 60.0),
        survives=real(0.0, 1.0),
        seed=whole(0, 99),
    )
    explorer.change(**start)
    return explorer
