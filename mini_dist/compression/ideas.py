"""Send fewer bits of a gradient: what is left out, what travels, and what of it was one's own.

    half_mean         two bytes for four
    quantized_mean    one byte for four, rounded up or down by lot
    sign_mean         one bit
    top_k_mean        the k largest elements, and their places
    random_k_mean     k elements at places that all ranks draw alike
    power_mean        two thin matrices for one
    with_feedback     what was left out is added to the next gradient

Each takes this rank's x, and returns the mean over the ranks as far as it came through, equal on
all ranks to the last bit, and `sent`: what this rank's x became on its way. engine.py makes of them
what a wrapper like `Overlapped` sends its buckets by.

Legend: n ranks, N elements of 4 bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..collectives import all_gather, all_reduce, all_to_all
from ..ledger.recording import recorded

BLOCK = 256  # elements that share a scale
LEVELS = 127  # of int8, on either side of 0


@recorded
def half_mean(x: Tensor, group, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Round to 16 bits, then all-reduce: 2 (n-1)/n 2N bytes a rank.

    Divided by n before it is added up, or a sum of float16 could overflow.
    """
    n = group.size()
    part = x.to(dtype) / n
    return all_reduce(part, group).to(x.dtype), part.to(x.dtype) * n


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes [..., blocks, BLOCK] and a scale for each block; x: [..., multiple of BLOCK].

    Rounded up with a probability of what is behind the decimal point, so that the expectation of
    codes * scale is x (Alistarh et al. 2017, QSGD, section 3.1).
    """
    blocks = x.unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(dim=-1, keepdim=True) / LEVELS
    steps = blocks / scale.where(scale > 0, 1.0)
    codes = (steps + torch.rand_like(steps)).floor().clamp(-LEVELS, LEVELS)
    return codes.to(torch.int8), scale


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """The numbers that the codes stand for: [..., blocks, BLOCK] -> [..., N]."""
    return (codes * scale).flatten(-2)


@recorded
def quantized_reduce_scatter(x: Tensor, group) -> tuple[Tensor, Tensor]:
    """This rank's chunk [N/n] of the mean of all x [N], and `sent` [N]; n BLOCK divides N.

    A ring would have to round at every rank, as sums of bytes do not fit into bytes. So everyone
    gets the chunks from all others as codes, and adds up numbers: (n-1)/n (N + 4 N/BLOCK) bytes
    (Wang et al. 2023, ZeRO++, section 3.3; there in 4 bits, and in two hops).
    """
    codes, scale = quantize(x.view(group.size(), -1))  # [n, N/n/BLOCK, BLOCK]
    arrived = dequantize(all_to_all(codes, group), all_to_all(scale, group))  # [n, N/n]
    return arrived.mean(dim=0), dequantize(codes, scale).flatten()


@recorded
def quantized_all_gather(chunk: Tensor, group) -> Tensor:
    """All ranks' chunks [N/n], each rounded to codes by its owner -> [N], the same on all ranks.

    (n-1)/n (N + 4 N/BLOCK) bytes a rank; BLOCK divides N/n (ZeRO++, section 3.1).
    """
    codes, scale = quantize(chunk)
    return dequantize(all_gather(codes, group), all_gather(scale, group))


@recorded
def quantized_mean(x: Tensor, group) -> tuple[Tensor, Tensor]:
    """int8 both ways: 2 (n-1)/n (N + 4 N/BLOCK) bytes a rank, for x padded to n BLOCK."""
    padded = torch.nn.functional.pad(x, (0, -len(x) % (group.size() * BLOCK)))
    chunk, sent = quantized_reduce_scatter(padded, group)
    return quantized_all_gather(chunk, group)[: len(x)], sent[: len(x)]


@recorded
def sign_mean(x: Tensor, group) -> tuple[Tensor, Tensor]:
    """Signs, and one size for all of them: the mean of |x| (Karimireddy et al. 2019, section 4).

    Sums of bits are no bits, so all ranks' signs are gathered: (n-1) (N/8 + 4) bytes a rank, which
    grows with n.
    """
    scale = x.abs().mean().view(1)
    bits = pack(x >= 0)
    signs = unpack(all_gather(bits.view(1, -1), group), len(x)) * 2.0 - 1  # [n, N]
    scales = all_gather(scale, group)  # [n]
    mean = scales.to(x.dtype) @ signs.to(x.dtype) / group.size()
    return mean, signs[group.rank()].to(x.dtype) * scale


def pack(bits: Tensor) -> Tensor:
    """Eight a byte: bool [..., N] -> uint8 [..., N/8, rounded up]."""
    bits = torch.nn.functional.pad(bits, (0, -bits.shape[-1] % 8)).unflatten(-1, (-1, 8))
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.to(torch.uint8) << places).sum(dim=-1, dtype=torch.uint8)


def unpack(packed: Tensor, length: int) -> Tensor:
    """The inverse of `pack`: uint8 [..., N/8] -> bool [..., length]."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> places & 1).flatten(-2)[..., :length].bool()


@recorded
def top_k_mean(x: Tensor, k: int, group) -> tuple[Tensor, Tensor]:
    """The k elements of each rank that are largest in size, all others taken for 0.

    Each rank has other places, so places and values of all are gathered: (n-1) 8k bytes a rank,
    which grows with n (Aji and Heafield 2017).
    """
    check_k(k, x)
    places = x.abs().topk(k).indices
    everywhere = all_gather(places.int(), group)
    values = all_gather(x[places], group)
    total = torch.zeros_like(x).index_add_(0, everywhere, values)
    return total / group.size(), torch.zeros_like(x).index_copy_(0, places, x[places])


def check_k(k: int, x: Tensor) -> None:
    if not 1 <= k <= len(x):
        raise ValueError(f"k={k} of {len(x)} elements: send at least 1, and at most all of them")


@recorded
def random_k_mean(x: Tensor, k: int, generator: torch.Generator, group) -> tuple[Tensor, Tensor]:
    """k elements drawn anew each time; all ranks' generators are in the same state.

    All know the places, so none travel, and values can be all-reduced: 2 (n-1)/n 4k bytes a rank.
    """
    check_k(k, x)
    places = torch.randperm(len(x), generator=generator)[:k].to(x.device)
    values = all_reduce(x[places], group, op="mean")
    mean = torch.zeros_like(x).index_copy_(0, places, values)
    return mean, torch.zeros_like(x).index_copy_(0, places, x[places])


@recorded
def power_mean(x: Tensor, q: Tensor, group) -> tuple[Tensor, Tensor]:
    """The mean of the ranks' matrices x [A, B] by one step of the power method, and the next q.

    q [B, r]: the same on all ranks; what the last step returned, or random numbers. The mean is
    p q.T, with p [A, r] of orthonormal columns. Sends 2 (n-1)/n 4 r (A + B) bytes a rank, since a
    product with x can be added up as x can (Vogels et al. 2019, PowerSGD, algorithm 1).
    """
    p = torch.linalg.qr(all_reduce(x @ q, group)).Q
    q = all_reduce(x.T @ p, group, op="mean")
    return p @ q.T, q


def with_feedback(mean: Callable, x: Tensor, error: Tensor, group) -> tuple[Tensor, Tensor]:
    """The mean of x and what was left out before, and what is left out now (Seide et al. 2014).

    mean: (x, group) -> (mean, sent), one of the above with its options. error: like x, 0 at first.
    """
    whole = x + error
    found, sent = mean(whole, group)
    return found, whole - sent
