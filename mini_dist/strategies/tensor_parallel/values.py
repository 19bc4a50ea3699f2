"""Cut a whole model's values, a state dict or initial values, into this rank's shards.

`full_state.full_state_dict` is the inverse.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mini_dist.model.initial_values import initial_value, named_tensors
from mini_dist.plan.fields import checks_kinds

from .plan import tie


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load this rank's shards of a whole model's state dict; strict, like `load_state_dict`."""
    cuts = model.sharding.cuts
    if any(parameter.is_meta for parameter in model.parameters()):
        make_memory(model, next(iter(state.values())).device)
    model.load_state_dict(
        {name: cuts[name].piece(t) if name in cuts else t for name, t in state.items()}
    )


@checks_kinds
@torch.no_grad()
def init_weights_(
    model: nn.Module, seed: int, device: torch.device | str | None = None
) -> nn.Module:
    """Give a sharded GPT, perhaps on the meta device, the values it would have in one process.

    device: of the new memory, torch's default device if not given.
    Each whole tensor is drawn, cut and freed before the next: no rank ever holds the whole model.
    """
    make_memory(model, torch.get_default_device() if device is None else device)
    for name, tensor in named_tensors(model):
        cut, shape = model.sharding.cuts.get(name), list(tensor.shape)
        if cut:
            shape[cut.dim] *= cut.parts
        whole = initial_value(name, tuple(shape), model.config, seed)
        tensor.copy_(cut.piece(whole) if cut else whole)
    return model


def make_memory(model: nn.Module, device: torch.device | str) -> None:
    """Allocate the parameters on `device`, without values yet."""
    model.to_empty(device=device)
    tie(model)  # to_empty separated tied parameters
