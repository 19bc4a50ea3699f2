"""A collective, message by message, and how long its messages take."""

from __future__ import annotations

from matplotlib.figure import Figure

from mini_dist.ranks.ledger.steps import steps
from mini_dist.ranks.watch import Watched, read

from .picture import CHUNK_COLORS, Picture
from .svg import INK, Drawing, Panel

BOX = 0.84  # width of a number; 1 is the height of a line


def collective(seen: Watched, title: str = "") -> Drawing:
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
    height, width = tops[-1] + lines[-1], lefts[-1] + widths[-1]
    size_of = 44 * (width + 1.8), 30 * (height + 1.15) + 17
    panel = Panel(*size_of, (-1.7, width + 0.1), (height + 0.15, -1.0), title=title, sides="")

    def middle(rank: int) -> float:
        return tops[rank] + lines[rank] / 2

    def place(rank: int, number: int, count: int) -> float:  # of line `number` among `count`
        return middle(rank) - (count - 1) / 2 + number

    for left, column in zip(lefts, columns):
        for rank, row in enumerate(column):
            for number, message in enumerate(row):
                y = place(rank, number, len(row))
                for index, value in enumerate(message):
                    box(panel, left + index * BOX, y, value, size)
    for column, source, target, number in arrows:
        y = place(target, number, len(columns[column][target]))
        before = lefts[column] - gap + 0.1
        panel.line([(before, middle(source)), (lefts[column], y)], "#888888", 1.2, head=True)
    names = ["input", *(f"step {i + 1}" for i in range(len(found))), "result"]
    for left, width, name in zip(lefts, widths, names):
        panel.words(left + width / 2, -0.5, name, anchor="middle")
    for rank in range(size):
        panel.words(-0.25, middle(rank), f"rank {rank}", anchor="end")
    count = "1 step" if len(found) == 1 else f"{len(found)} steps"
    return Drawing([panel], f"{title or 'messages'}: {len(arrows)} in {count}")


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


def box(panel: Panel, left: float, y: float, value: int, size: int) -> None:
    """Draw a number as a box of its chunk's color; the ink around it says that it is complete."""
    found = read(value, size)
    chunk, ranks = next(iter(found.items())) if len(found) == 1 else (None, [])
    complete = size > 1 and ranks == list(range(size))  # each term once
    face = "#ffffff" if chunk is None else CHUNK_COLORS[chunk]
    right, edge = left + BOX - 0.06, 0.05 if complete else 0.02
    panel.box(left, y - 0.4, right, y + 0.4, INK if complete else "#888888")
    panel.box(left + edge, y - 0.4 + edge, right - edge, y + 0.4 - edge, face)
    said = "?" if chunk is None else "abcd"[chunk] + "".join("₀₁₂₃"[rank] for rank in ranks)
    panel.words((left + right) / 2, y, said, "#000000", "middle")


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
