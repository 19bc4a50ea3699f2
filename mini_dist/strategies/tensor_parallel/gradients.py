"""After backward: gradients of which each rank has a summand only, and what the norm counts once.

Backward leaves on each rank the whole gradient of what this rank alone holds, and with TENSOR of
what all ranks hold, since they computed the same with it. Two kinds of gradients are partial: their
sum over some ranks is the gradient.

    key/value heads that several ranks hold           each found what its own query heads send back
    with SEQUENCE, parameters that no plan cuts       each used them on its part of the sequence:
                                                      norms, the biases of o and down, positions
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

    One all-reduce a dtype and set of ranks.
    """
    sharding = model.sharding
    partial_gradients = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and len(ranks_to_sum_over(sharding, name)) > 1:
            parameter.grad = gradient(parameter)  # zeros if no backward on this rank has used it
            partial_gradients.append((name, parameter.grad))
    add_up_parts_(sharding, partial_gradients)


@torch.no_grad()
def add_up_parts_(sharding: Sharding, gradients: Iterable[tuple[str, Tensor]]) -> None:
    """Sum those of the given gradients that are partial, in place.

    gradients: (full parameter name, its gradient), in the same order on all ranks. Instead of the
    whole gradient it may be a slice, the same on all ranks, as ZeRO leaves it.
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
    """The ranks (of the group that cuts it) whose partial gradients of this parameter add up to the
    gradient of this rank's piece; only this rank where its gradient is whole already."""
    group, cut = sharding.group_of(name), sharding.cuts.get(name)
    rank, size = group.rank(), group.size()
    if cut is None:
        return tuple(range(size)) if sharding.pair.cuts_sequence else (rank,)
    holders = size // cut.parts  # neighbours that hold the same piece
    return tuple(range(cut.part * holders, (cut.part + 1) * holders))


def for_grad_norm(model: nn.Module) -> tuple[list[nn.Parameter], dict]:
    """The arguments of `grad_norm`: parameters that are whole, and those that are cut.

    A piece that several ranks hold is given by the first of them only, so that it counts once.
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
