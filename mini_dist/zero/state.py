"""The whole state of a training from all ranks' shards, and back on any number of ranks.

    shards = launch(train, 4).results   # train returns model.state_shard()
    state = join(shards)                # {"head.norm.weight": {"parameter": ..., "exp_avg": ...}}
    model.load_state(state)             # of any stage, on any number of ranks

The state is in the precision of the shards. Hyperparameters are not in it: `make_optimizer` has
them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .unit import Unit


@torch.no_grad()
def state_shard(model) -> dict:
    """What this rank holds: its part of every unit's parameters and optimizer states.

    Parameters that are not trained, and buffers, are whole on every rank, and in every shard.
    """
    units = []
    for unit in model.units:
        states = model.optimizer.state[unit.shard]
        with model.place.fetched(unit.shard, states):
            held = {"parameter": unit.shard, **states}
            tensors = {name: torch.as_tensor(value).clone() for name, value in held.items()}
        shapes = {name: p.shape for name, p in zip(unit.names, unit.parameters)}
        units.append({"shapes": shapes, "tensors": tensors})
    whole = {name: tensor.clone() for name, tensor in untrained(model).items()}
    return {"rank": model.group.rank(), "size": model.group.size(), "units": units, "whole": whole}


def untrained(model) -> dict[str, Tensor]:
    frozen = {name: p for name, p in model.own.items() if not p.requires_grad}
    return frozen | dict(model.module.named_buffers())


def join(shards: list[dict]) -> dict[str, dict[str, Tensor]]:
    """The whole state from the shards of all ranks, in any order: name -> kind -> tensor.

    Raises ValueError where shards do not belong together.
    """
    shards = sorted(shards, key=lambda shard: shard["rank"])
    check_shards(shards)
    state = {name: {"parameter": tensor} for name, tensor in shards[0]["whole"].items()}
    for parts in zip(*(shard["units"] for shard in shards)):
        shapes = parts[0]["shapes"]
        state |= {name: {} for name in shapes}
        for kind, first in parts[0]["tensors"].items():
            if first.dim() == 0:  # one number for all of the unit, as AdamW's count of steps
                wholes = [first] * len(shapes)
            else:
                flat = torch.cat([part["tensors"][kind] for part in parts])
                sizes = [shape.numel() for shape in shapes.values()]
                wholes = flat[: sum(sizes)].split(sizes)
            for (name, shape), whole in zip(shapes.items(), wholes):
                state[name][kind] = whole.reshape(shape if first.dim() else ()).clone()
    return state


def check_shards(shards: list[dict]) -> None:
    if not shards:
        raise ValueError("nothing to join: give the shards of all ranks")
    sizes, ranks = {shard["size"] for shard in shards}, [shard["rank"] for shard in shards]
    if len(sizes) != 1 or ranks != list(range(*sizes)):
        raise ValueError(
            f"these are shards of ranks {ranks} of {' and '.join(map(str, sorted(sizes)))}: "
            "give one of each rank of one run"
        )
    for shard in shards[1:]:
        for unit, first in zip(shard["units"], shards[0]["units"]):
            if unit["shapes"] != first["shapes"] or list(unit["tensors"]) != list(first["tensors"]):
                raise ValueError(
                    f"the shards of ranks 0 and {shard['rank']} are of different models, units or "
                    "optimizers: they do not belong together"
                )
            for kind, tensor in unit["tensors"].items():
                if tensor.dim() == 0 and tensor != first["tensors"][kind]:
                    raise ValueError(
                        f"{kind} is {first['tensors'][kind].item():g} on rank 0 and "
                        f"{tensor.item():g} on rank {shard['rank']}: saved at different times"
                    )


@torch.no_grad()
def load_state(model, state: dict[str, dict[str, Tensor]]) -> None:
    """Give this rank its part of a whole state, whatever ranks or stage it comes from.

    Raises ValueError, and changes nothing, where names or shapes are not this model's.
    """
    wanted = {n: p for u in model.units for n, p in zip(u.names, u.parameters)}
    wanted |= untrained(model)
    for name in wanted.keys() ^ state.keys():
        where = "the model, not the state" if name in wanted else "the state, not the model"
        raise ValueError(f"{name} is in {where}: they do not belong together")
    for name, tensor in wanted.items():
        if state[name]["parameter"].shape != tensor.shape:
            found = list(state[name]["parameter"].shape)
            raise ValueError(
                f"{name} is {found} in the state and {list(tensor.shape)} in the model"
            )
    for unit in model.units:
        first, *others = unit.names
        for name in others:
            for kind in state[first].keys() ^ state[name].keys():
                without, other = (name, first) if kind in state[first] else (first, name)
                raise ValueError(f"{without} has no {kind}, but {other} has")
    for name, tensor in untrained(model).items():
        tensor.copy_(state[name]["parameter"])
    for unit in model.units:
        load_unit(model, unit, [state[name] for name in unit.names])
    model.share()


def load_unit(model, unit: Unit, saved: list[dict[str, Tensor]]) -> None:
    def own_part(kind: str) -> Tensor:
        if saved[0][kind].dim() == 0 and unit.parameters[0].dim() > 0:
            return saved[0][kind].clone()
        flat = unit.flatten([one[kind] for one in saved])
        return flat.chunk(model.group.size())[model.group.rank()].clone()

    states = model.optimizer.state[unit.shard]
    with model.place.fetched(unit.shard, states):
        unit.shard.copy_(own_part("parameter"))
        states |= {kind: own_part(kind) for kind in saved[0] if kind != "parameter"}
