"""Attention over some keys, tile by tile as FlashAttention does it, and its backward.

What merges tiles, and the blocks of a ring, is in ideas.py (Dao et al. 2022, section 3.1).
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
from mini_dist.ranks.older_torch import KERNEL_SHARES_HEADS

from .ideas import Partial, merge

TILE = 128  # queries and keys of a tile: its scores are all that is ever in memory


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool | Tensor, scale: float | None = None
) -> Partial:
    """Attention of q over these keys, tile by tile: at most TILE x TILE scores of a head at once.

    q [B, N, S, H], k and v [B, K, T, H] -> out [B, N, S, H], lse [B, N, S]. causal: query i sees
    the keys 0..i (then S = T); or of each query how many keys it sees, the first ones, rising and
    at least 1: [S], on the CPU. scale: of the scores, 1/sqrt(H) unless given.
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
    """What these keys contribute to the gradient of q, and the gradients of these k and v.

    `out` and `lse` are those of *all* keys: exp(score - lse) is then the weight that the key has in
    the complete softmax, so that the scores can be computed again, tile by tile, and forgotten
    (Dao et al. 2022, appendix B.4). Shapes and dtypes of d_q, d_k, d_v are those of q, k, v.
    """
    scale = scale_of(q, scale)
    d_q, d_k, d_v = (at_least_float32(torch.zeros_like(t)) for t in (q, k, v))
    mean = (at_least_float32(d_out) * out).sum(-1, keepdim=True)  # of d_weight, over the weights
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
    """(queries, keys, which of their pairs are hidden) of each tile, without queries and keys that
    are hidden altogether; None where no pair is."""
    S, T = q.shape[-2], k.shape[-2]
    if not isinstance(causal, Tensor):
        causal = torch.arange(1, S + 1) if causal else torch.full((S,), T)
    for i in range(0, S, TILE):
        sees = causal[i : i + TILE]
        for j in range(0, int(sees[-1]), TILE):
            seeing = sees[sees > j]  # of these queries the last ones
            rows = slice(i + len(sees) - len(seeing), i + len(sees))
            columns = slice(j, min(j + TILE, T))
            hidden = torch.arange(j, columns.stop) >= seeing.unsqueeze(-1)
            yield rows, columns, hidden if hidden.any() else None


def masked(scores: Tensor, hidden: Tensor | None) -> Tensor:
    return scores if hidden is None else scores.masked_fill(hidden.to(scores.device), -math.inf)


def scale_of(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def spread(x: Tensor, q: Tensor) -> Tensor:
    """Each key/value head as often as query heads read it: [B, K, ...] -> [B, N, ...]."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def gather_heads(gradient: Tensor, like: Tensor) -> Tensor:
    """The way back: sum over the query heads that read one head, [B, N, ...] -> [B, K, ...]."""
    return gradient.unflatten(1, (like.shape[1], -1)).sum(2)


# The same two functions by torch's fused kernel, which works tile by tile as above.


def fused_attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool | Tensor, scale: float | None = None
) -> Partial:
    """`attend` by the kernel inside torch's scaled_dot_product_attention, CPU only.

    It is called by its inner name because the public function keeps the lse to itself.
    """
    if heads_are_spread(q, k):
        k, v = spread(k, q), spread(v, q)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attend(q, k, v, 0.0, causal is True, attn_mask=mask(q, k, causal), scale=scale)
    return Partial(at_least_float32(out), lse)


def fused_attend_backward(d_out, q, k, v, out, lse, causal, scale=None):
    """`attend_backward` by the same kernel's backward."""
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
    """What the fused kernel adds to the scores where it must be told who sees whom: [S, T]."""
    if not isinstance(causal, Tensor):
        return None
    hidden = torch.arange(k.shape[-2]) >= causal.unsqueeze(-1)
    return torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, -math.inf)


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
