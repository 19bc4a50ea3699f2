"""A unit: parameters that are flattened, sharded, gathered, reduced and freed together.

Legend: n ranks, L elements of a unit, padded to a multiple of n.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mini_dist.collectives import all_gather

from ..replicas import gradient
from .freed import Freed
from .offload import OnDevice


class Unit:
    """Parameters as one flat tensor; every rank owns a part of it.

    `flat` [L]: all parameters, concatenated; they are views of it.
    `mine` [L/n]: this rank's part of `flat`.
    `shard` [L/n]: what the optimizer steps: `mine` itself, unless it must differ (another
    precision or device, or because it must stay when `flat` is freed).
    """

    def __init__(
        self,
        module: nn.Module,
        named: dict[str, Tensor],
        group,
        master_dtype: torch.dtype | None,
        tier: OnDevice,
        messages,
    ):
        self.module = module  # the module whose forward and backward need the parameters
        self.names, self.parameters = list(named), list(named.values())
        self.group, self.tier, self.messages = group, tier, messages
        dtypes = {str(parameter.dtype) for parameter in self.parameters}
        if len(dtypes) > 1:
            raise ValueError(
                f"{self.names[0]} to {self.names[-1]} are {' and '.join(sorted(dtypes))}, but a "
                "unit is one flat tensor: convert them to one dtype"
            )
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.classes = [type(parameter) for parameter in self.parameters]
        self.padding = -sum(self.sizes) % group.size()
        with torch.no_grad():
            self.flat = self.flatten(self.parameters)
            self.parts = self.split(self.flat)  # of `flat`, made once: later none can be cut off
            self.point_at(self.parts)
            self.mine = self.flat.chunk(group.size())[group.rank()]
            self.shard = tier.keep(self.mine, master_dtype or self.flat.dtype)
        storages = self.shard.untyped_storage(), self.mine.untyped_storage()
        self.shard_is_mine = storages[0]._cdata == storages[1]._cdata
        self.is_whole = True  # the parameters are the latest of all ranks
        self.arriving = self.leaving = None  # a gather, a scatter in flight
        self.inside = None  # a group on one host that keeps second shards (hpZ)
        self.second: Tensor | None = None  # [L/k], of the last gathered parameters
        self.lent: Tensor | None = None  # what the parameters are views of, instead of `flat`

    def flatten(self, tensors: list[Tensor]) -> Tensor:
        parts = [tensor.flatten() for tensor in tensors]
        return torch.cat([*parts, parts[0].new_zeros(self.padding)])

    def split(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([*self.sizes, self.padding])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters)]

    def parameters_in_shard(self) -> Iterator[tuple[Tensor, slice, slice]]:
        """Yield each parameter, the range of its elements in this rank's shard, and the matching
        range of the shard; the ranges are empty for a parameter that is on other ranks."""
        length = self.shard.numel()
        begin = self.group.rank() * length  # of the shard, relative to the parameter's begin
        for parameter, size in zip(self.parameters, self.sizes):
            start, stop = (min(max(edge, 0), size) for edge in (begin, begin + length))
            yield parameter, slice(start, stop), slice(start - begin, stop - begin)
            begin -= size

    # -- parameters ---------------------------------------------------------------------------

    @torch.no_grad()
    def begin_gather(self) -> None:
        """Start to gather all ranks' shards, unless they are here or in flight."""
        if self.is_whole or self.arriving:
            return
        storage = self.flat.untyped_storage()
        storage.resize_(self.flat.numel() * self.flat.element_size())  # if it was freed
        if self.second is not None:
            self.part_inside().copy_(self.second)
            self.arriving = self.messages.begin_all_gather_(self.flat, self.inside)
            return
        filling = None if self.shard_is_mine else self.tier.fill_(self.mine, self.shard)
        if filling:
            self.arriving = Gathered(self, filling)
        else:
            self.arriving = self.messages.begin_all_gather_(self.flat, self.group)

    def begin_fetch(self) -> None:
        """Ask another tier for this rank's own part, before the gather begins."""
        if not (self.is_whole or self.arriving):
            self.tier.fetch(self.mine, self.shard)

    def gather(self) -> None:
        """Fill the parameters with all ranks' shards."""
        self.begin_gather()
        if self.arriving:
            self.arriving.wait()
            self.arriving, self.is_whole = None, True
            self.become(self.classes)

    def free(self) -> None:
        """Free the parameters' memory. Tensors that autograd saved are views of it: they stay valid
        and have the right values again after the next `gather`. Reading a parameter before that
        raises an error, but a view that other code keeps has no memory."""
        if self.arriving:  # a gather was begun, but no forward or backward has waited for it
            self.gather()
        if self.inside and self.is_whole and self.second is None:
            self.second = self.part_inside().clone()
        self.is_whole = False
        self.flat.untyped_storage().resize_(0)
        if self.lent is None:
            self.become([Freed] * len(self.parameters))

    def part_inside(self) -> Tensor:
        """Return this rank's part of `flat` if it is split over the ranks of its host."""
        return self.flat.chunk(self.inside.size())[self.inside.rank()]

    def become(self, classes: list[type]) -> None:
        for parameter, cls in zip(self.parameters, classes):
            parameter.__class__ = cls

    @torch.no_grad()
    def lend(self) -> None:
        """Make the parameters whole in a separate tensor that is not freed. Forward and backward
        still fill and free `flat`, because autograd may have saved views of it."""
        if self.arriving:
            self.free()
        mine = self.flat.new_empty(self.shard.numel())
        filling = self.tier.fill_(mine, self.shard)
        if filling:
            filling.wait()
        self.lent = all_gather(mine, self.group)
        self.before = mine
        self.become(self.classes)
        self.point_at(self.split(self.lent))

    @torch.no_grad()
    def take_back(self) -> None:
        """End `lend`: copy the changes of its part to the shard."""
        after = self.lent.chunk(self.group.size())[self.group.rank()]
        changed = (after != self.before).to(self.shard.device)
        if not changed.is_meta and changed.any():
            with self.tier.fetched(self.shard, {}):
                self.shard[changed] = after.to(self.shard)[changed]
        self.point_at(self.parts)
        self.lent = self.before = self.second = None
        if self.is_whole:  # between its forward and its backward
            self.is_whole = False
            self.gather()
        else:
            self.free()

    def point_at(self, parts: list[Tensor]) -> None:
        for parameter, part in zip(self.parameters, parts):
            parameter.data = part

    def part_from_whole(self) -> None:
        """Give the shard its own memory, so that `flat` can be freed."""
        if self.shard_is_mine:
            self.shard.data = self.mine.clone()
            self.shard_is_mine = False

    # -- gradients ----------------------------------------------------------------------------

    @torch.no_grad()
    def begin_scatter(self) -> None:
        """Send every rank its part of this rank's gradients, and free them."""
        whole = self.flatten([gradient(parameter) for parameter in self.parameters])
        for parameter in self.parameters:
            parameter.grad = None
        self.leaving = self.messages.begin_reduce_scatter(whole, self.group, self.shard.dtype)

    @torch.no_grad()
    def finish_scatter(self) -> None:
        """Add this rank's part of the mean gradient to its shard's."""
        part = self.leaving.wait().div_(self.group.size())
        self.tier.add_gradient(self.shard, part)
        self.leaving = None

    def drop_scatter(self) -> None:
        """Wait for a scatter's messages, because the other ranks sent theirs, and discard it."""
        if self.leaving:
            self.leaving.wait()
            self.leaving = None


class Gathered:
    """A gather that first waits for this rank's own part from another tier."""

    def __init__(self, unit: Unit, filling):
        self.unit, self.filling = unit, filling

    def wait(self) -> None:
        self.filling.wait()
        self.unit.messages.begin_all_gather_(self.unit.flat, self.unit.group).wait()
