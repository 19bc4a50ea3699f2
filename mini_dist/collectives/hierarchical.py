"""Two levels: links inside a node are faster than links between nodes, so send less between nodes.

    inside a node: reduce-scatter      each rank gets 1/k of the node's sum
    across nodes:  ring                among the ranks with the same index in their nodes
    inside a node: all-gather

Legend: n ranks on h nodes of k ranks, N bytes. Bytes over a node's uplink, each way, where a ring
in the order of the nodes sends 2(n-1)/n N for an all-reduce and (n-1)/n N for either half of it:

    all-reduce 2(h-1)/h N     reduce-scatter (h-1)/h N     all-gather (h-1)/h N

`nodes`, everywhere in this file: k, if ranks 0 ... k-1 are the first node and so on; or a list with
the node of each rank, in any order; None to use what `launch(hosts=...)` or torchrun define.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mini_dist.ranks.hosts import hosts_of

from .messages import Members, check_rows, collective, exchange, reduction, split_sizes
from .ring import check_sizes, ring_all_gather, ring_all_reduce, ring_reduce_scatter


@collective
def hierarchical_all_reduce(
    x: torch.Tensor, group, nodes: int | Sequence[int] | None = None, op: str = "sum"
) -> torch.Tensor:
    """Reduce-scatter in the node, all-reduce each chunk between nodes, all-gather in the node.

    x: any shape -> the same. For N bytes, a rank sends only 2(h-1)/h N/k between nodes.
    Raises ValueError for nodes of unequal size.
    """
    node, same_place = two_levels(group, nodes)
    flat = x.flatten()
    chunk = ring_reduce_scatter(flat, node, op)
    chunk = ring_all_reduce(chunk, same_place, op)
    return ring_all_gather(chunk, node, split_sizes(len(flat), node.size())).view(x.shape)


@collective
def hierarchical_reduce_scatter(
    x: torch.Tensor, group, nodes: int | Sequence[int] | None = None, op: str = "sum"
) -> torch.Tensor:
    """Cut x along dim 0 into n chunks; rank r returns chunk r, reduced over all ranks.

    x: [L, ...] -> [L/n, ...]; the first L % n chunks have one row more. Inside a node, the rank
    with index p collects the chunks of all ranks with index p; then each of these gets its own
    chunk. Raises ValueError for nodes of unequal size.
    """
    check_rows(x)
    node, same_place = two_levels(group, nodes)
    chunks = x.tensor_split(group.size())
    for_place = [torch.cat([chunks[rank] for rank in each.ranks]) for each in places(group, nodes)]
    mine = scatter_chunks(for_place, node, op)
    mine = mine.split([len(chunks[rank]) for rank in same_place.ranks])
    return scatter_chunks(mine, same_place, op)


@collective
def hierarchical_all_gather(
    x: torch.Tensor,
    group,
    nodes: int | Sequence[int] | None = None,
    sizes: list[int] | None = None,
) -> torch.Tensor:
    """Return all ranks' x on every rank, concatenated along dim 0 in rank order.

    x: [L, ...] -> [n L, ...]; `sizes`: every rank's L, if they differ. Gathers between nodes first,
    among ranks with the same index, then inside. Raises ValueError for nodes of unequal size.
    """
    sizes = check_sizes(x, sizes, group)
    node, same_place = two_levels(group, nodes)
    of_place = [[sizes[rank] for rank in each.ranks] for each in places(group, nodes)]
    mine = ring_all_gather(x, same_place, of_place[node.rank()])
    every = ring_all_gather(mine, node, [sum(rows) for rows in of_place])
    order = [rank for each in places(group, nodes) for rank in each.ranks]
    return in_rank_order(every.split([sizes[rank] for rank in order]), order)


def in_rank_order(parts: Sequence[torch.Tensor], ranks: list[int]) -> torch.Tensor:
    """Concatenate the parts in rank order; ranks: the owner of each part."""
    part_of = dict(zip(ranks, parts))
    return torch.cat([part_of[rank] for rank in sorted(ranks)])


def scatter_chunks(chunks: Sequence[torch.Tensor], group, op: str) -> torch.Tensor:
    """Run the ring's reduce-scatter (ring.py) on chunks of any sizes."""
    rank, size, add = group.rank(), group.size(), reduction(op, chunks[0])
    after, before = (rank + 1) % size, (rank - 1) % size
    partial = chunks[rank - 1]
    for step in range(2, size + 1):
        mine = chunks[rank - step]
        incoming = exchange(partial, after, before, group, like=mine)
        partial = add(incoming, mine, out=incoming)
    return partial if size > 1 else chunks[0].clone()


def two_levels(group, nodes: int | Sequence[int] | None) -> tuple[Members, Members]:
    """Return this rank's node, and the ranks with the same index in all nodes."""
    homes = check_nodes(group, nodes)
    node = Members(group, [r for r, home in enumerate(homes) if home == homes[group.rank()]])
    return node, places(group, nodes)[node.rank()]


def places(group, nodes: int | Sequence[int] | None) -> list[Members]:
    """Return, for each index in a node, the ranks that have it, node by node."""
    homes = check_nodes(group, nodes)
    by_node = [[r for r, home in enumerate(homes) if home == node] for node in sorted({*homes})]
    return [Members(group, ranks) for ranks in zip(*by_node)]


def check_nodes(group, nodes: int | Sequence[int] | None) -> list[int]:
    """Return the node of every rank; raise ValueError unless all nodes have equal sizes."""
    size = group.size()
    if nodes is None:
        nodes = hosts_of(group)
    if isinstance(nodes, int):
        if nodes < 1 or size % nodes:
            raise ValueError(
                f"nodes={nodes} ranks each do not divide the {size} ranks of the group"
            )
        nodes = [rank // nodes for rank in range(size)]
    if len(nodes) != size:
        raise ValueError(f"nodes={list(nodes)} has not one entry for each of {size} ranks")
    counts = {node: list(nodes).count(node) for node in sorted({*nodes})}
    if len({*counts.values()}) > 1:
        raise ValueError(
            f"nodes of {', '.join(map(str, counts.values()))} ranks: who has no partner at its "
            "place in another node? Give nodes of equal size, or take ring_by_hosts"
        )
    return list(nodes)
