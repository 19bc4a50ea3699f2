"""The one training step of the course: for a model alone, averaged over ranks, or sharded.

    for step in range(steps):
        inputs, targets = batches.batch(step)                        # this rank's [B/dp, S]
        done = train_step(model, optimizer, split(inputs, targets, 4), max_norm=1.0)
        print(done.loss)

`model` is a plain GPT, or whatever a strategy has made of it (see trainable.Trainable). A strategy
that has an order of its own for forward and backward, as a pipeline does, takes `update` from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mini_dist.collectives import all_reduce
from mini_dist.model.loss import IGNORE_INDEX, TokenLoss, check_any_counts, token_loss
from mini_dist.plan.fields import checks_kinds

from .grad_norm import clip_
from .precision import FULL, LossScaler, Precision
from .trainable import Trainable


class Step(NamedTuple):
    """What came of a step. `norm`: before clipping; None if nothing asked for it."""

    loss: Tensor  # [], mean over the tokens of all ranks and micro-batches
    norm: Tensor | None  # []
    skipped: bool  # float16 gradients overflowed: nothing was changed but the scale


@checks_kinds(infinite=("max_norm",))
def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[tuple[Tensor, Tensor]],
    *,
    max_norm: float | None = None,
    precision: Precision = FULL,
    loss: Callable[..., TokenLoss] | None = None,
) -> Step:
    """One optimizer step on all micro-batches of all ranks: equal to one process with all of them.

    micro_batches: (inputs, targets) [b, S] each, of any sizes; ranks may have different numbers of
        tokens. max_norm: clip the whole model's gradient to this. loss: (model, inputs, targets) ->
        a TokenLoss, where it is not the next token's.
    Raises ValueError if no target of any rank counts.
    """
    if not isinstance(model, Trainable):
        model = Trainable(model)
    micro_batches = list(micro_batches)
    tokens = count_tokens(model, micro_batches)
    model.zero_grad()
    total = accumulate(model, micro_batches, tokens, precision, loss or next_token_loss)
    norm, skipped = update(model, optimizer, max_norm, precision.scaler)
    return Step(over_ranks(model, total) / tokens, norm, skipped)


def accumulate(model, micro_batches, tokens, precision, loss) -> Tensor:
    """Add up the gradients of all micro-batches; returns the loss, summed over their tokens.

    Strategies leave the *mean* of the ranks' gradients. Times n that is their sum, and divided by
    the tokens of all ranks the gradient of the whole batch's mean, however tokens are spread.
    """
    size = 1 if model.group is None else model.group.size()
    share = precision.scale * size / int(tokens)  # (by a tensor: rounded to float32)
    parameter = next(model.parameters())
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    total = torch.zeros((), dtype=dtype, device=parameter.device)
    for number, (inputs, targets) in enumerate(micro_batches):
        is_last = number == len(micro_batches) - 1
        with nullcontext() if is_last else model.no_sync():
            with precision.autocast(inputs.device.type):
                summed = loss(model, inputs, targets).total
            (share * summed).backward()
        total = total + summed.detach()
    return total


def update(
    model: Trainable,
    optimizer: torch.optim.Optimizer,
    max_norm: float | None = None,
    scaler: LossScaler | None = None,
) -> tuple[Tensor | None, bool]:
    """Finish the gradients, unscale and clip them, step. Returns (norm or None, skipped or not).

    One element that overflowed on one rank makes the norm of the whole infinite or nan on all of
    them. So the ranks agree on skipping a step without another word.
    """
    model.finish()
    norm = None
    if scaler or max_norm is not None:
        norm = model.grad_norm()
    if scaler:
        norm = norm / scaler.scale
        unscale_(model.tensors_to_step(), scaler.scale)
        overflowed = not norm.isfinite()
        scaler.adjust(overflowed)
        if overflowed:
            return norm, True
    if max_norm is not None:
        clip_(model.tensors_to_step(), norm, max_norm)
    optimizer.step()
    model.refresh_parameters()
    return norm, False


def next_token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> TokenLoss:
    return token_loss(model(inputs), targets)


@checks_kinds
def split(inputs: Tensor, targets: Tensor, num_micro_batches: int) -> list[tuple[Tensor, Tensor]]:
    """Cut a batch [B, S] into micro-batches; sizes may differ by one."""
    return list(
        zip(inputs.tensor_split(num_micro_batches), targets.tensor_split(num_micro_batches))
    )


def count_tokens(model: Trainable, micro_batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Count the targets of all ranks that count; raise ValueError if none does."""
    if any(targets.is_meta for _, targets in micro_batches):  # no values: then all of them count
        size = 1 if model.group is None else model.group.size()
        over_ranks(model, torch.zeros((), dtype=torch.int64, device="meta"))  # for the ledger
        return torch.tensor(size * sum(targets.numel() for _, targets in micro_batches))
    here = sum(int((targets != IGNORE_INDEX).sum()) for _, targets in micro_batches)
    tokens = over_ranks(model, torch.tensor(here, device=next(model.parameters()).device))
    check_any_counts(tokens)
    return tokens


def over_ranks(model: Trainable, value: Tensor) -> Tensor:
    """The sum over the ranks that share the batch."""
    if model.group is None:
        return value
    return all_reduce(value, model.group)


def unscale_(parameters: Iterable[Tensor], scale: float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.div_(scale)
