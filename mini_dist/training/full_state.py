"""The state dict of the whole model, whatever the sharding.

    state = full_state_dict(model, group)            # on every rank
    state = full_state_dict(model, group, rank=0)    # on rank 0, and None on the others
    GPT(config).load_state_dict(state)               # as in one process

A checkpoint knows which part of which tensor each rank holds (checkpoint/pieces.py). Here these
parts are sent to the ranks that want the whole, not to files.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mini_dist.collectives import broadcast, device_of, recv, send
from mini_dist.plan.fields import checks_kinds

from .all_axes import ParallelModel
from .checkpoint import Piece, Place, Training
from .checkpoint.files import check_whole, name_of, tell_all
from .checkpoint.pieces import copy_common, piece


@checks_kinds
@torch.no_grad()
def full_state_dict(
    model: nn.Module | Iterable[nn.Module],
    group,
    *,
    rank: int | None = None,
    names: dict[Tensor, str] | None = None,
) -> dict[str, Tensor] | None:
    """Return the `state_dict()` that the same model has in one process: copies of all its tensors.

    model: a module, a module wrapped by a strategy, the result of `parallelize`, or all modules of
    this rank. group: all ranks that hold a part; each of them calls this. rank: in the
    group, the only one that gets the state dict, while the others return None; by default all do.
    names: names of parameters in the whole model, where they differ from those in the module.
    Every part is sent once to each receiver, which holds the whole model and one rank's parts.

    Raises ValueError if the ranks together do not hold all of a tensor.
    """
    if rank is not None and not 0 <= rank < group.size():
        raise ValueError(f"rank={rank} is not one of the {group.size()} ranks of this group")
    if isinstance(model, ParallelModel):
        models, names, renamed = model.parts, model.names_in_whole(), {}
        named = list(model.stages.values())
    else:
        models = [model] if isinstance(model, nn.Module) else list(model)
        named, renamed = [getattr(each, "module", each) for each in models], names or {}
    training = Training(models, [], group, names=names)
    places = training.places()
    dtypes = {place.name: tensor.dtype for tensor, place in places.items()}
    state: dict[str, Tensor] = {}
    with training.fetched():
        held = {p.place: p.tensor for pieces in training.held().values() for _, p in pieces}
        known = [(p.name, p.shape, p.where, name_of(dtypes[p.name])) for p in held]
        everyones = tell_all((known, other_names(named, places, renamed)), group)
        for (owner, dtype), there in owners([known for known, _ in everyones]).items():
            if rank is not None and group.rank() not in (owner, rank):
                continue
            if owner == group.rank():
                parts = [held[place].reshape(-1).to(device_of(group), dtype) for place in there]
                flat = torch.cat(parts)
            else:
                numel = sum(place.numel for place in there)
                flat = torch.empty(numel, dtype=dtype, device=device_of(group))
            flat = deliver(flat, owner, rank, group)
            if rank is None or rank == group.rank():
                unpack(flat, there, state)
    if rank is not None and rank != group.rank():
        return None
    return state | {other: state[name] for _, others in everyones for other, name in others}


def other_names(modules, places: dict[Tensor, Place], renamed) -> list[tuple[str, str]]:
    """Return (name, first name) of tied parameters: the state dict lists them under every name."""
    names = []
    for module in modules:
        for name, tensor in module.state_dict(keep_vars=True).items():
            if tensor in places and tensor not in renamed and name != places[tensor].name:
                names.append((name, places[tensor].name))
    return names


def owners(known: list[list]) -> dict[tuple[int, torch.dtype], list[Place]]:
    """Return the sender of each part: the first rank that holds it."""
    first, tensors = {}, {}
    for rank, parts in enumerate(known):
        for name, shape, where, dtype in parts:
            first.setdefault(Place(name, shape, *where), (rank, getattr(torch, dtype)))
    sent: dict[tuple[int, torch.dtype], list[Place]] = {}
    for place, owner in first.items():
        sent.setdefault(owner, []).append(place)
        about = tensors.setdefault(place.name, {"shape": place.shape, "pieces": []})
        about["pieces"].append([owner[0], *place.where])
    check_whole(tensors)
    return sent


def deliver(flat: Tensor, owner: int, rank: int | None, group) -> Tensor:
    if rank is None:
        return broadcast(flat, owner, group)
    if owner == rank:
        return flat
    if owner == group.rank():
        send(flat, rank, group)
        return flat
    return recv(flat, owner, group)


def unpack(flat: Tensor, places: list[Place], state: dict[str, Tensor]) -> None:
    for place, values in zip(places, flat.split([place.numel for place in places])):
        if place.name not in state:
            state[place.name] = flat.new_empty(place.shape)
        copy_common(piece(place.name, state[place.name]), Piece(place, values))
