"""Run any schedule on real models: execute this rank's list, action by action.

The list decides everything. The executor only knows where a stage's input comes from (the data, a
message, or a stage on the same rank) and where its output goes.

The page is `ideas.run_list`. tests/strategies/test_pipeline_ideas.py checks that both give the same
losses and gradients, bit by bit, and the same messages in the same order. The differences:

* a rank may have several stages, and stages on one rank hand over without a message;
* receives are started two computations ahead, so messages overlap with computing (EARLY in
  schedule/communication.py);
* the last stage's rank sends the losses while the others still compute (losses.py);
* a tensor is freed as soon as its receiver must have it (messages.py), and a stage's output at
  once, because its backward needs its node in the graph but not its values;
* recomputation, split backwards, optimizer steps in the list, a tied embedding, NCCL.

Freeing early saves memory: in lesson 12's run of 1F1B (4 ranks, 8 micro-batches) the ranks hold at
most 9.4, 7.1, 4.8 and 2.7 MB of activations; with the page 9.7, 7.3, 5.1 and 2.6.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mini_dist.collectives import device_of, exchange
from mini_dist.collectives.messages import runs_in_order
from mini_dist.plan.schedule import Action, Schedule, Span, forward_only
from mini_dist.plan.schedule.action import COMMUNICATION, Key

from .fits import check_message, micro_batches, stages_that_fit
from .losses import Losses
from .messages import Messages
from .plan import RankPlan
from .stage import Stage, WithLoss


class Pipeline:
    """A model cut into stages, run by a schedule on the ranks of `group`.

    stages: this rank's chunks, {stage number: callable}; for one chunk just the callable.
    loss_fn: (output of the last stage, target) -> scalar; without it the last stage returns the
        scalar itself.
    activation: shape and dtype of the message that one micro-batch sends between stages, as an
        empty tensor (device="meta" is enough).
    recompute: save only the stages' inputs, and run each forward again before its backward; True
        for all of this rank's stages, or the numbers of some.
    optimizer: of this rank's parameters, for schedules that contain optimizer steps (S).
    shared: this rank's copy of a parameter that the first and the last stage both hold (a tied
        embedding), else None. Its gradients are summed at the end of a step.

    Raises ScheduleError if schedule, stages, group and batch do not fit together, and
    RuntimeError for a step after a step that ended in an exception.
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
        self.schedule, self.group, self.rank = schedule, group, group.rank()
        stages = stages_that_fit(schedule, stages, group, activation, optimizer, shared)
        self.device = device_of_stages(stages, group)
        on_nccl = runs_in_order(group)
        self.training = RankPlan(schedule, self.rank, on_nccl)
        self.evaluation = RankPlan(forward_only(schedule), self.rank, on_nccl)
        self.last = schedule.num_stages - 1
        self.activation, self.shared = activation, shared
        self.has_targets = loss_fn is not None
        if self.last in stages and self.has_targets:
            stages = {**stages, self.last: WithLoss(stages[self.last], loss_fn)}
        again = stages if recompute is True else recompute or ()
        self.stages = {
            number: function
            if hasattr(function, "backward")
            else Stage(function, recompute=number in again, optimizer=optimizer)
            for number, function in stages.items()
        }
        self.is_interrupted = (
            False  # after an exception, while ranks may wait for each other's messages
        )
        self.spans: list[Span] = []  # of the last run, by this machine's monotonic clock
        self.micro_losses: Tensor | None = None  # [m], of the last run, equal on all ranks

    def step(
        self, inputs: Tensor | Sequence[Tensor], targets: Tensor | Sequence[Tensor] | None = None
    ) -> Tensor:
        """Run forwards and backwards of one batch; return the mean loss of its micro-batches.

        inputs, targets: [B, ...], split evenly, or a list of m micro-batches. Only the first
        stage's rank reads inputs, and only the last one's reads targets. All ranks get the loss.
        Gradients are added to the parameters' .grad, as gradients of the mean loss.
        """
        with torch.enable_grad():
            losses = self._run(self.training, inputs, targets)
        if self.shared is not None:
            self._add_up_shared_gradient()
        self.micro_losses = losses.on_all_ranks()
        return self.micro_losses.mean()

    def evaluate(self, inputs, targets=None) -> Tensor:
        """Return the mean loss of a batch on all ranks; run forwards only and save nothing."""
        with torch.no_grad():
            self.micro_losses = self._run(self.evaluation, inputs, targets).on_all_ranks()
        return self.micro_losses.mean()

    # -- executing the list -----------------------------------------------------------------------

    def _run(self, plan: RankPlan, inputs, targets) -> Losses:
        m = self.schedule.num_micro_batches
        self.inputs = micro_batches(inputs, m, "inputs") if 0 in self.stages else None
        self.targets = None
        if self.last in self.stages and self.has_targets:
            self.targets = micro_batches(targets, m, "targets")
        self.plan = plan
        self.values: dict[Key, Tensor] = {}  # key: (stage, "F" or "B", micro) that computed it
        self.messages = Messages(plan, self.group, self.device)
        self.losses = Losses(plan, self.group, self.device, self.activation)
        self.spans = []
        if self.is_interrupted:
            raise RuntimeError(
                "the last step of this pipeline ended in an exception, and other ranks may still "
                "wait for its messages: rebuild the model on all ranks"
            )
        self.is_interrupted = self.group.size() > 1 or self.schedule.asynchronous
        for item in plan.items:
            if item[0].kind in COMMUNICATION:
                with self.messages.together():
                    for action in item:
                        self._do(action)
            else:
                received = self._input_of(item[0])  # may wait for a message
                start = time.monotonic()
                self._do(item[0], received)
                self.spans.append(Span(item[0], start, time.monotonic()))
        self.messages.finish_sends()
        self.is_interrupted = False
        self._set_phase("step")
        return self.losses

    def _do(self, action: Action, received: Tensor | None = None) -> None:
        for phase, part in self._parts(action):
            self._set_phase(phase)
            part(action, received)

    def _set_phase(self, phase: str) -> None:
        """Tell the ledger the phase: by itself it sees only where a Module or autograd begins."""
        if recorder := getattr(self.group, "recorder", None):
            recorder.phases.set(phase)

    def _parts(self, action: Action) -> Iterator[tuple[str, Callable]]:
        """Yield the parts of an action, each with the ledger's phase that it belongs to."""
        stage, kind, _ = action.key
        way = "forward" if kind.endswith("F") else "backward"
        if kind.startswith("SEND"):
            yield way, self._send
        elif kind.startswith("RECV"):
            yield way, self._receive
        elif kind == "F":
            yield "forward", self._forward
            if stage == self.last:
                yield "step", self._add_loss  # sending losses is neither forward nor backward
        elif kind == "B":
            if getattr(self.stages[stage], "recompute", False):
                yield "forward", self._run_again  # it computes activations
            yield "backward", self._backward
        elif kind == "W":
            yield "backward", self._weight
        else:
            yield "step", self._optimizer_step

    def _input_of(self, action: Action) -> Tensor | None:
        """Return x for a forward; for a backward the gradient of the forward's output."""
        stage, kind, micro = action.key
        if kind == "F":
            return self.inputs[micro] if stage == 0 else self._take(stage - 1, "F", micro)
        if kind == "B" and stage == self.last:
            return torch.full_like(self.losses.computed[micro], self.plan.loss_weight[micro])
        return self._take(stage + 1, "B", micro) if kind == "B" else None

    def _take(self, source: int, kind: str, micro: int) -> Tensor:
        """Return what stage `source` computed: it is already here, or arrives in a message."""
        if source in self.stages:
            return self.values.pop((source, kind, micro))
        return self.messages.take(Action(source, f"SEND_{kind}", micro))

    # -- the parts of actions ---------------------------------------------------------------------

    def _forward(self, action: Action, x: Tensor) -> None:
        stage, _, micro = action.key
        ends = stage == self.last and self.targets is not None
        inputs = [x, self.targets[micro]] if ends else [x]
        split = (stage, micro) in self.plan.schedule.split
        self.values[action.key] = self.stages[stage].forward(
            micro, inputs, split=split, version=action.version
        )

    def _add_loss(self, action: Action, _) -> None:
        self.losses.add(action.micro, self.values.pop(action.key))

    def _run_again(self, action: Action, _) -> None:
        self.stages[action.stage].run_again(action.micro)

    def _backward(self, action: Action, gradient: Tensor) -> None:
        of_input = self.stages[action.stage].backward(action.micro, gradient)
        if action.stage > 0:
            self.values[action.key] = of_input

    def _weight(self, action: Action, _) -> None:
        self.stages[action.stage].weight(action.micro)

    def _optimizer_step(self, action: Action, _) -> None:
        self.stages[action.stage].step(self.plan.versions_needed[action])

    def _send(self, action: Action, _) -> None:
        value = self.values.pop((action.stage, action.kind[-1], action.micro))
        check_message(value, self.activation, action)
        self.messages.send(action, value)

    def _receive(self, action: Action, _) -> None:
        like = self.activation
        buffer = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        self.messages.receive(action, buffer)

    # -- after the list ---------------------------------------------------------------------------

    def _add_up_shared_gradient(self) -> None:
        """Sum first + last, in this order on both ranks, so that both copies stay bitwise equal."""
        first, last = self.schedule.rank_of[0], self.schedule.rank_of[self.last]
        if first == last:  # one parameter: autograd has already summed
            return
        mine, peer = self.shared.grad, last if self.rank == first else first
        theirs = exchange(mine, peer, peer, self.group)
        self.shared.grad = mine + theirs if self.rank == first else theirs + mine


def device_of_stages(stages: Mapping[int, Any], group) -> torch.device:
    """Return the device of this rank's stages' parameters, on which messages are allocated."""
    for stage in stages.values():
        for parameter in stage.parameters() if isinstance(stage, nn.Module) else ():
            return parameter.device
    return device_of(group)
