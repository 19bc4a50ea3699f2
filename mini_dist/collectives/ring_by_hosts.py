"""The ring, host after host: it leaves each host once, wherever the ranks are.

Unlike a hierarchy, it does not need hosts of equal size, because no rank needs a partner with the
same index on another host. Legend: n ranks, N bytes. One rank per host has its successor on the
next host, so an uplink carries, each way, as much as one rank sends: 2(n-1)/n N for an all-reduce,
and (n-1)/n N for either half of it, if all parts are equal.
"""

from __future__ import annotations

import torch

from mini_dist.ranks.hosts import hosts_of

from .hierarchical import in_rank_order, scatter_chunks
from .messages import Members, check_rows, collective
from .ring import check_sizes, ring_all_gather, ring_all_reduce


@collective
def ring_by_hosts_all_reduce(x: torch.Tensor, group, op: str = "sum") -> torch.Tensor:
    """Run ring_all_reduce with the ranks in the order of their hosts. x: any shape -> the same."""
    return ring_all_reduce(x, host_after_host(group), op)


@collective
def ring_by_hosts_reduce_scatter(x: torch.Tensor, group, op: str = "sum") -> torch.Tensor:
    """Cut x along dim 0 into n chunks; rank r returns chunk r, reduced over all ranks.

    x: [L, ...] -> [L/n, ...]; the first L % n chunks have one row more.
    """
    check_rows(x)
    ring, chunks = host_after_host(group), x.tensor_split(group.size())
    return scatter_chunks([chunks[rank] for rank in ring.ranks], ring, op)


@collective
def ring_by_hosts_all_gather(
    x: torch.Tensor, group, sizes: list[int] | None = None
) -> torch.Tensor:
    """Return all ranks' x on every rank, concatenated along dim 0 in rank order.

    x: [L, ...] -> [n L, ...]; `sizes`: every rank's L, if they differ.
    """
    sizes, ring = check_sizes(x, sizes, group), host_after_host(group)
    rows = [sizes[rank] for rank in ring.ranks]
    return in_rank_order(ring_all_gather(x, ring, rows).split(rows), ring.ranks)


def host_after_host(group) -> Members:
    hosts = hosts_of(group)
    return Members(group, sorted(range(group.size()), key=lambda rank: hosts[rank]))
