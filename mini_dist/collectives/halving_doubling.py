"""Recursive halving and doubling: partners at distances of powers of two, log2 n rounds.

Ranks talk in pairs, rank ^ distance. Halving: each pair splits its data in two, and each rank keeps
the sum of one half. Doubling: each pair combines its two blocks. Thakur, Rabenseifner and
Gropp 2005, section 4. Legend: n ranks, N bytes, m the largest power of two <= n.

Folding: if n is not a power of two, each of the n-m extra ranks (m, m+1, ...) first sends its data
to a partner (rank - m) and receives its result at the end. This costs two more rounds, and an
all-reduce moves 2 (n-m) N bytes more than on m ranks; for these n the ring moves fewer.
"""

from __future__ import annotations

import torch

from .messages import check_rows, collective, exchange, recv, reduction, send, split_sizes
from .ring import check_sizes


@collective
def recursive_halving_reduce_scatter(x: torch.Tensor, group, op: str = "sum") -> torch.Tensor:
    """Cut x along dim 0 into n chunks; rank r returns chunk r, reduced over all ranks.

    x: [L, ...] on every rank -> [L/n, ...]; the first L % n chunks have one row more.
    Cost: log2 n rounds and (n-1)/n N bytes per rank if n is a power of two.
    """
    check_rows(x)
    rank, size, add = group.rank(), group.size(), reduction(op, x)
    m, rows = power_of_two(size), split_sizes(len(x), size)
    if rank >= m:
        return exchange(x, rank - m, rank - m, group, like=x[: rows[rank]])
    if rank + m < size:
        x = add(x, recv(x, rank + m, group))
    if m < size:  # combine the chunks of a rank and of the extra rank that it represents
        chunks = x.tensor_split(size)
        x = torch.cat([chunk for place in range(m) for chunk in chunks[place::m]])
    x = halve(x, [sum(rows[place::m]) for place in range(m)], group, add)
    if rank + m < size:
        x, theirs = x.split([rows[rank], rows[rank + m]])
        send(theirs, rank + m, group)
    return x.clone()


@collective
def recursive_doubling_all_gather(
    x: torch.Tensor, group, sizes: list[int] | None = None
) -> torch.Tensor:
    """Return all ranks' x on every rank, concatenated along dim 0 in rank order.

    x: [L, ...] -> [n L, ...]; if L differs between ranks, all pass the same `sizes`, a list of
    every rank's L. Cost: log2 n rounds and (n-1) L rows per rank if n is a power of two.
    """
    rank, size = group.rank(), group.size()
    sizes = check_sizes(x, sizes, group)
    m = power_of_two(size)
    if rank >= m:
        whole = x.new_empty(sum(sizes), *x.shape[1:])
        return exchange(x, rank - m, rank - m, group, out=whole)
    if rank + m < size:
        theirs = x.new_empty(sizes[rank + m], *x.shape[1:])
        x = torch.cat([x, recv(theirs, rank + m, group)])
    x = double(x, [sum(sizes[place::m]) for place in range(m)], group)
    if m < size:  # back into rank order
        order = [chunk for place in range(m) for chunk in range(place, size, m)]
        parts = dict(zip(order, x.split([sizes[chunk] for chunk in order])))
        x = torch.cat([parts[chunk] for chunk in range(size)])
    if rank + m < size:
        send(x, rank + m, group)
    return x


@collective
def halving_doubling_all_reduce(x: torch.Tensor, group, op: str = "sum") -> torch.Tensor:
    """Reduce x over the group: halve among m ranks, then double; bit-identical on all ranks.

    x: any shape -> the same. It sends as few bytes as the ring, in 2 log2 n rounds instead of
    2(n-1), if n is a power of two; otherwise see folding above.
    """
    rank, size, add = group.rank(), group.size(), reduction(op, x)
    m, flat = power_of_two(size), x.flatten()
    if rank >= m:
        return exchange(flat, rank - m, rank - m, group).view(x.shape)
    if rank + m < size:
        flat = add(flat, recv(flat, rank + m, group))
    rows = split_sizes(len(flat), m)
    flat = double(halve(flat, rows, group, add), rows, group)
    if rank + m < size:
        send(flat, rank + m, group)
    return flat.view(x.shape)


@collective
def doubling_all_reduce(x: torch.Tensor, group, op: str = "sum") -> torch.Tensor:
    """Reduce x over the group in log2 n rounds: exchange the whole sum with rank ^ 1, ^ 2, ^ 4, ...

    x: any shape -> the same, bit-identical on all ranks (a pair adds the same two terms, and a + b
    is b + a). Half the rounds of halving-doubling, but log2 n N bytes per rank: for small tensors.
    """
    rank, size, add = group.rank(), group.size(), reduction(op, x)
    m = power_of_two(size)
    if rank >= m:
        return exchange(x, rank - m, rank - m, group)
    total = add(x, recv(x, rank + m, group)) if rank + m < size else x.clone()
    distance = 1
    while distance < m:
        total = add(total, exchange(total, rank ^ distance, rank ^ distance, group))
        distance *= 2
    if rank + m < size:
        send(total, rank + m, group)
    return total


def halve(x: torch.Tensor, rows: list[int], group, add) -> torch.Tensor:
    """Halve on ranks 0 ... m-1: x has m blocks with these rows; each rank returns its block's
    sum."""
    rank = group.rank()
    while len(rows) > 1:
        half = len(rows) // 2
        lower, upper = x.split([sum(rows[:half]), sum(rows[half:])])
        if rank & half:  # in the upper half of the ranks that still communicate
            keep, give, rows = upper, lower, rows[half:]
        else:
            keep, give, rows = lower, upper, rows[:half]
        x = add(keep, exchange(give, rank ^ half, rank ^ half, group, like=keep))
    return x


def double(block: torch.Tensor, rows: list[int], group) -> torch.Tensor:
    """Invert halving: each of m ranks holds a block with these rows; all return all blocks."""
    rank = group.rank()
    whole = block.new_empty(sum(rows), *block.shape[1:])
    blocks = whole.split(rows)
    blocks[rank].copy_(block)
    distance = 1
    while distance < len(rows):
        first = rank & -distance  # first of the `distance` blocks that this rank has now
        theirs = first ^ distance
        exchange(
            span(whole, rows, first, distance),
            *(rank ^ distance, rank ^ distance, group),
            out=span(whole, rows, theirs, distance),
        )
        distance *= 2
    return whole


def span(whole: torch.Tensor, rows: list[int], first: int, count: int) -> torch.Tensor:
    """Return `count` neighboring blocks of `whole`, starting with block `first`."""
    return whole.narrow(0, sum(rows[:first]), sum(rows[first : first + count]))


def power_of_two(size: int) -> int:
    """Return the largest power of two that is not above `size`."""
    return 1 << (size.bit_length() - 1)
