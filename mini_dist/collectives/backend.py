"""Our collectives as a backend of PyTorch: a process group that DDP and FSDP2 accept.

    ring = own_backend(group)                              # the ring of lesson 03
    mine = own_backend(group, all_reduce=my_all_reduce)    # or what you wrote
    DistributedDataParallel(gpt, process_group=ring)
    fully_shard(gpt, mesh=DeviceMesh.from_group(ring, "cpu"))

torch.distributed lets anyone register a backend: a class with one method per collective. Three
methods are enough for DDP and FSDP2; everything else goes to gloo (or NCCL) as before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from mini_dist.ranks.ledger.group import DoneWork, RecordingGroup

from . import ring_all_gather, ring_all_reduce, ring_reduce_scatter


def own_backend(
    group,
    all_reduce: Callable = ring_all_reduce,
    all_gather: Callable = ring_all_gather,
    reduce_scatter: Callable = ring_reduce_scatter,
) -> dist.ProcessGroup:
    """Make a new group of the same ranks whose collectives are these functions.

    Each is a function (x, group) -> a new tensor, along dim 0: the sum of all x; all x,
    concatenated; this rank's part of the sum. All ranks of the group call this, in the same order.
    Raises ValueError for a group that `launch` did not make.
    """
    if not isinstance(group, RecordingGroup):
        raise ValueError(f"{type(group).__name__} records nothing: give the group of a launch")
    name = f"own{len(dist.Backend.backend_list)}"
    dist.Backend.register_backend(
        name,
        lambda options, _: OwnGroup(options, group, all_reduce, all_gather, reduce_scatter),
        extended_api=True,
        devices=[*group.carriers],
    )
    return dist.new_group(group.ranks, backend=name, use_local_synchronization=True)


SUMS = ("SUM", "AVG")


class OwnGroup(RecordingGroup):
    """torch passes tensors to be filled; our functions return new tensors."""

    def __init__(self, options, like: RecordingGroup, all_reduce, all_gather, reduce_scatter):
        super().__init__(options, like.recorder, like.device, like.is_staged)
        self.all_reduce, self.all_gather = all_reduce, all_gather
        self.reduce_scatter_sums = reduce_scatter

    def allreduce(self, tensors, opts=None):
        if reduction(opts) not in SUMS:
            return super().allreduce(tensors, opts)
        for tensor in tensors:
            self.fill(tensor, self.all_reduce(tensor, self), reduction(opts))
        return DoneWork(tensors)

    def all_gather_single(self, output, input, opts=None):
        self.fill(output, self.all_gather(input, self))
        return DoneWork(output)

    def reduce_scatter_single(self, output, input, opts=None):
        if reduction(opts) not in SUMS:
            return super().reduce_scatter_single(output, input, opts)
        self.fill(output, self.reduce_scatter_sums(input, self), reduction(opts))
        return DoneWork(output)

    def fill(self, output: Tensor, result: Tensor, reduction: str = "") -> None:
        output.view(-1).copy_(result.flatten())
        if reduction == "AVG":
            output /= self.size()


def reduction(opts) -> str:
    return "SUM" if opts is None else opts.reduceOp.__getstate__()[0].name
