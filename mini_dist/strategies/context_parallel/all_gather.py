"""The alternative to a ring: fetch all keys and values at once, then attend (Llama 3: Grattafiori
et al. 2024, section 3.3.2).

It computes the same blocks and sums as the ring, with one collective instead of cp-1 hops. There is
no overlap to arrange, but while a layer computes, it holds the keys and values of the whole
sequence. They are dropped after forward and gathered again in backward. With few key/value heads
they are small. Bytes per rank, in units of its own K and V: cp-1 forward, 2(cp-1) backward, as in
the ring.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mini_dist.collectives import all_gather, reduce_scatter
from mini_dist.model.digits import at_least_float32
from mini_dist.plan.fields import checks_kinds

from .placement import block_of, check_heads, positions_of_ranks
from .ring import add_block, add_block_backward
from .tiles import kernel_of, scale_of


@checks_kinds
def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group,
    *,
    placement: str = "zigzag",
    causal: bool = True,
    kernel: str | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend over the whole sequence; arguments, shapes and errors as in `ring_attention`."""
    check_heads(q, k)
    positions = positions_of_ranks(placement, q.shape[-2] * group.size(), group.size())
    kernel = kernel_of(kernel, q, scale_of(q, scale) if return_lse else scale)
    out, lse = AllGatherAttention.apply(q, k, v, positions, causal, kernel, group)
    return (out, lse) if return_lse else out


class AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, positions, causal, kernel, group):
        rank, size = group.rank(), group.size()
        order = [(rank - step) % size for step in range(size)]  # its own first, as in the ring
        ctx.blocks = [(source, block_of(positions, rank, source, causal)) for source in order]
        ctx.kernel, ctx.group = kernel, group
        all_kv, total = gather_ranks(k, v, group), None
        for source, block in ctx.blocks:
            total = add_block(total, q, all_kv[source], block, kernel)
        out, lse = total
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)  # d_lse is None if nobody asked for lse
        return out, lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        q, k, v, out, lse = ctx.saved_tensors
        d_out = torch.zeros_like(out) if d_out is None else d_out
        all_kv = gather_ranks(k, v, ctx.group)
        d_q, d_all_kv = at_least_float32(torch.zeros_like(q)), torch.zeros_like(all_kv)
        for source, block in ctx.blocks:
            kv, d_kv = all_kv[source], d_all_kv[source]
            add_block_backward(d_q, d_kv, d_out, q, kv, out, lse, block, ctx.kernel, d_lse)
        (d_kv,) = reduce_scatter(d_all_kv, ctx.group)
        return d_q.to(q.dtype), *d_kv, None, None, None, None


def gather_ranks(k: Tensor, v: Tensor, group) -> Tensor:
    """Gather all ranks' keys and values: [cp, 2, B, K, S/cp, H]."""
    return all_gather(torch.stack([k, v]).unsqueeze(0), group)
