"""After backward: sum partial gradients over ranks, and count each gradient once in the norm.

Backward leaves on each rank the whole gradient of the parameters that only this rank holds, and,
with TENSOR, of the replicated ones, since all ranks did the same computation with them. Two kinds
of gradients are partial: their sum over some ranks is the gradient.

    key/value heads on several ranks                  each rank has the part of its own query heads
    with SEQUENCE, parameters that no plan shards     each rank used them on its part of the
                                                      sequence: norms, biases of o and down,
                                                      positions
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mini_dist.collectives import all_reduce
from mini_dist.collectives.messages import Members

from ..replicas import gradient
from .plan import Sharding


@torch.no_grad()
def finish_gradients(model: nn.Module) -> None:
    """Sum the partial gradients of a sharded model; call it after the last backward of a step.

    Sends one all-reduce per dtype and set of ranks.
    """
    sharding = model.sharding
    partial_gradients = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and len(ranks_to_sum_over(sharding, name)) > 1:
            parameter.grad = gradient(parameter)  # zeros if this rank did not use it
            partial_gradients.append((name, parameter.grad))
    add_up_parts_(sharding, partial_gradients)


@torch.no_grad()
def add_up_parts_(sharding: Sharding, gradients: Iterable[tuple[str, Tensor]]) -> None:
    """Sum the partial ones among the given gradients, in place.

    gradients: (full parameter name, its gradient), in the same order on all ranks. A slice of the
    gradient, the same on all ranks, is also possible, such as ZeRO's shards.
    """
    partial: dict[tuple, list[Tensor]] = {}
    for name, summand in gradients:
        ranks = ranks_to_sum_over(sharding, name)
        if len(ranks) > 1:
            key = sharding.group_of(name), ranks, summand.dtype
            partial.setdefault(key, []).append(summand)
    for (group, ranks, _), summands in partial.items():
        flat = torch.cat([summand.flatten() for summand in summands])
        total = all_reduce(flat, Members(group, ranks))
        sizes = [summand.numel() for summand in summands]
        for summand, summed in zip(summands, total.split(sizes)):
            summand.copy_(summed.view_as(summand))


def ranks_to_sum_over(sharding: Sharding, name: str) -> tuple[int, ...]:
    """Return the ranks (of the group that shards it) whose partial gradients of this parameter sum
    to the gradient of this rank's shard; only this rank if its gradient is already whole."""
    group, cut = sharding.group_of(name), sharding.cuts.get(name)
    rank, size = group.rank(), group.size()
    if cut is None:
        return tuple(range(size)) if sharding.pair.cuts_sequence else (rank,)
    holders = size // cut.parts  # neighbors that hold the same shard
    return tuple(range(cut.part * holders, (cut.part + 1) * holders))


def for_grad_norm(model: nn.Module) -> tuple[list[nn.Parameter], dict]:
    """Return the arguments of `grad_norm`: whole parameters, and sharded ones.

    A shard that several ranks hold is returned on the first of them only, so it counts once.
    """
    sharding = model.sharding
    whole, cut = [], {sharding.group: []}
    for name, parameter in model.named_parameters():
        group = sharding.group_of(name)
        if name not in sharding.cuts:
            whole.append(parameter)
        elif group.rank() == ranks_to_sum_over(sharding, name)[0]:
            cut.setdefault(group, []).append(parameter)
    return whole, cut
