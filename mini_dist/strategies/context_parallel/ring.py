"""Ring attention: queries stay, keys and values travel.

Each rank keeps its queries and sees the keys and values of every rank pass by, one after the other.
It attends to those it holds while the next ones arrive, and merges the results (Liu et al. 2023).
It never holds more than three ranks' keys and values: its own, the leaving and the arriving ones.

Bytes per rank, in units of its own K and V: forward cp-1. Backward 2(cp-1): K and V go around
again, followed by their gradients, which travel from the first rank that adds to them to the
owner of the keys. (A rank's own contribution to its own keys' gradient never travels, so it is
cp-1, not cp.) The gradients are summed in the dtype of K: in bfloat16 each hop rounds, as in our
collectives.
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
    """Attend over the whole sequence; each rank holds S/cp tokens. Differentiable.

    q [B, N, S/cp, H], k and v [B, K, S/cp, H] -> [B, N, S/cp, H]. placement: which tokens these
    are (placement.py). kernel: "fused" (torch's, for a CPU) or "explicit" (ours, for any device).
    scale: of the scores, 1/sqrt(H) by default. return_lse: also return the log of each query's sum
    of exp(score) [B, N, S/cp], in float32 or better, so that the result can be merged with others.
    Raises ValueError for an unknown placement or kernel, a length that the placement cannot split,
    or key/value heads that do not divide the heads.
    """
    check_heads(q, k)
    positions = positions_of_ranks(placement, q.shape[-2] * group.size(), group.size())
    kernel = kernel_of(kernel, q, scale_of(q, scale) if return_lse else scale)
    out, lse = RingAttention.apply(q, k, v, positions, causal, kernel, group)
    return (out, lse) if return_lse else out


class RingAttention(torch.autograd.Function):
    """Saves for backward q, k, v, out [.., S/cp, H] and lse [.., S/cp], and no other rank's
    tensors."""

    @staticmethod
    def forward(ctx, q, k, v, positions, causal, kernel, group):
        rank, size = group.rank(), group.size()
        blocks = [block_of(positions, rank, (rank - step) % size, causal) for step in range(size)]
        ctx.blocks, ctx.kernel, ctx.group = blocks, kernel, group
        total, kv = None, torch.stack([k, v])  # [2, B, K, S/cp, H]: one message per hop
        for step in range(size - 1):  # now held: keys and values of rank - step
            total, kv = ring_step(total, q, kv, blocks[step], kernel, group)
        out, lse = add_block(total, q, kv, blocks[-1], kernel)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)  # d_lse is None if nobody asked for lse
        return out, lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        q, k, v, out, lse = ctx.saved_tensors
        d_out = torch.zeros_like(out) if d_out is None else d_out
        size, group = ctx.group.size(), ctx.group
        kv = torch.stack([k, v])
        d_q = at_least_float32(torch.zeros_like(q))
        behind = None  # gradients in flight to the next rank; the previous rank's arrive
        for step, block in enumerate(ctx.blocks):
            ahead = Hop(kv, group) if step < size - 1 else None
            d_kv = torch.zeros_like(kv)
            add_block_backward(d_q, d_kv, d_out, q, kv, out, lse, block, ctx.kernel, d_lse)
            if step == 0:
                home = d_kv  # of our own keys: the other ranks' contributions will be added to it
            else:
                if behind:
                    d_kv += behind.arrived()  # what the previous ranks collected for these keys
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
    """Attend to the keys and values held now while they are sent to the next rank.

    Returns the attention so far, including these, and the keys and values that arrived meanwhile.
    """
    rank, size = group.rank(), group.size()
    arriving = torch.empty_like(kv)
    handles = start(group, [(arriving, (rank - 1) % size)], [(kv, (rank + 1) % size)])
    total = add_block(total, q, kv, block, kernel)
    wait(handles)
    return total, arriving


class Hop:
    """A hop of the backward: sends a tensor to the next rank and receives one like it from the
    previous rank; computing continues between the start and `arrived()`."""

    def __init__(self, tensor: Tensor, group):
        after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
        self.leaving, self.arriving = tensor, torch.empty_like(tensor)  # kept until it is sent
        self.handles = start(group, [(self.arriving, before)], [(self.leaving, after)])

    def arrived(self) -> Tensor:
        wait(self.handles)
        return self.arriving


def add_block(
    total: Partial | None, q: Tensor, kv: Tensor, block: ScoreBlock | None, kernel: TileKernel
) -> Partial:
    """Add one more block of keys to `total`, the attention over some keys. The first block holds
    the rank's own keys, which all its queries see."""
    if block is None:
        return total
    rows, columns = block.queries, block.keys
    part = kernel.forward(q[:, :, rows], *kv[:, :, :, columns], block.causal)
    if total is None:
        if isinstance(rows, slice):
            return part
        back = rows.argsort()  # from sequence order to q's order
        return Partial(part.out[:, :, back], part.lse[:, :, back])
    out, lse = total
    out[:, :, rows], lse[:, :, rows] = merge(Partial(out[:, :, rows], lse[:, :, rows]), part)
    return total


def add_block_backward(
    d_q, d_kv, d_out, q, kv, out, lse, block, kernel, d_lse: Tensor | None = None
) -> None:
    """Add a block's contribution to the gradients of these queries and of these keys and values.

    d_q and d_kv cover all tokens of q and kv, whatever part of them the block is.
    """
    if block is None:
        return
    rows, columns = block.queries, block.keys
    d_out, q, out, lse = (t[:, :, rows] for t in (d_out, q, out, lse))
    kv, H = kv[:, :, :, columns], q.shape[-1]
    if d_lse is not None:
        # A kernel uses `out` only in its product with d_out, which it subtracts from the gradient
        # of each weight. An extra column, with 1 in d_out and -d_lse in out, adds d_lse to it.
        q, kv, d_out = pad(q, (0, 1)), pad(kv, (0, 1)), pad(d_out, (0, 1), value=1.0)
        out = torch.cat([out, -d_lse[:, :, rows].unsqueeze(-1).to(out.dtype)], -1)
    of_q, of_k, of_v = kernel.backward(d_out, q, *kv, out, lse, block.causal)
    d_q[:, :, rows] += of_q[..., :H]
    d_kv[0, :, :, columns] += of_k[..., :H]
    d_kv[1, :, :, columns] += of_v[..., :H]
