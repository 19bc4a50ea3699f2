"""Softmax over some keys now, over others later, merged exactly: what ring attention rests on.

Softmax divides by a sum over all keys, so it seems to need them all at once. It does not. Over some
of the keys compute the output *and* the log of the sum it was divided by; two such partial results
are merged by a weighted mean (Milakov and Gimelshein 2018; Rabe and Staats 2021).

tiles.py attends so tile by tile, ring.py block by block while blocks travel.
Legend: B batch, N heads, S sequence, H head dim; T keys.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


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


def online_softmax(scores: Tensor, values: Tensor, tile: int = 128) -> Tensor:
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
