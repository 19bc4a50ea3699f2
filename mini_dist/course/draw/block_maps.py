"""Draw which request holds which block of a server's memory, and how full the block is."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from mini_dist.serving import Memory, Request, ServerStep, replayed

from .palette import RANK_COLORS
from .svg import FAINT, INK, WIDEST, Drawing, Panel, numbered, round_places

SHARED = "#737373"
SEQUENCE_COLORS = [*RANK_COLORS[:6], "#8c6d31", "#e377c2", "#17becf", "#bcbd22", "#ce6dbd"]


def blocks(
    runs: dict[str, Iterable[ServerStep]], memory: Memory, requests: Iterable[Request]
) -> Drawing:
    """Draw a panel per run, with a row per block and a column per step.

    A block has the color of the sequence that holds it, paler where the block is not full, and gray
    where several sequences share it. memory: only its sizes are read.
    """
    runs = {name: list(steps) for name, steps in runs.items()}
    names = [name for request in requests for name in request.sequences]
    colors = {name: SEQUENCE_COLORS[i % len(SEQUENCE_COLORS)] for i, name in enumerate(names)}
    longest = max(map(len, runs.values()))
    panels, said = [], []
    for label, steps in runs.items():
        rows: list[list] = [[None] * longest for _ in range(memory.num_blocks)]
        empty = []
        for column, (_, book) in enumerate(replayed(steps, memory)):
            empty += [book.unused_share] if book.used else []
            for block, color, share in of_blocks(book, colors):
                rows[block][column] = (color, 0.25 + 0.75 * share)
        unused = sum(empty) / len(empty)
        said.append(f"{label}: {len(steps)} steps, {unused:.0%} of what is held is empty")
        panel = Panel(
            WIDEST, 70 + 9 * memory.num_blocks, (0, longest), (0, memory.num_blocks),
            title=said[-1], ylabel="block", xticks=numbered(round_places(0, longest)), sides="",
        )  # fmt: skip
        panel.box(0, 0, longest, memory.num_blocks, INK, FAINT / 2)
        for block, row in enumerate(rows):
            for cell, columns in groupby(range(longest), row.__getitem__):
                first, *rest = columns
                if cell:
                    panel.box(first, block, first + 1 + len(rest), block + 1, *cell)
        panels.append(panel)
    panels[0].legend = {**colors, "several": SHARED}
    panels[-1].xlabel = "step"
    return Drawing(panels, "; ".join(said))


def of_blocks(book: Memory, colors: dict[str, str]):
    """Return (block, color, share of its slots that hold a token) for each block in use."""
    found: dict[int, tuple[str, float]] = {}
    for name, table in book.tables.items():
        for i, block in enumerate(table):
            here = min(max(book.written[name] - i * book.block_size, 0), book.block_size)
            color = SHARED if book.users[block] > 1 else colors[name]
            share = max(here / book.block_size, found.get(block, ("", 0.0))[1])
            found[block] = color, share
    return [(block, *rest) for block, rest in found.items()]
