"""Devices and links that take a stated time, and replays on other machines."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .picture import CHUNK_COLORS, INK, PHASE_COLORS, Picture, canvas

KIND_COLORS = {
    "product": "#3182bd",
    "attention": "#756bb1",
    "stream": "#9ecae1",
    "stated": "#9ecae1",
    "wait": "#fcae91",
    "message": "#31a354",
}


KIND_NAMES = {"product": "matrices", "stream": "everything else", "message": "on the links"}


def replayed(replay, title: str = "") -> Picture:
    """The last step of a replay.Replay: what each rank computes, where it waits; messages above.

    A message stands in the row of its sender, a collective in that of its first rank.
    """
    began, ended = replay.steps[-1]
    unit, name = (1e-3, "ms") if ended - began >= 1e-3 else (1e-6, "µs")
    figure, axes = canvas(9, 0.9 + 0.5 * replay.num_ranks)
    bars: dict[tuple, list] = {}
    for span in replay.spans:
        if span.end > began and span.start < ended:
            left = (max(span.start, began) - began) / unit
            bars.setdefault((span.kind, span.rank), []).append(
                (left, (min(span.end, ended) - began) / unit - left)
            )
    for (kind, rank), places in bars.items():
        bottom, height = (0.3, 0.16) if kind == "message" else (-0.3, 0.55)
        base = replay.num_ranks - 1 - rank
        axes.broken_barh(places, (base + bottom, height), color=KIND_COLORS[kind], linewidth=0)
    axes.set_yticks(
        range(replay.num_ranks),
        [f"rank {replay.num_ranks - 1 - i}" for i in range(replay.num_ranks)],
    )
    axes.set_xlim(0, (ended - began) / unit)
    axes.set_xlabel(name)
    kinds = [kind for kind in KIND_COLORS if any(kind == found for found, _ in bars)]
    handles = [Patch(color=KIND_COLORS[k], label=KIND_NAMES.get(k, k)) for k in kinds]
    figure.legend(handles=handles, loc="outside upper center", ncols=6, frameon=False, fontsize=8)
    axes.set_title(title or replay.machine, fontsize=10)
    waits = sum(1 for kind, _ in bars if kind == "wait")
    said = f"a step of {(ended - began) / unit:.3g} {name} on {replay.machine}, {waits} ranks wait"
    return Picture(figure, said)


def devices(runs: dict[str, list[list]], scale: float = 1e3, unit: str = "ms") -> Picture:
    """When emulated devices were busy: a panel a run, a row a rank, each interval with its name.

    runs: for each name every rank's emulate.Interval's. Panels share the axis.
    """
    rows = sum(map(len, runs.values()))
    figure = Figure(figsize=(9, 0.7 + 0.3 * rows + 0.45 * len(runs)), dpi=110, layout="constrained")
    heights = [len(ranks) for ranks in runs.values()]
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    last = max(done.end for ranks in runs.values() for row in ranks for done in row) * scale
    said = []
    for axes, (name, ranks) in zip(panels, runs.items()):
        end = max(done.end for row in ranks for done in row)
        busy = sum(done.end - done.start for row in ranks for done in row) / (len(ranks) * end)
        for rank, row in enumerate(ranks):
            for done in row:
                left, width = done.start * scale, (done.end - done.start) * scale
                color = CHUNK_COLORS[done.name % len(CHUNK_COLORS)]
                axes.barh(rank, width, 0.8, left, color=color, edgecolor="white", linewidth=0.6)
                if width > last / 40:
                    axes.text(
                        left + width / 2, rank, done.name, ha="center", va="center", fontsize=8
                    )
        axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
        axes.set_ylim(len(ranks) - 0.5, -0.5)
        axes.set_xlim(0, last)
        axes.spines[["top", "right"]].set_visible(False)
        label = f"{name}: {end * scale:.0f} {unit}, devices busy {busy:.0%}".replace("%", " %")
        axes.set_title(label, fontsize=9, loc="left")
        said.append(label)
    panels[-1].set_xlabel(unit)
    return Picture(figure, "; ".join(said))


def overlap(runs: dict[str, tuple[list, list]], scale: float = 1e3, unit: str = "ms") -> Picture:
    """What a device computed and its network carried: a panel a run, computing above sending.

    runs: name -> (the device's, the network's) emulate.Interval's, named F0, B3, R1 and so on.
    """
    last = max(done.end for both in runs.values() for row in both for done in row) * scale
    figure = Figure(figsize=(9, 0.8 + 1.0 * len(runs)), dpi=110, layout="constrained")
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    said = []
    for axes, (name, both) in zip(panels, runs.items()):
        end = max(done.end for row in both for done in row)
        for lane, row in enumerate(both):
            for done in row:
                left, width = done.start * scale, (done.end - done.start) * scale
                color = OVERLAP_COLORS[done.name[0]]
                axes.barh(lane, width, 0.8, left, color=color, edgecolor="white", linewidth=0.6)
                if width > last / 40:
                    at = (left + width / 2, lane)
                    axes.text(*at, done.name, ha="center", va="center", fontsize=8, color=INK)
        axes.set_yticks([0, 1], ["computes", "sends"])
        axes.set_ylim(1.5, -0.5)
        axes.set_xlim(0, last)
        axes.spines[["top", "right"]].set_visible(False)
        said.append(f"{name}: {end * scale:.1f} {unit}")
        axes.set_title(said[-1], fontsize=9, loc="left")
    panels[-1].set_xlabel(unit)
    return Picture(figure, "; ".join(said))


OVERLAP_COLORS = {"F": PHASE_COLORS["forward"], "B": PHASE_COLORS["backward"], "R": "#9e9ac8"}
