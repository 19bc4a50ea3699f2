"""Draw emulated devices and links, and replays on other machines."""

from __future__ import annotations

from .palette import CHUNK_COLORS, PHASE_COLORS
from .svg import WIDEST, Drawing, Panel, ink_on, numbered, round_places

KIND_COLORS = {
    "product": "#3182bd",
    "attention": "#756bb1",
    "stream": "#9ecae1",
    "stated": "#9ecae1",
    "wait": "#fcae91",
    "message": "#31a354",
}
OVERLAP_COLORS = {"F": PHASE_COLORS["forward"], "B": PHASE_COLORS["backward"], "R": "#9e9ac8"}
KIND_NAMES = {"product": "matrices", "stream": "everything else", "message": "on the links"}


def replayed(replay, title: str = "") -> Drawing:
    """Draw the last step of a replay.Replay: what each rank computes and where it waits.

    A message is drawn above its sender, and a collective above its first rank.
    """
    began, ended = replay.steps[-1]
    unit, name = (1e-3, "ms") if ended - began >= 1e-3 else (1e-6, "µs")
    last, size = (ended - began) / unit, replay.num_ranks
    panel = Panel(
        WIDEST, 90 + 48 * size, (0, last), (size - 0.6, -0.6), title=title or replay.machine,
        xlabel=name, xticks=numbered(round_places(0, last, 9)),
        yticks={rank: f"rank {rank}" for rank in range(size)},
    )  # fmt: skip
    waits = set()
    for kind, color in KIND_COLORS.items():
        for span in replay.spans:
            if span.kind == kind and span.end > began and span.start < ended:
                ends = [(min(max(t, began), ended) - began) / unit for t in (span.start, span.end)]
                top, low = (-0.46, -0.3) if kind == "message" else (-0.25, 0.3)
                panel.box(ends[0], span.rank + top, ends[1], span.rank + low, color)
                panel.legend[KIND_NAMES.get(kind, kind)] = color
                waits |= {span.rank} if kind == "wait" else set()
    said = f"a step of {last:.3g} {name} on {replay.machine}, {len(waits)} ranks wait"
    return Drawing([panel], said)


def devices(runs: dict[str, list[list]], scale: float = 1e3, unit: str = "ms") -> Drawing:
    """Draw when emulated devices were busy: a panel per run, a row per rank, each interval named.

    runs: name -> the emulate.BusyInterval objects of each rank. All panels share one axis.
    """
    last = max(done.end for ranks in runs.values() for row in ranks for done in row) * scale
    panels = []
    for name, ranks in runs.items():
        end = max(done.end for row in ranks for done in row)
        busy = sum(done.end - done.start for row in ranks for done in row) / (len(ranks) * end)
        label = f"{name}: {end * scale:.0f} {unit}, devices busy {busy:.0%}".replace("%", " %")
        colors = CHUNK_COLORS
        rows = [[(done, colors[done.name % len(colors)], scale) for done in row] for row in ranks]
        names = [f"rank {rank}" for rank in range(len(ranks))]
        panels.append(intervals(rows, names, last, label))
    return in_one_unit(panels, unit)


def overlap(runs: dict[str, tuple[list, list]], scale: float = 1e3, unit: str = "ms") -> Drawing:
    """Draw what a device computed and what its network carried: a panel per run.

    runs: name -> emulate.BusyInterval objects (device's, network's), named F0, B3, R1 and so on.
    """
    last = max(done.end for both in runs.values() for row in both for done in row) * scale
    panels = []
    for name, both in runs.items():
        end = max(done.end for row in both for done in row)
        rows = [[(done, OVERLAP_COLORS[done.name[0]], scale) for done in row] for row in both]
        label = f"{name}: {end * scale:.1f} {unit}"
        panels.append(intervals(rows, ["computes", "sends"], last, label))
    return in_one_unit(panels, unit)


def intervals(rows: list[list[tuple]], names: list[str], last: float, title: str) -> Panel:
    """Draw rows of (interval, color, scale), each interval with its name where there is room."""
    panel = Panel(
        WIDEST, 52 + 26 * len(rows), (0, last), (len(rows) - 0.5, -0.5), title=title,
        xticks=numbered(round_places(0, last, 9)), yticks=dict(enumerate(names)),
    )  # fmt: skip
    for lane, row in enumerate(rows):
        for done, color, scale in row:
            left, right = done.start * scale, done.end * scale
            panel.box(left, lane - 0.4, right, lane + 0.4, color, gap=1)
            if right - left > last / 40:
                panel.words((left + right) / 2, lane, done.name, ink_on(color), "middle")
    return panel


def in_one_unit(panels: list[Panel], unit: str) -> Drawing:
    panels[-1].xlabel = unit
    panels[-1].height += 17
    return Drawing(panels, "; ".join(panel.title for panel in panels))
