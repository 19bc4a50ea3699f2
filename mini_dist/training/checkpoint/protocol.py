"""What a checkpoint asks of the models that it saves. Nothing else of a strategy is known here.

Any module can be saved. One that a strategy has changed says so by these attributes:

    Wrapped        `module` is the one whose names and buffers count
    Sharded        ZeRO: `units` hold shards of parameters, and it has their optimizer
    CutModule      tensor parallelism: `sharding.cuts` names the parameters that are parts
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
    """Parameters that are flattened together and shared out in equal parts (zero.Unit)."""

    shard: Tensor  # [L/n], what the optimizer steps
    parameters: list[Tensor]

    def parameters_in_shard(self) -> Iterator[tuple[Tensor, slice, slice]]:
        """(parameter, range of its flattened elements, the same as a range of `shard`)."""


class TierLike(Protocol):
    """Where shards and optimizer states are between steps: on the device, the host, in files."""

    def fetched(self, shard: Tensor, states: dict) -> AbstractContextManager:
        """Inside, shard and states have their values in memory."""


class Sharded(Wrapped, Protocol):
    """A model whose parameters this rank steps in part only (zero.ZeRO1 and those after it)."""

    units: list[ShardedUnit]
    optimizer: torch.optim.Optimizer
    tier: TierLike


class CutLike(Protocol):
    """Of a parameter: it is part number `part` of `parts` equal ones along `dim`."""

    dim: int
    part: int
    parts: int


class ShardingLike(Protocol):
    cuts: dict[str, CutLike]  # by parameter name; what is not there is whole


class CutModule(Protocol):
    """A module whose matrices are cut over ranks (tensor_parallel.shard_model)."""

    sharding: ShardingLike
