"""Room 4, collectives: how ranks communicate, built from messages between two ranks.

It may import `model`, `plan` and `ranks`. Begin with `messages.py` (send, recv, exchange), then
`ring.py`. `choose.py` states the common rules and picks the fastest algorithm, `mesh.py` arranges
ranks on axes, and `sharding/` works out which collectives a sharding needs.
"""

from .choose import all_gather, all_reduce, all_to_all, broadcast, reduce, reduce_scatter
from .halving_doubling import (
    doubling_all_reduce,
    halving_doubling_all_reduce,
    recursive_doubling_all_gather,
    recursive_halving_reduce_scatter,
)
from .hierarchical import (
    hierarchical_all_gather,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
)
from .in_flight import begin_all_gather_, begin_reduce_scatter
from .messages import collective, device_of, exchange, recv, send, split_sizes, start, wait
from .pairwise import barrier, pairwise_all_to_all
from .pipelined_hierarchy import pipelined_hierarchical_all_reduce
from .pipelined_ring import pipelined_ring_all_reduce
from .ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from .ring_by_hosts import (
    ring_by_hosts_all_gather,
    ring_by_hosts_all_reduce,
    ring_by_hosts_reduce_scatter,
)
from .star_tree import (
    gather,
    scatter,
    star_all_reduce,
    star_broadcast,
    star_reduce,
    stars_all_reduce,
    tree_all_reduce,
    tree_broadcast,
    tree_reduce,
)
from .torus import torus_all_reduce

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "begin_all_gather_",
    "begin_reduce_scatter",
    "broadcast",
    "collective",
    "device_of",
    "doubling_all_reduce",
    "exchange",
    "gather",
    "halving_doubling_all_reduce",
    "hierarchical_all_gather",
    "hierarchical_all_reduce",
    "hierarchical_reduce_scatter",
    "pairwise_all_to_all",
    "pipelined_hierarchical_all_reduce",
    "pipelined_ring_all_reduce",
    "recursive_doubling_all_gather",
    "recursive_halving_reduce_scatter",
    "recv",
    "reduce",
    "reduce_scatter",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_by_hosts_all_gather",
    "ring_by_hosts_all_reduce",
    "ring_by_hosts_reduce_scatter",
    "ring_reduce_scatter",
    "scatter",
    "send",
    "split_sizes",
    "star_all_reduce",
    "star_broadcast",
    "star_reduce",
    "stars_all_reduce",
    "start",
    "torus_all_reduce",
    "tree_all_reduce",
    "tree_broadcast",
    "tree_reduce",
    "wait",
]
