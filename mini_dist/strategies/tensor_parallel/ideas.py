"""Tensor parallelism in plain functions; layers.py does the same in the layers of real models.

Each rank holds a shard of every matrix and computes a part of every layer:

    x ── enter ── W₁ cut by outputs ── GELU ── W₂ cut by inputs ── leave ── + bias
         copy       [F/t, D]          on F/t         [D, F/t]      all_reduce

A matrix that is cut by outputs leaves each rank with some of the hidden features. These are exactly
the inputs that the next matrix, cut by inputs, needs, so nothing is sent between the two (Shoeybi
et al. 2019, section 3). In attention, q, k and v come first and o second, and the cut runs between
heads. The part between entering and leaving is called a region.

Legend: t ranks, B batch, S sequence, D model, F ffn, N heads, H head dim, V vocab. A weight is
[outputs, inputs], as in torch. Every function takes this rank's shards of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mini_dist import collectives
from mini_dist.collectives import ops
from mini_dist.model.digits import at_least_float32
from mini_dist.model.loss import IGNORE_INDEX, TokenLoss
from mini_dist.model.vocabulary import check_tokens

# --- two linears: the first cut by its outputs, the second by its inputs ------------------------


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group) -> Tensor:
    """Multiply the whole x [..., D] -> this rank's outputs [..., F/t]; weight [F/t, D], bias [F/t].

    Forward sends nothing. Backward sums the gradients of x over the ranks, since every rank used
    all of x. ("Column" because Megatron writes y = xA, where a column of A is an output. torch
    stores A transposed, so here outputs are rows.)
    """
    return functional.linear(ops.copy(x, group), weight, bias)


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group) -> Tensor:
    """Multiply this rank's inputs x [..., F/t] -> all outputs [..., D]; weight [D, F/t], bias [D].

    Every rank holds the whole bias and adds it after the sum; before the sum it would count t
    times.
    """
    y = ops.all_reduce(functional.linear(x, weight), group)
    return y if bias is None else y + bias


# --- a whole region: enter, compute on a piece, leave -------------------------------------------


class Pair(NamedTuple):
    """How x enters a region and how the result leaves it, both functions (x, group) -> x.

    Each of the two does in backward what the other does in forward.
    """

    enter: Callable
    leave: Callable
    cuts_sequence: bool = False  # whether a rank holds S/t of the sequence outside the regions
    gathers_again: bool = False  # see SEQUENCE_AGAIN in column_linears.py; not used on this page


# Outside the regions every rank has the same x [B, S, D].
TENSOR = Pair(enter=ops.copy, leave=ops.all_reduce)

# Outside the regions every rank has a different part of the sequence, x [B, S/t, D] (Korthikanti et
# al. 2022, section 4.2.2). This sends as many bytes as TENSOR, because an all-reduce consists of
# these two, and activations between regions (norms, dropout, the residual) are saved for S/t
# positions only. Parameters that every rank holds whole, such as norms and the biases of row
# linears, see only S/t tokens, so gradients.py sums their gradients over the ranks after backward.
SEQUENCE = Pair(
    enter=partial(ops.all_gather, dim=-2),
    leave=partial(ops.reduce_scatter, dim=-2),
    cuts_sequence=True,
)


def mlp(
    x: Tensor,
    up: tuple[Tensor, Tensor | None],
    down: tuple[Tensor, Tensor | None],
    group,
    pair: Pair = TENSOR,
) -> Tensor:
    """Compute the MLP on F/t of its hidden features: x [B, S, D] -> [B, S, D].

    With SEQUENCE, x and the result are this rank's part of the sequence, [B, S/t, D].
    up: weight [F/t, D] and bias [F/t] or None. down: weight [D, F/t] and the whole bias [D].
    """
    x = pair.enter(x, group)  # [B, S, D]
    hidden = functional.gelu(functional.linear(x, *up))  # [B, S, F/t]
    weight, bias = down
    y = pair.leave(functional.linear(hidden, weight), group)
    return y if bias is None else y + bias


def attention(
    x: Tensor,
    qkv: list[tuple[Tensor, Tensor | None]],
    o: tuple[Tensor, Tensor | None],
    head_dim: int,
    group,
    pair: Pair = TENSOR,
) -> Tensor:
    """Compute causal attention for N/t of the heads: x [B, S, D] -> [B, S, D].

    With SEQUENCE [B, S/t, D], as in `mlp`; inside the region every rank has all S tokens.
    qkv: of q, k and v each the weight [N/t * H, D] and the bias [N/t * H] or None.
    o: weight [D, N/t * H] and the whole bias [D].
    """
    x = pair.enter(x, group)  # [B, S, D], once for q, k and v
    q, k, v = (  # [B, N/t, S, H] each
        functional.linear(x, *each).unflatten(-1, (-1, head_dim)).transpose(1, 2) for each in qkv
    )
    heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    weight, bias = o
    y = pair.leave(functional.linear(heads.transpose(1, 2).flatten(-2), weight), group)
    return y if bias is None else y + bias


# --- the vocabulary: each rank has V/t rows of the embedding, and V/t of the logits -------------


def embedding(tokens: Tensor, weight: Tensor, group, pair: Pair = TENSOR) -> Tensor:
    """Look up tokens [B, S] in a table of which each rank has weight [V/t, D] -> x [B, S, D].

    A rank returns zeros for a token whose row is on another rank; the sum over the ranks is
    complete. With SEQUENCE each rank gets its part of that sum, [B, S/t, D]. Raises ValueError for
    a token outside 0..V-1, because no rank has its row.
    """
    check_tokens(tokens, len(weight) * group.size())
    row, is_here = find_rows(tokens, len(weight), group)
    x = functional.embedding(row, weight).masked_fill(~is_here[..., None], 0)
    return pair.leave(x, group)


def find_rows(tokens: Tensor, num_rows: int, group) -> tuple[Tensor, Tensor]:
    """Return for each token which of this rank's rows it needs, and whether this rank has the row.

    tokens [...], num_rows V/t -> rows [...], 0 if another rank has it; bool [...].
    """
    row = tokens - group.rank() * num_rows
    is_here = (row >= 0) & (row < num_rows)
    return row.where(is_here, 0), is_here


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, group, *, reduction: str | None = None
) -> TokenLoss | Tensor:
    """Compute `token_loss` of logits [..., V/t] sharded by vocabulary, targets [...] on all ranks.

    Sends three numbers per token instead of V: the maximum of the ranks' logsumexps, and two sums.
    Targets of IGNORE_INDEX do not count; others outside 0..V-1 raise ValueError.
    reduction: as in torch: "none", each token's loss [...], 0 for ignored tokens; "sum";
    "mean" over tokens that count. None returns a TokenLoss, before the division.
    """
    if reduction not in (None, "none", "sum", "mean"):
        raise ValueError(f"reduction={reduction!r} is none of 'none', 'sum', 'mean'")
    logits = at_least_float32(logits)
    check_tokens(targets, logits.shape[-1] * group.size(), "target", ignored=IGNORE_INDEX)
    counts = targets != IGNORE_INDEX
    row, is_here = find_rows(targets, logits.shape[-1], group)
    at_target = logits.gather(-1, row[..., None]).squeeze(-1).masked_fill(~is_here, 0)
    # The softmax's denominator is the sum of exp(logsumexp) over the ranks. The largest logsumexp
    # is subtracted from all of them, so that nothing overflows, and added back to the log.
    mine = logits.logsumexp(-1)  # [...]
    highest = collectives.all_reduce(mine.detach(), group, op="max")
    denominator, at_target = ops.all_reduce(torch.stack([(mine - highest).exp(), at_target]), group)
    losses = (highest + denominator.log() - at_target).masked_fill(~counts, 0)
    if reduction == "none":
        return losses
    loss = TokenLoss(losses.sum(), counts.sum())
    if reduction is None:
        return loss
    return loss.total if reduction == "sum" else loss.mean()
