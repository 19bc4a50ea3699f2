"""Attention in pieces: softmax over some keys now, over others later, merged exactly.

Softmax divides by a sum over all keys, so it seems to need them all at once. It does not. Over some
of the keys compute the output *and* the log of the sum it was divided by; two such partial results
are merged by a weighted mean (Milakov and Gimelshein 2018; Rabe and Staats 2021). FlashAttention
does so tile by tile (Dao et al. 2022, section 3.1), a ring of ranks block by block.
Legend: B batch, N heads, K key/value heads (query head n reads n // (N/K)), H head dim; q has S
tokens, k and v have T.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 128  # queries and keys of a tile: its scores are all that is ever in memory


class Partial(NamedTuple):
    """Attention over some of the keys. At least float32: it is summed up many times."""

    out: Tensor  # [B, N, S, H], as if these were all the keys
    lse: Tensor  # [B, N, S], log of the sum of exp(score) over these keys


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the keys of both. Each output counts by its share of the exponentials.

    With sums e^lse: out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b), written so that
    nothing is exponentiated but a difference that is at most 0.
    """
    lse = torch.logaddexp(a.lse, b.lse)
    share_of_b = (b.lse - lse).exp().unsqueeze(-1)
    return Partial(torch.lerp(a.out, b.out, share_of_b), lse)


def online_softmax(scores: Tensor, values: Tensor, tile: int = TILE) -> Tensor:
    """softmax(scores) @ values, reading both once, from left to right, `tile` columns at a time.

    scores [..., S, T], values [..., T, H] -> [..., S, H]. The recurrence of FlashAttention: keep
    the largest score m, the sum l of exp(score - m), and the output o not yet divided; when a
    larger score turns up, what was summed before shrinks by exp(old m - new m).
    """
    m = scores.new_full((*scores.shape[:-1], 1), -math.inf)
    l = torch.zeros_like(m)
    o = 0.0
    for s, v in zip(scores.split(tile, dim=-1), values.split(tile, dim=-2)):
        new_m = torch.maximum(m, s.amax(-1, keepdim=True))
        shrink = (m - new_m).exp()
        p = (s - new_m).exp()
        l = shrink * l + p.sum(-1, keepdim=True)
        o = shrink * o + p @ v
        m = new_m
    return o / l


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    """Attention of q over these keys, tile by tile: at most TILE x TILE scores of a head at once.

    q [B, N, S, H], k and v [B, K, T, H] -> out [B, N, S, H], lse [B, N, S]. causal: query i sees
    the keys 0..i (then S = T).
    """
    out = at_least_float32(torch.empty_like(q))
    lse = out.new_full(q.shape[:-1], -math.inf)
    for rows, columns, mask in tiles(q, k, causal):
        keys, values = (spread(t[:, :, columns], q) for t in (k, v))  # [B, N, tile, H]
        scores = masked(q[:, :, rows] @ keys.mT / math.sqrt(q.shape[-1]), mask)
        tile_lse = at_least_float32(scores).logsumexp(-1)
        weights = (scores - tile_lse.unsqueeze(-1)).exp().to(v.dtype)
        part = Partial(at_least_float32(weights @ values), tile_lse)
        if columns.start > 0:
            part = merge(Partial(out[:, :, rows], lse[:, :, rows]), part)
        out[:, :, rows], lse[:, :, rows] = part
    return Partial(out, lse)


def attend_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys contribute to the gradient of q, and the gradients of these k and v.

    `out` and `lse` are those of *all* keys: exp(score - lse) is then the weight that the key has in
    the complete softmax, so that the scores can be computed again, tile by tile, and forgotten
    (Dao et al. 2022, appendix B.4). Shapes and dtypes of d_q, d_k, d_v are those of q, k, v.
    """
    scale = 1 / math.sqrt(q.shape[-1])
    d_q, d_k, d_v = (at_least_float32(torch.zeros_like(t)) for t in (q, k, v))
    mean = (at_least_float32(d_out) * out).sum(-1, keepdim=True)  # of d_weight, over the weights
    for rows, columns, mask in tiles(q, k, causal):
        queries, above = q[:, :, rows], d_out[:, :, rows]
        keys, values = (spread(t[:, :, columns], q) for t in (k, v))
        scores = masked(queries @ keys.mT * scale, mask)
        weights = (scores - lse[:, :, rows].unsqueeze(-1)).exp()  # [B, N, tile, tile]
        d_weights = above @ values.mT
        d_scores = (weights * (d_weights - mean[:, :, rows]) * scale).to(q.dtype)
        d_q[:, :, rows] += d_scores @ keys
        d_k[:, :, columns] += gather_heads(d_scores.mT @ queries, k)
        d_v[:, :, columns] += gather_heads(weights.mT.to(q.dtype) @ above, v)
    return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)


def tiles(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice, bool]]:
    """(queries, keys, whether on the diagonal) of each tile that is not hidden altogether."""
    for i in range(0, q.shape[-2], TILE):
        for j in range(0, i + 1 if causal else k.shape[-2], TILE):
            yield slice(i, i + TILE), slice(j, j + TILE), causal and i == j


def masked(scores: Tensor, mask: bool) -> Tensor:
    if not mask:
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -math.inf)


def spread(x: Tensor, q: Tensor) -> Tensor:
    """Each key/value head as often as query heads read it: [B, K, ...] -> [B, N, ...]."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def gather_heads(gradient: Tensor, like: Tensor) -> Tensor:
    """The way back: sum over the query heads that read one head, [B, N, ...] -> [B, K, ...]."""
    return gradient.unflatten(1, (like.shape[1], -1)).sum(2)


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


# The same two functions by torch's fused kernel, which works tile by tile as above.


def fused_attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Partial:
    """`attend` by the kernel inside torch's scaled_dot_product_attention, CPU only.

    It is called by its inner name because the public function keeps the lse to itself.
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return Partial(at_least_float32(out), lse)


def fused_attend_backward(d_out, q, k, v, out, lse, causal):
    """`attend_backward` by the same kernel's backward."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(d_out, q, k, v, out, lse, 0.0, causal)


class Kernel(NamedTuple):
    forward: Callable  # as `attend`
    backward: Callable  # as `attend_backward`


KERNELS = {
    "explicit": Kernel(attend, attend_backward),
    "fused": Kernel(fused_attend, fused_attend_backward),
}


def kernel_of(name: str | None, q: Tensor) -> Kernel:
    """The kernel of this name; None: "fused" for tensors on a CPU, "explicit" elsewhere."""
    name = name or ("fused" if q.device.type == "cpu" else "explicit")
    if name not in KERNELS:
        raise ValueError(f"kernel={name!r} is unknown: give {' or '.join(map(repr, KERNELS))}")
    return KERNELS[name]
