"""The page of context parallelism: softmax in pieces, and a ring in which keys and values travel.

Softmax divides by a sum over all keys, so it seems to need them all at once. It does not. Compute
the output over some of the keys *and* the log of the sum that it was divided by; two such partial
results are merged by a weighted mean (Milakov and Gimelshein 2018; Rabe and Staats 2021).

Ring attention (Liu et al. 2023) is that merge in a loop: every rank keeps its queries, attends to
the keys and values that are here, and meanwhile sends them on to the next rank. The page lays the
sequence out in order, rank after rank. tiles.py attends tile by tile and ring.py does the same for
any placement of tokens, grouped heads, and half precision; a test holds the two equal.
Legend: B batch, N heads, S sequence, H head dim, T keys, cp ranks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mini_dist.collectives import start, wait


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


def attention_over(q: Tensor, k: Tensor, v: Tensor, is_own: bool) -> Partial:
    """Attend to one rank's keys. q [B, N, S/cp, H]; k and v alike. Own keys have a causal mask."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])  # [B, N, S/cp, S/cp]
    if is_own:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    lse = scores.logsumexp(-1)
    return Partial((scores - lse.unsqueeze(-1)).exp() @ v, lse)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group) -> Partial:
    """Causal attention over the whole sequence, of which this rank holds the part `rank`.

    q, k, v [B, N, S/cp, H] -> out [B, N, S/cp, H] and lse [B, N, S/cp]. Each rank sends its K and
    V, or those that came by, cp - 1 times; it never holds more than three ranks' of them.
    """
    rank, size = group.rank(), group.size()
    total, kv = None, torch.stack([k, v])  # [2, B, N, S/cp, H]: one message per step
    for step in range(size):
        source = (rank - step) % size  # whose keys and values are here
        if step < size - 1:
            arriving = torch.empty_like(kv)
            handles = start(group, [(arriving, (rank - 1) % size)], [(kv, (rank + 1) % size)])
        if source <= rank:  # Later tokens are hidden by the causal mask.
            part = attention_over(q, *kv, is_own=source == rank)
            total = part if total is None else merge(total, part)
        if step < size - 1:
            wait(handles)
            kv = arriving
    return total


def gradients_over(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, total: Partial, is_own: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what these queries and one rank's keys give each other: d_q, d_k, d_v.

    The weights are computed again. exp(score - lse) with the lse over *all* keys is the final
    weight of a key, whichever keys are here (Dao et al. 2022, appendix B.2).
    """
    scale = 1 / math.sqrt(q.shape[-1])
    weights = (q @ k.mT * scale - total.lse.unsqueeze(-1)).exp()  # [B, N, S/cp, S/cp]
    if is_own:
        weights = weights.tril()
    d_weights = d_out @ v.mT - (d_out * total.out).sum(-1, keepdim=True)
    d_scores = weights * d_weights * scale
    return d_scores @ k, d_scores.mT @ q, weights.mT @ d_out


def ring_attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, total: Partial, group
) -> tuple[Tensor, Tensor, Tensor]:
    """Return d_q, d_k, d_v [B, N, S/cp, H] from the gradient of ring_attention's output.

    Keys and values go round once more. Their gradient follows one step behind: it starts on the
    rank after its owner, collects every rank's part, and arrives at its owner at the end. So a
    rank sends K and V cp - 1 times and gradients of their size cp - 1 times.
    """
    rank, size = group.rank(), group.size()
    before, after = (rank - 1) % size, (rank + 1) % size
    d_q, kv = torch.zeros_like(q), torch.stack([k, v])
    d_kv = gradient = None  # the gradient that arrives, and its messages
    for step in range(size):
        source = (rank - step) % size
        if step < size - 1:
            arriving = torch.empty_like(kv)
            handles = start(group, [(arriving, before)], [(kv, after)])
        here = torch.zeros_like(kv)  # what this rank adds to the gradient of these keys and values
        if source <= rank:
            of_q, *of_kv = gradients_over(d_out, q, *kv, total, is_own=source == rank)
            d_q += of_q
            here += torch.stack(of_kv)
        if step == 0:
            home = here  # This rank's own keys: the other ranks' parts arrive at the end.
        else:
            if gradient:
                wait(gradient)
                here += d_kv
            leaving = here  # A message needs its tensor until it is sent.
            d_kv = torch.empty_like(kv)
            gradient = start(group, [(d_kv, before)], [(leaving, after)])
        if step < size - 1:
            wait(handles)
            kv = arriving
    if gradient:
        wait(gradient)
        home += d_kv
    return d_q, *home
