"""What belongs to which rank: groups of a mesh, scores of a sequence that is cut."""

from __future__ import annotations

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from .picture import CHUNK_COLORS, INK, RANK_COLORS, Picture

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
