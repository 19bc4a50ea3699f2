"""Which tokens each rank holds, and which keys of other ranks they may see.

A placement is a table of positions [cp, S/cp]: row r lists the positions of rank r's tokens in the
sequence, in the order in which the rank holds them. Tokens, targets, positions and losses follow
it. Legend: S sequence, cp ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mini_dist.collectives.divides import check_divides
from mini_dist.ranks.devices import HOST


def contiguous(seq_len: int, size: int) -> Tensor:
    """Give rank r the r-th of `size` equal pieces of the sequence: positions [cp, S/cp].

    Under a causal mask the last rank has the most work: its tokens see all the others.
    """
    check_divides(size, seq_len, "seq_len", by=f"cp={size}")
    return torch.arange(seq_len, device=HOST).view(size, -1)


def zigzag(seq_len: int, size: int) -> Tensor:
    """Cut into 2 cp chunks; rank r gets chunks r and 2cp-1-r: positions [cp, S/cp].

        rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4

    An early chunk sees few keys, and the late chunk paired with it sees many. So all ranks have
    equal work in every step of the ring (Llama 3: Grattafiori et al. 2024, section 3.3.2).
    """
    two_chunks_each = f"2*cp={2 * size} (zig-zag gives each rank two chunks)"
    check_divides(2 * size, seq_len, "seq_len", by=two_chunks_each)
    chunks = torch.arange(seq_len, device=HOST).view(2 * size, -1)
    return torch.cat([chunks[:size], chunks.flip(0)[:size]], dim=1)


def striped(seq_len: int, size: int) -> Tensor:
    """Deal out tokens one by one; rank r gets r, r + cp, r + 2 cp, ...: positions [cp, S/cp].

    The tokens of any two ranks alternate, so each block of scores is a triangle; it includes the
    diagonal if the keys' rank is not after the queries'. So all ranks have almost equal work in
    every step of the ring (Brandon et al. 2023, Striped Attention).
    """
    check_divides(size, seq_len, "seq_len", by=f"cp={size}")
    return torch.arange(seq_len, device=HOST).view(-1, size).T.contiguous()


PLACEMENTS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}


def positions_of_ranks(placement: str, seq_len: int, size: int) -> Tensor:
    """Return the table [cp, S/cp] of a placement by its name.

    Raises ValueError for an unknown name, and for a table that is not a placement.
    """
    if placement not in PLACEMENTS:
        known = " or ".join(map(repr, PLACEMENTS))
        raise ValueError(f"placement={placement!r} is unknown: give {known}")
    positions = PLACEMENTS[placement](seq_len, size)
    shape = (size, seq_len // size)
    counts = positions.flatten().clamp(min=0).bincount(minlength=seq_len)
    each_once = torch.equal(counts, torch.ones_like(counts[:seq_len]))
    if positions.shape != shape or not each_once:
        raise ValueError(
            f"placement={placement!r} gave a table {list(positions.shape)} for {seq_len} tokens on "
            f"{size} ranks: it must be {list(shape)} and have each of 0..{seq_len - 1} once"
        )
    return positions


class ScoreBlock(NamedTuple):
    """The part of a block of scores that has to be computed: `queries` of one rank, `keys` of
    another, both in the order of the sequence. Each is a slice, or indices if the rank holds its
    tokens in another order.

    causal: False: every query sees every key. True: as many queries as keys, and query i sees keys
    0..i. Otherwise a tensor [queries]: how many of the first keys each query sees, at least 1.
    """

    queries: slice | Tensor
    keys: slice | Tensor
    causal: bool | Tensor

    def num_scores(self) -> int:
        """Count the pairs of a query and a key that it may see."""
        if isinstance(self.causal, Tensor):
            return int(self.causal.sum())
        rows, columns = map(length, (self.queries, self.keys))
        return rows * (rows + 1) // 2 if self.causal else rows * columns


def block_of(positions: Tensor, rank: int, source: int, causal: bool = True) -> ScoreBlock | None:
    """Return what the queries of `rank` compute with the keys of `source`; None if they see none.

    In the order of the sequence, each query sees at least the keys that the query before it sees.
    So the queries that see any key are the last ones, and the keys that any query sees are the
    first ones. Between them, a block is a staircase. Contiguous and zig-zag pieces give one stair;
    striped ones give stairs one query high and one key wide.
    """
    if not causal:
        everything = slice(0, positions.shape[1])
        return ScoreBlock(everything, everything, False)
    (queries, rows), (keys, columns) = in_order(positions[rank]), in_order(positions[source])
    if rank == source:
        return ScoreBlock(part(rows, 0, len(queries)), part(columns, 0, len(keys)), True)
    sees = torch.searchsorted(keys, queries, right=True)  # number of keys that each query sees
    first_query, last_key = int((sees == 0).sum()), int(sees[-1])
    if last_key == 0:
        return None
    sees = sees[first_query:]
    rows, columns = part(rows, first_query, len(queries)), part(columns, 0, last_key)
    if sees[0] == last_key:
        return ScoreBlock(rows, columns, False)
    one_more_each = torch.equal(sees, torch.arange(1, last_key + 1, device=sees.device))
    return ScoreBlock(rows, columns, True if one_more_each else sees)


def in_order(positions: Tensor) -> tuple[Tensor, Tensor | None]:
    """Sort a rank's positions [S/cp]; also return their indices, or None if they were sorted."""
    if bool((positions.diff() > 0).all()):
        return positions, None
    return positions.sort()


def part(where: Tensor | None, start: int, stop: int) -> slice | Tensor:
    return slice(start, stop) if where is None else where[start:stop]


def length(part: slice | Tensor) -> int:
    return part.stop - part.start if isinstance(part, slice) else len(part)


def num_scores(positions: Tensor, causal: bool = True) -> list[list[int]]:
    """Count the pairs of query and key that a rank computes in each step of the ring, [rank][step],
    for any table of positions."""
    size = len(positions)
    blocks = [
        [block_of(positions, rank, (rank - step) % size, causal) for step in range(size)]
        for rank in range(size)
    ]
    return [[block.num_scores() if block else 0 for block in row] for row in blocks]


def check_heads(q: Tensor, k: Tensor, ranks: int = 1) -> None:
    """Check that the kv heads divide the heads, and `ranks` the kv heads if each rank needs whole
    ones."""
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
    """Return the divisors of `number` next to one that does not divide it."""
    divides = [d for d in range(1, number + 1) if number % d == 0]
    return [d for d in divides if d < divisor][-1:] + [d for d in divides if d > divisor][:1]
