"""ZeRO: what all data-parallel ranks hold alike is cut, so that each holds one n-th.

    ZeRO1   optimizer states are sharded. Each rank steps its own part and shares the result.
    ZeRO2   gradients, too: reduced and freed unit by unit while backward is still running.
    ZeRO3   parameters, too: gathered when a unit needs them, freed when it is done.

Each class is the one before with a small change (Rajbhandari et al. 2020, section 5). Units, as
the blocks of a GPT, are what is flattened, reduced, gathered and freed at a time; parameters in no
unit are one unit more, the root. All three are used alike:

    gpt = GPT(config)
    model = ZeRO2(gpt, group, lambda shards: AdamW(shards, lr=1e-3), units=gpt.blocks)
    for micro_batch in step:
        loss(model(micro_batch)).backward()
    model.step(max_norm=1.0)
    model.zero_grad()

Legend: n ranks, Ψ parameters, k micro-batches in a step. Elements sent by a rank in a step, in
units of (n-1)/n Ψ: ZeRO1 2 (scatter gradients, gather parameters), ZeRO2 k+1 (gradients after
every micro-batch), ZeRO3 3k (gather for forward, gather for backward, scatter; the root is gathered
once for both, so 2k for its part).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from .collectives import all_gather, reduce_scatter
from .grad_norm import clip_, grad_norm
from .replicas import broadcast_state, gradient

# Their update of an element depends on that element's gradient and state only, so an optimizer of
# a shard does what the optimizer of the whole would do to it.
ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.RMSprop),
)


class Unit:
    """Parameters that are flattened, reduced, gathered and freed together, cut into n shards.

    `flat` [L]: all of them one after the other, padded to a multiple of n; they are views of it.
    `shard` [L/n]: this rank's part, in the precision of the optimizer; the optimizer sees only it.
    """

    def __init__(self, parameters: list[Tensor], group, master_dtype: torch.dtype | None):
        if len({parameter.dtype for parameter in parameters}) > 1:
            raise ValueError("a unit's parameters must have one dtype, to be one flat tensor")
        self.parameters, self.group = parameters, group
        numel = sum(parameter.numel() for parameter in parameters)
        self.padding = -numel % group.size()
        with torch.no_grad():
            self.flat = self.flatten(parameters)
            for parameter, part in zip(parameters, self.split(self.flat)):
                parameter.data = part
            mine = self.flat.chunk(group.size())[group.rank()]
            self.shard = nn.Parameter(mine.to(master_dtype or mine.dtype, copy=True))

    def flatten(self, tensors: list[Tensor]) -> Tensor:
        parts = [tensor.flatten() for tensor in tensors]
        return torch.cat([*parts, parts[0].new_zeros(self.padding)])

    def split(self, flat: Tensor) -> list[Tensor]:
        sizes = [parameter.numel() for parameter in self.parameters]
        parts = flat.split([*sizes, self.padding])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters)]

    @torch.no_grad()
    def gather(self) -> None:
        """Fill the parameters with all ranks' shards."""
        storage = self.flat.untyped_storage()
        storage.resize_(self.flat.numel() * self.flat.element_size())  # if it was freed
        self.flat.copy_(all_gather(self.shard.detach().to(self.flat.dtype), self.group))

    def free(self) -> None:
        """Give the parameters' memory back. What autograd saved are views of it: they stay valid,
        and hold the values again after the next `gather`."""
        self.flat.untyped_storage().resize_(0)

    @torch.no_grad()
    def scatter_gradients(self) -> None:
        """Add this rank's part of the mean gradient to its shard's, and free the whole."""
        whole = self.flatten([gradient(parameter) for parameter in self.parameters])
        part = reduce_scatter(whole, self.group, op="mean").to(self.shard.dtype)
        self.shard.grad = part if self.shard.grad is None else self.shard.grad + part
        for parameter in self.parameters:
            parameter.grad = None


class ZeRO1(nn.Module):
    """Optimizer states are sharded: scatter the gradients, step the own part, gather parameters.

    make_optimizer: (shards) -> a torch optimizer over them, one that treats every element alone.
    units: modules inside `module` that share no parameter. master_dtype: of the shards, e.g.
    float32 for a bfloat16 model. Frozen parameters stay whole on every rank.
    """

    def __init__(
        self,
        module: nn.Module,
        group,
        make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
        units: Iterable[nn.Module] = (),
        master_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.module, self.group = module, group
        broadcast_state(module, group)
        self.unit_modules = [*units, module]  # the root: what no other unit has
        self.units = []
        owned: set[Tensor] = set()
        for unit_module in self.unit_modules:
            mine = [p for p in unit_module.parameters() if p.requires_grad and p not in owned]
            owned.update(mine)
            if mine:
                self.units.append(Unit(mine, group, master_dtype))
        if not self.units:
            raise ValueError("no parameter requires a gradient: there is nothing to train")
        self.shards = [unit.shard for unit in self.units]
        self.optimizer = make_optimizer(self.shards)
        if not isinstance(self.optimizer, ELEMENTWISE):
            known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            raise ValueError(
                f"{type(self.optimizer).__name__} cannot be sharded: its update of an element may "
                f"depend on others, which are on other ranks. These can: {known}"
            )

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def step(self, max_norm: float | None = None) -> Tensor | None:
        """One optimizer step from the gradients of all backwards since `zero_grad`.

        With `max_norm` the gradients are clipped, and their norm before that is returned.
        """
        self.finish_gradients()
        norm = None
        if max_norm is not None:
            norm = grad_norm(sharded={self.group: self.shards})
            clip_(self.shards, norm, max_norm)
        self.optimizer.step()
        self.share_parameters()
        return norm

    def finish_gradients(self) -> None:
        for unit in reversed(self.units):
            unit.scatter_gradients()

    def share_parameters(self) -> None:
        for unit in self.units:
            unit.gather()

    def zero_grad(self) -> None:
        for tensor in (*self.module.parameters(), *self.shards):
            tensor.grad = None


class ZeRO2(ZeRO1):
    """Gradients are sharded, too: each unit's are scattered and freed during backward."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.missing = {unit: len(unit.parameters) for unit in self.units}
        for unit in self.units:
            for parameter in unit.parameters:
                parameter.register_post_accumulate_grad_hook(self.hook(unit))

    def hook(self, unit: Unit) -> Callable:
        def gradient_is_ready(parameter):
            self.missing[unit] -= 1
            if self.missing[unit] == 0:
                self.unit_is_done(unit)

        return gradient_is_ready

    def unit_is_done(self, unit: Unit) -> None:
        unit.scatter_gradients()
        self.missing[unit] = len(unit.parameters)

    def finish_gradients(self) -> None:
        for unit in reversed(self.units):  # with a parameter that backward did not reach
            if self.missing[unit] < len(unit.parameters) or unit.shard.grad is None:
                self.unit_is_done(unit)


class ZeRO3(ZeRO2):
    """Parameters are sharded, too: gathered for a unit's forward and backward, freed after each.

    The root has no single place in the model: it is there from the start of forward to the end of
    its backward.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        modules = [m for m in self.unit_modules if any(p.requires_grad for p in m.parameters())]
        for unit, module in zip(self.units, modules):
            unit.free()
            module.register_forward_pre_hook(lambda *_, unit=unit: unit.gather())
            if module is not self.module:
                module.register_forward_hook(lambda *_, unit=unit: unit.free())
                module.register_full_backward_pre_hook(lambda *_, unit=unit: unit.gather())

    def unit_is_done(self, unit: Unit) -> None:
        super().unit_is_done(unit)
        unit.free()

    def share_parameters(self) -> None:
        """Nothing to do: whoever needs them will gather them."""
