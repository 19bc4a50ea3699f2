"""The front door: one name per operation; size and number of ranks choose the algorithm.

    all_reduce(x, group)                                # the fastest here for this size
    all_reduce(x, group, op="mean", algorithm="ring")   # or one by name

All ranks must make the same choice, so it depends only on what they share: the number of ranks and
the total bytes. The limits were measured with gloo on one machine with two cores
(benchmarks/collectives.py). There a byte costs the same on every path, and a message costs much
more, so stars win for longer than on machines where each rank has its own link. Lesson 04 finds
your limits. On several hosts (`launch(hosts=...)`) the uplinks count: "hierarchical" sends the
least over them, with no more messages than a ring. For an all-reduce of several pieces,
"pipelined_hierarchy" also keeps them busy. Hosts of unequal size use "ring_by_hosts", which passes
through one host after the other.

The rules for every collective of this room:
* All ranks of the group call it with tensors of the same dtype and, unless its docstring says
  otherwise, of the same shape. It returns a new tensor and changes no argument. Peers, roots and
  results are numbered by ranks in the group.
* A tensor is cut along dim 0 (an all-reduce flattens it first) into parts that differ by at most
  one row, the longer parts first, as torch.tensor_split does. (Several stars cut equal parts and a
  shorter last one.) A part may be empty, and so may x.
* Sums are computed in the tensor's dtype and rounded after each addition. float16 and bfloat16
  lose digits with every rank, as in NCCL's ring: pass x.float() if that matters.
* The order in which an element is summed depends on its index, the number of ranks and the
  algorithm, never on timing, and all ranks get the same rank's sum. So results are bit-identical on
  all ranks and in all runs. Different algorithms round differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from mini_dist.plan.fields import checks_kinds
from mini_dist.ranks.hosts import hosts_of

from .halving_doubling import (
    doubling_all_reduce,
    halving_doubling_all_reduce,
    power_of_two,
    recursive_doubling_all_gather,
    recursive_halving_reduce_scatter,
)
from .hierarchical import (
    hierarchical_all_gather,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
)
from .messages import begin, check_rows, collective
from .pairwise import pairwise_all_to_all
from .pipelined_hierarchy import PIECE_BYTES, pipelined_hierarchical_all_reduce
from .pipelined_ring import pipelined_ring_all_reduce
from .ring import check_sizes, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from .ring_by_hosts import (
    ring_by_hosts_all_gather,
    ring_by_hosts_all_reduce,
    ring_by_hosts_reduce_scatter,
)
from .star_tree import (
    star_all_reduce,
    star_broadcast,
    star_reduce,
    stars_all_reduce,
    tree_all_reduce,
    tree_broadcast,
    tree_reduce,
)

STAR_BYTES = 1 << 19  # below, the fewest messages win, though one rank handles them all
STARS_BYTES = 4 << 20  # below, a few more messages are worth sharing that rank's load
REDUCE_STAR_BYTES = 4 << 20  # a reduce to one root: a star below, a tree above
HOSTS_BYTES = 1 << 12  # on several hosts: above, the bytes on the uplinks count
ROUNDS_BYTES = 1 << 20  # below, the fewest rounds win; above, the fewest bytes

BROADCAST = {"star": star_broadcast, "tree": tree_broadcast}
REDUCE = {"star": star_reduce, "tree": tree_reduce}
ALL_GATHER = {"ring": ring_all_gather, "doubling": recursive_doubling_all_gather}
ALL_GATHER |= {"hierarchical": hierarchical_all_gather, "ring_by_hosts": ring_by_hosts_all_gather}
REDUCE_SCATTER = {"ring": ring_reduce_scatter, "halving": recursive_halving_reduce_scatter}
REDUCE_SCATTER["hierarchical"] = hierarchical_reduce_scatter
REDUCE_SCATTER["ring_by_hosts"] = ring_by_hosts_reduce_scatter
ALL_REDUCE = {
    "star": star_all_reduce,
    "stars": stars_all_reduce,
    "tree": tree_all_reduce,
    "ring": ring_all_reduce,
    "ring_by_hosts": ring_by_hosts_all_reduce,
    "pipelined_ring": pipelined_ring_all_reduce,
    "doubling": doubling_all_reduce,
    "halving_doubling": halving_doubling_all_reduce,
}
TWO_LEVELS = {  # all-reduces that take `nodes`
    "hierarchical": hierarchical_all_reduce,
    "pipelined_hierarchy": pipelined_hierarchical_all_reduce,
}


@checks_kinds
@collective
def broadcast(x: torch.Tensor, root: int, group, algorithm: str = "auto") -> torch.Tensor:
    """Return the root's x on every rank. x: the same shape and dtype on all ranks.

    algorithm: "star", "tree", or "auto".
    """
    auto = "star" if group.size() <= 3 else "tree"
    return pick(BROADCAST, algorithm, auto)(x, root, group)


@checks_kinds
@collective
def reduce(
    x: torch.Tensor, root: int, group, op: str = "sum", algorithm: str = "auto"
) -> torch.Tensor | None:
    """Return x reduced over all ranks on the root, and None on the others.

    op: "sum", "mean", "max", "min" or "product". algorithm: "star", "tree", or "auto".
    """
    auto = "star" if x.nbytes <= REDUCE_STAR_BYTES else "tree"
    function = pick(REDUCE, algorithm, auto)
    return finish(function(x, root, group, begin(op, x)), op, group)


@checks_kinds
@collective
def all_gather(
    x: torch.Tensor, group, sizes: list[int] | None = None, dim: int = 0, algorithm: str = "auto"
) -> torch.Tensor:
    """Return all ranks' x on every rank, concatenated along `dim` in rank order.

    sizes: every rank's x.shape[dim], if they differ. algorithm: "ring", "doubling",
    "hierarchical", "ring_by_hosts", or "auto".
    """
    check_rows(x)
    x = x.movedim(dim, 0)
    sizes = check_sizes(x, sizes, group)
    nbytes = sum(sizes) * x.shape[1:].numel() * x.itemsize  # (a rank's own part may be empty)
    auto = by_uplinks(nbytes, group) or by_rounds(nbytes, group, "doubling", "ring")
    function = pick(ALL_GATHER, algorithm, auto)
    return function(x, group, sizes=sizes).movedim(0, dim)


@checks_kinds
@collective
def reduce_scatter(
    x: torch.Tensor, group, op: str = "sum", dim: int = 0, algorithm: str = "auto"
) -> torch.Tensor:
    """Cut x along `dim` into n chunks; rank r returns chunk r, reduced over all ranks.

    If n does not divide x.shape[dim], the first chunks are one longer (as torch.tensor_split).
    op: "sum", "mean", "max", "min" or "product". algorithm: "ring", "halving", "hierarchical",
    "ring_by_hosts", or "auto".
    """
    check_rows(x)
    auto = by_uplinks(x.nbytes, group) or by_rounds(x.nbytes, group, "halving", "ring")
    function = pick(REDUCE_SCATTER, algorithm, auto)
    chunk = function(x.movedim(dim, 0), group, op=begin(op, x)).movedim(0, dim)
    return finish(chunk, op, group)


@checks_kinds
@collective
def all_reduce(
    x: torch.Tensor,
    group,
    op: str = "sum",
    algorithm: str = "auto",
    nodes: int | Sequence[int] | None = None,
) -> torch.Tensor:
    """Return x reduced over all ranks on every rank, bit-identical.

    op: "sum", "mean" (the sum, divided at the end), "max", "min" or "product". algorithm: "star",
    "stars", "tree", "ring", "ring_by_hosts", "pipelined_ring", "doubling", "halving_doubling",
    "hierarchical" or "pipelined_hierarchy" (with `nodes`, as in hierarchical.py, if launch
    does not know the hosts), or "auto".
    """
    if nodes is not None and algorithm not in (*TWO_LEVELS, "auto"):
        raise ValueError(
            f"nodes={nodes!r} has no meaning for algorithm={algorithm!r}: give "
            f"{' or '.join(map(repr, TWO_LEVELS))}, or leave nodes out"
        )
    ways = ALL_REDUCE | {name: partial(way, nodes=nodes) for name, way in TWO_LEVELS.items()}
    auto = "stars" if x.nbytes <= STARS_BYTES else "ring"
    if x.nbytes <= STAR_BYTES:
        auto = "star"
    auto = by_uplinks(x.nbytes, group) or auto
    if auto == "hierarchical" and x.nbytes >= 2 * PIECE_BYTES:
        auto = "pipelined_hierarchy"
    return finish(pick(ways, algorithm, auto)(x, group, op=begin(op, x)), op, group)


@checks_kinds
@collective
def all_to_all(
    x: torch.Tensor,
    group,
    input_splits: list[int] | None = None,
    output_splits: list[int] | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Send the d-th part of x (along dim 0) to rank d; return the received parts in rank order.

    input_splits, output_splits: rows to and from each rank, if they are uneven.
    algorithm: "pairwise" or "auto".
    """
    function = pick({"pairwise": pairwise_all_to_all}, algorithm, "pairwise")
    return function(x, group, input_splits, output_splits)


def by_rounds(nbytes: int, group, few_rounds: str, few_bytes: str) -> str:
    """Choose by rounds. Folding to a power of two costs bytes, so there the ring wins earlier."""
    folded = power_of_two(group.size()) < group.size()
    limit = ROUNDS_BYTES // 8 if folded else ROUNDS_BYTES
    return few_rounds if nbytes <= limit else few_bytes


def by_uplinks(nbytes: int, group) -> str | None:
    """Choose what saves uplink bytes; None on one host, or if rounds count more than bytes."""
    hosts = hosts_of(group)
    if len({*hosts}) == 1 or nbytes <= HOSTS_BYTES:
        return None
    even = len({hosts.count(host) for host in hosts}) == 1
    return "hierarchical" if even else "ring_by_hosts"


def pick(ways: dict, algorithm: str, auto: str):
    if algorithm == "auto":
        algorithm = auto
    if algorithm not in ways:
        known = ", ".join(f'"{name}"' for name in ways)
        raise ValueError(f'algorithm={algorithm!r} is none of {known}, "auto"')
    return ways[algorithm]


def finish(total: torch.Tensor | None, op: str, group) -> torch.Tensor | None:
    return total / group.size() if op == "mean" and total is not None else total
