"""Stars, trees, rings and doublings: what each rank sends, and how long all the rounds take.

Recursive algorithms pair ranks by powers of two.  With m the largest power of two <= n, the n - m
extra ranks (m, m+1, ...) first send theirs to a partner (rank - m), sit out, and get the result.
"""

from __future__ import annotations

from .links import Hierarchy, Link


def log2_up(size: int) -> int:
    return (size - 1).bit_length()


def fold(size: int) -> tuple[int, int]:
    """The largest power of two in `size`, and how many ranks are left over."""
    m = 1 << (size.bit_length() - 1)
    return m, size - m


def children(size: int) -> list[int]:
    """How many messages each rank of a binomial broadcast sends: in round k the 2**k ranks that
    have it send to the rank 2**k further."""
    return [
        sum(1 for k in range(log2_up(size)) if rank < 2**k and rank + 2**k < size)
        for rank in range(size)
    ]


def tree_seconds(num_bytes: int, size: int, link: Link | Hierarchy) -> float:
    return sum(
        link.slowest(2**k, size, paired=True).seconds(num_bytes) for k in range(log2_up(size))
    )


def star_seconds(messages: list[int], size: int, link: Link | Hierarchy) -> float:
    """All messages pass the root's one link, one after the other."""
    near = (link.ranks_per_node if isinstance(link, Hierarchy) else size) - 1
    return sum(
        link.slowest(1, 1 if i < near else size).seconds(message)
        for i, message in enumerate(messages)
    )


def ring_seconds(shards: list[int], link: Link | Hierarchy) -> float:
    """In every round some rank passes on the longest shard."""
    size = len(shards)
    return link.slowest(1, size).seconds(max(shards), rounds=size - 1)


def fold_seconds(messages: list[int], m: int, size: int, link: Link | Hierarchy) -> float:
    if size == m:
        return 0.0
    return sum(link.slowest(m, size).seconds(message) for message in messages)


def doubling(blocks: list[int], link: Link | Hierarchy, size: int) -> tuple[list[int], float]:
    """Recursive doubling over a power of two of ranks: in round k everyone sends the aligned
    group of 2**k blocks it has by then."""
    m, seconds = len(blocks), 0.0
    sent = [0] * m
    groups, width = blocks, 1
    while width < m:
        for rank in range(m):
            sent[rank] += groups[rank // width]
        seconds += link.slowest(width, size, paired=True).seconds(max(groups))
        groups = [groups[i] + groups[i + 1] for i in range(0, len(groups), 2)]
        width *= 2
    return sent, seconds
