"""The interface of models that can be saved; checkpoints know nothing else of a strategy.

Any module can be saved. A module that a strategy has changed has these attributes:

    Wrapped        `module` is the module whose names and buffers count
    Sharded        ZeRO: `units` hold shards of parameters, and it has their optimizer
    CutModule      tensor parallelism: `sharding.cuts` names the sharded parameters
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn


class Wrapped(Protocol):
    """A module inside a data-parallel strategy."""

    module: nn.Module


class ShardedUnit(Protocol):
    """Parameters that are flattened together and sharded in equal parts (zero.Unit)."""

    shard: Tensor  # [L/n], what the optimizer steps
    parameters: list[Tensor]

    def parameters_in_shard(self) -> Iterator[tuple[Tensor, slice, slice]]:
        """Yield (parameter, range of its flattened elements, the matching range of `shard`)."""


class TierLike(Protocol):
    """The place of shards and optimizer states between steps: device, host or files."""

    def fetched(self, shard: Tensor, states: dict) -> AbstractContextManager:
        """Load the values of shard and states into memory inside `with`."""


class Sharded(Wrapped, Protocol):
    """A model of whose parameters this rank steps only a part (zero.ZeRO1 and its subclasses)."""

    units: list[ShardedUnit]
    optimizer: torch.optim.Optimizer
    tier: TierLike


class CutLike(Protocol):
    """How a parameter is sharded: it is part number `part` of `parts` equal ones along `dim`."""

    dim: int
    part: int
    parts: int


class ShardingLike(Protocol):
    cuts: dict[str, CutLike]  # by parameter name; all others are whole


class CutModule(Protocol):
    """A module whose matrices are sharded over ranks (tensor_parallel.shard_model)."""

    sharding: ShardingLike
