"""A torus of rows and columns: two links per rank and axis, all busy at once.

    first half of x:   reduce-scatter along the row, all-reduce along the column, all-gather, row
    second half:       the same with rows and columns exchanged, at the same time

In a ring of all n ranks each rank uses only one of its links. Here each half uses one axis at a
time while the other half uses the other axis, so a rank sends over both. On a torus of a x a no
algorithm can do better than keep both busy (Mikami et al. 2018, section 3.2, has one half; TPUs use
all axes: *How to Scale Your Model*, "Sharding"). Legend: n = a b ranks, N bytes; a rank sends
2(n-1)/n N in all, half of it along its row and half along its column if a = b.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .messages import Members, collective, reduction, start, wait


@collective
def torus_all_reduce(x: torch.Tensor, group, columns: int, op: str = "sum") -> torch.Tensor:
    """Reduce x over the group along both axes of a torus at once; bit-identical on all ranks.

    Rank r is in row r // columns and column r % columns. x: any shape -> the same.
    Raises ValueError if `columns` does not divide the number of ranks.
    """
    rank, size, add = group.rank(), group.size(), reduction(op, x)
    if columns < 1 or size % columns:
        raise ValueError(f"columns={columns} does not divide the {size} ranks of the group")
    row = Members(group, range(rank - rank % columns, rank - rank % columns + columns))
    column = Members(group, range(rank % columns, size, columns))
    halves = [half.clone() for half in x.flatten().tensor_split(2)]
    ways = [two_axes(halves[0], row, column, add), two_axes(halves[1], column, row, add)]
    while ways:  # a round: one message of each unfinished half
        begun = [(way, next(way, None)) for way in ways]
        for _, handles in begun:
            wait(handles or [])
        ways = [way for way, handles in begun if handles is not None]
    return torch.cat(halves).view(x.shape)


def two_axes(x: torch.Tensor, first, second, add) -> Iterator[list]:
    """All-reduce x in place over both lines; yield the handles of each round's messages."""
    chunks = x.tensor_split(first.size())
    yield from scatter_rounds(chunks, first, add)
    own = chunks[first.rank()].tensor_split(second.size())
    yield from scatter_rounds(own, second, add)
    yield from gather_rounds(own, second)
    yield from gather_rounds(chunks, first)


def scatter_rounds(chunks, line, add) -> Iterator[list]:
    """Run the ring's reduce-scatter in place: chunk r on rank r gets the sum."""
    rank, size = line.rank(), line.size()
    for step in range(2, size + 1):
        mine = chunks[rank - step]
        incoming = torch.empty_like(mine)
        sends = [(chunks[rank - step + 1], (rank + 1) % size)]
        yield start(line, [(incoming, (rank - 1) % size)], sends)
        add(incoming, mine, out=mine)


def gather_rounds(chunks, line) -> Iterator[list]:
    """Run the ring's all-gather in place."""
    rank, size = line.rank(), line.size()
    for step in range(1, size):
        receives = [(chunks[rank - step], (rank - 1) % size)]
        yield start(line, receives, [(chunks[rank - step + 1], (rank + 1) % size)])
