"""Ring attention: queries stay, keys and values travel.

Each rank keeps its queries and, one after the other, sees every rank's keys and values go by: it
attends to those that are here while the next ones arrive, and merges (Liu et al. 2023). At no time
does it hold more than three ranks' keys and values: its own, those that leave, those that arrive.

Bytes a rank sends, in units of its own K and V: forward cp-1. Backward 2(cp-1): K and V go round
again, and behind them their gradients, from the first rank that adds to them to the one they
belong to. (A rank's own share of its own keys' gradient never travels, so it is cp-1, not cp.)
Legend: B batch, N heads, K key/value heads, S sequence, H head dim, cp ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..collectives import collective, start, wait
from .online_softmax import KERNELS, Kernel, Partial, at_least_float32, merge
from .placement import Block, block_of, positions_of_ranks


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group,
    *,
    placement: str = "zigzag",
    causal: bool = True,
    kernel: str = "fused",
) -> Tensor:
    """Attention over the whole sequence, of which each rank holds S/cp tokens; differentiable.

    q [B, N, S/cp, H], k and v [B, K, S/cp, H] -> [B, N, S/cp, H]. placement: which tokens these
    are (placement.py). kernel: "fused" (torch's, on a CPU) or "explicit" (ours, on any device).
    Raises ValueError for an unknown placement, or one that this length cannot have.
    """
    positions = positions_of_ranks(placement, q.shape[-2] * group.size(), group.size())
    return RingAttention.apply(q, k, v, positions, causal, KERNELS[kernel], group)


class RingAttention(torch.autograd.Function):
    """Saved for backward: q, k, v, out [.., S/cp, H] and lse [.., S/cp], nothing of the others'."""

    @staticmethod
    def forward(ctx, q, k, v, positions, causal, kernel, group):
        rank, size = group.rank(), group.size()
        blocks = [block_of(positions, rank, (rank - step) % size, causal) for step in range(size)]
        ctx.blocks, ctx.kernel, ctx.group = blocks, kernel, group
        own_k, own_v, total = k, v, None
        for step in range(size - 1):  # now here: keys and values of rank - step
            total, k, v = ring_step(total, q, k, v, blocks[step], kernel, group)
        out, lse = add_block(total, q, k, v, blocks[-1], kernel)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, own_k, own_v, out, lse)
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        size, group = ctx.group.size(), ctx.group
        d_q = at_least_float32(torch.zeros_like(q))
        behind = None  # gradients on the way to the rank after, those of the rank before arriving
        for step, block in enumerate(ctx.blocks):
            ahead = Hop((k, v), group) if step < size - 1 else None
            d_k, d_v = torch.zeros_like(k), torch.zeros_like(v)
            add_block_backward((d_q, d_k, d_v), d_out, q, k, v, out, lse, block, ctx.kernel)
            if step == 0:
                home = d_k, d_v  # of our own keys: the others' shares will be added to it
            else:
                if behind:  # what the ranks before us have collected for these keys
                    add_((d_k, d_v), behind.arrived())
                behind = Hop((d_k, d_v), group)
            if ahead:
                k, v = ahead.arrived()
        if behind:
            add_(home, behind.arrived())
        return d_q.to(q.dtype), *home, None, None, None, None


@collective
def ring_step(
    total: Partial | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: Block | None,
    kernel: Kernel,
    group,
) -> tuple[Partial, Tensor, Tensor]:
    """Attend to the keys and values that are here while they go on to the rank after.

    Returns the attention so far with these in it, and the keys and values that came meanwhile.
    """
    hop = Hop((k, v), group)
    total = add_block(total, q, k, v, block, kernel)
    return total, *hop.arrived()


class Hop:
    """Some tensors leave for the rank after, as many come from the rank before. Work goes on
    between the start and `arrived()`."""

    def __init__(self, tensors: tuple[Tensor, ...], group):
        after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
        self.leaving = [tensor.contiguous() for tensor in tensors]  # kept until they have left
        self.arriving = [torch.empty_like(tensor) for tensor in self.leaving]
        receives = [(tensor, before) for tensor in self.arriving]
        self.handles = start(group, receives, [(tensor, after) for tensor in self.leaving])

    def arrived(self) -> list[Tensor]:
        wait(self.handles)
        return self.arriving


def add_block(
    total: Partial | None, q: Tensor, k: Tensor, v: Tensor, block: Block | None, kernel: Kernel
) -> Partial:
    """`total`, attention over some keys, with those of one more block. The first block is a rank's
    own, which all its queries see."""
    if block is None:
        return total
    rows, columns = block.queries, block.keys
    part = kernel.forward(q[:, :, rows], k[:, :, columns], v[:, :, columns], block.causal)
    if total is None:
        return part
    out, lse = total
    out[:, :, rows], lse[:, :, rows] = merge(Partial(out[:, :, rows], lse[:, :, rows]), part)
    return total


def add_block_backward(gradients, d_out, q, k, v, out, lse, block, kernel) -> None:
    """Add what a block contributes to `gradients`, the d_q, d_k and d_v of all its tokens."""
    if block is None:
        return
    rows, columns = block.queries, block.keys
    parts = kernel.backward(
        d_out[:, :, rows],
        *(q[:, :, rows], k[:, :, columns], v[:, :, columns]),
        *(out[:, :, rows], lse[:, :, rows].contiguous()),
        block.causal,
    )
    for gradient, part, where in zip(gradients, parts, (rows, columns, columns)):
        gradient[:, :, where] += part


def add_(totals, tensors) -> None:
    for total, tensor in zip(totals, tensors):
        total += tensor
