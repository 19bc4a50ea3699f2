"""Training on a sharded sequence: its inputs, each rank's loss, and which gradient it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from mini_dist.collectives import all_gather, all_reduce
from mini_dist.model.loss import TokenLoss, check_any_counts
from mini_dist.plan.fields import checks_kinds

from .all_gather import all_gather_attention
from .placement import positions_of_ranks
from .ring import ring_attention
from .ulysses import ulysses_attention

FORMS = {
    "ring": ring_attention,
    "all_gather": all_gather_attention,
    "ulysses": ulysses_attention,
}


@checks_kinds
def positions_here(seq_len: int, group, placement: str = "zigzag") -> Tensor:
    """Return the positions of this rank's tokens in the sequence: [S/cp], for the model and
    `shard`, on torch's default device.

    Raises ValueError if the placement cannot split the sequence.
    """
    mine = positions_of_ranks(placement, seq_len, group.size())[group.rank()]
    return mine.to(torch.get_default_device())


@checks_kinds
def shard(x: Tensor, group, placement: str = "zigzag", dim: int = 1) -> Tensor:
    """Return this rank's tokens of x: [.., S, ..] -> [.., S/cp, ..]. Use it for inputs and targets.

    Shift targets before you shard them: the token after a piece's last one is on another rank.
    """
    return x.index_select(dim, positions_here(x.shape[dim], group, placement).to(x.device))


@checks_kinds
def unshard(x: Tensor, group, placement: str = "zigzag", dim: int = 1) -> Tensor:
    """Gather all ranks' tokens in sequence order: [.., S/cp, ..] -> [.., S, ..]. Not
    differentiable."""
    size = group.size()
    order = positions_of_ranks(placement, x.shape[dim] * size, size).flatten().argsort()
    whole = all_gather(x.movedim(dim, 0).contiguous(), group)
    return whole[order.to(x.device)].movedim(0, dim)


@checks_kinds
def make_attention(group, form: str = "ring", placement: str = "zigzag") -> Callable:
    """Make the attention of a GPT whose sequence is sharded over `group`: GPT(config,
    attention=...).

    The model must be given this rank's positions: model(shard(tokens), positions_here(...)).
    When called, it raises ValueError for other positions, and for dropout of attention weights.
    """
    if form not in FORMS:
        raise ValueError(f"form={form!r} is unknown: give one of {', '.join(map(repr, FORMS))}")

    def attention(q, k, v, positions=None, dropout=0.0):
        expected = positions_here(q.shape[-2] * group.size(), group, placement).to(q.device)
        has_values = positions is not None and not positions.is_meta
        if positions is None or (has_values and not torch.equal(positions, expected)):
            given = "none" if positions is None else f"{positions.flatten()[:4].tolist()}..."
            raise ValueError(
                f"rank {group.rank()} of a {placement} sequence holds positions "
                f"{expected[:4].tolist()}..., but the model was given {given}: pass "
                "positions_here(seq_len, group, placement) beside the tokens."
            )
        if dropout:
            raise ValueError(
                f"dropout={dropout}: attention weights that are computed again in backward cannot "
                "be dropped out at random. Give the config dropout=0."
            )
        return FORMS[form](q, k, v, group, placement=placement)

    return attention


def share_of_mean(loss: TokenLoss, group) -> Tensor:
    """Return this rank's part of the mean loss over all tokens of all ranks; the parts sum to it.

    The mean of the ranks' means would differ if ranks have different numbers of targets that
    count, as happens with padding at the end of a sequence.
    Raises ValueError if every target on every rank is IGNORE_INDEX.
    """
    num_tokens = all_reduce(loss.num_tokens, group)
    check_any_counts(num_tokens)
    return loss.total / num_tokens


def sum_gradients(parameters: Iterable[Tensor], group) -> None:
    """Sum the gradients over the ranks: each rank has the gradients from its own tokens only.

    This is the all-reduce of data parallelism, and real systems use one call for both:
    one group of dp*cp ranks (with losses by `share_of_mean`, a sum and not a mean).
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = all_reduce(torch.cat([gradient.flatten() for gradient in gradients]), group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(part.view_as(gradient))
