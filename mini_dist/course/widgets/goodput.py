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

from ..draw.svg import Drawing, Panel, numbered
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
) -> tuple[Drawing, str]:
    """Draw where the seconds of a simulated month went.

    years_of_one: mean time between failures of one device and its share of the rest (Llama 3: 5.8).
    save_seconds: how long a save stops training. times_the_best: the interval between saves over
    Daly's interval. survives: the share of failures after which the other ranks continue in 30 s
    and lose at most a minute of work.
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


def draw(month: Month) -> Drawing:
    days = [seconds / DAY for seconds, _ in month.points]
    done = [progress / DAY for _, progress in month.points]
    places = numbered(range(0, 31, 10))
    left = Panel(
        400, 280, (0, 30), (0, 30), title="days of work done (gray: without a failure)",
        xlabel="days", xticks=places, yticks=places,
    )  # fmt: skip
    left.line([(0, 0), (days[-1], days[-1])], width=1.2, alpha=0.4)
    left.line(zip(days, done), COLORS["progress"], 2)
    right = Panel(
        320, 150, (0, 30), (0, 1), title="where the 30 days went", xlabel="days", xticks=places,
        legend=COLORS, sides="b",
    )  # fmt: skip
    start = 0.0
    for name, seconds in parts(month).items():
        right.box(start, 0.1, start + seconds / DAY, 0.9, COLORS[name])
        start += seconds / DAY
    went = ", ".join(f"{name} {seconds / DAY:.1f} days" for name, seconds in parts(month).items())
    return Drawing([left, right], f"{month.failures} failures, goodput {month.goodput:.1%}: {went}")


def goodput_of_a_month(**start) -> Explorer:
    """Return the explorer; `start` sets controls, as in goodput_of_a_month(save_seconds=5)."""
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
