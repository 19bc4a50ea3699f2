"""The result of `parallelize`: one model to the caller, many modules and strategies on this rank.

`step` is one optimizer step of the whole model. The methods below implement the interface that
`train.update` needs (trainable.Trainable), for all parts together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from mini_dist.collectives import device_of
from mini_dist.model.loss import IGNORE_INDEX, TokenLoss, token_loss
from mini_dist.model.vocabulary import check_tokens
from mini_dist.plan.schedule import Schedule
from mini_dist.strategies.context_parallel import shard
from mini_dist.strategies.expert_parallel import set_loss_scale, visits_of_whole_steps
from mini_dist.strategies.pipeline import Pipeline, shared_parameter
from mini_dist.strategies.precision import Precision
from mini_dist.strategies.tensor_parallel import add_up_parts_, vocab_parallel_cross_entropy
from mini_dist.strategies.train import Step, accumulate, count_tokens, over_ranks, split, update
from mini_dist.strategies.trainable import Trainable

from .norm import count_holders, norm_over_grid


class ParallelModel(Trainable):
    """One model for train.update, whatever parts of it are on this rank.

    stages: this rank's stages of the model, by number. parts: the same stages, wrapped by
    data-parallel strategies; a stage's experts are a separate part.
    """

    def __init__(self, config, layout, mesh, schedule, stages, parts, optimizer, precision) -> None:
        super().__init__(nn.ModuleList(parts))
        self.config, self.layout, self.mesh, self.precision = config, layout, mesh, precision
        self.stages, self.parts, self.optimizer = stages, parts, optimizer
        self.group = mesh["dp", "cp"]
        self.holders = count_holders(stages, parts, layout)
        self.loss_weight = 1.0  # of a micro-batch's summed loss, for the schedule
        self.pipeline = self.make_pipeline(schedule) if layout.pp > 1 else None

    def step(self, inputs: Tensor, targets: Tensor, max_norm: float | None = None) -> Step:
        """Take one optimizer step on the global batch; all ranks return the same.

        inputs, targets: [B/dp, S], B/dp = micro_batch_size * num_micro_batches: the rows of this
        rank's replica, the same on all of the replica's ranks, on any device.

        If it raises on all ranks, the next step is as if this one had not begun; with a
        pipeline, the next step raises RuntimeError, because the model must be rebuilt.
        """
        with visits_of_whole_steps(self.stages.values()):
            return self._step(inputs, targets, max_norm)

    def _step(self, inputs: Tensor, targets: Tensor, max_norm: float | None) -> Step:
        layout = self.layout
        self.check_batch(inputs, targets)
        inputs, targets = (x.to(device_of(self.group)) for x in (inputs, targets))
        if layout.cp > 1:
            inputs, targets = (shard(x, self.mesh["cp"]) for x in (inputs, targets))
        micro_batches = split(inputs, targets, layout.num_micro_batches)  # [b, S/cp] each
        tokens = count_tokens(self, micro_batches)
        self.zero_grad()
        # The experts' own losses count as their mean over micro-batches; and over tp if its ranks
        # have different tokens, because gradients are summed over tp and not averaged.
        terms = layout.num_micro_batches * (layout.tp if layout.sequence_parallel else 1)
        for stage in self.stages.values():
            set_loss_scale(stage, self.precision.scale / terms)
        if self.pipeline is None:
            total = accumulate(self, micro_batches, tokens, self.precision, self.next_token_loss)
        else:
            # The schedule takes the mean over micro-batches, and the parts take the mean over
            # ranks. The result must be the sum over all of them, divided by the number of all
            # tokens.
            self.loss_weight = layout.num_micro_batches * self.group.size() / tokens
            mean = self.pipeline.step(*map(list, zip(*micro_batches)))
            total = mean * tokens / self.group.size() / self.precision.scale
        norm, skipped = update(self, self.optimizer, max_norm, self.precision.scaler)
        return Step(over_ranks(self, total) / tokens, norm, skipped)

    def check_batch(self, inputs: Tensor, targets: Tensor) -> None:
        """Raise ValueError on all ranks of a replica together, so that none waits for a message."""
        rows = self.layout.micro_batch_size * self.layout.num_micro_batches
        if tuple(inputs.shape) != (rows, self.config.seq_len):
            raise ValueError(
                f"inputs are {list(inputs.shape)}, but micro_batch_size * num_micro_batches = "
                f"{rows} rows of seq_len={self.config.seq_len} tokens make a step"
            )
        check_tokens(inputs, self.config.vocab_size)
        check_tokens(targets, self.config.vocab_size, "target", ignored=IGNORE_INDEX)

    # -- the loss --------------------------------------------------------------------------------

    def loss(self, logits: Tensor, targets: Tensor) -> TokenLoss:
        """Compute the loss of logits [b, S/cp, V], or [b, S/cp, V/tp] if the vocabulary is
        sharded."""
        if self.layout.tp > 1:
            return vocab_parallel_cross_entropy(logits, targets, self.mesh["tp"])
        return token_loss(logits, targets)

    # -- without a pipeline: one stage, forward and backward in turn -------------------------------

    def forward(self, tokens: Tensor) -> Tensor:
        return self.part_of(0)(tokens)

    def next_token_loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> TokenLoss:
        return self.loss(model(inputs), targets)

    # -- with a pipeline: a schedule runs the stages -----------------------------------------------

    def make_pipeline(self, schedule: Schedule) -> Pipeline:
        # Messages between stages are x [b, S/cp, D]; with sequence parallelism S/(cp tp).
        cut = self.layout.cp * (self.layout.tp if self.layout.sequence_parallel else 1)
        shape = self.layout.micro_batch_size, self.config.seq_len // cut, self.config.d_model
        return Pipeline(
            schedule,
            {number: WithAutocast(self.part_of(number), self.precision) for number in self.stages},
            self.mesh["pp"],
            loss_fn=self.weighted_loss,
            activation=torch.empty((), device="meta").expand(shape),  # a shape, and no memory
            shared=shared_parameter(self.stages, schedule.num_stages),
        )

    def weighted_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.loss(logits, targets).total * (self.loss_weight * self.precision.scale)

    def part_of(self, stage: int) -> Trainable:
        return next(part for part in self.parts if part.module is self.stages[stage])

    # -- the interface of a Trainable, for all parts -----------------------------------------------

    @contextmanager
    def no_sync(self):
        with ExitStack() as all_of_them:
            for part in self.parts:
                all_of_them.enter_context(part.no_sync())
            yield

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def finish(self) -> None:
        """Average over dp*cp; then sum over tp the gradients of which each tp rank has a part.

        In this order, because with ZeRO only this rank's shard is left to be summed.
        """
        for part in self.parts:
            part.finish()
        if self.layout.tp > 1:
            for stage in self.stages.values():
                names = {parameter: name for name, parameter in stage.named_parameters()}
                mine = [(names[p], gradient) for p, gradient in self.gradients() if p in names]
                add_up_parts_(stage.sharding, mine)

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        for part in self.parts:
            yield from part.gradients()

    def grad_norm(self) -> Tensor:
        return norm_over_grid(self.gradients(), self.holders, self.mesh)

    def tensors_to_step(self) -> list[Tensor]:
        return [tensor for part in self.parts for tensor in part.tensors_to_step()]

    def refresh_parameters(self) -> None:
        for part in self.parts:
            part.refresh_parameters()

    # -- for checkpoints -------------------------------------------------------------------------

    def names_in_whole(self) -> dict[Tensor, str]:
        """Return the name that each parameter here has in the GPT of one process."""
        names: dict[Tensor, str] = {}
        for _, stage in sorted(self.stages.items()):
            for name, parameter in stage.named_parameters():
                names.setdefault(parameter, name)  # the first of two names, as in one process
        tied = shared_parameter(self.stages, self.layout.num_stages)
        if tied is not None:
            names[tied] = "embed.token.weight"
        return names


class WithAutocast(nn.Module):
    """A stage that computes in the step's precision."""

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.module, self.precision = module, precision

    def forward(self, x: Tensor) -> Tensor:
        with self.precision.autocast(x.device.type):
            return self.module(x)
