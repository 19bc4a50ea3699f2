"""A table of the modules to replace and their replacements; `shard_model` applies it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn

from mini_dist.collectives import all_gather, device_of

from .dropout import SequenceCutDropout, share_random_state
from .ideas import TENSOR, Pair
from .layers import (
    ColumnParallelLinear,
    Cut,
    HoldsPieces,
    ParallelAttention,
    ParallelMLP,
    SequenceCutEmbedding,
    VocabParallelEmbedding,
)

NUMBERS_AT_ONCE = 2**24  # 128 MiB in float64


def if_sequence_is_cut(make: Callable) -> Callable:
    """Wrap a plan's entry: replace the module by make(module, group) only with sequence
    parallelism."""
    return lambda module, group, *, pair: make(module, group) if pair.cuts_sequence else module


GPT_PLAN = {
    "embed.token": VocabParallelEmbedding,
    "embed.position": if_sequence_is_cut(SequenceCutEmbedding),
    "embed.dropout": if_sequence_is_cut(SequenceCutDropout),
    "blocks.*.attn": ParallelAttention,
    "blocks.*.ffn": ParallelMLP,
    "blocks.*.dropout": if_sequence_is_cut(SequenceCutDropout),
    "head.out": ColumnParallelLinear,  # gives logits [B, S, V/t]
}


@dataclass
class Sharding:
    """The result of `shard_model`, kept as `model.sharding`."""

    group: object
    pair: Pair
    tied: list[list[str]]  # all names of each parameter with several names
    cuts: dict[str, Cut] = field(default_factory=dict)  # full parameter name -> Cut
    groups: dict[str, object] = field(default_factory=dict)  # if another group shards it

    def group_of(self, name: str):
        """Return the ranks over which this parameter is sharded or replicated."""
        return self.groups.get(name, self.group)


def shard_model(
    model: nn.Module, plan: dict[str, Callable], group, *, pair: Pair = TENSOR
) -> nn.Module:
    """Replace modules of `model` by their parallel forms and return it; each rank keeps its shards.

    plan: name of a module, `*` for any -> a function (module, group, pair=...) -> module. A name
    that leads to None (a stage without a head) is skipped. All ranks pass equal models:
    made from one seed, or on the meta device, followed by `init_weights_` or
    `load_full_state_dict`. With dropout, all ranks copy rank 0's random state. Parameters that were
    one (a tied embedding) stay one. Raises ValueError for sizes that do not divide, if the ranks'
    models differ, and for a name that matches nothing.
    """
    check_equal(model, group)
    if any(isinstance(module, nn.Dropout) and module.p for module in model.modules()):
        share_random_state(model, group)
    tied = names_of_tied(model)
    for pattern, how in plan.items():
        for parent, name in find(model, pattern):
            setattr(parent, name, how(getattr(parent, name), group, pair=pair))
    model.sharding = Sharding(group, pair, tied)
    for prefix, module in model.named_modules():
        if isinstance(module, HoldsPieces):
            model.sharding.cuts |= {f"{prefix}.{name}": cut for name, cut in module.cuts.items()}
            if module.group is not group:
                names = [f"{prefix}.{name}" for name in module._parameters]
                model.sharding.groups |= dict.fromkeys(names, module.group)
    tie(model)
    return model


def check_equal(model: nn.Module, group) -> None:
    """Raise ValueError if the ranks' models differ, because their shards would not form one
    model."""
    parameters = list(model.parameters())
    if group.size() == 1 or not parameters or parameters[0].device.type != device_of(group).type:
        return  # (a model of shapes only)
    # In float64 a whole embedding would be the largest tensor that the rank ever holds.
    parts = [part for p in parameters for part in p.detach().flatten().split(NUMBERS_AT_ONCE)]
    sums = torch.stack([part.double().sum() for part in parts]).sum().reshape(1)
    everyones = all_gather(sums.to(parameters[0].device), group)
    if not sums.is_meta and not bool((everyones == everyones[0]).all()):
        raise ValueError(
            "the ranks' models differ, and their pieces would not fit: make them from one seed"
        )


def find(model: nn.Module, pattern: str) -> list[tuple[nn.Module, str]]:
    """Return (parent, name in it) of each module that the pattern matches, except those that are
    None."""
    found = [(None, "", model)]
    for component in pattern.split("."):
        parents, found = [module for *_, module in found], []
        for parent in parents:
            names = [name for name in parent._modules if fnmatchcase(name, component)]
            if not names and not hasattr(parent, component):
                raise ValueError(
                    f"the plan names {pattern!r}, but there is no {component!r} in a "
                    f"{type(parent).__name__}: it has {', '.join(parent._modules) or 'no modules'}"
                )
            found += [(parent, name, getattr(parent, name)) for name in names]
        found = [each for each in found if each[-1] is not None]
    return [(parent, name) for parent, name, _ in found]


# --- parameters with several names --------------------------------------------------------------


def names_of_tied(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has more than one name."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [each for each in names.values() if len(each) > 1]


def tie(model: nn.Module) -> None:
    """Tie parameters again that were tied before each name got its own shard.

    Raises ValueError if the pieces differ.
    """
    cuts = model.sharding.cuts
    for first, *others in model.sharding.tied:
        for other in others:
            if cuts.get(first) != cuts.get(other):
                raise ValueError(
                    f"{first} and {other} are one parameter, but the plan cuts them differently"
                )
            module, _, name = other.rpartition(".")
            setattr(model.get_submodule(module), name, model.get_parameter(first))
