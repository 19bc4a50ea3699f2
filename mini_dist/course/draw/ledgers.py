"""A run as its ledger tells it: who did what when, who sent how much to whom."""

from __future__ import annotations

from matplotlib.patches import Patch

from mini_dist.ranks.ledger import Ledger

from .picture import INK, PHASE_COLORS, RANK_COLORS, Picture, canvas

COMM_COLORS = ["#756bb1", "#de2d26", "#2b8cbe", "#31a354", "#b15928", "#e7298a"]


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


def curve(lines: dict[str, list[float] | tuple], x: str, y: str) -> Picture:
    """One line per entry over its index, as a loss over steps; or of a pair, the second of it over
    the first, as a loss over seconds."""
    figure, axes = canvas(6, 3)
    for label, values in lines.items():
        pair = values if isinstance(values, tuple) else (range(len(values)), values)
        axes.plot(*pair, label=label, linewidth=1.6)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(frameon=False, fontsize=8)
    return Picture(figure, f"{y} over {x}: " + "; ".join(lines))


def staleness(races: dict[str, tuple[list[float], list]], until: float) -> Picture:
    """The staleness of each update over the moment when it was made, in seconds, a panel a race.

    races: {label: (moments, updates)}, updates with a `worker` and a `staleness`.
    """
    figure, first = canvas(6, 1.4 * len(races))
    first.remove()
    panels = figure.subplots(len(races), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (label, (moments, updates)) in zip(panels, races.items()):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(label, fontsize=9, loc="left")
        for worker in sorted({update.worker for update in updates}):
            mine = [(t, u.staleness) for t, u in zip(moments, updates) if u.worker == worker]
            color = RANK_COLORS[worker % len(RANK_COLORS)]
            axes.plot(*zip(*mine), ".", color=color, label=f"worker {worker}")
    panels[0].set_xlim(0, until)
    panels[-1].set_xlabel("seconds")
    panels[len(races) // 2].set_ylabel("staleness")
    panels[0].legend(frameon=False, fontsize=8, ncols=4, loc="upper right")
    return Picture(figure, "staleness of each update: " + "; ".join(races))


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


def scatter(points: dict[str, tuple[float, float]], x: str, y: str) -> Picture:
    """A named point each, over powers of ten: what one pays and what one gets."""
    figure, axes = canvas(6, 3.4)
    for number, (name, (left, up)) in enumerate(points.items()):
        axes.scatter([left], [up], color=BAR_COLORS[number % len(BAR_COLORS)])
        axes.annotate(name, (left, up), (4, 3), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.margins(0.15)
    return Picture(figure, f"{y} over {x}: " + "; ".join(points))


BAR_COLORS = ["#d95f02", "#7570b3", "#1b9e77", "#999999"]
