"""What torch 2.8 to 2.12 do in another way than torch 2.13, in one place.

The library is written for torch 2.13. Everything that an older torch needs besides is here, so when
the oldest version in pyproject.toml rises, this is the file that shrinks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from inspect import signature

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

# Methods of a process group: the name since torch 2.13, and the name before.
FORMER_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
IS_OLDER = not hasattr(dist.ProcessGroup, "all_gather_single")


# ---- names and order of ranks --------------------------------------------------------------------


def with_former_names(group_class: type) -> type:
    """Let torch call the methods of a process group class by their former names as well."""
    for name, former in FORMER_NAMES.items():
        setattr(group_class, former, getattr(group_class, name))
    return group_class


class InPlace(int):
    """A rank that sorts by its place in a list and is an ordinary int for everything else."""

    place: int

    def __lt__(self, other: int) -> bool:
        return self.place < other.place if isinstance(other, InPlace) else int(self) < other


def new_group(ranks: Sequence[int], **how):
    """Make a group whose ranks have the order of `ranks`, as dist.new_group(sort_ranks=False) does.

    An older torch has no such argument, and always sorts.
    """
    if "sort_ranks" in signature(dist.new_group).parameters:
        return dist.new_group([*ranks], sort_ranks=False, **how)
    in_place = [InPlace(rank) for rank in ranks]
    for place, rank in enumerate(in_place):
        rank.place = place
    made = dist.new_group(in_place, **how)
    if isinstance(made, dist.ProcessGroup):
        kept = dist.distributed_c10d._world.pg_group_ranks
        kept[made] = {int(rank): place for rank, place in kept[made].items()}
    return made


# ---- gloo ----------------------------------------------------------------------------------------


@contextmanager
def silent_gloo() -> Iterator[None]:
    """Keep to itself what an older gloo prints as it connects ("[Gloo] Rank 0 is connected to")."""
    if not IS_OLDER:
        yield
        return
    before, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(before, 1)
        os.close(before)
        os.close(nowhere)


def as_today(group):
    """Give a process group of an older torch the names and the averages of torch 2.13."""
    return group if hasattr(group, "all_gather_single") else FormerGroup(group)


class FormerGroup:
    """A process group that has the former names, behind the names of today.

    gloo's reduce-scatter, asked for the average, returns the sum in torch 2.8: FSDP2 on CPUs
    trains with gradients that are too large by the number of ranks. So here gloo is asked for the
    sum, and `wait` divides it.
    """

    def __init__(self, group):
        self.group = group

    def __getattr__(self, method: str):
        return getattr(self.group, FORMER_NAMES.get(method, method))

    def reduce_scatter(self, outputs, inputs, opts):
        return self._reduce_scatter(self.group.reduce_scatter, outputs, inputs, opts)

    def reduce_scatter_single(self, output, input, opts):
        return self._reduce_scatter(self.group._reduce_scatter_base, output, input, opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        call = self.group.reduce_scatter_tensor_coalesced
        return self._reduce_scatter(call, outputs, inputs, opts)

    def _reduce_scatter(self, call, filled, given, opts):
        outputs = tree_leaves(filled)
        on_cpu = all(tensor.is_cpu for tensor in outputs)  # NCCL's averages are right
        if not on_cpu or opts.reduceOp.__getstate__()[0] != dist.ReduceOp.AVG:
            return call(filled, given, opts)
        sums = dist.ReduceScatterOptions()
        sums.timeout, sums.asyncOp = opts.timeout, opts.asyncOp
        sums.reduceOp = dist.ReduceOp.SUM
        return DividingWork(call(filled, given, sums), outputs, self.group.size())


class DividingWork:
    """The handle of sums that become averages when somebody waits for them."""

    def __init__(self, work, sums: list[Tensor], number: int):
        self.work, self.sums, self.number = work, sums, number

    def wait(self, timeout=timedelta(0)) -> bool:
        if self.sums:  # Only once: gloo's own second wait would bring the sums back.
            self.work.wait(*([timeout] if timeout else []))
            for tensor in self.sums:
                tensor /= self.number
            self.sums = []
        return True

    def is_completed(self) -> bool:
        return not self.sums and self.work.is_completed()

    def get_future(self) -> torch.futures.Future:
        return self.work.get_future()  # which raises: gloo's reduce-scatter has none

    def is_success(self) -> bool:
        return self.work.is_success()

    def exception(self):
        return self.work.exception()


def fake_group(rank: int, size: int):
    """Make torch's process group that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeProcessGroup

    make = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
    return make(rank, size)


# ---- autograd ------------------------------------------------------------------------------------


def gradients_of(given: Sequence[Tensor] | tuple[list[Tensor]]) -> list[Tensor]:
    """Return what backward(ctx, *given) of a function with `boxed_grads_call` got, as a list.

    Since torch 2.13 backward gets one list that it may empty, which frees each gradient after its
    last use. An older torch passes the gradients one by one and keeps them until backward returns.
    """
    return given[0] if isinstance(given[0], list) else list(given)


def gradient_edge(output: Tensor) -> GradientEdge:
    """Return the place in the graph where backward of `output` begins, without the tensor.

    In torch 2.8 backward cannot begin at an autograd.Function of Python; at a view of it, it can.
    """
    return get_gradient_edge(output.view_as(output) if IS_OLDER else output)


# ---- kernels -------------------------------------------------------------------------------------

# Whether torch's fused attention for CPUs takes fewer key/value heads than query heads. In torch
# 2.8 it reads and writes beyond their end, and the process aborts.
KERNEL_SHARES_HEADS = not IS_OLDER
