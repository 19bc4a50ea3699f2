"""Who has which block of a server's memory, step by step, and how full each one is."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mini_dist.serving import Memory, Request, ServerStep, replayed

from .picture import INK, RANK_COLORS, Picture

EMPTY, SHARED = "#f2f2f2", "#333333"
SEQUENCE_COLORS = [*RANK_COLORS[:6], "#8c6d31", "#e377c2", "#17becf", "#bcbd22", "#ce6dbd"]


def blocks(
    runs: dict[str, Iterable[ServerStep]], memory: Memory, requests: Iterable[Request]
) -> Picture:
    """A panel a run: a row a block, a column a step. A block has the colour of the sequence that
    has it, paler where it is not full; dark where several have it. memory: its sizes are read."""
    runs = {name: list(steps) for name, steps in runs.items()}
    names = [name for request in requests for name in request.sequences]
    colors = {name: SEQUENCE_COLORS[i % len(SEQUENCE_COLORS)] for i, name in enumerate(names)}
    longest = max(map(len, runs.values()))
    height = 0.9 + sum(0.35 + 0.085 * memory.num_blocks for _ in runs)
    figure = Figure(figsize=(9.2, height), dpi=110, layout="constrained")
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    shares = {}
    for axes, (label, steps) in zip(panels, runs.items()):
        image = [[to_rgb(EMPTY)] * longest for _ in range(memory.num_blocks)]
        empty = []
        for column, (_, book) in enumerate(replayed(steps, memory)):
            empty += [book.unused_share] if book.used else []
            for block, color, share in of_blocks(book, colors):
                image[block][column] = paler(color, 0.25 + 0.75 * share)
        share = sum(empty) / len(empty)
        shares[label] = f"{len(steps)} steps, {share:.0%} of what is held is empty"
        axes.imshow(image, aspect="auto", interpolation="nearest", origin="lower")
        axes.set_title(f"{label}: {shares[label]}", fontsize=9, loc="left")
        axes.set_ylabel("block", fontsize=8)
        axes.tick_params(labelsize=8)
    panels[-1].set_xlabel("step")
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    handles.append(Patch(color=SHARED, label="several"))
    columns = min(len(handles), 13)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8,
                  frameon=False, labelcolor=INK)  # fmt: skip
    return Picture(figure, "; ".join(f"{label}: {said}" for label, said in shares.items()))


def of_blocks(book: Memory, colors: dict[str, str]):
    """(block, colour, share of its places that hold a token) of each block in use."""
    found: dict[int, tuple[str, float]] = {}
    for name, table in book.tables.items():
        for i, block in enumerate(table):
            here = min(max(book.written[name] - i * book.block_size, 0), book.block_size)
            color = SHARED if book.users[block] > 1 else colors[name]
            share = max(here / book.block_size, found.get(block, ("", 0.0))[1])
            found[block] = color, share
    return [(block, *rest) for block, rest in found.items()]


def paler(color: str, share: float) -> tuple[float, ...]:
    return tuple(1 - share * (1 - each) for each in to_rgb(color))
