"""Two levels: the links inside a node are the faster ones, so send less between nodes."""

from __future__ import annotations

import torch

from .messages import Members, collective, split_sizes
from .ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter


@collective
def hierarchical_all_reduce(
    x: torch.Tensor, group, ranks_per_node: int, op: str = "sum"
) -> torch.Tensor:
    """Reduce-scatter in the node, all-reduce each chunk between nodes, all-gather in the node.

    Ranks 0 ... k-1 are the first node, the next k the second, ... (k = `ranks_per_node`).
    x: any shape -> the same. Of N bytes a rank sends only 2(nodes-1)/nodes N/k between nodes.
    """
    rank, size = group.rank(), group.size()
    if not ranks_per_node or size % ranks_per_node:
        raise ValueError(
            f"ranks_per_node={ranks_per_node} does not divide the {size} ranks of the group"
        )
    first = rank - rank % ranks_per_node
    node = Members(group, range(first, first + ranks_per_node))
    same_place = Members(group, range(rank % ranks_per_node, size, ranks_per_node))

    flat = x.flatten()
    chunk = ring_reduce_scatter(flat, node, op)
    chunk = ring_all_reduce(chunk, same_place, op)
    return ring_all_gather(chunk, node, split_sizes(len(flat), ranks_per_node)).view(x.shape)
