"""Draw a collective message by message, and how long messages take."""

from __future__ import annotations

from math import log10

from mini_dist.ranks.ledger.steps import steps
from mini_dist.ranks.watch import Watched, read

from .palette import CHUNK_COLORS
from .svg import FAINT, INK, WIDEST, Drawing, Panel, around, numbered, powers, round_places

BOX = 0.84  # width of a number; 1 is the height of a line


def collective(seen: Watched, title: str = "") -> Drawing:
    """Draw every message of a watched collective, step by step, and each rank's result.

    A box is a number. Its letter and color name the chunk, its small digits the ranks whose terms
    it contains. A strong edge marks a complete sum. A step holds all messages that need not wait
    for each other, so a rank may send several; in a round (steps.count_rounds) at most one.
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

    def place(rank: int, number: int, count: int) -> float:  # y of line `number` among `count`
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
    return Drawing([panel], f"{title or 'messages'}: {len(arrows)} messages in {count}")


def contents(seen: Watched) -> dict[int, list[int]]:
    """Return the numbers that each send of the ledger carried, by the id of the send."""
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
    """Draw a number as a box of its chunk's color; an edge in ink marks a complete sum."""
    found = read(value, size)
    chunk, ranks = next(iter(found.items())) if len(found) == 1 else (None, [])
    complete = size > 1 and ranks == list(range(size))  # each term once
    face = "#ffffff" if chunk is None else CHUNK_COLORS[chunk]
    right, edge = left + BOX - 0.06, 0.05 if complete else 0.02
    panel.box(left, y - 0.4, right, y + 0.4, INK if complete else "#888888")
    panel.box(left + edge, y - 0.4 + edge, right - edge, y + 0.4 - edge, face)
    said = "?" if chunk is None else "abcd"[chunk] + "".join("₀₁₂₃"[rank] for rank in ranks)
    panel.words((left + right) / 2, y, said, "#000000", "middle")


def link_fit(sizes: list[int], seconds: list[float], link, title: str = "") -> Drawing:
    """Draw measured message times and the times that `link` predicts; below, their ratio."""
    said = [link.seconds(size) for size in sizes]
    xs = [log10(size) for size in sizes]
    x, y = around(xs), around(map(log10, [*seconds, *said]))
    line, dots = "#de2d26", "#2b8cbe"
    above = Panel(
        560, 280, x, y, title=title, ylabel="seconds", xticks=powers(*x), yticks=powers(*y),
        legend={"latency + bytes / bandwidth": line, "measured": dots},
    )  # fmt: skip
    between = [min(xs) + (max(xs) - min(xs)) * k / 99 for k in range(100)]
    above.line([(place, log10(link.seconds(10**place))) for place in between], line)
    half = log10(link.latency * link.bandwidth)
    if x[0] < half < x[1]:
        above.guide(x=half, dash="2 2", alpha=0.6)
        above.words(half, y[0], "half is latency", shift=(5, -10))
    ratios = [measured / fitted for measured, fitted in zip(seconds, said)]
    most = max(2, 1.15 * max(ratios))
    below = Panel(
        560, 150, x, (0, most), ylabel="measured / line", xlabel="bytes in a message",
        xticks=powers(*x), yticks=numbered(round_places(0, most, 4)),
    )  # fmt: skip
    below.guide(y=1, color=line, dash="")
    for place, measured, ratio in zip(xs, seconds, ratios):
        above.dot(place, log10(measured), dots)
        below.dot(place, ratio, dots)
    worst = max(ratios, key=lambda ratio: max(ratio, 1 / ratio))
    alt = f"{len(sizes)} sizes and a line; the worst ratio is {worst:.2f}"
    return Drawing([above, below], alt)


def flights(runs: dict[str, list], size: int, unit: float = 1.0, name: str = "rounds") -> Drawing:
    """Draw ranks over time, a panel per run: each message of play_messages is a line from its
    sender and start to its receiver and end, and its width grows with its bytes."""
    most = max(flight.nbytes for run in runs.values() for flight in run)
    panels = []
    for label, run in runs.items():
        last = max(flight.end for flight in run) / unit
        panel = Panel(
            max(WIDEST / len(runs), 230), 80 + 40 * size, (0, last), (size - 0.8, -0.2),
            title=label, xlabel=name, xticks=numbered(round_places(0, last)),
            yticks={rank: f"rank {rank}" for rank in range(size)},
        )  # fmt: skip
        for place in panel.xticks:
            panel.guide(x=place, width=1, dash="", alpha=FAINT)
        for flight in run:
            ends = [(flight.start / unit, flight.source), (flight.end / unit, flight.target)]
            panel.line(ends, "#2b8cbe", 0.8 + 3.2 * flight.nbytes / most)
        panels.append(panel)
    alt = "; ".join(f"{label}: {len(run)} messages" for label, run in runs.items())
    return Drawing(panels, alt)
