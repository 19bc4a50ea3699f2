"""One root and all others: broadcast, reduce, gather, scatter, as a star or as a binomial tree.

In a star the root talks to each rank itself: n-1 messages through its one link. In a tree every
rank that has the data passes it on, so log2 n rounds are enough. An all-reduce can also be several
stars at once, each for a part of the tensor. Legend: n ranks, N bytes.
"""

from __future__ import annotations

import functools
from collections import deque

import torch

from .messages import check_rows, collective, empty, exchange, recv, reduction, send, start, wait
from .ring import check_sizes

LARGE_TERM = 64 << 10  # bytes; above, memory counts more than waiting for a buffer


@collective
def star_broadcast(x: torch.Tensor, root: int, group) -> torch.Tensor:
    """Return the root's x on every rank: [...], the same shape and dtype on all ranks.

    Only the root's values of x are read. The root sends (n-1) N bytes.
    """
    check_root(root, group)
    if group.rank() != root:
        return recv(x, root, group)
    x = x.contiguous()
    wait(start(group, sends=[(x, peer) for peer in range(group.size()) if peer != root]))
    return x.clone()


@collective
def tree_broadcast(x: torch.Tensor, root: int, group) -> torch.Tensor:
    """Return the root's x on every rank in ceil(log2 n) rounds; each doubles the ranks that have
    it.

    A rank sends at most ceil(log2 n) N bytes; in total they send (n-1) N, as in the star.
    """
    check_root(root, group)
    size = group.size()
    place = (group.rank() - root) % size  # index relative to the root
    x, have = x.clone(), 1  # indices 0 ... have-1 have the data
    while have < size:
        if place < have and place + have < size:
            send(x, (root + place + have) % size, group)
        elif have <= place < 2 * have:
            x = recv(x, (root + place - have) % size, group)
        have *= 2
    return x


@collective
def star_reduce(x: torch.Tensor, root: int, group, op: str = "sum") -> torch.Tensor | None:
    """Return x reduced over all ranks, in rank order, on the root, and None on the others.

    Every other rank sends N bytes, and the root receives (n-1) N.
    """
    check_root(root, group)
    add = reduction(op, x)
    if group.rank() != root:
        return send(x, root, group)
    terms = [x if rank == root else empty(x) for rank in range(group.size())]
    receive_all(terms, root, group)
    return functools.reduce(add, terms[1:], terms[0].clone())


@collective
def tree_reduce(x: torch.Tensor, root: int, group, op: str = "sum") -> torch.Tensor | None:
    """Return x reduced over all ranks, in ceil(log2 n) rounds, on the root; None on the others.

    This reverses the broadcast: in each round, half of the ranks that still hold a term send it.
    """
    check_root(root, group)
    size, add = group.size(), reduction(op, x)
    place = (group.rank() - root) % size
    x = x.clone()
    half = 1 << max(size - 1, 0).bit_length()  # a power of two, not below n
    while half > 1:
        half //= 2
        if place >= half:
            return send(x, (root + place - half) % size, group)
        if place + half < size:
            x = add(x, recv(x, (root + place + half) % size, group))
    return x


@collective
def gather(x: torch.Tensor, root: int, group, sizes: list[int] | None = None):
    """Return all ranks' x on the root, concatenated along dim 0 in rank order; None on the others.

    x: [L, ...] -> [n L, ...] on the root. If L differs between ranks, pass `sizes`, a list of
    every rank's L. Every other rank sends its part once.
    """
    check_root(root, group)
    sizes = check_sizes(x, sizes, group)
    if group.rank() != root:
        return send(x, root, group)
    parts = [x.new_empty(rows, *x.shape[1:]) for rows in sizes]
    parts[root] = x
    receive_all(parts, root, group)
    return torch.cat(parts)


@collective
def scatter(x: torch.Tensor, root: int, group) -> torch.Tensor:
    """Cut the root's x along dim 0 into n chunks; rank r returns chunk r.

    x: [L, ...], of the same shape and dtype on all ranks -> [L/n, ...]; the first L % n chunks have
    one more row. Only the root's values are read.
    """
    check_root(root, group)
    check_rows(x)
    rank, chunks = group.rank(), x.tensor_split(group.size())
    if rank != root:
        return recv(chunks[rank], root, group)
    parcels = [(chunk.contiguous(), peer) for peer, chunk in enumerate(chunks) if peer != root]
    wait(start(group, sends=parcels))
    return chunks[root].clone()


@collective
def star_all_reduce(x: torch.Tensor, group, op: str = "sum") -> torch.Tensor:
    """Gather on rank 0, sum in rank order, broadcast: few messages, but all through one rank.

    Best for small tensors; rank 0 sends and receives (n-1) N bytes, every other rank N.
    """
    add = reduction(op, x)
    if group.rank() != 0:  # posting the receive before the send saves a round
        return exchange(x, 0, 0, group)
    peers = range(1, group.size())
    if not peers:
        return x.clone()
    at_once = 2 if x.nbytes > LARGE_TERM else len(peers)
    total = add_up(x, peers, [empty(x) for _ in peers[:at_once]], group, add)
    wait(start(group, sends=[(total, peer) for peer in peers]))
    return total


@collective
def tree_all_reduce(x: torch.Tensor, group, op: str = "sum") -> torch.Tensor:
    """Reduce up a binomial tree and broadcast down it: 2 ceil(log2 n) rounds of N bytes."""
    total = tree_reduce(x, 0, group, op)
    return tree_broadcast(x if total is None else total, 0, group)


@collective
def stars_all_reduce(
    x: torch.Tensor, group, op: str = "sum", roots: int | None = None
) -> torch.Tensor:
    """Run one star per root at once, each for its part of x, so that the roots share the load.

    roots: how many, spread evenly; by default every second rank. One makes a star; n do the same as
    a reduce-scatter and an all-gather in one step each ("two-shot"). x is cut into equal parts, the
    last ones shorter. A root sends (n + roots - 2) N/roots bytes, every other rank N. A root needs
    no more memory than the others. Raises ValueError for no roots, or more roots than ranks.
    """
    add, rank, size = reduction(op, x), group.rank(), group.size()
    roots = max(1, size // 2) if roots is None else roots
    if not 1 <= roots <= size:
        raise ValueError(f"roots={roots}: in a group of {size} ranks it can be 1 to {size}")
    if roots == 1:
        return star_all_reduce(x, group, op)
    places = [part * size // roots for part in range(roots)]  # of the roots
    pairs = pairs_of_stars(places, size)
    my_roots = [root for peer, root in pairs if peer == rank]
    my_peers = [peer for peer, root in pairs if root == rank]

    length = -(-x.numel() // roots)
    spans = {root: slice(part * length, (part + 1) * length) for part, root in enumerate(places)}
    flat, room = x.contiguous().view(-1), x.new_empty(roots * length)
    result = room[: x.numel()]
    terms = [(flat[spans[root]], root) for root in my_roots]
    sums = [(result[spans[root]], root) for root in my_roots]
    if rank not in places:
        wait(start(group, receives=sums, sends=terms))
        return result.view(x.shape)
    # Until the other roots' sums arrive, a root receives terms into their memory.
    mine, total = flat[spans[rank]], result[spans[rank]]
    buffers = [total, *(room[spans[root]][: len(mine)] for root in my_roots)]
    add_up(mine, my_peers, buffers, group, add, sends=terms)
    wait(start(group, receives=sums, sends=[(total, peer) for peer in my_peers]))
    return result.view(x.shape)


def pairs_of_stars(roots: list[int], size: int) -> list[tuple[int, int]]:
    """Return (peer, root) for every two ranks that talk, in rounds without a repeated peer or root.

    The roots come first, among themselves: if their terms came later, two roots could wait for
    each other.
    """
    others = [rank for rank in range(size) if rank not in roots]
    k, rounds = len(roots), max(len(roots), len(others))
    pairs = [(roots[i], roots[(i + turn) % k]) for turn in range(1, k) for i in range(k)]
    for turn in range(rounds):
        meet = [((i + turn) % rounds, root) for i, root in enumerate(roots)]
        pairs += [(others[i], root) for i, root in meet if i < len(others)]
    return pairs


def add_up(mine, peers, buffers, group, add, sends=()) -> torch.Tensor:
    """Sum mine and every peer's term in the first of the buffers.

    One term per buffer is in flight at a time: while one is added, the next
    arrives. `sends` start together with the first terms.
    """
    receives = list(zip(buffers, peers))
    handles = start(group, receives, sends)
    arriving, later = deque(zip(buffers, handles)), deque(peers[len(receives) :])
    total, so_far = buffers[0], mine
    for _ in peers:
        term, handle = arriving.popleft()
        handle.wait()
        so_far = add(so_far, term, out=total)
        if later and term is not total:  # this buffer is free again
            receive = [(term, later.popleft())]
            arriving.append((term, *start(group, receive)))
    wait(handles[len(receives) :])
    return total


def receive_all(parts: list[torch.Tensor], root: int, group) -> None:
    """Fill every part but the root's own: post all receives at once, so no rank has to queue."""
    others = [(part, peer) for peer, part in enumerate(parts) if peer != root]
    wait(start(group, receives=others))


def check_root(root: int, group) -> None:
    if not 0 <= root < group.size():
        raise ValueError(f"root={root} is no rank of this group: give 0 to {group.size() - 1}")
