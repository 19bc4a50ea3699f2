"""The ring: every rank sends to the next rank and receives from the previous one.

    rank 0 -> rank 1 -> rank 2 -> ... -> rank n-1 -> rank 0

There is no central rank, every link carries the same, and no algorithm can move fewer bytes
(Patarasuk and Yuan 2009). Legend: n ranks, N bytes.
"""

from __future__ import annotations

import torch

from .messages import check_rows, collective, exchange, reduction, split_sizes


@collective
def ring_reduce_scatter(x: torch.Tensor, group, op: str = "sum") -> torch.Tensor:
    """Cut x along dim 0 into n chunks; rank r returns chunk r, reduced over all ranks.

    x: [L, ...] on every rank -> [L/n, ...]; the first L % n chunks have one row more.
    Cost: n-1 rounds; a rank sends every chunk but its own, (n-1)/n N bytes.
    """
    check_rows(x)
    rank, size, add = group.rank(), group.size(), reduction(op, x)
    after, before = (rank + 1) % size, (rank - 1) % size
    chunks = x.tensor_split(size)
    # Chunk c starts at rank c+1 and collects one term per rank on its way to rank c.
    # (Indices below 0 wrap around, as the ring does.)
    partial = chunks[rank - 1]
    for step in range(2, size + 1):
        mine = chunks[rank - step]
        incoming = exchange(partial, after, before, group, like=mine)
        partial = add(incoming, mine, out=incoming)
    return partial if size > 1 else x.clone()


@collective
def ring_all_gather(x: torch.Tensor, group, sizes: list[int] | None = None) -> torch.Tensor:
    """Return all ranks' x on every rank, concatenated along dim 0 in rank order.

    x: [L, ...] -> [n L, ...]; if L differs between ranks, all pass the same `sizes`, a list of
    every rank's L. Cost: n-1 rounds; a rank sends every part but its successor's.
    """
    rank, size = group.rank(), group.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    sizes = check_sizes(x, sizes, group)
    whole = x.new_empty(sum(sizes), *x.shape[1:])
    parts = whole.split(sizes)
    parts[rank].copy_(x)
    for step in range(1, size):  # pass on what arrived last, receive the part before it
        exchange(parts[rank - step + 1], after, before, group, out=parts[rank - step])
    return whole


@collective
def ring_all_reduce(x: torch.Tensor, group, op: str = "sum") -> torch.Tensor:
    """Reduce x over the group in 2(n-1) rounds: first scatter the sums, then gather them.

    x: any shape, any length -> the same shape, bit-identical on all ranks. A rank sends
    2(n-1)/n N bytes, the least that any algorithm can.
    """
    flat = x.flatten()
    chunk = ring_reduce_scatter(flat, group, op)
    sizes = split_sizes(len(flat), group.size())
    return ring_all_gather(chunk, group, sizes).view(x.shape)


def check_sizes(x: torch.Tensor, sizes: list[int] | None, group) -> list[int]:
    """Return the rows of every rank's part; raise ValueError if they are impossible."""
    rank, size = group.rank(), group.size()
    check_rows(x)
    if sizes is None:
        return [len(x)] * size
    if len(sizes) != size or sizes[rank] != len(x):
        raise ValueError(
            f"sizes={sizes} does not fit {size} ranks of which rank {rank} has {len(x)} rows: "
            f"give the number of rows of each rank"
        )
    return sizes
