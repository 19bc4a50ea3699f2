"""Figures drawn from what ran. Nothing in here computes a result.

Every function returns a Picture, which a notebook shows as PNG and `.save(path)` writes.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.markers import TICKDOWN, TICKLEFT
from matplotlib.patches import Patch, Rectangle
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Affine2D

from .ledger import Ledger
from .ledger.steps import steps
from .schedule import Timeline
from .watch import Watched, read

PHASE_COLORS = {
    "setup": "#e6e6e6",
    "forward": "#9ecae1",
    "backward": "#fdbe85",
    "step": "#a1d99b",
}
INK = "#333333"
COMM_COLORS = ["#756bb1", "#de2d26", "#2b8cbe", "#31a354", "#b15928", "#e7298a"]


class Picture:
    """A figure that shows itself in a notebook, with bytes that are the same at each run."""

    def __init__(self, figure: Figure, alt: str):
        self.figure, self.alt = figure, alt

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        FigureCanvasAgg(self.figure).print_png(buffer, metadata={"Software": None})
        return buffer.getvalue()

    def __repr__(self) -> str:
        return self.alt

    def save(self, path) -> None:
        with open(path, "wb") as file:
            file.write(self._repr_png_())


def canvas(width: float, height: float):
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


# -- labels ---------------------------------------------------------------------------------------
# matplotlib lays a Text out anew for every picture, and a tick is two Texts and three lines: most
# of a small picture's time. Here a label is the outline of its letters, made once, and many labels
# are one collection, as the dots of a scatter are. No layout engine knows of their size.

LABEL, MARK, GAP = 8, 3.5, 3.5  # points: size of labels, of the marks of ticks, between them
CAPITAL = 0.73  # height of a digit or capital letter in DejaVu Sans, in sizes


class Labels(PathCollection):
    """Words in a picture; `labels` are they."""

    def __init__(self, labels: list[str], outlines: list[Path], **style):
        super().__init__(outlines, **style)
        self.labels = labels
        self.set_in_layout(False)


def write(axes, labels: Iterable[str], xs, ys, *, size=LABEL, color=INK, ha="center", va="center",
          transform=None, shift=(0.0, 0.0)) -> None:  # fmt: skip
    """Labels of one line at these places. color: one, or one for each; shift: in points."""
    labels = list(labels)
    style = dict(
        offsets=list(zip(xs, ys)),
        offset_transform=transform or axes.transData,
        transform=Affine2D().translate(*shift).scale(1 / 72) + axes.figure.dpi_scale_trans,
        facecolors=color,
        linewidths=0,
        clip_on=False,
        zorder=3,
    )
    axes.add_artist(Labels(labels, [outline(label, size, ha, va) for label in labels], **style))


@lru_cache(maxsize=4096)
def outline(label: str, size: float, ha: str, va: str) -> Path:
    """The letters of a label around its place, in points."""
    letters = [letter(each) for each in label]
    starts = [0.0, *accumulate(advance for _, advance in letters)]
    width = starts[-1]
    left = {"left": 0.0, "center": -width / 2, "right": -width}[ha]
    low = {"bottom": 0.0, "center": -CAPITAL / 2, "top": -CAPITAL}[va]
    placed = [path.vertices + (start + left, low) for (path, _), start in zip(letters, starts)]
    codes = [path.codes for path, _ in letters]
    return Path(size * np.concatenate(placed), np.concatenate(codes))


@lru_cache(maxsize=1024)
def letter(each: str) -> tuple[Path, float]:
    """Its outline at size 1, and how far behind it the next one stands."""
    before, bar = (TextPath((0, 0), text, 1).get_extents().x1 for text in (each + "|", "|"))
    nothing = Path(np.empty((0, 2)), np.empty(0, Path.code_type))
    return nothing if each.isspace() else TextPath((0, 0), each, 1), before - bar


def ticks(axes, x: dict[float, str] | None = None, y: dict[float, str] | None = None) -> None:
    """Mark these places of the axes with these labels, instead of matplotlib's ticks."""

    def mark(xs, ys, marker, transform):
        style = dict(linestyle="", marker=marker, markersize=MARK, markeredgewidth=0.8)
        axes.add_artist(Line2D(xs, ys, color=INK, clip_on=False, transform=transform, **style))

    axes.set_xticks([])
    axes.set_yticks([])
    if x:
        places, edge, along = list(x), [0] * len(x), axes.get_xaxis_transform()
        mark(places, edge, TICKDOWN, along)
        below = dict(va="top", transform=along, shift=(0, -MARK - GAP))
        write(axes, x.values(), places, edge, **below)
        axes.xaxis.labelpad += MARK + GAP + LABEL
    if y:
        places, edge, along = list(y), [0] * len(y), axes.get_yaxis_transform()
        mark(edge, places, TICKLEFT, along)
        beside = dict(ha="right", transform=along, shift=(-MARK - GAP, 0))
        write(axes, y.values(), edge, places, **beside)
        axes.yaxis.labelpad += MARK + GAP + 0.6 * LABEL * max(map(len, y.values()))


def numbered(places: Iterable[float]) -> dict[float, str]:
    """Places that are their own labels."""
    return {place: f"{place:g}" for place in places}


def round_places(least: float, most: float, intervals: int = 9) -> list[float]:
    """Round numbers from `least` to `most`, that many steps at most, as matplotlib chooses them."""
    places = MaxNLocator(nbins=intervals, steps=[1, 2, 5, 10]).tick_values(least, most)
    return [float(place) for place in places if least <= place <= most]


# -- ledgers --------------------------------------------------------------------------------------


def timeline(ledger: Ledger, title: str = "") -> Picture:
    """What each rank did when: the phases of its training below, its communication above.

    Communications that overlap in time are stacked. Time is milliseconds from the first start.
    """
    size = len(ledger.span)
    began = min(start for start, _ in ledger.span)
    ended = max(end for _, end in ledger.span)
    figure, axes = canvas(9, 0.6 + 0.75 * size)
    ops = list(dict.fromkeys(comm.op for comm in ledger.calls()))
    colors = {op: COMM_COLORS[i % len(COMM_COLORS)] for i, op in enumerate(ops)}
    for rank in range(size):
        base = size - 1 - rank
        changes = [(max(t, began), phase) for t, phase in ledger.phases[rank]]
        ends = [t for t, _ in changes[1:]] + [ledger.span[rank][1]]
        for (start, phase), end in zip(changes, ends):
            if end > began:
                color = PHASE_COLORS.get(phase, "#dddddd")
                axes.barh(base, 1e3 * (end - start), 0.34, 1e3 * (start - began), color=color)
        lanes: list[float] = []  # when each lane above the phases is free again
        for comm in ledger.calls(rank=rank):
            lane = next((i for i, free in enumerate(lanes) if free <= comm.start), len(lanes))
            lanes[lane : lane + 1] = [comm.end]
            lane = min(lane, 3)
            left, width = 1e3 * (comm.start - began), 1e3 * (comm.end - comm.start)
            least = 1e3 * (ended - began) / 1500  # so that a short message is seen at all
            axes.barh(
                base + 0.25 + 0.13 * lane, max(width, least), 0.11, left, color=colors[comm.op]
            )
    axes.set_yticks(range(size), [f"rank {size - 1 - i}" for i in range(size)])
    axes.set_xlabel("ms")
    axes.set_xlim(0, 1e3 * (ended - began))
    phases = {phase for changes in ledger.phases for _, phase in changes}
    handles = [Patch(color=PHASE_COLORS[p], label=p) for p in PHASE_COLORS if p in phases]
    handles += [Patch(color=colors[op], label=op) for op in ops]
    figure.legend(handles=handles, loc="outside upper center", ncols=6, frameon=False, fontsize=8)
    if title:
        axes.set_title(title, fontsize=10)
    return Picture(figure, f"timeline of {size} ranks over {1e3 * (ended - began):.0f} ms")


def traffic(ledger: Ledger, title: str = "", axis: str | None = None) -> Picture:
    """Who sent how much to whom, on all axes or on one: a matrix from row to column."""
    matrix, title = ledger.traffic(axis), title or (axis or "")
    size = len(matrix)
    most = max(max(row) for row in matrix) or 1
    unit, name = next((u, n) for u, n in UNITS if most >= u)
    side = 1.5 + 0.55 * size
    figure, axes = canvas(side + 0.6, side)
    axes.imshow([[v / most for v in row] for row in matrix], cmap="Purples", vmin=0, vmax=1.3)
    for source, row in enumerate(matrix):
        for target, nbytes in enumerate(row):
            if nbytes:
                text = f"{nbytes / unit:.3g}" if nbytes > 1e-3 * most else "≈ 0"
                ink = "white" if nbytes > 0.7 * most else INK
                axes.text(target, source, text, ha="center", va="center", fontsize=8, color=ink)
    axes.set_xticks(range(size))
    axes.set_yticks(range(size))
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    axes.set_title(f"{title}, {name} sent" if title else f"{name} sent", fontsize=10)
    total = sum(map(sum, matrix))
    return Picture(figure, f"traffic between {size} ranks, {total:,} bytes in all")


UNITS = [(1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes")]


def curve(lines: dict[str, list[float]], x: str, y: str) -> Picture:
    """One line per entry over its index, as a loss over steps."""
    figure, axes = canvas(6, 3)
    for label, values in lines.items():
        axes.plot(values, label=label, linewidth=1.6)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(frameon=False, fontsize=8)
    return Picture(figure, f"{y} over {x}: " + "; ".join(lines))


def bars(groups: dict[str, dict], unit: str, title: str = "", x: str = "") -> Picture:
    """Bars side by side: groups[label][place] is the height of the bar called `label` there."""
    places = list(dict.fromkeys(place for values in groups.values() for place in values))
    figure, axes = canvas(6, 3)
    width = 0.8 / len(groups)
    for number, (label, values) in enumerate(groups.items()):
        shift = (number - (len(groups) - 1) / 2) * width
        left = [places.index(place) + shift for place in values]
        axes.bar(left, list(values.values()), 0.92 * width, label=label, color=BAR_COLORS[number])
    axes.set_xticks(range(len(places)), [str(place) for place in places])
    axes.set_xlabel(x)
    axes.set_ylabel(unit)
    axes.set_title(title, fontsize=10)
    axes.margins(y=0.25)  # room for the legend above the bars
    axes.legend(frameon=False, fontsize=8, ncols=len(groups))
    return Picture(figure, f"{title or unit}: " + "; ".join(groups))


BAR_COLORS = ["#d95f02", "#7570b3", "#1b9e77", "#999999"]


# -- a collective, message by message -----------------------------------------------------------

CHUNK_COLORS = ["#9ecae1", "#fdae6b", "#a1d99b", "#dadaeb"]
BOX = 0.84  # width of a number; 1 is the height of a line


def collective(seen: Watched, title: str = "") -> Picture:
    """Every message of a watched collective, step by step, and what each rank has in the end.

    A box is a number: letter and colour say which chunk it is, the small digits whose terms are in
    it. A strong edge marks a sum that is complete. A step holds all messages that need not wait for
    each other, so a rank may have several; a round (steps.count_rounds) holds one of each rank.
    """
    size, found = seen.size, steps(seen.run.ledger)
    columns: list[list[list[list[int]]]] = [[[numbers] for numbers in seen.inputs]]
    arrows: list[tuple[int, int, int, int]] = []  # column, source, target, line within the row
    carried = contents(seen)
    for step in found:
        column: list[list[list[int]]] = [[] for _ in range(size)]
        for message in step:
            row = column[message.target]
            arrows.append((len(columns), message.source, message.target, len(row)))
            row.append(carried[id(message.send)])
        columns.append(column)
    columns.append([[result] if result is not None else [] for result in seen.results])

    lines = [max(len(column[rank]) for column in columns) for rank in range(size)]
    tops = [sum(lines[:rank]) * 1.0 + 0.9 * rank for rank in range(size)]
    widths = [max((len(m) for row in column for m in row), default=1) * BOX for column in columns]
    gap = 1.15
    lefts = [sum(widths[:i]) + gap * i for i in range(len(columns))]
    height = tops[-1] + lines[-1]
    figure, axes = canvas(0.9 + 0.45 * (lefts[-1] + widths[-1]), 0.7 + 0.3 * height)

    def middle(rank: int) -> float:
        return -(tops[rank] + lines[rank] / 2)

    def place(rank: int, number: int, count: int) -> float:  # of line `number` among `count`
        return middle(rank) + (count - 1) / 2 - number

    for left, column in zip(lefts, columns):
        for rank, row in enumerate(column):
            for number, message in enumerate(row):
                y = place(rank, number, len(row))
                for index, value in enumerate(message):
                    box(axes, left + index * BOX, y, value, size)
    for column, source, target, number in arrows:
        y = place(target, number, len(columns[column][target]))
        before = lefts[column] - gap + 0.1
        style = dict(arrowstyle="-|>", color="#888888", lw=0.9, shrinkA=0, shrinkB=1)
        axes.annotate("", (lefts[column], y), (before, middle(source)), arrowprops=style)
    names = ["input", *(f"step {i + 1}" for i in range(len(found))), "result"]
    for left, width, name in zip(lefts, widths, names):
        axes.text(left + width / 2, 0.35, name, ha="center", fontsize=9, color=INK)
    for rank in range(size):
        axes.text(-0.35, middle(rank), f"rank {rank}", ha="right", va="center", fontsize=9)
    axes.set_xlim(-1.7, lefts[-1] + widths[-1] + 0.1)
    axes.set_ylim(-height - 0.15, 1.0)
    axes.axis("off")
    if title:
        axes.set_title(title, fontsize=10)
    count = "1 step" if len(found) == 1 else f"{len(found)} steps"
    return Picture(figure, f"{title or 'messages'}: {len(arrows)} in {count}")


def contents(seen: Watched) -> dict[int, list[int]]:
    """What each send of the ledger carried."""
    sends: list[list] = [[] for _ in range(seen.size)]
    for comm in seen.run.ledger.leaves():
        if comm.op == "send":
            sends[comm.rank].append(comm)
    return {
        id(comm): numbers
        for own, carried in zip(sends, seen.carried)
        for comm, numbers in zip(own, carried)
    }


def box(axes, left: float, y: float, value: int, size: int) -> None:
    found = read(value, size)
    chunk, ranks = next(iter(found.items())) if len(found) == 1 else (None, [])
    complete = size > 1 and ranks == list(range(size))  # each term once
    face = "#ffffff" if chunk is None else CHUNK_COLORS[chunk]
    edge, width = (INK, 1.6) if complete else ("#888888", 0.6)
    axes.add_patch(
        Rectangle((left, y - 0.4), BOX - 0.06, 0.8, facecolor=face, edgecolor=edge, linewidth=width)
    )
    # (Plain text: matplotlib takes ten times as long to set a formula.)
    text = "?" if chunk is None else "abcd"[chunk] + "".join("₀₁₂₃"[rank] for rank in ranks)
    axes.text(left + (BOX - 0.06) / 2, y, text, ha="center", va="center", fontsize=9)


# -- links ----------------------------------------------------------------------------------------


def link_fit(sizes: list[int], seconds: list[float], link, title: str = "") -> Picture:
    """Times of messages and what `link` says of them; below, the ratio of the two."""
    figure = Figure(figsize=(7, 4.4), dpi=110, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.2])
    said = [link.seconds(size) for size in sizes]
    between = [min(sizes) * (max(sizes) / min(sizes)) ** (k / 99) for k in range(100)]
    label = "latency + bytes / bandwidth"
    above.loglog(between, [link.seconds(size) for size in between], color="#de2d26", label=label)
    above.loglog(sizes, seconds, "o", color="#2b8cbe", label="measured")
    half = link.latency * link.bandwidth
    above.axvline(half, color="#999999", linestyle=":", linewidth=1)
    above.text(half, min(said), " half is latency", fontsize=8, color="#777777", va="bottom")
    above.set_ylabel("seconds")
    above.legend(frameon=False, fontsize=8)
    above.set_title(title, fontsize=10)
    ratios = [measured / line for measured, line in zip(seconds, said)]
    below.axhline(1, color="#de2d26", linewidth=1.2)
    below.plot(sizes, ratios, "o", color="#2b8cbe")
    below.set_ylim(0, max(2, 1.15 * max(ratios)))
    below.set_ylabel("measured / line")
    below.set_xlabel("bytes in a message")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    worst = max(ratios, key=lambda ratio: max(ratio, 1 / ratio))
    return Picture(figure, f"{len(sizes)} sizes and a line; the worst ratio is {worst:.2f}")


def flights(runs: dict[str, list], size: int, unit: float = 1.0, name: str = "rounds") -> Picture:
    """Space and time, one panel a run: each message of play_messages is a line from its sender
    and start to its receiver and end, as thick as it has bytes."""
    figure = Figure(figsize=(9.2, 0.9 + 0.42 * size), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    most = max(flight.nbytes for run in runs.values() for flight in run)
    for axes, (label, run) in zip(panels, runs.items()):
        for flight in run:
            times = [flight.start / unit, flight.end / unit]
            width = 0.8 + 3.2 * flight.nbytes / most
            axes.plot(times, [flight.source, flight.target], color="#2b8cbe", linewidth=width)
        last = max(flight.end for flight in run) / unit
        axes.set_xlim(0, last)
        if last <= 16:
            axes.set_xticks(range(int(last) + 1))
        axes.grid(axis="x", color="#e6e6e6")
        axes.set_title(label, fontsize=10)
        axes.set_xlabel(name)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(size), [f"rank {rank}" for rank in range(size)])
    panels[0].invert_yaxis()
    return Picture(
        figure, "; ".join(f"{label}: {len(run)} messages" for label, run in runs.items())
    )


# -- pipelines ------------------------------------------------------------------------------------

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


RANK_COLORS = [  # the first four still differ when paled, as `scores` does
    "#08519c",
    "#d95f02",
    "#31a354",
    "#756bb1",
    "#6baed6",
    "#de2d26",
    "#999999",
    "#333333",
]


# -- rank grids -----------------------------------------------------------------------------------

GROUP_COLORS = [*CHUNK_COLORS, "#fb9a99", "#ffff99", "#80cdc1", "#cab2d6"]


def rank_grid(grid, *axes, ranks_per_node: int = 0) -> Picture:
    """Who is in one group with whom: a panel an axis, one colour a group.

    grid: a mesh.Grid. axes: names, or tuples of names for a product; all axes of more than one
    rank unless given. A row is a place on the outermost of them. ranks_per_node: frame the nodes.
    """
    sizes = {name: size for name, size in (grid.axes | grid.experts).items() if size > 1}
    names = [(a,) if isinstance(a, str) else a for a in axes or sizes]
    outermost = next((size for name, size in grid.axes.items() if size > 1), 1)
    columns = grid.size // outermost if outermost < grid.size else grid.size
    rows = grid.size // columns
    if ranks_per_node and columns % ranks_per_node and ranks_per_node % columns:
        raise ValueError(
            f"ranks_per_node={ranks_per_node} does not fit rows of {columns} ranks: give a divisor "
            "or a multiple of that"
        )
    across = min(len(names), max(1, 24 // columns))
    down = -(-len(names) // across)
    width, height = 0.4 + across * (0.5 + 0.36 * columns), down * (0.5 + 0.36 * rows)
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for panel in panels:
        panel.axis("off")
    for panel, together in zip(panels, names):
        for number, ranks in enumerate(grid.groups(*together)):
            color = GROUP_COLORS[number % len(GROUP_COLORS)]
            for rank in ranks:
                row, column = divmod(rank, columns)
                panel.add_patch(Rectangle((column + 0.04, row + 0.04), 0.92, 0.92, color=color))
                panel.text(column + 0.5, row + 0.5, str(rank), ha="center", va="center", fontsize=8)
        for first in range(0, grid.size, ranks_per_node) if ranks_per_node else ():
            row, column = divmod(first, columns)
            size = min(ranks_per_node, columns), max(1, ranks_per_node // columns)
            panel.add_patch(Rectangle((column, row), *size, fill=False, ec=INK, lw=1.3))
        panel.set_xlim(-0.05, columns + 0.05)
        panel.set_ylim(rows + 0.05, -0.05)
        panel.set_aspect("equal")
        panel.set_title("*".join(together), fontsize=10)
    said = "; ".join(
        f"{'*'.join(together)}: " + ", ".join(str(ranks) for ranks in grid.groups(*together))
        for together in names
    )
    return Picture(figure, f"{grid.size} ranks. Groups of {said}")


# -- replays --------------------------------------------------------------------------------------

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


# -- a sequence cut over ranks --------------------------------------------------------------------


def scores(placements: dict[str, list[list[int]]]) -> Picture:
    """Who computes which score under a causal mask: a panel a placement, a colour a rank.

    placements: for each name a table of positions [cp, S/cp], row r those of rank r's tokens.
    """
    figure = Figure(figsize=(3.4 * len(placements), 3.9), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(placements), squeeze=False)[0]
    said = []
    for axes, (name, table) in zip(panels, placements.items()):
        owner = {int(position): rank for rank, row in enumerate(table) for position in row}
        length, counts = len(owner), [0] * len(table)
        image = [[(1.0, 1.0, 1.0)] * length for _ in range(length)]
        for query in range(length):
            rank = owner[query]
            counts[rank] += query + 1
            color = to_rgb(RANK_COLORS[rank % len(RANK_COLORS)])
            for key in range(query + 1):  # paler where the key has to come from another rank
                pale = 0.0 if owner[key] == rank else 0.45
                image[query][key] = tuple(c + (1 - c) * pale for c in color)
        axes.imshow(image, interpolation="nearest")
        axes.set_xlabel("key")
        axes.set_ylabel("query")
        each = ", ".join(map(str, counts))
        axes.set_title(f"{name}\nscores of a rank: {each}", fontsize=9)
        said.append(f"{name}: {each}")
    names = [Patch(color=RANK_COLORS[r], label=f"rank {r}") for r in range(len(table))]
    figure.legend(handles=names, loc="outside lower center", ncols=8, frameon=False, fontsize=8)
    return Picture(figure, f"scores that each rank computes, {'; '.join(said)}")


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
