"""The three stages. Read from the top: each class defines only what differs from the previous
one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mini_dist.collectives import all_reduce, broadcast, in_flight
from mini_dist.plan.fields import checks_kinds

from ..grad_norm import clip_, grad_norm
from ..replicas import CALL_ZERO_GRAD, meet
from ..trainable import Trainable
from .offload import tier_of
from .unit import Unit

# They update an element from its own gradient and state only, so an optimizer of a shard gives
# the same values as an optimizer of the whole tensor.
ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.RMSprop),
)


class ZeRO1(Trainable):
    """Shard optimizer states: scatter the gradients, step this rank's shard, gather parameters.

    module: what to train; or, except for ZeRO-3, only its parameters, and you run the forward.
    make_optimizer: (shards) -> a torch optimizer over them, one that updates elementwise. A
    shard is cut from a whole unit, so all of a unit has the same settings: weight decay only for
    matrices and not for biases, for example, is impossible here.
    units: modules inside `module` that share no parameter, in the order in which forward uses them,
    such as the blocks of a GPT. All other parameters form one more unit, the root. Lists of
    parameters are also units.
    master_dtype: of the shards, e.g. float32 for a bfloat16 model; gradients travel in the model's.
    offload: "cpu" keeps shards and optimizer states on the host, a directory keeps them in files;
    `offload.OverlappedOffload(...)` does so while the device computes.
    ignored: parameters that another wrapper handles. Frozen ones stay whole on every rank.
    messages: what begins a unit's gather and scatter. `compression.Quantized()` sends 8 or 4
    bits, and the optimizer steps shards that were not rounded; `collectives.by_hosts` sends as
    little as possible between hosts.
    replicas: the group of the ranks that hold the same shards as this rank, in other groups like
    `group`; the mean gradient then covers them as well (HSDP, MiCS).
    A parameter that no rank used in a step gets a gradient of zeros, not None: weight decay and
    momentum still change it.

    Raises ValueError for an optimizer that cannot be sharded or that steps anything but the shards,
    if there is nothing to train, and for a tensor in a list that is not a Parameter.
    """

    def __init__(
        self,
        module: nn.Module | Iterable[nn.Parameter],
        group,
        make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
        units: Iterable[nn.Module | Iterable[nn.Parameter]] = (),
        master_dtype: torch.dtype | None = None,
        offload=None,
        ignored: Iterable[Tensor] = (),
        messages=in_flight,
        replicas=None,
    ):
        module, *units = map(as_module, (module, *units))
        super().__init__(module)
        self.group, self.replicas, self.tier = group, replicas, tier_of(offload, group)
        ignored = set(ignored)
        self.own = {n: p for n, p in module.named_parameters() if p not in ignored}
        names = {p: name for name, p in self.own.items() if p.requires_grad}
        if not names:
            raise ValueError("no parameter requires a gradient: there is nothing to train")
        with torch.no_grad():  # ranks that start equal stay equal
            for tensor in (*self.own.values(), *module.buffers()):
                if replicas:
                    tensor.copy_(broadcast(tensor, 0, replicas))
                tensor.copy_(broadcast(tensor, 0, group))
        self.units: list[Unit] = []
        for part in (*units, module):
            named = {names.pop(p): p for p in part.parameters() if p in names}
            if named:
                self.units.append(Unit(part, named, group, master_dtype, self.tier, messages))
                if messages is not in_flight:
                    self.units[-1].part_from_whole()
        self.units.sort(key=lambda unit: unit.module is not module)  # the root is used first
        self.leaving: Unit | None = None  # its gradients are in flight
        self.is_sending = False  # sending a unit's gradients, or that ended in an exception
        self.lots = getattr(messages, "lots", None)  # random numbers of each step's messages
        self.optimizer = make_optimizer(self.tensors_to_step())
        if not isinstance(self.optimizer, ELEMENTWISE):
            known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            raise ValueError(
                f"{type(self.optimizer).__name__} cannot be sharded: its update of an element may "
                f"depend on others, which are on other ranks. These can: {known}"
            )
        stepped = [p for each in self.optimizer.param_groups for p in each["params"]]
        if set(stepped) != set(self.tensors_to_step()):
            raise ValueError(
                f"make_optimizer was called with {len(self.units)} shards, one a unit, and its "
                f"optimizer steps {len(stepped)} tensors that are not these: give it the shards. "
                "Groups of parameters with settings of their own cannot be kept apart inside a unit"
            )
        self.tier.take_over(self.optimizer)

    def step(self, max_norm: float | None = None) -> Tensor | None:
        """Take one optimizer step with the gradients of all backward passes since `zero_grad`.

        With `max_norm` the gradients are clipped, and their norm before clipping is returned.
        """
        self.finish()
        self.average_with_replicas()
        norm = None
        if max_norm is not None:
            norm = self.grad_norm()
            clip_(self.tier.one_by_one(self.tensors_to_step()), norm, max_norm)
        self.optimizer.step()
        self.refresh_parameters()
        return norm

    def finish(self) -> None:
        for unit in reversed(self.units):
            self.scatter(unit)
        self.finish_scatter()

    def average_with_replicas(self) -> None:
        """Average once per step, however many micro-batches it has: the second hop of MiCS (Zhang
        et al. 2022, section 3.3). By default FSDP2 does it in every backward."""
        if self.replicas:
            for unit in self.units:
                unit.shard.grad = all_reduce(unit.shard.grad, self.replicas, op="mean")

    def refresh_parameters(self) -> None:
        for unit in self.units:
            unit.is_whole = False
            unit.begin_gather()
        for unit in self.units:
            unit.gather()

    def tensors_to_step(self) -> list[Tensor]:
        return [unit.shard for unit in self.units]

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.tier.show_gradients(self.tensors_to_step())
        for unit in self.units:
            for parameter, _, in_shard in unit.parameters_in_shard():
                yield parameter, unit.shard.grad[in_shard]

    def grad_norm(self) -> Tensor:
        return grad_norm(sharded={self.group: self.tier.one_by_one(self.tensors_to_step())})

    def zero_grad(self) -> None:
        """Clear all gradients. If a forward or a backward ended in an exception, call this on all
        ranks, and the next step is as if the failed one had not begun."""
        if self.is_interrupted():
            self.start_over()
            meet(self.group)
        elif self.lots:
            self.lots.begin_step()
        for parameter in self.own.values():
            parameter.grad = None
        for shard in self.tensors_to_step():
            self.tier.forget_gradient(shard)

    def is_interrupted(self) -> bool:
        """Return whether the last forward, backward or finish was interrupted (outside of a
        step)."""
        return self.leaving is not None or self.is_sending

    def start_over(self) -> None:
        """Complete what an exception has interrupted, and discard it."""
        self.is_sending = False
        if self.lots:
            self.lots.repeat_step()
        if self.leaving:
            self.leaving.drop_scatter()
            self.leaving = None

    # One unit's gradients are in flight at a time: more would only take more memory. A single
    # rank does not have to wait for anyone.

    def scatter(self, unit: Unit) -> None:
        self.finish_scatter()
        self.is_sending = True
        unit.begin_scatter()
        self.is_sending = False
        self.leaving = unit
        if self.group.size() == 1:
            self.finish_scatter()

    def finish_scatter(self) -> None:
        if self.leaving:
            self.leaving.finish_scatter()
            self.leaving = None


class ZeRO2(ZeRO1):
    """Also shard gradients: each unit's are scattered and freed while backward is running."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.waiting: list[Unit] = []  # complete in this backward, not sent yet
        for unit in self.units:
            for parameter in unit.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self.gradient_is_ready, unit))

    def gradient_is_ready(self, unit: Unit, parameter: Tensor) -> None:
        if not self.waiting:  # the first of this backward
            self.waiting = self.units[::-1]
            self.missing = {unit: len(unit.parameters) for unit in self.waiting}
            at_end = partial(self.backward_is_over)
            self.at_end = weakref.ref(at_end)
            torch.autograd.Variable._execution_engine.queue_callback(at_end)
        elif self.at_end() is None:
            raise RuntimeError(CALL_ZERO_GRAD)
        self.missing[unit] -= 1
        while self.waiting and self.missing[self.waiting[0]] == 0:
            self.unit_is_done(self.waiting.pop(0))

    def backward_is_over(self) -> None:
        while self.waiting:  # with parameters that this rank did not use, but others may have
            self.unit_is_done(self.waiting.pop(0))
        self.finish_scatter()

    def unit_is_done(self, unit: Unit) -> None:
        self.scatter(unit)

    def finish(self) -> None:
        """Do nothing: backward has averaged. Raises RuntimeError if backward was interrupted."""
        if self.is_interrupted():
            raise RuntimeError(CALL_ZERO_GRAD)

    def is_interrupted(self) -> bool:
        return bool(self.waiting) or super().is_interrupted()

    def start_over(self) -> None:
        super().start_over()
        self.waiting = []


@checks_kinds
class ZeRO3(ZeRO2):
    """Also shard parameters: gather them for a unit's forward and backward, free them after each.

    While a unit computes, the next `prefetch` units are being gathered. The root has no single
    position in the model: it stays whole from the start of forward to the end of its backward. All
    ranks must run the same units in the same order: if one rank skips a unit, the others wait in
    its gather. A freed parameter keeps its shape, and raises FreedError when it is read or written.
    inside: the ranks of `group` on this host. Each rank then keeps a second shard of what forward
    gathered, 1/k for k ranks per host, and backward gathers from these second shards: nothing
    passes the uplink (hpZ; Wang et al. 2023, ZeRO++, section 3.2).
    """

    def __init__(self, *args, prefetch: int = 1, inside=None, **kwargs):
        super().__init__(*args, **kwargs)
        if any(isinstance(unit.module, nn.ParameterList) for unit in self.units):
            raise ValueError(
                "ZeRO3 gathers parameters when a module's forward begins, and a list of them has "
                "none: give it modules, or take ZeRO2"
            )
        self.prefetch = prefetch
        self.kept: set[Unit] = set()  # from the start of their backward to its end
        self.is_in_forward = False
        self.module.register_forward_pre_hook(self.forward_begins)
        self.module.register_forward_hook(self.forward_ends)
        for unit in self.units:
            unit.part_from_whole()
            unit.free()
            unit.inside = inside
            unit.module.register_forward_pre_hook(partial(self.before_forward, unit))
            if unit.module is not self.module:
                unit.module.register_forward_hook(partial(self.after_forward, unit))

    def forward_begins(self, *_) -> None:
        if self.is_in_forward:
            raise RuntimeError(CALL_ZERO_GRAD)
        self.is_in_forward = True

    def forward_ends(self, *_) -> None:
        self.is_in_forward = False

    def is_interrupted(self) -> bool:
        return bool(self.kept) or self.is_in_forward or super().is_interrupted()

    def start_over(self) -> None:
        super().start_over()
        self.is_in_forward = False
        self.kept.clear()
        for unit in self.units:
            unit.free()

    def before_forward(self, unit: Unit, *_) -> None:
        unit.gather()
        if unit not in self.kept and not is_in_backward():
            self.begin_gathers(self.units, after=unit)

    def after_forward(self, unit: Unit, module: nn.Module, inputs, output) -> None:
        trains = False
        for tensor in tree_leaves(output):  # the first to get a gradient begins its backward
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self.before_backward, unit))
                trains = True
        if trains and is_in_backward():
            # An outer block is being recomputed, and this unit's backward follows at once.
            self.kept.add(unit)
        # Backward begins with the last units: this one, and as many as it prefetches.
        stays = trains and self.tier.keeps_last_units and unit in self.units[-1 - self.prefetch :]
        if unit not in self.kept and not stays:
            unit.free()

    def before_backward(self, unit: Unit, *_) -> None:
        unit.gather()
        self.kept.add(unit)  # backward may recompute its forward, which must not free it
        self.begin_gathers(self.units[::-1], after=unit)

    def begin_gathers(self, order: list[Unit], after: Unit) -> None:
        place = order.index(after) + 1
        for unit in order[place : place + self.prefetch]:
            unit.begin_gather()
        for unit in order[place + self.prefetch : place + self.prefetch + 1]:
            unit.begin_fetch()

    def unit_is_done(self, unit: Unit) -> None:
        super().unit_is_done(unit)
        self.kept.discard(unit)
        unit.free()

    def refresh_parameters(self) -> None:
        """Send nothing, because each unit gathers its parameters when it needs them. Units that are
        still gathered have values from before the step, so they are freed."""
        for unit in self.units:
            unit.free()
            unit.second = None

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Make all parameters whole inside `with`, to be read, or changed equally on all ranks;
        each rank keeps its shard of the changes. All ranks enter and leave together.

            with model.gathered() as module:
                torch.save(module.state_dict(), file)
        """
        units = [unit for unit in self.units if unit.lent is None]  # (else already inside)
        for unit in units:
            unit.lend()
        try:
            yield self.module
        finally:
            for unit in units:
                unit.take_back()


def is_in_backward() -> bool:
    """Return whether autograd calls us, as when backward recomputes a forward."""
    return torch._C._current_graph_task_id() != -1


def as_module(given: nn.Module | Iterable[nn.Parameter]) -> nn.Module:
    """Return a module of these parameters, named by their numbers."""
    if isinstance(given, nn.Module):
        return given
    parameters = list(given)
    for number, parameter in enumerate(parameters):
        if not isinstance(parameter, nn.Parameter):
            raise ValueError(
                f"number {number} of the list is a {type(parameter).__name__}: give Parameters, or "
                "the module itself"
            )
    return nn.ParameterList(parameters)
