"""DeepSpeed-Ulysses: an all-to-all turns a sharded sequence into sharded heads.

Attention needs all tokens, but each head works alone. Before attention, each rank sends its tokens'
values for the other ranks' heads and receives all tokens of its own heads; afterwards an all-to-all
reverses this (Jacobs et al. 2023, section 3.1). In between, any attention works on whole sequences.
Bytes per rank: (cp-1)/cp of its q, k, v and output forward, and the same backward. With more ranks
each sends less, unlike in the ring. But cp can be at most the number of key/value heads.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from mini_dist.collectives import ops
from mini_dist.model.gpt import heads_for_kernel
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
    """Attend over the whole sequence; shapes and scale as in `ring_attention`; differentiable.

    Zig-zag placement is accepted but balances nothing, because each rank sees whole sequences.
    Raises ValueError if cp does not divide the kv heads, or the kv heads do not divide the heads.
    """
    size = group.size()
    check_heads(q, k, ranks=size)
    positions = positions_of_ranks(placement, q.shape[-2] * size, size)
    order = positions.flatten().argsort()  # sorts the tokens, which arrive rank by rank
    q, k, v = (heads_for_tokens(x, group)[:, :, order] for x in (q, k, v))  # [B, N/cp, S, H]
    k, v = heads_for_kernel(q, k, v)
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
    """Invert `heads_for_tokens`: [B, N/cp, S, H] -> [B, N, S/cp, H]."""
    parts = x.unflatten(2, (group.size(), -1)).movedim(2, 0)  # [cp, B, N/cp, S/cp, H], by receiver
    came = ops.all_to_all(parts, group)
    return came.movedim(0, 1).flatten(1, 2)
