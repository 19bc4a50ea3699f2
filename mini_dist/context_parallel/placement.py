"""Which tokens each rank holds, and what of each other's keys they may see.

A placement is a table of positions [cp, S/cp]: row r says where in the sequence the tokens of rank
r stand, in the order in which it holds them. Tokens, targets, positions and losses all follow it.
Legend: S sequence, cp ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def contiguous(seq_len: int, size: int) -> Tensor:
    """Rank r holds the r-th of `size` equal pieces of the sequence: positions [cp, S/cp].

    Under a causal mask the last rank has most to do: its tokens see all the others.
    """
    check_divides(seq_len, size, f"cp={size}")
    return torch.arange(seq_len).view(size, -1)


def zigzag(seq_len: int, size: int) -> Tensor:
    """Cut into 2 cp chunks; rank r holds chunk r and chunk 2cp-1-r: positions [cp, S/cp].

        rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4

    An early chunk sees little, the late one that goes with it much: all ranks have equally much to
    do, and in every step of the ring (Llama 3: Grattafiori et al. 2024, section 3.3.2).
    """
    check_divides(seq_len, 2 * size, f"2*cp={2 * size} (zig-zag gives each rank two chunks)")
    chunks = torch.arange(seq_len).view(2 * size, -1)
    return torch.cat([chunks[:size], chunks.flip(0)[:size]], dim=1)


PLACEMENTS = {"contiguous": contiguous, "zigzag": zigzag}


def positions_of_ranks(placement: str, seq_len: int, size: int) -> Tensor:
    """The table [cp, S/cp] of a placement by its name; raises ValueError for another name."""
    if placement not in PLACEMENTS:
        known = " or ".join(map(repr, PLACEMENTS))
        raise ValueError(f"placement={placement!r} is unknown: give {known}")
    return PLACEMENTS[placement](seq_len, size)


class Block(NamedTuple):
    """The part of a block of scores that has to be computed: `queries` of one rank, `keys` of
    another. If `causal`, both are the same tokens, and none sees what comes after it."""

    queries: slice
    keys: slice
    causal: bool

    def num_scores(self) -> int:
        """How many pairs of a query and a key that it may see."""
        rows = self.queries.stop - self.queries.start
        columns = self.keys.stop - self.keys.start
        return rows * (rows + 1) // 2 if self.causal else rows * columns


def block_of(positions: Tensor, rank: int, source: int, causal: bool = True) -> Block | None:
    """What the queries of `rank` compute with the keys of `source`; None if they see none.

    In both placements a rank's tokens stand in the order of the sequence. So the queries that see
    any key are the last ones, the keys that any query sees are the first ones, and between two
    ranks' tokens all of those queries see all of those keys.
    """
    queries, keys = positions[rank], positions[source]
    everything = slice(0, len(queries))
    if not causal or rank == source:
        return Block(everything, everything, causal)
    first_query = int((queries < keys[0]).sum())
    last_key = int((keys <= queries[-1]).sum())
    if first_query == len(queries):
        return None
    return Block(slice(first_query, len(queries)), slice(0, last_key), False)


def num_scores(positions: Tensor, causal: bool = True) -> list[list[int]]:
    """[rank][step]: pairs of query and key computed by a rank in each step of the ring."""
    size = len(positions)
    blocks = [
        [block_of(positions, rank, (rank - step) % size, causal) for step in range(size)]
        for rank in range(size)
    ]
    return [[block.num_scores() if block else 0 for block in row] for row in blocks]


def check_divides(seq_len: int, divisor: int, name: str) -> None:
    if seq_len % divisor or seq_len < divisor:
        works = max(1, round(seq_len / divisor)) * divisor
        raise ValueError(
            f"seq_len={seq_len}: {name} must divide it. The nearest that works is {works}."
        )


def check_heads(q: Tensor, k: Tensor, ranks: int = 1) -> None:
    """Key/value heads divide the heads, and `ranks` divides them where each rank has whole ones."""
    N, K = q.shape[1], k.shape[1]
    if N % K:
        works = " or ".join(map(str, nearest(N, K)))
        raise ValueError(f"{K} key/value heads must divide the {N} query heads: {works} would work")
    if K % ranks:
        works = " or ".join(f"cp={size}" for size in nearest(K, ranks))
        raise ValueError(
            f"{K} key/value heads cannot go whole to cp={ranks} ranks (Ulysses): {works} would work"
        )


def nearest(number: int, divisor: int) -> list[int]:
    """The divisors of `number` next to one that does not divide it."""
    divides = [d for d in range(1, number + 1) if number % d == 0]
    return [d for d in divides if d < divisor][-1:] + [d for d in divides if d > divisor][:1]
