"""Attention over some keys, tile by tile as in FlashAttention, and its backward.

ideas.py merges tiles and the blocks of a ring (Dao et al. 2022, section 3.1).
Legend: B batch, N heads, K key/value heads (query head n reads n // (N/K)), H head dim; q has S
tokens, k and v have T.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mini_dist.model.digits import at_least_float32
from mini_dist.ranks.devices import HOST
from mini_dist.ranks.older_torch import KERNEL_SHARES_HEADS

from .ideas import Partial, merge

TILE = 128  # queries and keys per tile: only one tile's scores are ever in memory


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool | Tensor, scale: float | None = None
) -> Partial:
    """Attend from q to these keys, tile by tile: at most TILE x TILE scores per head at once.

    q [B, N, S, H], k and v [B, K, T, H] -> out [B, N, S, H], lse [B, N, S]. causal: query i sees
    the keys 0..i (then S = T). Or a tensor [S] on the CPU: how many of the first keys each query
    sees, non-decreasing and at least 1. scale: of the scores, 1/sqrt(H) by default.
    """
    scale = scale_of(q, scale)
    out = at_least_float32(torch.empty_like(q))
    lse = out.new_full(q.shape[:-1], -math.inf)
    for rows, columns, hidden in tiles(q, k, causal):
        keys, values = (spread(t[:, :, columns], q) for t in (k, v))  # [B, N, tile, H]
        scores = masked(q[:, :, rows] @ keys.mT * scale, hidden)
        tile_lse = at_least_float32(scores).logsumexp(-1)
        weights = (scores - tile_lse.unsqueeze(-1)).exp().to(v.dtype)
        part = Partial(at_least_float32(weights @ values), tile_lse)
        if columns.start > 0:
            part = merge(Partial(out[:, :, rows], lse[:, :, rows]), part)
        out[:, :, rows], lse[:, :, rows] = part
    return Partial(out, lse)


def attend_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool | Tensor,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return these keys' contribution to the gradient of q, and the gradients of these k and v.

    `out` and `lse` belong to *all* keys: exp(score - lse) is then a key's weight in the complete
    softmax, so the scores can be recomputed tile by tile and dropped again
    (Dao et al. 2022, appendix B.4). d_q, d_k, d_v have the shapes and dtypes of q, k, v.
    """
    scale = scale_of(q, scale)
    d_q, d_k, d_v = (at_least_float32(torch.zeros_like(t)) for t in (q, k, v))
    mean = (at_least_float32(d_out) * out).sum(-1, keepdim=True)  # of d_weight over the weights
    for rows, columns, hidden in tiles(q, k, causal):
        queries, above = q[:, :, rows], d_out[:, :, rows]
        keys, values = (spread(t[:, :, columns], q) for t in (k, v))
        scores = masked(queries @ keys.mT * scale, hidden)
        weights = (scores - lse[:, :, rows].unsqueeze(-1)).exp()  # [B, N, tile, tile]
        d_weights = above @ values.mT
        d_scores = (weights * (d_weights - mean[:, :, rows]) * scale).to(q.dtype)
        d_q[:, :, rows] += d_scores @ keys
        d_k[:, :, columns] += gather_heads(d_scores.mT @ queries, k)
        d_v[:, :, columns] += gather_heads(weights.mT.to(q.dtype) @ above, v)
    return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)


def tiles(
    q: Tensor, k: Tensor, causal: bool | Tensor
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield (queries, keys, which pairs are hidden) of each tile. Skip queries and keys that are
    completely hidden; the mask is None if no pair is."""
    S, T = q.shape[-2], k.shape[-2]
    if not isinstance(causal, Tensor):
        stairs = torch.arange(1, S + 1, device=HOST)
        causal = stairs if causal else torch.full_like(stairs, T)
    for i in range(0, S, TILE):
        sees = causal[i : i + TILE]
        for j in range(0, int(sees[-1]), TILE):
            seeing = sees[sees > j]  # the last of these queries
            rows = slice(i + len(sees) - len(seeing), i + len(sees))
            columns = slice(j, min(j + TILE, T))
            hidden = torch.arange(j, columns.stop, device=causal.device) >= seeing.unsqueeze(-1)
            yield rows, columns, hidden if hidden.any() else None


def masked(scores: Tensor, hidden: Tensor | None) -> Tensor:
    return scores if hidden is None else scores.masked_fill(hidden.to(scores.device), -math.inf)


def scale_of(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def spread(x: Tensor, q: Tensor) -> Tensor:
    """Repeat each key/value head for the query heads that read it: [B, K, ...] -> [B, N, ...]."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def gather_heads(gradient: Tensor, like: Tensor) -> Tensor:
    """Invert `spread`: sum over the query heads that read one head, [B, N, ...] -> [B, K, ...]."""
    return gradient.unflatten(1, (like.shape[1], -1)).sum(2)


# The same two functions with torch's fused kernel, which also works tile by tile.


def fused_attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool | Tensor, scale: float | None = None
) -> Partial:
    """Compute `attend` with the kernel inside torch's scaled_dot_product_attention, CPU only.

    We call it by its internal name because the public function does not return the lse.
    """
    if heads_are_spread(q, k):
        k, v = spread(k, q), spread(v, q)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attend(q, k, v, 0.0, causal is True, attn_mask=mask(q, k, causal), scale=scale)
    return Partial(at_least_float32(out), lse)


def fused_attend_backward(d_out, q, k, v, out, lse, causal, scale=None):
    """Compute `attend_backward` with the same kernel's backward."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    how = {"attn_mask": mask(q, k, causal), "scale": scale}
    if not heads_are_spread(q, k):
        return backward(d_out, q, k, v, out, lse, 0.0, causal is True, **how)
    keys, values = spread(k, q), spread(v, q)
    d_q, d_k, d_v = backward(d_out, q, keys, values, out, lse, 0.0, causal is True, **how)
    return d_q, gather_heads(d_k, k), gather_heads(d_v, v)


def heads_are_spread(q: Tensor, k: Tensor) -> bool:
    """Whether the kernel needs a copy of each key/value head for every query head that reads it."""
    return not KERNEL_SHARES_HEADS and k.shape[1] < q.shape[1]


def mask(q: Tensor, k: Tensor, causal: bool | Tensor) -> Tensor | None:
    """Return the mask [S, T] that the fused kernel adds to the scores, if it needs one."""
    if not isinstance(causal, Tensor):
        return None
    hidden = torch.arange(k.shape[-2], device=causal.device) >= causal.unsqueeze(-1)
    return torch.zeros(hidden.shape, dtype=q.dtype, device=hidden.device).masked_fill(
        hidden, -math.inf
    )


class TileKernel(NamedTuple):
    forward: Callable  # as `attend`
    backward: Callable  # as `attend_backward`


KERNELS = {
    "explicit": TileKernel(attend, attend_backward),
    "fused": TileKernel(fused_attend, fused_attend_backward),
}


def kernel_of(name: str | None, q: Tensor, scale: float | None = None) -> TileKernel:
    """The kernel of this name; None: "fused" for tensors on a CPU, "explicit" elsewhere."""
    name = name or ("fused" if q.is_cpu else "explicit")
    if name not in KERNELS:
        raise ValueError(f"kernel={name!r} is unknown: give {' or '.join(map(repr, KERNELS))}")
    kernel = KERNELS[name]
    return kernel if scale is None else TileKernel(*(partial(way, scale=scale) for way in kernel))
