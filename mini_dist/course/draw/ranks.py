"""Draw what belongs to each rank: its groups in a mesh, its scores of a sharded sequence."""

from __future__ import annotations

from itertools import groupby

from .palette import CHUNK_COLORS, RANK_COLORS
from .svg import Drawing, Panel, numbered, round_places

GROUP_COLORS = [*CHUNK_COLORS, "#fb9a99", "#ffff99", "#80cdc1", "#cab2d6"]


def rank_grid(grid, *axes, ranks_per_node: int = 0) -> Drawing:
    """Draw which ranks share a group: one panel per axis, one color per group.

    grid: a mesh.Grid. axes: names, or tuples of names for a product; by default all axes longer
    than 1. A row is an index on the grid's outermost axis. ranks_per_node: frame the nodes.
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
    panels = []
    for together in names:
        panel = Panel(
            20 + 38 * columns, 34 + 38 * rows, (-0.05, columns + 0.05), (rows + 0.05, -0.05),
            title="*".join(together), sides="",
        )  # fmt: skip
        for number, ranks in enumerate(grid.groups(*together)):
            color = GROUP_COLORS[number % len(GROUP_COLORS)]
            for rank in ranks:
                row, column = divmod(rank, columns)
                panel.box(column + 0.04, row + 0.04, column + 0.96, row + 0.96, color)
        for rank in range(grid.size):
            row, column = divmod(rank, columns)
            panel.words(column + 0.5, row + 0.5, rank, "#000000", "middle")
        for first in range(0, grid.size, ranks_per_node) if ranks_per_node else ():
            row, column = divmod(first, columns)
            right = column + min(ranks_per_node, columns)
            low = row + max(1, ranks_per_node // columns)
            corners = [(column, row), (right, row), (right, low), (column, low), (column, row)]
            panel.line(corners, width=2)
        panels.append(panel)
    said = "; ".join(
        f"{'*'.join(together)}: " + ", ".join(str(ranks) for ranks in grid.groups(*together))
        for together in names
    )
    return Drawing(panels, f"{grid.size} ranks. Groups of {said}")


def scores(placements: dict[str, list[list[int]]]) -> Drawing:
    """Draw which rank computes each causal score: a panel per placement, a color per rank.

    placements: name -> a table of positions [cp, S/cp]; row r has the positions of rank r's tokens.
    """
    panels, said = [], []
    for name, table in placements.items():
        owner = {int(position): rank for rank, row in enumerate(table) for position in row}
        length, counts = len(owner), [0] * len(table)
        square = (-0.5, length - 0.5)
        panel = Panel(330, 350, square, square[::-1], xlabel="key", ylabel="query")
        panel.xticks = panel.yticks = numbered(round_places(0, length - 1, 4))
        for query in range(length):
            rank = owner[query]
            counts[rank] += query + 1
            color = RANK_COLORS[rank % len(RANK_COLORS)]
            # A score is paler if its key has to come from another rank.
            for is_own, keys in groupby(range(query + 1), lambda key: owner[key] == rank):  # noqa: B023
                first, *rest = keys
                ends = first - 0.5, first + 0.5 + len(rest)
                panel.box(ends[0], query - 0.5, ends[1], query + 0.5, color, 1 if is_own else 0.55)
        each = ", ".join(map(str, counts))
        panel.title = f"{name}; scores per rank: {each}"
        said.append(f"{name}: {each}")
        panels.append(panel)
    names = {f"rank {r}": RANK_COLORS[r % len(RANK_COLORS)] for r in range(len(table))}
    for panel in panels:
        panel.legend = names
    return Drawing(panels, f"scores that each rank computes, {'; '.join(said)}")
