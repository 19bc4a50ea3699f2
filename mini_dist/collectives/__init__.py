"""Room 4, collectives: what ranks say to each other, from nothing but messages between two ranks.

It may import `model`, `plan` and `ranks`. Begin with `messages.py`, then `ring.py`.

    messages.py          send, recv, exchange: all that torch.distributed is asked for
    ring.py              reduce-scatter, all-gather, and both together: the all-reduce
    star_tree.py         broadcast, reduce, gather, scatter; the all-reduce by stars and trees
    halving_doubling.py  fewer rounds than the ring: partners at powers of two
    pipelined_ring.py    the ring made fast
    hierarchical.py      nodes x ranks in a node
    pipelined_hierarchy.py  its all-reduce made fast
    torus.py             rows x columns, both at once
    pairwise.py          everyone with everyone; the barrier
    in_flight.py         begun now, waited for later
    by_hosts.py          the same on two levels
    choose.py            all_reduce(x, group, op=..., algorithm="auto") and its like
    mesh.py              ranks laid out on axes, a group for each line of ranks
    ops.py               the collectives that autograd sees
    sharding/            a notation for shardings, and the rules that follow from it
    emulate.py           devices and links in virtual time
    backend.py           our collectives under unmodified DDP and FSDP2

What holds for all of them:
* All ranks of the group call it, with tensors of the same dtype and, where not said otherwise,
  the same shape. They return new tensors and change no argument. Peers, roots and results are in
  ranks of the group.
* A tensor is cut along dim 0 (an all-reduce: flattened) into parts that differ by at most one row,
  the longer ones first, as torch.tensor_split does (several stars: all equal but the last ones).
  Parts may be empty, and so may x.
* Sums are taken in the dtype of the tensor and rounded after each addition: float16 and bfloat16
  lose digits with every rank, as in NCCL's ring. Pass x.float() where that matters.
* In which order an element is summed depends on its place, the number of ranks and the algorithm,
  never on timing, and one rank's sum goes to all: a result is bit-identical on all ranks and runs.
  Different algorithms round differently.
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
