"""Which links a group of the mesh uses: how many of its devices share a node, and how many nodes.

Ranks fill the nodes in order, and the mesh is [pp, dp, cp, tp] with tp innermost.  So a group along
an axis is a row of ranks that stand `stride` apart, the product of the axes further in; its groups
stand side by side in blocks of size * stride ranks.  All groups talk at once, and the step waits
for the one that stands worst.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..config import Layout


class GroupPlace(NamedTuple):
    """Where a group stands."""

    inside: int  # its members in a node, at the least: each has its own way out
    nodes: int  # that it touches


def worst_place(size: int, stride: int, per_node: int, world: int | None = None) -> GroupPlace:
    """Of the groups of `size` ranks, `stride` apart, among `world` ranks: the one on most nodes.

    Without `world` there is one group only, and it starts a node.
    """
    block, each = size * stride, max(1, per_node // stride)
    if block <= per_node and (world is None or world <= per_node or per_node % block == 0):
        return GroupPlace(size, 1)
    if per_node % stride:  # a group of an odd stride may have a node for one of its members
        return GroupPlace(1 if size <= each else each, -(-size // each) + (each > 1))
    inside = math.gcd(size, each)  # blocks start at multiples of this many places of a node
    return GroupPlace(inside, 1 + -(-(size - inside) // each))


def crossings(layout: Layout, per_node: int) -> list[bool]:
    """For each pair of neighbouring pipeline ranks whether any message between them leaves a node.

    Both ranks' blocks of dp cp tp devices have to be in one node for it to stay inside.
    """
    block = layout.dp * layout.cp * layout.tp
    return [
        rank * block // per_node != ((rank + 2) * block - 1) // per_node
        for rank in range(layout.pp - 1)
    ]
