"""Send fewer bits of a gradient: what is left out, what travels, and what of it was one's own.

    half_mean         two bytes for four
    quantized_mean    one byte for four, rounded up or down by lot
    sign_mean         one bit, and a size for all of them
    majority          one bit there, one bit back: the ranks vote
    one_bit_mean      one bit there, one bit back, and what both leave out is kept
    top_k_mean        the k largest elements, and their places
    random_k_mean     k elements at places that all ranks draw alike
    power_mean        two thin matrices for one
    with_feedback     what was left out is added to the next gradient

A mean takes this rank's x, and returns the mean over the ranks as far as it came through, equal on
all ranks to the last bit, and `sent`: what this rank's x became on its way. engine.py makes of them
what a wrapper like `Overlapped` sends its buckets by, sharded.py what ZeRO sends its units by.

Legend: n ranks, N elements of 4 bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mini_dist.collectives import all_gather, all_reduce, all_to_all
from mini_dist.collectives.messages import Members
from mini_dist.ranks.ledger.recording import recorded

BLOCK = 256  # elements that share a scale
LEVELS = 127  # of int8, on either side of 0; 7 of four bits


@recorded
def half_mean(x: Tensor, group, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Round to 16 bits, then all-reduce: 2 (n-1)/n 2N bytes a rank.

    Divided by n before it is added up, or a sum of float16 could overflow.
    """
    n = group.size()
    part = x.to(dtype) / n
    return all_reduce(part, group).to(x.dtype), part.to(x.dtype) * n


def quantize(
    x: Tensor, lots: torch.Generator | None = None, levels: int = LEVELS
) -> tuple[Tensor, Tensor]:
    """Quantize x [..., multiple of BLOCK] to int8 codes [..., blocks, BLOCK] and a scale per block.

    Codes are rounded to the nearest. With `lots` each is rounded up with the probability of its
    fraction, so that the expectation of codes * scale is x (Alistarh et al. 2017, section 3.1).
    """
    blocks = x.unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(dim=-1, keepdim=True) / levels
    steps = blocks / scale.where(scale > 0, 1.0)
    codes = steps.round() if lots is None else round_by_lot(steps, lots)
    return codes.clamp(-levels, levels).to(torch.int8), scale


def round_by_lot(x: Tensor, lots: torch.Generator) -> Tensor:
    """Each element to a whole number next to it, up with the probability of what is behind the
    decimal point: 0.3 becomes 1 in three of ten cases, else 0, and its expectation is 0.3."""
    lot = torch.rand(x.shape, generator=lots, dtype=x.dtype, device=x.device)  # each its own
    return (x + lot).floor()


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """The numbers that the codes stand for: [..., blocks, BLOCK] -> [..., N]."""
    return (codes * scale).flatten(-2)


@recorded
def quantized_reduce_scatter(x: Tensor, lots, group) -> tuple[Tensor, Tensor]:
    """Return this rank's chunk [N/n] of the mean of all x [N], and `sent` [N]; n BLOCK divides N.

    A ring would have to round at every rank, because sums of bytes do not fit into bytes. So every
    rank receives its chunk from all others as codes and adds numbers: (n-1)/n (N + 4 N/BLOCK)
    bytes (Wang et al. 2023, ZeRO++, section 3.3; there in 4 bits, and in two hops).
    """
    codes, scale = quantize(x.view(group.size(), -1), lots)  # [n, N/n/BLOCK, BLOCK]
    arrived = dequantize(all_to_all(codes, group), all_to_all(scale, group))  # [n, N/n]
    return arrived.mean(dim=0), dequantize(codes, scale).flatten()


@recorded
def quantized_reduce_scatter_by_nodes(x: Tensor, lots, ranks_per_node: int, group) -> Tensor:
    """The same in two hops, inside each node and then between nodes (ZeRO++, section 3.3).

    Codes cannot be added up on their way. In one hop all codes of a rank for other nodes leave its
    node, (n-k)/n of N, for k ranks a node; here the node's mean leaves it, a k-th of that. Rounded
    twice. k divides n, and n BLOCK divides N.
    """
    size, k = group.size(), ranks_per_node
    node, place = divmod(group.rank(), k)
    inner = Members(group, range(node * k, node * k + k))
    outer = Members(group, range(place, size, k))
    mean = x.view(size // k, k, -1).transpose(0, 1)  # [k, nodes, N/n], for whom in each node
    for peers in (inner, outer):
        codes, scale = quantize(mean.contiguous(), lots)
        mean = dequantize(all_to_all(codes, peers), all_to_all(scale, peers)).mean(dim=0)
    return mean  # [N/n]


@recorded
def quantized_all_gather(chunk: Tensor, lots, group) -> Tensor:
    """All ranks' chunks [N/n], each rounded to codes by its owner -> [N], the same on all ranks.

    (n-1)/n (N + 4 N/BLOCK) bytes a rank; BLOCK divides N/n (ZeRO++, section 3.1).
    """
    codes, scale = quantize(chunk, lots)
    return dequantize(all_gather(codes, group), all_gather(scale, group))


@recorded
def quantized_mean(x: Tensor, lots, group) -> tuple[Tensor, Tensor]:
    """int8 both ways: 2 (n-1)/n (N + 4 N/BLOCK) bytes a rank, for x padded to n BLOCK.

    lots: this rank's generator, or None to round to the nearest. Ranks that draw other lots make
    errors that cancel in the mean.
    """
    padded = torch.nn.functional.pad(x, (0, -len(x) % (group.size() * BLOCK)))
    chunk, sent = quantized_reduce_scatter(padded, lots, group)
    return quantized_all_gather(chunk, lots, group)[: len(x)], sent[: len(x)]


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


@recorded
def majority(x: Tensor, group) -> Tensor:
    """What most ranks say of each element, up or down: +1 or -1 (Bernstein et al. 2018, signSGD).

    Each rank counts the votes on one n-th and hands out the result, a bit an element both ways:
    2 (n-1)/n N/8 bytes a rank, for N padded to 8 n. A tie goes as the rank that counts has voted.
    """
    rank, size = group.rank(), group.size()
    padded = torch.nn.functional.pad(x, (0, -len(x) % (8 * size)))
    chunks = padded.view(size, -1) >= 0
    votes = unpack(all_to_all(pack(chunks), group), chunks.shape[1])  # [n, N/n], one row a rank
    ups = 2 * votes.sum(dim=0)
    won = (ups > size) | ((ups == size) & votes[rank])
    return unpack(all_gather(pack(won), group), len(x)).to(x.dtype) * 2 - 1


@recorded
def one_bit_mean(x: Tensor, left: Tensor, group) -> tuple[Tensor, Tensor, Tensor]:
    """Average in one bit both ways, with separate errors for x and for the means.

    Each rank sends the signs of its x and one size per chunk. It averages its own chunk, adds
    `left` (what the last mean left out there, [N/n] rounded up to whole bytes), and sends signs and
    a size of the result: 2 (n-1)/n (N/8 + 4 n) bytes per rank, for N padded to 8 n. Returns mean,
    sent, and the new `left` (Tang et al. 2021, 1-bit Adam, algorithm 1, which sends the momentum).
    """
    rank, size = group.rank(), group.size()
    padded = torch.nn.functional.pad(x, (0, -len(x) % (8 * size))).view(size, -1)
    scales, signs = size_and_signs(padded)
    arrived = unpack(all_to_all(pack(signs), group), padded.shape[1])  # [n, N/n]
    mine = from_signs(all_to_all(scales, group), arrived).mean(dim=0) + left
    mine[max(0, len(x) - rank * len(mine)) :] = 0  # the padding
    scale, signs_of_mine = size_and_signs(mine)
    whole = unpack(all_gather(pack(signs_of_mine).view(1, -1), group), len(mine))
    mean = from_signs(all_gather(scale.view(1, 1), group), whole)
    sent = from_signs(scales, signs)
    left = mine - from_signs(scale, signs_of_mine)
    return mean.flatten()[: len(x)], sent.flatten()[: len(x)], left


def size_and_signs(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of |x| along the last dim, [..., 1], and whether x is up, bool."""
    return x.abs().mean(dim=-1, keepdim=True), x >= 0


def from_signs(scale: Tensor, up: Tensor) -> Tensor:
    return scale.where(up, -scale)


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
    check_rank(q, x)
    p = torch.linalg.qr(all_reduce(x @ q, group)).Q
    q = all_reduce(x.T @ p, group, op="mean")
    return p @ q.T, q


def check_rank(q: Tensor, x: Tensor) -> None:
    if q.shape[1] > min(x.shape):
        raise ValueError(
            f"q has {q.shape[1]} columns, but a matrix {list(x.shape)} has rank {min(x.shape)} at "
            f"most: give {min(x.shape)} or fewer"
        )


def with_feedback(mean: Callable, x: Tensor, error: Tensor, group) -> tuple[Tensor, Tensor]:
    """Average x plus what was left out before; return the mean and what is left out now.

    mean: (x, group) -> (mean, sent), a function of this page with its options. error: like x, zero
    at first (Seide et al. 2014).
    """
    whole = x + error
    found, sent = mean(whole, group)
    return found, whole - sent
