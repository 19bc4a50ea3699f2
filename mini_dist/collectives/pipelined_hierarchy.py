"""The fast hierarchy: the all-reduce of hierarchical.py, in pieces that follow each other.

In the readable version the uplink idles while the ranks of a node talk to each other, before and
after its use. Here x is cut into pieces, and each piece takes the same path one step behind the
previous one: while one piece crosses the uplink, the next is summed inside its node, and the
previous one is passed on there. Every link carries the same bytes, in one message per piece instead
of one, which costs latency. benchmarks/hosts.py compares both versions between two hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .hierarchical import two_levels
from .messages import Members, collective, empty, reduction, start, wait

PIECE_BYTES = 1 << 20  # as in pipelined_ring.py: smaller pieces cost more messages


@collective
def pipelined_hierarchical_all_reduce(
    x: torch.Tensor,
    group,
    nodes: int | Sequence[int] | None = None,
    op: str = "sum",
    piece_bytes: int = PIECE_BYTES,
) -> torch.Tensor:
    """Reduce x over the ranks of each node and over nodes, in pieces of about `piece_bytes`.

    x: any shape -> the same; each piece is bitwise equal to `hierarchical_all_reduce` of it.
    Raises ValueError for nodes of unequal size.
    """
    node, same_place = two_levels(group, nodes)
    add, result, num_pieces = reduction(op, x), empty(x), max(1, round(x.nbytes / piece_bytes))
    terms, sums = x.flatten().tensor_split(num_pieces), result.view(-1).tensor_split(num_pieces)
    ways = [one_piece(*piece, node, same_place, add) for piece in zip(terms, sums)]
    under_way = [[]] * num_pieces  # handles of each piece's current step
    num_steps = 2 * (node.size() - 1) + 2 * (same_place.size() - 1)
    for moment in range(num_steps + num_pieces):
        # Every rank handles the oldest piece first: messages carry no tag and are matched by order.
        for piece in range(max(0, moment - num_steps), min(moment + 1, num_pieces)):
            wait(under_way[piece])
            under_way[piece] = next(ways[piece], [])
    return result


def one_piece(
    term: torch.Tensor, total: torch.Tensor, node: Members, same_place: Members, add
) -> Iterator[list]:
    """Reduce `term` over all ranks into `total`. Yields the handles of each step; the caller waits
    for them before it resumes."""
    chunk = yield from scatter_sums(term.tensor_split(node.size()), node, add)
    part = yield from scatter_sums(chunk.tensor_split(same_place.size()), same_place, add)
    chunks = total.tensor_split(node.size())
    parts = chunks[node.rank()].tensor_split(same_place.size())
    parts[same_place.rank()].copy_(part)
    yield from hand_round(parts, same_place)
    yield from hand_round(chunks, node)


def scatter_sums(chunks: Sequence[torch.Tensor], group: Members, add) -> Iterator[list]:
    """Run the ring's reduce-scatter (ring.py) in steps; return this rank's chunk of the sum."""
    rank, size = group.rank(), group.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    partial = chunks[rank - 1]
    for step in range(2, size + 1):
        incoming = empty(chunks[rank - step])
        yield start(group, receives=[(incoming, before)], sends=[(partial, after)])
        partial = add(incoming, chunks[rank - step], out=incoming)
    return partial


def hand_round(parts: Sequence[torch.Tensor], group: Members) -> Iterator[list]:
    """Run the ring's all-gather (ring.py) in steps: every part arrives in place."""
    rank, size = group.rank(), group.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    for step in range(1, size):
        receives, sends = [(parts[rank - step], before)], [(parts[rank - step + 1], after)]
        yield start(group, receives, sends)
