"""Draw a run from its ledger, and the numbers of runs as curves, bars and points."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10

from mini_dist.ranks.ledger import Ledger

from .palette import BAR_COLORS, LINE_COLORS, PHASE_COLORS, RANK_COLORS
from .svg import LETTER, SIZE, WIDEST, Drawing, Panel, around, numbered, powers, round_places

COMM_COLORS = ["#756bb1", "#de2d26", "#2b8cbe", "#31a354", "#b15928", "#e7298a"]
UPRIGHT = 560  # width in pixels of a panel with vertical bars
UNITS = [(1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes")]


def timeline(
    ledger: Ledger,
    title: str = "",
    between: tuple[float, float] | None = None,
    rows: Sequence[int] | None = None,
) -> Drawing:
    """Draw what each rank did when: the phases of its training below, its communication above.

    ledger: a run's ledger, or the run. A large simulated run has one row per kind of rank.
    Communications that overlap in time are stacked. Time is in milliseconds from the first start.
    between: the part of the run to draw, in these milliseconds. rows: the rows to draw, from 0.
    """
    ledger = getattr(ledger, "ledger", ledger)
    names, size = row_names(ledger), len(ledger.span)
    rows = range(size) if rows is None else rows
    began = min(start for start, _ in ledger.span)
    ended = max(end for _, end in ledger.span)
    first, last = between or (0.0, 1e3 * (ended - began))
    ops = list(dict.fromkeys(comm.op for comm in ledger.calls()))
    colors = {op: COMM_COLORS[i % len(COMM_COLORS)] for i, op in enumerate(ops)}
    phases = {phase for changes in ledger.phases for _, phase in changes}
    panel = Panel(
        WIDEST, 90 + 68 * len(rows), (first, last), (len(rows) - 0.7, -0.75), title=title,
        xlabel="ms", xticks=numbered(round_places(first, last, 9)),
        yticks={row: names[rank] for row, rank in enumerate(rows)},
        legend={phase: PHASE_COLORS[phase] for phase in PHASE_COLORS if phase in phases} | colors,
    )  # fmt: skip

    def box(left: float, right: float, bottom: float, top: float, color: str) -> None:
        if left < last and right > first:
            panel.box(max(left, first), bottom, min(right, last), top, color)

    for row, rank in enumerate(rows):
        changes = [(max(t, began), phase) for t, phase in ledger.phases[rank]]
        ends = [t for t, _ in changes[1:]] + [ledger.span[rank][1]]
        for (start, phase), end in zip(changes, ends):
            if end > began:
                color = PHASE_COLORS.get(phase, "#bdbdbd")
                left, right = 1e3 * (start - began), 1e3 * (end - began)
                box(left, right, row - 0.17, row + 0.17, color)
        lanes: list[float] = []  # when each lane above the phases is free again
        least = (last - first) / 1500  # so that a short message stays visible
        boxes = {op: [] for op in ops}  # drawn color by color: one path per color, not one per box
        for comm in ledger.calls(rank=rank):
            lane = next((i for i, free in enumerate(lanes) if free <= comm.start), len(lanes))
            lanes[lane : lane + 1] = [comm.end]
            middle = row - 0.25 - 0.13 * min(lane, 3)
            left = 1e3 * (comm.start - began)
            right = left + max(1e3 * (comm.end - comm.start), least)
            boxes[comm.op].append((left, right, middle - 0.055, middle + 0.055))
        for op, places in boxes.items():
            for place in places:
                box(*place, colors[op])
    return Drawing([panel], f"timeline of {len(rows)} ranks over {last - first:.0f} ms")


def row_names(ledger: Ledger) -> list[str]:
    """Return the names of a timeline's rows: ranks, or kinds of ranks of a large simulated run."""
    return getattr(ledger, "row_names", [f"rank {rank}" for rank in range(len(ledger.span))])


def traffic(ledger: Ledger, title: str = "", axis: str | None = None) -> Drawing:
    """Draw a matrix of what each rank (row) sent to each other (column), on all axes or on one."""
    matrix, title = ledger.traffic(axis), title or (axis or "")
    size = len(matrix)
    most = max(max(row) for row in matrix) or 1
    unit, name = next((u, n) for u, n in UNITS if most >= u)
    said = f"{title}, {name} sent" if title else f"{name} sent"
    square, ranks = (-0.5, size - 0.5), numbered(range(size))
    panel = Panel(
        100 + 52 * size, 80 + 44 * size, square, square[::-1], title=said, xlabel="to rank",
        ylabel="from rank", xticks=ranks, yticks=ranks,
    )  # fmt: skip
    for source, row in enumerate(matrix):
        for target, nbytes in enumerate(row):
            if nbytes:
                alpha = 0.1 + 0.6 * nbytes / most
                corners = target - 0.5, source - 0.5, target + 0.5, source + 0.5
                panel.box(*corners, "#756bb1", alpha)
                text = f"{nbytes / unit:.3g}" if nbytes > 1e-3 * most else "≈ 0"
                panel.words(target, source, text, anchor="middle")
    total = sum(map(sum, matrix))
    return Drawing([panel], f"traffic between {size} ranks, {total:,} bytes in all")


def curve(lines: dict[str, list[float] | tuple], x: str, y: str) -> Drawing:
    """Draw one line per entry: a list over its index (a loss over steps), or the second of a pair
    over the first (a loss over seconds)."""
    pairs = {
        label: values if isinstance(values, tuple) else (range(len(values)), values)
        for label, values in lines.items()
    }
    across = around(place for places, _ in pairs.values() for place in places)
    up = around(value for _, values in pairs.values() for value in values)
    colors = {label: LINE_COLORS[i % len(LINE_COLORS)] for i, label in enumerate(pairs)}
    panel = Panel(
        560, 300 + 18 * (len(pairs) // 4), across, up, xlabel=x, ylabel=y, legend=colors,
        xticks=numbered(round_places(*across)), yticks=numbered(round_places(*up)),
    )  # fmt: skip
    for label, pair in pairs.items():
        panel.line(zip(*pair), colors[label])
    return Drawing([panel], f"{y} over {x}: " + "; ".join(lines))


def staleness(races: dict[str, tuple[list[float], list]], until: float) -> Drawing:
    """Draw the staleness of each update over the time when it was made, a panel per race.

    races: {label: (moments, updates)}, updates with a `worker` and a `staleness`.
    """
    updates = [update for _, each in races.values() for update in each]
    workers = sorted({update.worker for update in updates})
    colors = {worker: RANK_COLORS[worker % len(RANK_COLORS)] for worker in workers}
    up = around(update.staleness for update in updates)
    panels = []
    for label, (moments, made) in races.items():
        panel = Panel(
            560, 130, (0, until), up, title=label, ylabel="staleness",
            xticks=numbered(round_places(0, until)), yticks=numbered(round_places(*up, 4)),
        )  # fmt: skip
        for moment, update in zip(moments, made):
            panel.dot(moment, update.staleness, colors[update.worker], 2)
        panels.append(panel)
    panels[0].legend = {f"worker {worker}": color for worker, color in colors.items()}
    panels[0].height += 18
    panels[-1].xlabel = "seconds"
    panels[-1].height += 17
    return Drawing(panels, "staleness of each update: " + "; ".join(races))


def bars(groups: dict[str, dict], unit: str, title: str = "", x: str = "") -> Drawing:
    """Draw bars side by side: groups[label][place] is the height of the bar `label` at a place."""
    places = list(dict.fromkeys(place for values in groups.values() for place in values))
    heights = [height for values in groups.values() for height in values.values()]
    up = min(0, 1.1 * min(heights)), 1.1 * max(heights) or 1.0
    labels = [str(place) for place in places]
    words = dict(title=title, legend=dict(zip(groups, BAR_COLORS)))
    ticks, marks = dict(enumerate(labels)), numbered(round_places(*up))
    across = len(places) - 0.5, -0.5
    room = (UPRIGHT - 80) / len(labels)  # pixels per name; 80 are for the axis
    lying = LETTER * SIZE * max(map(len, labels)) > room - 6  # Long names get a row each.
    if lying:
        height = 60 + (8 + 18 * len(groups)) * len(places)
        panel = Panel(
            WIDEST, height, up, across, xlabel=unit, ylabel=x, xticks=marks, yticks=ticks, **words
        )
    else:
        panel = Panel(
            UPRIGHT,
            300,
            across[::-1],
            up,
            xlabel=x,
            ylabel=unit,
            xticks=ticks,
            yticks=marks,
            **words,
        )
    width = 0.8 / len(groups)
    for number, values in enumerate(groups.values()):
        shift = (number - (len(groups) - 1) / 2) * width
        for place, height in values.items():
            middle, half = places.index(place) + shift, 0.46 * width
            ends = middle - half, middle + half
            corners = (0, ends[0], height, ends[1]) if lying else (ends[0], 0, ends[1], height)
            panel.box(*corners, BAR_COLORS[number])
    return Drawing([panel], f"{title or unit}: " + "; ".join(groups))


def scatter(points: dict[str, tuple[float, float]], x: str, y: str) -> Drawing:
    """Draw a named point (cost, gain) per entry; the x axis is logarithmic."""
    across = around((log10(left) for left, _ in points.values()), 0.2)
    up = around((up for _, up in points.values()), 0.15)
    panel = Panel(
        560, 330, across, up, xlabel=x, ylabel=y, xticks=powers(*across),
        yticks=numbered(round_places(*up)),
    )  # fmt: skip
    for number, (name, (left, up)) in enumerate(points.items()):
        panel.dot(log10(left), up, BAR_COLORS[number % len(BAR_COLORS)])
        panel.words(log10(left), up, name, shift=(6, -8))
    return Drawing([panel], f"{y} over {x}: " + "; ".join(points))
