"""How long messages and collectives take on a machine: which links a group of the mesh uses, then
a ring or a tree over them.

Ranks fill the nodes in order, and the mesh is [pp, dp, cp, tp] with tp innermost.  So a group along
an axis consists of ranks that are `stride` apart, where stride is the product of the inner axes'
sizes. The groups are arranged in blocks of size * stride ranks.  All groups communicate at once,
and the step waits for the group with the worst placement.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from ..config import Layout
from .links import Link
from .machines import COLLECTIVE_SECONDS, PROTOCOLS, Hardware


class GroupPlace(NamedTuple):
    """The placement of a group."""

    inside: int  # its members per node, at least: each has its own port
    nodes: int  # the number of nodes that it spans


def worst_place(size: int, stride: int, per_node: int, world: int | None = None) -> GroupPlace:
    """Return the placement of the group on most nodes: `size` ranks, `stride` apart, of `world`
    ranks.

    Without `world` there is only one group, and it starts a node.
    """
    block, each = size * stride, max(1, per_node // stride)
    if block <= per_node and (world is None or world <= per_node or per_node % block == 0):
        return GroupPlace(size, 1)
    if per_node % stride:  # a group of an odd stride may have one member in a node
        return GroupPlace(1 if size <= each else each, -(-size // each) + (each > 1))
    inside = math.gcd(size, each)  # blocks start at multiples of this in a node
    return GroupPlace(inside, 1 + -(-(size - inside) // each))


def crossings(layout: Layout, per_node: int) -> list[bool]:
    """Return, for each pair of neighboring pipeline ranks, whether a message between them leaves a
    node.

    It stays inside only if both ranks' blocks of dp cp tp devices are in one node.
    """
    block = layout.dp * layout.cp * layout.tp
    return [
        rank * block // per_node != ((rank + 2) * block - 1) // per_node
        for rank in range(layout.pp - 1)
    ]


TWO_HOPS = "all_to_all_by_nodes"  # how ZeRO++ scatters gradients (Wang et al. 2023, section 3.3)


@lru_cache(maxsize=4096)
def collective_seconds(
    machine: Hardware,
    op: str,
    num_bytes: float,
    size: int,
    stride: int = 1,
    world: int | None = None,
) -> float:
    """Time a ring over `size` devices that are `stride` apart, the worst placed of `world` devices;
    for an all-reduce over nodes also a tree, if that is faster.

    NCCL runs one ring per port of a node: a group with k members in each node gets k network
    ports, until the links inside the node are the bottleneck. An all-to-all is not a ring: each
    device sends its own data to other nodes, through its own port. TWO_HOPS reduces inside each
    node first, then between the ranks that have the same index in their nodes.
    """
    if size == 1 or not num_bytes:
        return 0.0
    inside, nodes = worst_place(size, stride, machine.devices_per_node, world)
    if op == TWO_HOPS:
        hops = (num_bytes, inside, stride), (num_bytes / inside, nodes, machine.devices_per_node)
        return sum(collective_seconds(machine, "all_to_all", *hop, world) for hop in hops)
    link = machine.node_link(op)
    if nodes == 1:
        seconds = _by_protocol(op, num_bytes, size, link.latency, 0.0, link.bandwidth)
        return COLLECTIVE_SECONDS + seconds
    network = machine.network_link(nodes)
    if op == "all_to_all":  # all at once; links inside and ports work at the same time
        inner = link.seconds((inside - 1) / size * num_bytes)
        outer = network.seconds((size - inside) / size * num_bytes)
        return COLLECTIVE_SECONDS + max(inner, outer)
    ports = inside * network.bandwidth
    bandwidth = min(link.bandwidth, ports) if inside > 1 else ports
    if machine.by_nodes:  # each step was timed
        seconds = _ring_seconds(op, num_bytes, size, Link(network.latency, bandwidth))
    else:  # the mean ring step; one in `inside` leaves the node
        leaves = (nodes - 1) / (size - 1)
        seconds = _by_protocol(
            op, num_bytes, size, link.latency, leaves * network.latency, bandwidth
        )
    if op == "all_reduce":
        seconds = min(seconds, _tree_seconds(machine, num_bytes, inside, nodes, bandwidth, ports))
    return COLLECTIVE_SECONDS + seconds


def _by_protocol(op, num_bytes, size, node_latency, network_latency, bandwidth) -> float:
    """Time a ring with the fastest of NCCL's protocols: short steps, or all of the link
    (PROTOCOLS)."""
    if op == "all_to_all":
        return _ring_seconds(op, num_bytes, size, Link(node_latency, bandwidth))
    return min(
        _ring_seconds(
            op, num_bytes, size, Link(a * node_latency + b * network_latency, share * bandwidth)
        )
        for a, b, share in PROTOCOLS
    )


def _ring_seconds(op: str, num_bytes: float, size: int, link: Link) -> float:
    steps = (size - 1) * (2 if op == "all_reduce" else 1)
    return link.seconds(num_bytes / size, rounds=steps)


def _tree_seconds(machine, num_bytes, inside: int, nodes: int, bandwidth, ports) -> float:
    """Time a tree of nodes, up and down, with the devices of each node in a row (NCCL,
    graph/tuning.cc: 0.9 of the ring's bandwidth); measured values with this group's ports if
    known."""
    if machine.by_nodes:
        timed = machine.tree_bandwidth(nodes) * inside / machine.devices_per_node
        return 2 * num_bytes / min(timed, ports)
    levels = math.ceil(math.log2(nodes))
    ways = (inside - 1) * machine.node_latency + levels * machine.network_latency
    return 2 * (ways + num_bytes / (0.9 * bandwidth))


def message_seconds(machine: Hardware, num_bytes: float, crosses: bool) -> float:
    """Return the seconds of one message from a device to another, perhaps in another node."""
    link = machine.network_link() if crosses else machine.node_link("send")
    return COLLECTIVE_SECONDS + link.seconds(num_bytes)
