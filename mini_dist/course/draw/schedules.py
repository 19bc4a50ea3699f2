"""Pipeline schedules: who computes what when, and what each rank holds meanwhile."""

from __future__ import annotations

from collections import defaultdict

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mini_dist.plan.schedule import Timeline

from .labels import write
from .picture import INK, RANK_COLORS, Picture

ACTION_COLORS = {  # by kind; the rank's first chunk is light, further ones darker
    "F": ["#9ecae1", "#4a90c4", "#2b6ca3", "#174a78"],
    "B": ["#fdbe85", "#f08a3c", "#c9621a", "#94430c"],
    "W": ["#b8deb0", "#74b86b", "#41903a", "#276122"],
    "S": ["#555555"] * 4,
}


ACTION_NAMES = {
    "F": "F forward",
    "B": "B backward",
    "W": "W weight gradients",
    "S": "S optimizer step",
}


def gantt(timelines: dict[str, Timeline], unit: str = "", scale: float = 1.0) -> Picture:
    """Who computes what when: a panel a timeline, a row a rank, white where it is idle.

    A number is a micro-batch, written where there is room. `scale` turns a timeline's times into
    `unit`: 1e3 for seconds and ms. All panels share the axis, so lengths can be compared.
    """
    rows = sum(len(timeline.spans) for timeline in timelines.values())
    figure = Figure(figsize=(9.2, 0.7 + 0.27 * rows + 0.45 * len(timelines)), dpi=110)
    figure.set_layout_engine("constrained")
    panels = figure.subplots(
        len(timelines),
        1,
        sharex=True,
        squeeze=False,
        height_ratios=[len(timeline.spans) for timeline in timelines.values()],
    )[:, 0]
    last = max(timeline.makespan for timeline in timelines.values()) * scale
    kinds: set[str] = set()
    for axes, (label, timeline) in zip(panels, timelines.items()):
        kinds |= lanes(axes, timeline, last, scale)
        ranks = range(len(timeline.spans))
        axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks], fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        said = f"bubble {timeline.bubble:.1%}".replace("%", " %")
        axes.set_title(f"{label}: {said}" if label else said, fontsize=9, loc="left")
    panels[-1].set_xlabel(unit)
    handles = [
        Patch(color=ACTION_COLORS[k][0], label=ACTION_NAMES[k]) for k in "FBWS" if k in kinds
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=4, frameon=False, fontsize=8)
    said = "; ".join(f"{label} {t.bubble:.1%}" for label, t in timelines.items())
    return Picture(figure, f"timelines and their bubbles: {said}")


def lanes(axes, timeline: Timeline, last: float, scale: float = 1.0) -> set[str]:
    """One timeline, drawn on `axes`; returns the kinds of actions that are in it.

    Where a measured rank woke up late and caught up, its next bar is cut to begin after that.
    """
    size, schedule = len(timeline.spans), timeline.schedule
    numbers = []  # (micro-batch, place, rank, ink)
    for rank, spans in enumerate(timeline.spans):
        over, bars = 0.0, defaultdict(list)  # bars of one color at once: much faster to draw
        for action, start, end in spans:
            chunk = min(schedule.stages_of[rank].index(action.stage), 3)
            start, over = max(start, over), end
            left, width = start * scale, (end - start) * scale
            bars[ACTION_COLORS[action.kind][chunk]].append((left, width))
            if width > 0.011 * last * len(str(action.micro)):
                ink = "white" if chunk > 1 else INK
                numbers.append((str(action.micro), left + width / 2, rank, ink))
        for color, intervals in bars.items():
            axes.broken_barh(
                intervals, (rank - 0.43, 0.86), color=color, edgecolor="white", linewidth=0.5
            )
    if numbers:
        labels, xs, ys, inks = zip(*numbers)
        write(axes, labels, xs, ys, size=7, color=inks)
    axes.set_ylim(size - 0.45, -0.55)
    axes.set_xlim(0, 1.005 * last)
    axes.spines[["top", "right"]].set_visible(False)
    return {span.action.kind for spans in timeline.spans for span in spans}


def held(timelines: dict[str, Timeline], title: str = "") -> Picture:
    """Activations that each rank holds over time, in micro-batches of one chunk: a panel each."""
    figure = Figure(figsize=(9.2, 2.5), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(timelines), sharey=True, squeeze=False)[0]
    for axes, (label, timeline) in zip(panels, timelines.items()):
        holdings(axes, timeline)
        axes.set_title(f"{label}: at most {timeline.peak_in_flight}", fontsize=9)
        axes.set_xlabel("time")
    panels[0].set_ylabel("micro-batches held")
    panels[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    most = "; ".join(f"{label} {t.peak_in_flight}" for label, t in timelines.items())
    return Picture(figure, f"activations held at most: {most}")


def holdings(axes, timeline: Timeline) -> None:
    """What each rank of one timeline holds, drawn on `axes`."""
    for rank in range(len(timeline.spans)):
        profile = timeline.in_flight(rank)
        times, counts = zip(*profile, (timeline.makespan, profile[-1][1]))
        color = RANK_COLORS[rank % len(RANK_COLORS)]
        axes.step(times, counts, where="post", color=color, label=f"rank {rank}", linewidth=1.4)
    axes.set_xlim(0, timeline.makespan)
    axes.set_ylim(0, None)
    axes.spines[["top", "right"]].set_visible(False)
