"""Context parallelism on one page: softmax in pieces, and a ring in which keys and values travel.

Softmax divides by a sum over all keys, so it seems to need them all at once. It does not. Compute
the output over some of the keys *and* the log of the sum that it was divided by; two such partial
results are merged by a weighted mean (Milakov and Gimelshein 2018; Rabe and Staats 2021).

Ring attention (Liu et al. 2023) runs that merge in a loop: every rank keeps its queries, attends to
the keys and values it holds, and at the same time sends them to the next rank. This page splits the
sequence in order, rank by rank. tiles.py attends tile by tile, and ring.py does the same for any
placement of tokens, grouped heads and half precision. A test checks that the results are equal.
Legend: B batch, N heads, S sequence, H head dim, T keys, cp ranks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mini_dist.collectives import start, wait


class Partial(NamedTuple):
    """Attention over some of the keys, in float32 or better, because many of them are summed."""

    out: Tensor  # [B, N, S, H], as if these were all the keys
    lse: Tensor  # [B, N, S], log of the sum of exp(score) over these keys


def merge(a: Partial, b: Partial) -> Partial:
    """Merge two partial results. Each output is weighted by its share of the exponentials.

    With sums e^lse: out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b), written so that
    only a difference of at most 0 is exponentiated.
    """
    lse = torch.logaddexp(a.lse, b.lse)
    share_of_b = (b.lse - lse).exp().unsqueeze(-1)
    return Partial(torch.lerp(a.out, b.out, share_of_b), lse)


def online_softmax(scores: Tensor, values: Tensor, tile: int = 128) -> Tensor:
    """Compute softmax(scores) @ values in one pass over both, `tile` columns at a time.

    scores [..., S, T], values [..., T, H] -> [..., S, H]. The recurrence of FlashAttention: keep
    the largest score m so far, the sum l of exp(score - m), and the output o before its division.
    When a larger score appears, the earlier sums shrink by exp(old m - new m).
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
    """Attend to one rank's keys. q, k, v [B, N, S/cp, H]. The rank's own keys get a causal mask."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])  # [B, N, S/cp, S/cp]
    if is_own:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    lse = scores.logsumexp(-1)
    return Partial((scores - lse.unsqueeze(-1)).exp() @ v, lse)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group) -> Partial:
    """Attend causally over the whole sequence; each rank holds one part of it.

    q, k, v [B, N, S/cp, H] -> out [B, N, S/cp, H] and lse [B, N, S/cp]. Each rank sends cp - 1
    messages, first its own K and V and then those it received. It never holds more than three
    pairs.
    """
    rank, size = group.rank(), group.size()
    total, kv = None, torch.stack([k, v])  # [2, B, N, S/cp, H]: one message per step
    for step in range(size):
        source = (rank - step) % size  # the rank whose keys and values are here
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
    """Return d_q, d_k and d_v for these queries and one rank's keys.

    The weights are recomputed. exp(score - lse), with the lse over *all* keys, is the final
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

    Keys and values go around once more. Their gradient follows one step behind: it starts on the
    rank after its owner, collects every rank's part, and arrives at its owner at the end. So a
    rank sends K and V cp - 1 times, and gradients of the same size cp - 1 times.
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
