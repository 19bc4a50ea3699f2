"""Tensor parallelism in plain functions; layers.py does the same in the layers of real models.

Each rank holds a piece of every matrix and computes a piece of every layer:

    x ── enter ── W₁ cut by outputs ── GELU ── W₂ cut by inputs ── leave ── + bias
         copy       [F/t, D]          on F/t         [D, F/t]      all_reduce

After a matrix that is cut by its outputs a rank has some of the hidden features, and these are the
inputs that the next matrix, cut by its inputs, needs: between the two nothing is sent (Shoeybi et
al. 2019, section 3). In attention q, k and v come first and o second, and the cut runs between
heads. What lies between entering and leaving is called a region.

Legend: t ranks, B batch, S sequence, D model, F ffn, N heads, H head dim, V vocab. A weight is
[outputs, inputs], as torch has it. Every function takes this rank's pieces of the weights.
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
    """All of x [..., D] -> this rank's outputs [..., F/t]; weight [F/t, D], bias [F/t].

    Nothing is sent forward. Backward adds up the gradients of x, since every rank used all of it.
    ("Column", because Megatron writes y = xA: a column of A is an output. torch stores A
    transposed, so here outputs are rows.)
    """
    return functional.linear(ops.copy(x, group), weight, bias)


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group) -> Tensor:
    """This rank's inputs x [..., F/t] -> all outputs [..., D]; weight [D, F/t], bias [D].

    The bias is whole on every rank and added after the sum: before it, it would count t times.
    """
    y = ops.all_reduce(functional.linear(x, weight), group)
    return y if bias is None else y + bias


# --- a whole region: enter, compute on a piece, leave -------------------------------------------


class Pair(NamedTuple):
    """How x enters a region and how the result leaves it, both functions (x, group) -> x.

    Each of the two is what the other does in backward.
    """

    enter: Callable
    leave: Callable
    cuts_sequence: bool = False  # outside the regions a rank has S/t of the sequence, not all of it
    gathers_again: bool = False  # see SEQUENCE_AGAIN in column_linears.py; nothing on this page


# Outside the regions every rank has the same x [B, S, D].
TENSOR = Pair(enter=ops.copy, leave=ops.all_reduce)

# Outside the regions every rank has another part of the sequence, x [B, S/t, D] (Korthikanti et al.
# 2022, section 4.2.2). It sends as many bytes as TENSOR, since an all-reduce is made of these
# two, and what lies between regions (norms, dropout, the residual) is kept for S/t positions only.
# What is whole on every rank, norms and the biases of row linears, is used on these tokens only, so
# its gradients are summed over the ranks after backward (gradients.py).
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
    """The MLP on F/t of its hidden features: x [B, S, D] -> [B, S, D].

    With SEQUENCE x is this rank's part of the sequence, and so is the result: [B, S/t, D].
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
    """Causal attention with N/t of its heads: x [B, S, D] -> [B, S, D].

    With SEQUENCE [B, S/t, D], as `mlp`; in between every rank has all S tokens, for its heads.
    qkv: of q, k and v each the weight [N/t * H, D] and the bias [N/t * H] or None.
    o: weight [D, N/t * H] and the whole bias [D].
    """
    x = pair.enter(x, group)  # [B, S, D], once for the three
    q, k, v = (  # [B, N/t, S, H] each
        functional.linear(x, *each).unflatten(-1, (-1, head_dim)).transpose(1, 2) for each in qkv
    )
    heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    weight, bias = o
    y = pair.leave(functional.linear(heads.transpose(1, 2).flatten(-2), weight), group)
    return y if bias is None else y + bias


# --- the vocabulary: each rank has V/t rows of the embedding, and V/t of the logits -------------


def embedding(tokens: Tensor, weight: Tensor, group, pair: Pair = TENSOR) -> Tensor:
    """Look up tokens [B, S] in a table of which a rank has weight [V/t, D] -> x [B, S, D].

    A rank gives zeros for a token whose row another rank has; the sum over ranks has all of them.
    With SEQUENCE each rank gets its part of that sum, [B, S/t, D].
    Raises ValueError for a token outside 0..V-1, of which no rank has the row.
    """
    check_tokens(tokens, len(weight) * group.size())
    row, is_here = find_rows(tokens, len(weight), group)
    x = functional.embedding(row, weight).masked_fill(~is_here[..., None], 0)
    return pair.leave(x, group)


def find_rows(tokens: Tensor, num_rows: int, group) -> tuple[Tensor, Tensor]:
    """Which of this rank's rows of the vocabulary belongs to each token, and whether one does.

    tokens [...], num_rows V/t -> rows [...], 0 where another rank has it; bool [...].
    """
    row = tokens - group.rank() * num_rows
    is_here = (row >= 0) & (row < num_rows)
    return row.where(is_here, 0), is_here


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, group, *, reduction: str | None = None
) -> TokenLoss | Tensor:
    """`token_loss` of logits whose vocabulary is cut: [..., V/t], targets [...] alike on all ranks.

    Sends three numbers a token instead of V: the largest of all ranks' logsumexps, and two sums.
    Targets of IGNORE_INDEX do not count; others outside 0..V-1 raise ValueError.
    reduction: as torch's: "none", the loss of each token [...], 0 where it does not count; "sum";
    "mean" over those that count. Without one a TokenLoss, not yet divided.
    """
    if reduction not in (None, "none", "sum", "mean"):
        raise ValueError(f"reduction={reduction!r} is none of 'none', 'sum', 'mean'")
    logits = at_least_float32(logits)
    check_tokens(targets, logits.shape[-1] * group.size(), "target", ignored=IGNORE_INDEX)
    counts = targets != IGNORE_INDEX
    row, is_here = find_rows(targets, logits.shape[-1], group)
    at_target = logits.gather(-1, row[..., None]).squeeze(-1).masked_fill(~is_here, 0)
    # The softmax's denominator is the sum of exp(logsumexp) over the ranks. The highest of these
    # exponents is subtracted from all of them, so that nothing overflows, and added to the log.
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
