"""in_flight.py on two levels: each part crosses an uplink once, and is passed on inside the host.

A gather's slow half, between hosts, is in flight while the rank computes; the fast half, inside the
host, runs in `wait`. A reduce-scatter begins with its fast half and leaves the slow half in flight.
As in hierarchical.py, `launch(hosts=...)` defines the hosts, which must have equal sizes.
"""

from __future__ import annotations

import torch

from .hierarchical import places, two_levels
from .in_flight import InFlight, cut
from .messages import collective, empty, start, wait


@collective
def begin_all_gather_(whole: torch.Tensor, group) -> InFlight:
    """Begin in_flight's all-gather; (h-1)/h of the whole crosses each host's uplink, not
    k(h-1)/h."""
    parts, rank, _ = cut(whole, group)
    node, same_place = two_levels(group, None)
    others = [peer for peer in range(same_place.size()) if peer != same_place.rank()]
    receives = [(parts[same_place.ranks[peer]], peer) for peer in others]
    across = start(group=same_place, receives=receives, sends=[(parts[rank], p) for p in others])
    of_place = [each.ranks for each in places(group, None)]

    def hand_round() -> torch.Tensor:
        mine, mates = of_place[node.rank()], [p for p in range(node.size()) if p != node.rank()]
        receives = [(parts[owner], mate) for mate in mates for owner in of_place[mate]]
        wait(start(node, receives, [(parts[owner], mate) for mate in mates for owner in mine]))
        return whole

    return InFlight(across, hand_round)


@collective
def begin_reduce_scatter(whole: torch.Tensor, group, dtype: torch.dtype | None = None) -> InFlight:
    """Begin in_flight's reduce-scatter; a host's terms are summed before they cross its uplink."""
    parts, rank, _ = cut(whole, group)
    node, same_place = two_levels(group, None)
    of_place = [each.ranks for each in places(group, None)]
    mates = [place for place in range(node.size()) if place != node.rank()]
    mine = of_place[node.rank()]  # this host's sums for these ranks are collected here
    terms = [[empty(parts[owner]) for owner in mine] for _ in mates]
    receives = [(term, mate) for mate, row in zip(mates, terms) for term in row]
    sends = [(parts[owner], mate) for mate in mates for owner in of_place[mate]]
    wait(start(node, receives, sends))
    sums = {owner: parts[owner].to(dtype or whole.dtype, copy=True) for owner in mine}
    for row in terms:
        for owner, term in zip(mine, row):
            sums[owner] += term
    others = [peer for peer in range(same_place.size()) if peer != same_place.rank()]
    travels = {owner: total.to(whole.dtype) for owner, total in sums.items()}
    arriving = [empty(parts[rank]) for _ in others]
    sends = [(travels[same_place.ranks[peer]], peer) for peer in others]
    handles = start(same_place, list(zip(arriving, others)), sends)

    def total() -> torch.Tensor:
        result = sums[rank]
        for term in arriving:
            result += term
        return result

    return InFlight(handles, total)
