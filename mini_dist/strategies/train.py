"""The course's one training step: for a model on one rank, averaged over ranks, or sharded.

    for step in range(steps):
        inputs, targets = batches.batch(step)                        # this rank's [B/dp, S]
        done = train_step(model, optimizer, split(inputs, targets, 4), max_norm=1.0)
        print(done.loss)

`model` is a plain GPT, or a GPT wrapped by a strategy (see trainable.Trainable). A strategy with
its own order of forwards and backwards, such as a pipeline, uses only `update` from this file.
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
from mini_dist.ranks.devices import HOST

from .grad_norm import clip_
from .precision import FULL, LossScaler, Precision
from .trainable import Trainable


class Step(NamedTuple):
    """The result of a step. `norm`: before clipping, or None if nothing asked for it."""

    loss: Tensor  # [], mean over the tokens of all ranks and micro-batches
    norm: Tensor | None  # []
    skipped: bool  # float16 gradients overflowed: nothing changed except the scale


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
    """Take one optimizer step on all ranks' micro-batches, equal to one process that has them all.

    micro_batches: (inputs, targets) [b, S] each, of any sizes; ranks may have different numbers of
    tokens. max_norm: clip the whole model's gradient to this norm. loss: (model, inputs, targets)
    -> a TokenLoss, if it is not the loss of the next token.
    Raises ValueError if every target on every rank is IGNORE_INDEX.
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
    """Accumulate the gradients of all micro-batches; return the loss, summed over their tokens.

    Strategies compute the *mean* of the ranks' gradients. Times n this is the sum; divided by the
    number of tokens on all ranks it is the gradient of the whole batch's mean loss.
    """
    size = 1 if model.group is None else model.group.size()
    share = precision.scale * size / int(tokens)  # (dividing by a tensor would round to float32)
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
    """Finish, unscale and clip the gradients, then step. Return (norm or None, whether skipped).

    If one element overflows on one rank, the norm of the whole model is inf or nan on every rank.
    So all ranks agree to skip the step without another message.
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
    """Split a batch [B, S] into micro-batches whose sizes differ by at most one."""
    return list(
        zip(inputs.tensor_split(num_micro_batches), targets.tensor_split(num_micro_batches))
    )


def count_tokens(model: Trainable, micro_batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Count the targets of all ranks other than IGNORE_INDEX; raise ValueError if there are
    none."""
    if any(targets.is_meta for _, targets in micro_batches):  # no values: all of them count
        size = 1 if model.group is None else model.group.size()
        over_ranks(model, torch.zeros((), dtype=torch.int64, device="meta"))  # for the ledger
        all_of_them = size * sum(targets.numel() for _, targets in micro_batches)
        return torch.tensor(all_of_them, device=HOST)
    here = sum(int((targets != IGNORE_INDEX).sum()) for _, targets in micro_batches)
    tokens = over_ranks(model, torch.tensor(here, device=next(model.parameters()).device))
    check_any_counts(tokens)
    return tokens


def over_ranks(model: Trainable, value: Tensor) -> Tensor:
    """Return the sum over the ranks that share the batch."""
    if model.group is None:
        return value
    return all_reduce(value, model.group)


def unscale_(parameters: Iterable[Tensor], scale: float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.div_(scale)
