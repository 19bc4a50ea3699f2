"""The cost of a collective: rounds, bytes and seconds of each algorithm, for any number of ranks.

The algorithms and their costs are in Thakur, Rabenseifner and Gropp 2005. links.py gives the time
of one message; rounds.py combines messages into stars, trees, rings and recursive doubling.

'Bytes' always means *payload bytes sent*.  There are no headers; a byte received is counted
where it was sent.  `sent[r]` is what rank r of the group sends, `total_bytes` their sum over the
ranks, `bytes_per_rank` the busiest rank's.  A round is a step in which every rank sends at most one
message and receives at most one; the rounds of an algorithm follow each other.

N is the whole tensor, as the caller of the collective sees it: the input of all_reduce, reduce and
broadcast; the *gathered* result of all_gather; the *unreduced* input of reduce_scatter; everything
that one rank sends out in all_to_all.  Shards differ by at most one element (as in
torch.tensor_split: the first are longer), so pass `itemsize` for exact bytes if it does not divide.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..fields import whole
from .links import Hierarchy, Link
from .rounds import (
    children,
    doubling,
    fold,
    fold_seconds,
    log2_up,
    ring_seconds,
    star_seconds,
    tree_seconds,
)


@dataclass(frozen=True)
class Cost:
    """The cost of one collective; the top of this file defines the bytes."""

    op: str
    algorithm: str
    rounds: int
    sent: tuple[int, ...]  # payload bytes, by rank of the group
    seconds: float

    @property
    def bytes_per_rank(self) -> int:
        return max(self.sent)

    @property
    def total_bytes(self) -> int:
        return sum(self.sent)


def split(num_bytes: int, parts: int, itemsize: int = 1) -> list[int]:
    """Return the bytes of each part, the first parts one element longer if it does not divide."""
    base, longer = divmod(num_bytes // itemsize, parts)
    return [(base + (part < longer)) * itemsize for part in range(parts)]


def broadcast(
    num_bytes: int, size: int, algorithm: str = "tree", link: Link | Hierarchy | None = None
) -> Cost:
    """Star: the root sends to each rank in turn.  Tree (binomial): ranks that have it send on."""
    link = _checked("broadcast", algorithm, num_bytes, size, link)
    if algorithm == "star":
        sent = (num_bytes * (size - 1),) + (0,) * (size - 1)
        seconds = star_seconds([num_bytes] * (size - 1), size, link)
        return Cost("broadcast", algorithm, size - 1, sent, seconds)
    sent = tuple(num_bytes * sends for sends in children(size))
    seconds = tree_seconds(num_bytes, size, link)
    return Cost("broadcast", algorithm, log2_up(size), sent, seconds)


def reduce(
    num_bytes: int, size: int, algorithm: str = "tree", link: Link | Hierarchy | None = None
) -> Cost:
    """Reverse the broadcast: star or binomial tree; every rank but the root sends once."""
    link = _checked("reduce", algorithm, num_bytes, size, link)
    sent = (0,) + (num_bytes,) * (size - 1)
    if algorithm == "star":
        seconds = star_seconds([num_bytes] * (size - 1), size, link)
        return Cost("reduce", algorithm, size - 1, sent, seconds)
    return Cost("reduce", algorithm, log2_up(size), sent, tree_seconds(num_bytes, size, link))


def gather(
    num_bytes: int,
    size: int,
    algorithm: str = "star",
    link: Link | Hierarchy | None = None,
    itemsize: int = 1,
) -> Cost:
    """Send every rank's shard of the N gathered bytes to the root (scatter is the reverse)."""
    link = _checked("gather", algorithm, num_bytes, size, link)
    shards = split(num_bytes, size, itemsize)
    seconds = star_seconds(shards[1:], size, link)
    return Cost("gather", algorithm, size - 1, (0, *shards[1:]), seconds)


def scatter(
    num_bytes: int,
    size: int,
    algorithm: str = "star",
    link: Link | Hierarchy | None = None,
    itemsize: int = 1,
) -> Cost:
    """Send every other rank its shard of N bytes from the root."""
    link = _checked("scatter", algorithm, num_bytes, size, link)
    shards = split(num_bytes, size, itemsize)
    sent, seconds = sum(shards[1:]), star_seconds(shards[1:], size, link)
    return Cost("scatter", algorithm, size - 1, (sent,) + (0,) * (size - 1), seconds)


def all_gather(
    num_bytes: int,
    size: int,
    algorithm: str = "ring",
    link: Link | Hierarchy | None = None,
    itemsize: int = 1,
) -> Cost:
    """Ring: each shard goes around.  Recursive doubling: blocks double, log2 n rounds."""
    link = _checked("all_gather", algorithm, num_bytes, size, link)
    shards = split(num_bytes, size, itemsize)
    if algorithm == "ring":  # rank r passes on every shard but its neighbor's own
        sent = tuple(num_bytes - shards[(rank + 1) % size] for rank in range(size))
        return Cost("all_gather", algorithm, size - 1, sent, ring_seconds(shards, link))
    m, extra = fold(size)
    blocks = [shards[rank] + (shards[rank + m] if rank < extra else 0) for rank in range(m)]
    sent, seconds = doubling(blocks, link, size)
    for rank in range(extra):  # before: the extra's shard in; after: the whole result out
        sent[rank] += num_bytes
    seconds += fold_seconds([max(shards[m:], default=0), num_bytes], m, size, link)
    rounds = log2_up(m) + 2 * (extra > 0)
    return Cost("all_gather", algorithm, rounds, (*sent, *shards[m:]), seconds)


def reduce_scatter(
    num_bytes: int,
    size: int,
    algorithm: str = "ring",
    link: Link | Hierarchy | None = None,
    itemsize: int = 1,
) -> Cost:
    """Ring: partial sums go around.  Recursive halving: blocks halve, log2 n rounds."""
    link = _checked("reduce_scatter", algorithm, num_bytes, size, link)
    shards = split(num_bytes, size, itemsize)
    if algorithm == "ring":  # rank r sends every shard but the one it keeps
        sent = tuple(num_bytes - shard for shard in shards)
        return Cost("reduce_scatter", algorithm, size - 1, sent, ring_seconds(shards, link))
    m, extra = fold(size)
    blocks = [shards[rank] + (shards[rank + m] if rank < extra else 0) for rank in range(m)]
    # Halving reverses doubling: the same messages in the other direction.
    _, seconds = doubling(blocks, link, size)
    sent = [num_bytes - block for block in blocks]
    for rank in range(extra):  # after: the extra's shard out
        sent[rank] += shards[rank + m]
    seconds += fold_seconds([num_bytes, max(shards[m:], default=0)], m, size, link)
    rounds = log2_up(m) + 2 * (extra > 0)
    return Cost("reduce_scatter", algorithm, rounds, (*sent, *[num_bytes] * extra), seconds)


def all_reduce(
    num_bytes: int,
    size: int,
    algorithm: str = "ring",
    link: Link | Hierarchy | None = None,
    itemsize: int = 1,
    ranks_per_node: int | None = None,
    roots: int | None = None,
) -> Cost:
    """Star and tree: reduce + broadcast.  Stars: one per part for `roots` parts (by default half as
    many as ranks), at once.  Ring: reduce-scatter + all-gather.  Halving-doubling:
    the same by recursion.  Doubling: the whole tensor is exchanged in each of log2 n rounds.
    Hierarchical: reduce-scatter in each node of `ranks_per_node` ranks, ring all-reduce of each
    shard between nodes, all-gather in the node."""
    link = _checked("all_reduce", algorithm, num_bytes, size, link)
    for name, value, of in (
        ("ranks_per_node", ranks_per_node, "hierarchical"),
        ("roots", roots, "stars"),
    ):
        if value is not None and algorithm != of:
            raise ValueError(f"{name}={value!r} is of {of!r}, not of {algorithm!r}: leave it out.")
    if algorithm in ("star", "tree"):
        parts = [
            reduce(num_bytes, size, algorithm, link),
            broadcast(num_bytes, size, algorithm, link),
        ]
    elif algorithm == "stars":
        return _stars(num_bytes, size, roots, link, itemsize)
    elif algorithm == "ring":
        parts = [
            reduce_scatter(num_bytes, size, "ring", link, itemsize),
            all_gather(num_bytes, size, "ring", link, itemsize),
        ]
    elif algorithm == "halving_doubling":
        m, extra = fold(size)
        parts = [
            reduce_scatter(num_bytes, m, "halving", link, itemsize),
            all_gather(num_bytes, m, "doubling", link, itemsize),
        ]
        if extra:  # an extra rank sends all it has and gets all of the result back
            swap = (num_bytes,) * extra + (0,) * (m - extra)
            both = tuple(a + b + c for a, b, c in zip(swap, parts[0].sent, parts[1].sent))
            rounds = parts[0].rounds + parts[1].rounds + 2
            seconds = parts[0].seconds + parts[1].seconds
            seconds += fold_seconds([num_bytes, num_bytes], m, size, link)
            return Cost("all_reduce", algorithm, rounds, both + (num_bytes,) * extra, seconds)
    elif algorithm == "doubling":
        m, extra = fold(size)
        rounds = log2_up(m)
        sent = [rounds * num_bytes + (num_bytes if rank < extra else 0) for rank in range(m)]
        hops = [link.slowest(2**k, size, paired=True) for k in range(rounds)]
        seconds = sum(hop.seconds(num_bytes) for hop in hops)
        seconds += fold_seconds([num_bytes, num_bytes], m, size, link)
        rounds += 2 * (extra > 0)
        return Cost("all_reduce", algorithm, rounds, (*sent, *[num_bytes] * extra), seconds)
    else:
        parts = _hierarchical(num_bytes, size, ranks_per_node, link, itemsize)
    return Cost(
        "all_reduce",
        algorithm,
        sum(part.rounds for part in parts),
        tuple(sum(sent) for sent in zip(*(part.sent for part in parts))),
        sum(part.seconds for part in parts),
    )


def all_to_all(
    num_bytes: int,
    size: int,
    algorithm: str = "pairwise",
    link: Link | Hierarchy | None = None,
    itemsize: int = 1,
    splits: list[list[int]] | None = None,
) -> Cost:
    """Pairwise: in round k rank r sends to r + k.  `splits[r][d]` are the bytes from r to d
    (even by default; what a rank keeps for itself is not counted)."""
    link = _checked("all_to_all", algorithm, num_bytes, size, link)
    if splits is None:
        splits = [split(num_bytes, size, itemsize)] * size
    elif len(splits) != size or any(len(row) != size for row in splits):
        raise ValueError(
            f"splits has {len(splits)} rows of {sorted({len(r) for r in splits})}: "
            f"give {size} rows of {size} byte counts."
        )
    sent = tuple(sum(row) - row[rank] for rank, row in enumerate(splits))
    seconds = sum(
        link.slowest(k, size).seconds(max(splits[rank][(rank + k) % size] for rank in range(size)))
        for k in range(1, size)
    )
    return Cost("all_to_all", algorithm, size - 1, sent, seconds)


COLLECTIVES = {
    "broadcast": (broadcast, ("star", "tree")),
    "reduce": (reduce, ("star", "tree")),
    "gather": (gather, ("star",)),
    "scatter": (scatter, ("star",)),
    "all_gather": (all_gather, ("ring", "doubling")),
    "reduce_scatter": (reduce_scatter, ("ring", "halving")),
    "all_reduce": (
        all_reduce,
        ("star", "stars", "tree", "ring", "doubling", "halving_doubling", "hierarchical"),
    ),
    "all_to_all": (all_to_all, ("pairwise",)),
}


def _stars(
    num_bytes: int, size: int, roots: int | None, link: Link | Hierarchy, itemsize: int
) -> Cost:
    """The roots exchange terms with each other, then with the others, one peer after another;
    the sums return the same way. (Between nodes as if each round had a pair on two of them.)"""
    roots = max(1, size // 2) if roots is None else roots
    if not isinstance(roots, int) or not 1 <= roots <= size:
        raise ValueError(f"roots={roots!r} is not a number of roots: give 1 to {size}.")
    others, longest = size - roots, -(-num_bytes // itemsize // roots) * itemsize
    parts = {  # equal parts, the last ones shorter
        part * size // roots: min(longest, max(0, num_bytes - part * longest))
        for part in range(roots)
    }
    rounds = 2 * (roots - 1 + (max(roots, others) if others else 0))
    sent = tuple(
        num_bytes + parts.get(rank, 0) * (size - 2 if rank in parts else 0) for rank in range(size)
    )
    seconds = rounds and link.slowest(1, size).seconds(longest, rounds)
    return Cost("all_reduce", "stars", rounds, sent, seconds)


def _hierarchical(
    num_bytes: int, size: int, ranks_per_node: int | None, link: Link | Hierarchy, itemsize: int
) -> list[Cost]:
    if ranks_per_node is None:
        ranks_per_node = getattr(link, "ranks_per_node", None)
    if not isinstance(ranks_per_node, int) or ranks_per_node < 1 or size % ranks_per_node:
        raise ValueError(
            f"ranks_per_node={ranks_per_node!r} does not divide size={size}: give the "
            "number of ranks in a node, or a Hierarchy as the link."
        )
    nodes = size // ranks_per_node
    inner = link.slowest(1, ranks_per_node)
    outer = link.slowest(ranks_per_node, size)
    local = [
        reduce_scatter(num_bytes, ranks_per_node, "ring", inner, itemsize),
        all_gather(num_bytes, ranks_per_node, "ring", inner, itemsize),
    ]
    # Each local rank owns one shard and reduces it with its peers on the other nodes.
    across = [
        all_reduce(shard, nodes, "ring", outer, itemsize)
        for shard in split(num_bytes, ranks_per_node, itemsize)
    ]
    places = (divmod(rank, ranks_per_node) for rank in range(size))
    middle = Cost(
        "all_reduce",
        "ring",
        across[0].rounds,
        tuple(across[local].sent[node] for node, local in places),
        max(cost.seconds for cost in across),
    )
    whole = [
        Cost(cost.op, cost.algorithm, cost.rounds, cost.sent * nodes, cost.seconds)
        for cost in local
    ]
    return [whole[0], middle, whole[1]]


def _checked(
    op: str, algorithm: str, num_bytes: int, size: int, link: Link | Hierarchy | None
) -> Link | Hierarchy:
    known = COLLECTIVES[op][1]
    if algorithm not in known:
        raise ValueError(
            f"algorithm={algorithm!r} is not one of {op}: give "
            f"{' or '.join(repr(name) for name in known)}."
        )
    whole("size", size)
    whole("num_bytes", num_bytes, at_least=0)
    return FREE if link is None else link


FREE = Link(latency=0.0, bandwidth=1e30)  # when only rounds and bytes matter
