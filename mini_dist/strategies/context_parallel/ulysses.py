"""DeepSpeed-Ulysses: an all-to-all turns a cut of the sequence into a cut of the heads.

Attention needs all tokens, but each head works alone. So before it each rank gives away its tokens'
values of the other ranks' heads and gets all tokens of its own heads; after it, the way back
(Jacobs et al. 2023, section 3.1). In between is plain attention on whole sequences, of any kind.
Bytes a rank sends: (cp-1)/cp of its q, k, v and output, forward, and the same backward: with more
ranks each sends less, in the ring it does not. But there is no more than one rank a key/value head.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from mini_dist.collectives import ops
from mini_dist.plan.fields import checks_kinds

from .placement import check_heads, positions_of_ranks


@checks_kinds
def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group,
    *,
    placement: str = "contiguous",
    causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """Attention over the whole sequence; shapes and scale as `ring_attention`; differentiable.

    Zig-zag balances nothing here (each rank sees whole sequences) and is accepted all the same.
    Raises ValueError where cp does not divide the key/value heads, or these not the heads.
    """
    size = group.size()
    check_heads(q, k, ranks=size)
    positions = positions_of_ranks(placement, q.shape[-2] * size, size)
    order = positions.flatten().argsort()  # of the tokens, as they come rank by rank
    q, k, v = (heads_for_tokens(x, group)[:, :, order] for x in (q, k, v))  # [B, N/cp, S, H]
    out = functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=True
    )
    return tokens_for_heads(out[:, :, positions.flatten()], group)


def heads_for_tokens(x: Tensor, group) -> Tensor:
    """[B, N, S/cp, H] -> [B, N/cp, S, H], tokens in rank order."""
    parts = x.unflatten(1, (group.size(), -1)).movedim(1, 0)  # [cp, B, N/cp, S/cp, H], by receiver
    came = ops.all_to_all(parts, group)  # [cp, B, N/cp, S/cp, H], by sender
    return came.movedim(0, 2).flatten(2, 3)


def tokens_for_heads(x: Tensor, group) -> Tensor:
    """The way back, [B, N/cp, S, H] -> [B, N, S/cp, H]."""
    parts = x.unflatten(2, (group.size(), -1)).movedim(2, 0)  # [cp, B, N/cp, S/cp, H], by receiver
    came = ops.all_to_all(parts, group)
    return came.movedim(0, 1).flatten(1, 2)
