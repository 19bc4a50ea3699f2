"""Ring attention: queries stay, keys and values travel.

Each rank keeps its queries and, one after the other, sees every rank's keys and values go by: it
attends to those that are here while the next ones arrive, and merges (Liu et al. 2023). At no time
does it hold more than three ranks' keys and values: its own, those that leave, those that arrive.

Bytes a rank sends, in units of its own K and V: forward cp-1. Backward 2(cp-1): K and V go round
again, and behind them their gradients, from the first rank that adds to them to the one they
belong to. (A rank's own share of its own keys' gradient never travels, so it is cp-1, not cp.) They
travel and are summed in the dtype of K: in bfloat16 each hop rounds, as in our collectives.
Legend: B batch, N heads, K key/value heads, S sequence, H head dim, cp ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mini_dist.collectives import collective, start, wait
from mini_dist.model.digits import at_least_float32
from mini_dist.plan.fields import checks_kinds

from .placement import ScoreBlock, block_of, check_heads, positions_of_ranks
from .tiles import Partial, TileKernel, kernel_of, merge, scale_of


@checks_kinds
def ring_attention(
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
    """Attention over the whole sequence, of which each rank holds S/cp tokens; differentiable.

    q [B, N, S/cp, H], k and v [B, K, S/cp, H] -> [B, N, S/cp, H]. placement: which tokens these
    are (placement.py). kernel: "fused" (torch's, for a CPU) or "explicit" (ours, for any device).
    scale: of the scores, 1/sqrt(H) unless given. return_lse: beside it the log of each query's sum
    of exp(score) [B, N, S/cp], in float32 at least: with it the result can be merged with more.
    Raises ValueError for an unknown placement or kernel, a length that cannot be placed so, or
    key/value heads that do not divide the heads.
    """
    check_heads(q, k)
    positions = positions_of_ranks(placement, q.shape[-2] * group.size(), group.size())
    kernel = kernel_of(kernel, q, scale_of(q, scale) if return_lse else scale)
    out, lse = RingAttention.apply(q, k, v, positions, causal, kernel, group)
    return (out, lse) if return_lse else out


class RingAttention(torch.autograd.Function):
    """Saved for backward: q, k, v, out [.., S/cp, H] and lse [.., S/cp], nothing of the others'."""

    @staticmethod
    def forward(ctx, q, k, v, positions, causal, kernel, group):
        rank, size = group.rank(), group.size()
        blocks = [block_of(positions, rank, (rank - step) % size, causal) for step in range(size)]
        ctx.blocks, ctx.kernel, ctx.group = blocks, kernel, group
        total, kv = None, torch.stack([k, v])  # [2, B, K, S/cp, H]: one message a hop
        for step in range(size - 1):  # now here: keys and values of rank - step
            total, kv = ring_step(total, q, kv, blocks[step], kernel, group)
        out, lse = add_block(total, q, kv, blocks[-1], kernel)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)  # d_lse is None where nobody asked for lse
        return out, lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        q, k, v, out, lse = ctx.saved_tensors
        d_out = torch.zeros_like(out) if d_out is None else d_out
        size, group = ctx.group.size(), ctx.group
        kv = torch.stack([k, v])
        d_q = at_least_float32(torch.zeros_like(q))
        behind = None  # gradients on their way to the rank after, while others' arrive from before
        for step, block in enumerate(ctx.blocks):
            ahead = Hop(kv, group) if step < size - 1 else None
            d_kv = torch.zeros_like(kv)
            add_block_backward(d_q, d_kv, d_out, q, kv, out, lse, block, ctx.kernel, d_lse)
            if step == 0:
                home = d_kv  # of our own keys: the others' shares will be added to it
            else:
                if behind:
                    d_kv += behind.arrived()  # what the ranks before us collected for these keys
                behind = Hop(d_kv, group)
            if ahead:
                kv = ahead.arrived()
        if behind:
            home += behind.arrived()
        return d_q.to(q.dtype), *home, None, None, None, None


@collective
def ring_step(
    total: Partial | None,
    q: Tensor,
    kv: Tensor,
    block: ScoreBlock | None,
    kernel: TileKernel,
    group,
) -> tuple[Partial, Tensor]:
    """Attend to the keys and values that are here while they go on to the rank after.

    Returns the attention so far with these in it, and the keys and values that came meanwhile.
    """
    rank, size = group.rank(), group.size()
    arriving = torch.empty_like(kv)
    handles = start(group, [(arriving, (rank - 1) % size)], [(kv, (rank + 1) % size)])
    total = add_block(total, q, kv, block, kernel)
    wait(handles)
    return total, arriving


class Hop:
    """For the backward: a tensor leaves for the rank after, one like it comes from the rank before,
    and work goes on between the start and `arrived()`."""

    def __init__(self, tensor: Tensor, group):
        after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
        self.leaving, self.arriving = tensor, torch.empty_like(tensor)  # kept until it has left
        self.handles = start(group, [(self.arriving, before)], [(self.leaving, after)])

    def arrived(self) -> Tensor:
        wait(self.handles)
        return self.arriving


def add_block(
    total: Partial | None, q: Tensor, kv: Tensor, block: ScoreBlock | None, kernel: TileKernel
) -> Partial:
    """`total`, attention over some keys, with those of one more block. The first block is a rank's
    own, which all its queries see."""
    if block is None:
        return total
    rows, columns = block.queries, block.keys
    part = kernel.forward(q[:, :, rows], *kv[:, :, :, columns], block.causal)
    if total is None:
        if isinstance(rows, slice):
            return part
        back = rows.argsort()  # from the order of the sequence to that of q
        return Partial(part.out[:, :, back], part.lse[:, :, back])
    out, lse = total
    out[:, :, rows], lse[:, :, rows] = merge(Partial(out[:, :, rows], lse[:, :, rows]), part)
    return total


def add_block_backward(
    d_q, d_kv, d_out, q, kv, out, lse, block, kernel, d_lse: Tensor | None = None
) -> None:
    """Add what a block contributes to the gradients of these queries and of these keys and values.

    d_q and d_kv are of all tokens of q and kv, whatever part of them the block is.
    """
    if block is None:
        return
    rows, columns = block.queries, block.keys
    d_out, q, out, lse = (t[:, :, rows] for t in (d_out, q, out, lse))
    kv, H = kv[:, :, :, columns], q.shape[-1]
    if d_lse is not None:
        # A kernel asks of `out` only its product with d_out, which it subtracts from the gradient
        # of each weight. One column more, of 1 in d_out and of -d_lse in out, adds d_lse to it.
        q, kv, d_out = pad(q, (0, 1)), pad(kv, (0, 1)), pad(d_out, (0, 1), value=1.0)
        out = torch.cat([out, -d_lse[:, :, rows].unsqueeze(-1).to(out.dtype)], -1)
    of_q, of_k, of_v = kernel.backward(d_out, q, *kv, out, lse, block.causal)
    d_q[:, :, rows] += of_q[..., :H]
    d_kv[0, :, :, columns] += of_k[..., :H]
    d_kv[1, :, :, columns] += of_v[..., :H]
