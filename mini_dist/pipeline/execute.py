"""Run any schedule: go down this rank's list and do what it says.

All that is decided is decided in the list. The executor knows where a stage's input comes from
(the data, a message, or a stage on the same rank) and where its output goes, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mini_dist.collectives import exchange
from mini_dist.pipeline.stage import Stage
from mini_dist.schedule import (
    Action,
    Schedule,
    ScheduleError,
    Span,
    add_communication,
    forward_only,
    fuse_communication,
    validate,
)
from mini_dist.schedule.action import COMMUNICATION, Key, members, receive_of, send_of

PHASES = {"F": "forward", "B": "backward", "W": "backward", "S": "step"}


class Pipeline:
    """A model cut into stages, run by a schedule on the ranks of `group`.

    stages: this rank's chunks, {stage number: callable}; for one chunk the callable alone.
    loss_fn: (output of the last stage, target) -> scalar; without it the last stage returns the
        scalar itself.
    activation: shape and dtype of what one micro-batch sends from stage to stage, as an empty
        tensor (device="meta" is enough).
    recompute: keep only the stages' inputs, and run each forward again before its backward; True
        for all of this rank's stages, or the numbers of some.
    optimizer: of this rank's parameters, for schedules with optimizer steps (S) in them.
    shared: this rank's copy of a parameter that the first and the last stage both hold (a tied
        embedding); None elsewhere. Its gradients are added up at the end of a step.

    Raises ScheduleError where schedule, stages, group and batch do not fit together.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Any] | Callable,
        group,
        *,
        loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
        activation: Tensor | None = None,
        recompute: bool | Collection[int] = False,
        optimizer: torch.optim.Optimizer | None = None,
        shared: Tensor | None = None,
    ) -> None:
        rank, size = group.rank(), group.size()
        if schedule.num_ranks != size:
            raise ScheduleError(
                f"{schedule.name} is for {schedule.num_ranks} ranks, the group has {size}"
            )
        mine = schedule.stages_of[rank]
        if not isinstance(stages, Mapping):
            stages = {mine[0]: stages}
        if sorted(stages) != list(mine):
            raise ScheduleError(
                f"{schedule.name} puts stages {list(mine)} on rank {rank}, not {sorted(stages)}"
            )
        if size > 1 and activation is None:
            raise ScheduleError("activation: say shape and dtype of what goes between the stages")
        autograd = any(not hasattr(function, "backward") for function in stages.values())
        if schedule.asynchronous and optimizer is None and autograd:
            raise ScheduleError(f"{schedule.name} has optimizer steps: give the optimizer")
        if schedule.asynchronous and shared is not None:
            raise ScheduleError(
                f"{schedule.name} steps the first and the last stage at different moments: untie "
                "the embedding (tied_embedding=False)"
            )
        self.schedule, self.group, self.rank = schedule, group, rank
        self.device = getattr(group, "device", torch.device("cpu"))
        on_nccl = self.device.type == "cuda"
        self.training = _Plan(schedule, rank, on_nccl)
        self.evaluation = _Plan(forward_only(schedule), rank, on_nccl)
        self.last = schedule.num_stages - 1
        self.activation, self.shared = activation, shared
        if self.last in stages and loss_fn is not None:
            stages = {**stages, self.last: _WithLoss(stages[self.last], loss_fn)}
        self.has_targets = loss_fn is not None
        self.stages = {
            stage: function
            if hasattr(function, "backward")
            else Stage(
                function,
                recompute=recompute if isinstance(recompute, bool) else stage in recompute,
                optimizer=optimizer,
            )
            for stage, function in stages.items()
        }
        self.spans: list[Span] = []  # of the last run, by this machine's monotonic clock
        self.micro_losses: Tensor | None = None  # [m], of the last run, the same on all ranks

    # -- what a caller does -----------------------------------------------------------------------

    def step(
        self, inputs: Tensor | Sequence[Tensor], targets: Tensor | Sequence[Tensor] | None = None
    ) -> Tensor:
        """Forwards and backwards of one batch; returns the mean loss of its micro-batches.

        inputs, targets: [B, ...], split evenly, or a list of m micro-batches. Only the first
        stage's rank reads inputs, only the last one's targets; the loss is known to all.
        Gradients are added to the parameters' .grad, as those of the mean loss.
        """
        with torch.enable_grad():
            losses = self._run(self.training, inputs, targets)
        if self.shared is not None:
            self._add_up_shared_gradient()
        self.micro_losses = losses.on_all_ranks()
        return self.micro_losses.mean()

    def evaluate(self, inputs, targets=None) -> Tensor:
        """The mean loss of a batch, known to all; forwards only, nothing is kept."""
        with torch.no_grad():
            self.micro_losses = self._run(self.evaluation, inputs, targets).on_all_ranks()
        return self.micro_losses.mean()

    # -- down the list ----------------------------------------------------------------------------

    def _run(self, plan: _Plan, inputs, targets) -> _Losses:
        m = self.schedule.num_micro_batches
        self.inputs = _micro_batches(inputs, m, "inputs") if 0 in self.stages else None
        self.targets = None
        if self.last in self.stages and self.has_targets:
            self.targets = _micro_batches(targets, m, "targets")
        self.values: dict[Key, Tensor] = {}  # by who computed them: (stage, "F" or "B", micro)
        self.messages = _Messages(plan, self.group, self.device)
        self.losses = _Losses(plan, self.group, self.device, self.activation)
        self.spans = []
        for item in plan.items:
            if item[0].kind in COMMUNICATION:
                with self.messages.together():
                    for action in item:
                        self._phase("forward" if action.kind.endswith("F") else "backward")
                        self._communicate(action)
            else:
                received = self._input_of(item[0], plan)  # may wait for a message
                self._phase(PHASES[item[0].kind])
                start = time.monotonic()
                self._compute(item[0], received, plan)
                self.spans.append(Span(item[0], start, time.monotonic()))
        self.messages.wait()
        self._phase("step")
        return self.losses

    def _phase(self, name: str) -> None:
        """Tell the ledger what belongs to what: between computations it cannot see it."""
        if recorder := getattr(self.group, "recorder", None):
            recorder.phases.set(name)

    def _input_of(self, action: Action, plan: _Plan) -> Tensor | None:
        number, kind, micro = action.key
        if kind == "F":
            return self.inputs[micro] if number == 0 else self._take(number - 1, "F", micro)
        if kind == "B" and number == self.last:
            return torch.full_like(self.losses.of[micro], plan.shares[micro])
        return self._take(number + 1, "B", micro) if kind == "B" else None

    def _take(self, source: int, kind: str, micro: int) -> Tensor:
        """What stage `source` computed: it lies here already, or arrives in a message."""
        if source in self.stages:
            return self.values.pop((source, kind, micro))
        return self.messages.take(Action(source, f"SEND_{kind}", micro))

    def _compute(self, action: Action, received: Tensor | None, plan: _Plan) -> None:
        number, kind, micro = action.key
        stage = self.stages[number]
        if kind == "F":
            inputs = [received]
            if number == self.last and self.targets is not None:
                inputs.append(self.targets[micro])
            split = (number, micro) in plan.schedule.split
            output = stage.forward(micro, inputs, split=split, version=action.version)
            if number == self.last:
                self._phase("step")  # telling the loss is no part of forward or backward
                self.losses.add(micro, output)
            else:
                self.values[action.key] = output
        elif kind == "B":
            if isinstance(stage, Stage) and stage.recompute:
                self._phase("forward")  # it is one: what it makes are activations
                stage.run_again(micro)
                self._phase("backward")
            gradient = stage.backward(micro, received)
            if number > 0:
                self.values[action.key] = gradient
        elif kind == "W":
            stage.weight(micro)
        else:
            stage.step(plan.keep[action])

    def _communicate(self, action: Action) -> None:
        number, kind, micro = action.key
        if kind.startswith("SEND"):
            value = self.values.pop((number, kind[-1], micro))
            self._check(value, action)
            self.messages.send(action, value)
        else:
            self.messages.receive(action, torch.empty_like(self.activation, device=self.device))

    def _check(self, value: Tensor, action: Action) -> None:
        """gloo hangs or dies on a message of the wrong size, so it has to be right before."""
        wanted = self.activation
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            raise ScheduleError(
                f"{action}: stage {action.stage} made {list(value.shape)} {value.dtype}, but "
                f"activation says {list(wanted.shape)} {wanted.dtype}"
            )

    # -- after the list ---------------------------------------------------------------------------

    def _add_up_shared_gradient(self) -> None:
        """first + last, in this order on both sides, so that both copies stay equal in bits."""
        first, last = self.schedule.rank_of[0], self.schedule.rank_of[self.last]
        if first == last:  # one parameter, autograd has added up already
            return
        mine, peer = self.shared.grad, last if self.rank == first else first
        theirs = exchange(mine, peer, peer, self.group)
        self.shared.grad = mine + theirs if self.rank == first else theirs + mine


class _Losses:
    """The losses of a batch, which the last stage's rank tells to all.

    It does so as soon as it has the last one: the others are still busy with backwards then, and
    find the news there when they are through. On NCCL a receive that waits from the start on would
    hold up all others, so there it is done at the end.
    """

    def __init__(self, plan: _Plan, group, device: torch.device, like: Tensor | None) -> None:
        schedule = plan.schedule
        # what all ranks know of it: float64 if the activations are, else float32
        dtype = torch.promote_types(torch.float32, torch.float32 if like is None else like.dtype)
        self.source, self.m = schedule.rank_of[schedule.num_stages - 1], schedule.num_micro_batches
        self.tag = 1 + 2 * schedule.num_stages * self.m  # above those of the messages
        self.group, self.early = group, device.type != "cuda"
        self.of: dict[int, Tensor] = {}  # by micro-batch
        self.told = torch.empty(self.m, dtype=dtype, device=device)  # [m]
        self.works: list = []
        if self.early and group.rank() != self.source:
            self._listen()

    def add(self, micro: int, loss: Tensor) -> None:
        self.of[micro] = loss
        if self.early and len(self.of) == self.m:
            self._tell()

    def on_all_ranks(self) -> Tensor:
        """The losses of all micro-batches, in order. [m]"""
        if not self.early:
            self._tell() if self.of else self._listen()
        for work in self.works:
            work.wait()
        return self.told

    def _tell(self) -> None:
        losses = [self.of[micro].detach().reshape(()) for micro in range(self.m)]
        self.told = torch.stack(losses).to(self.told.dtype)
        peers = [peer for peer in range(self.group.size()) if peer != self.source]
        self.works = [self.group.send([self.told], peer, self.tag) for peer in peers]

    def _listen(self) -> None:
        self.works = [self.group.recv([self.told], self.source, self.tag)]


class _Plan:
    """What the executor looks up while it goes down a list, worked out once."""

    def __init__(self, schedule: Schedule, rank: int, on_nccl: bool) -> None:
        if not schedule.has_communication:
            # Counted in tests/test_schedule.py: 2 is the least with which under GPipe, 1F1B and
            # ZB-H1 no message comes before its receive; it takes three receive buffers a rank.
            schedule = add_communication(schedule, early=2)
        if on_nccl:  # it runs messages in list order, each to its end
            schedule = fuse_communication(schedule)
        validate(schedule, rendezvous=on_nccl)
        self.schedule = schedule
        self.items = [members(item) for item in schedule.ranks[rank]]
        self.place = {
            action.key: place
            for peer in range(schedule.num_ranks)
            for place, action in enumerate(schedule.actions(peer))
        }
        self.shares = _shares(schedule)
        self.keep = _versions_named_later(schedule, rank)


class _WithLoss(torch.nn.Module):
    """The last stage and the loss as one function of (x, target); parameter names as before."""

    def __init__(self, function: Callable, loss_fn: Callable) -> None:
        super().__init__()
        self.function, self.loss_fn = function, loss_fn

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss_fn(self.function(x), target)


class _Messages:
    """Sends and receives under way, each with its tensor.

    gloo loses a send whose handle is dropped before it was waited for, and waiting at once would
    stop the rank. But the lists say when a message must have arrived: if something comes from the
    peer that its list has after the use of our message, then our message was used, and the wait is
    over at once. So tensors are kept as long as needed and no rank waits in a send.
    """

    def __init__(self, plan: _Plan, group, device: torch.device) -> None:
        self.schedule, self.place = plan.schedule, plan.place
        self.group, self.device = group, device
        self.sent: dict[int, list[_Message]] = {}  # to a peer
        self.coming: dict[Key, _Message] = {}
        self.started: list[_Message] = []

    def _tag(self, send: Action) -> int:
        """A number of its own for each message: the two ends may start several in another order."""
        number = send.micro * self.schedule.num_stages + send.stage
        return 1 + 2 * number + (send.kind == "SEND_B")  # collectives have 0

    def send(self, action: Action, value: Tensor) -> None:
        receive, value = receive_of(action), value.contiguous()
        peer = self.schedule.rank_of[receive.stage]
        work = self.group.send([value], peer, self._tag(action))
        used = self.place[receive.stage, action.kind[-1], action.micro]
        message = _Message(work, value, used)
        self.sent.setdefault(peer, []).append(message)
        self.started.append(message)

    def receive(self, action: Action, buffer: Tensor) -> None:
        send = send_of(action)
        peer = self.schedule.rank_of[send.stage]
        message = _Message(self.group.recv([buffer], peer, self._tag(send)), buffer)
        self.coming[send.key] = message
        self.started.append(message)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is started within becomes one operation on NCCL; gloo starts each by itself."""
        self.started.clear()
        if self.device.type != "cuda":
            yield
            return
        self.group._start_coalescing(self.device)
        yield
        work = self.group._end_coalescing(self.device)
        for message in self.started:
            message.work = work

    def take(self, send: Action) -> Tensor:
        message = self.coming.pop(send.key)
        message.work.wait()
        peer, now = self.schedule.rank_of[send.stage], self.place[send.key]
        self._wait(peer, lambda sent: sent.used < now)
        return message.tensor

    def wait(self) -> None:
        for peer in self.sent:
            self._wait(peer, lambda sent: True)

    def _wait(self, peer: int, over: Callable[[_Message], bool]) -> None:
        sent = self.sent.get(peer, [])
        for message in filter(over, sent):
            message.work.wait()
        self.sent[peer] = [message for message in sent if not over(message)]


@dataclass
class _Message:
    work: Any
    tensor: Tensor
    used: int = 0  # of a send: the place in the peer's list where it is needed


def _micro_batches(batch, m: int, name: str) -> list[Tensor]:
    if batch is None:
        raise ScheduleError(f"{name} are needed on this rank")
    if isinstance(batch, Tensor):
        if len(batch) % m:
            works = [n for n in range(1, len(batch) + 1) if len(batch) % n == 0]
            raise ScheduleError(
                f"{name} of {len(batch)} rows do not split into {m} equal micro-batches; "
                f"{', '.join(map(str, works))} would work"
            )
        return list(batch.chunk(m))
    if len(batch) != m:
        raise ScheduleError(f"the schedule has {m} micro-batches, {name} {len(batch)}")
    for micro, part in enumerate(batch):
        if part.shape != batch[0].shape:
            raise ScheduleError(
                f"micro-batch {micro} of {name} is {list(part.shape)}, the first is "
                f"{list(batch[0].shape)}: all must have one shape (pad the smaller ones)"
            )
    return list(batch)


def _shares(schedule: Schedule) -> dict[int, float]:
    """How much each micro-batch's loss counts in the step it belongs to: one over their number."""
    last = schedule.num_stages - 1
    shares, batch = {}, []
    for stage, kind, micro, _ in schedule.actions(schedule.rank_of[last]):
        if stage == last and kind == "B":
            batch.append(micro)
        if stage == last and kind == "S":
            shares |= dict.fromkeys(batch, 1 / len(batch))
            batch = []
    return shares | dict.fromkeys(batch, 1 / max(1, len(batch)))


def _versions_named_later(schedule: Schedule, rank: int) -> dict[Action, set[int]]:
    """For each optimizer step, the weight versions that the list still asks for after it."""
    named: dict[int, set[int]] = {}
    later = {}
    for action in reversed(list(schedule.actions(rank))):
        if action.kind == "S":
            later[action] = set(named.get(action.stage, ()))
        elif action.version is not None:
            named.setdefault(action.stage, set()).add(action.version)
    return later
