"""Draw pipeline schedules: what each rank computes when, and which activations it holds."""

from __future__ import annotations

from mini_dist.plan.schedule import Timeline

from .palette import RANK_COLORS
from .svg import WIDEST, Drawing, Panel, ink_on, numbered, round_places

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


def gantt(timelines: dict[str, Timeline], unit: str = "", scale: float = 1.0) -> Drawing:
    """Draw what each rank computes when: a panel per timeline, a row per rank, empty if idle.

    A number is a micro-batch, written where there is room. `scale` converts a timeline's times
    into `unit`: 1e3 from seconds to ms. All panels share the axis, so lengths can be compared.
    """
    last = max(timeline.makespan for timeline in timelines.values()) * scale
    places, panels = numbered(round_places(0, last, 9)), []
    for label, timeline in timelines.items():
        said = f"bubble {timeline.bubble:.1%}".replace("%", " %")
        title = f"{label}: {said}" if label else said
        panels.append(lanes(timeline, last, scale, title=title, xticks=places, width=WIDEST))
    panels[0].legend = legend(*timelines.values())
    panels[-1].xlabel = unit
    panels[-1].height += 17 * bool(unit)
    said = "; ".join(f"{label} {t.bubble:.1%}" for label, t in timelines.items())
    return Drawing(panels, f"timelines and their bubbles: {said}")


def legend(*timelines: Timeline) -> dict[str, str]:
    """Return the names and colors of the kinds of actions in these timelines."""
    kinds = {span.action.kind for t in timelines for spans in t.spans for span in spans}
    return {ACTION_NAMES[kind]: ACTION_COLORS[kind][0] for kind in "FBWS" if kind in kinds}


def lanes(timeline: Timeline, last: float, scale: float = 1.0, *, width: float, **words) -> Panel:
    """Draw one timeline up to the time `last`. If a measured rank woke up late and caught up, its
    next bar begins where the late one ends."""
    size, schedule = len(timeline.spans), timeline.schedule
    ranks = {rank: f"rank {rank}" for rank in range(size)}
    axes = (0, 1.005 * last), (size - 0.45, -0.55)
    panel = Panel(width, 66 + 22 * size, *axes, yticks=ranks, **words)
    numbers = []
    for rank, spans in enumerate(timeline.spans):
        over, bars = 0.0, []
        for action, start, end in spans:
            chunk = min(schedule.stages_of[rank].index(action.stage), 3)
            start, over = max(start, over), end
            left, right = start * scale, end * scale
            bars.append((ACTION_COLORS[action.kind][chunk], left, right))
            if right - left > 0.016 * last * len(str(action.micro)):
                numbers.append((left + (right - left) / 2, rank, action.micro, bars[-1][0]))
        for color, left, right in sorted(bars):  # boxes of one color are one path
            panel.box(left, rank - 0.43, right, rank + 0.43, color, gap=1)
    for x, rank, micro, color in numbers:
        panel.words(x, rank, micro, ink_on(color), "middle")
    return panel


def held(timelines: dict[str, Timeline], title: str = "") -> Drawing:
    """Draw the activations that each rank holds over time, in micro-batches of one chunk, a panel
    per timeline."""
    most = max(max(timeline.peak_in_flight) for timeline in timelines.values())
    panels = [
        holdings(
            timeline, timeline.makespan, width=WIDEST / max(2, len(timelines)), height=230,
            title=f"{label}: at most {timeline.peak_in_flight}", xlabel="time",
            xticks=numbered(round_places(0, timeline.makespan, 4)),
            yticks=numbered(round_places(0, most)), most=most,
        )
        for label, timeline in timelines.items()
    ]  # fmt: skip
    panels[0].ylabel = "micro-batches held"
    said = "; ".join(f"{label} {t.peak_in_flight}" for label, t in timelines.items())
    return Drawing(panels, f"activations held at most: {said}", title)


def holdings(timeline: Timeline, last: float, *, width, height=150, most=0.0, **words) -> Panel:
    """Draw what each rank of one timeline holds, up to the time `last`."""
    ranks = range(len(timeline.spans))
    colors = [RANK_COLORS[rank % len(RANK_COLORS)] for rank in ranks]
    most = most or max(timeline.peak_in_flight)
    names = {f"rank {rank}": color for rank, color in zip(ranks, colors)}
    panel = Panel(width, height, (0, 1.005 * last), (0, 1.05 * most), legend=names, **words)
    for rank, color in zip(ranks, colors):
        profile = timeline.in_flight(rank)
        times, counts = zip(*profile, (timeline.makespan, profile[-1][1]))
        steps = [(t, held) for t, *both in zip(times[1:], counts, counts[1:]) for held in both]
        panel.line([(times[0], counts[0]), *steps], color, 1.8)
    return panel
