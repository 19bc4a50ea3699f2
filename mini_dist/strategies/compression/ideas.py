"""Send fewer bits per gradient: what is dropped, what travels, and what a rank's own x became.

    half_mean         send 2 bytes instead of 4
    quantized_mean    send 1 byte instead of 4, rounded up or down at random
    sign_mean         send one bit per element, and one size for all of them
    majority          send one bit and receive one bit: the ranks vote
    one_bit_mean      send and receive one bit; both rounding errors are saved for the next step
    top_k_mean        send the k largest elements and their indices
    random_k_mean     send k elements at random indices that are the same on all ranks
    power_mean        send two thin matrices instead of one matrix
    with_feedback     add what was left out to the next gradient

A mean takes this rank's x and returns two tensors: the approximate mean over the ranks, bitwise
equal on all ranks, and `sent`: the part of this rank's x that the mean contains. engine.py turns
means into the function that `Overlapped` sends its buckets with, and sharded.py does so for ZeRO.

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
LEVELS = 127  # of int8, on either side of 0; 4-bit codes would have 7


@recorded
def half_mean(x: Tensor, group, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Round to 16 bits, then all-reduce: 2 (n-1)/n 2N bytes per rank.

    x is divided by n before the sum, because a sum in float16 could overflow.
    """
    n = group.size()
    part = x.to(dtype) / n
    return all_reduce(part, group).to(x.dtype), part.to(x.dtype) * n


def quantize(
    x: Tensor, lots: torch.Generator | None = None, levels: int = LEVELS
) -> tuple[Tensor, Tensor]:
    """Quantize x [..., multiple of BLOCK] to int8 codes [..., blocks, BLOCK] and a scale per block.

    Codes are rounded to the nearest integer. With `lots`, each is rounded up with a probability
    equal to its fraction, so that E[codes * scale] = x (Alistarh et al. 2017, section 3.1).
    """
    blocks = x.unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(dim=-1, keepdim=True) / levels
    steps = blocks / scale.where(scale > 0, 1.0)
    codes = steps.round() if lots is None else round_by_lot(steps, lots)
    return codes.clamp(-levels, levels).to(torch.int8), scale


def round_by_lot(x: Tensor, lots: torch.Generator) -> Tensor:
    """Round each element to a neighboring integer, up with a probability equal to its fraction:
    0.3 becomes 1 with probability 0.3, else 0, so its expectation is 0.3."""
    whole = x.floor()  # (x + lot).floor() would be rounded on the way in 16 bits
    return whole + (torch.rand(x.shape, generator=lots, device=x.device) >= 1 - (x - whole))


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """Turn codes back into numbers: [..., blocks, BLOCK] -> [..., N]."""
    return (codes * scale).flatten(-2)


@recorded
def quantized_reduce_scatter(x: Tensor, lots, group) -> tuple[Tensor, Tensor]:
    """Return this rank's chunk [N/n] of the mean of all x [N], and `sent` [N]; n BLOCK divides N.

    A ring would round at every hop, because a sum of int8 codes does not fit into int8. So every
    rank receives its chunk as codes from all other ranks, dequantizes, and adds: (n-1)/n (N + 4
    N/BLOCK) bytes (Wang et al. 2023, ZeRO++, section 3.3, which uses 4 bits and two hops).
    """
    codes, scale = quantize(x.view(group.size(), -1), lots)  # [n, N/n/BLOCK, BLOCK]
    arrived = dequantize(all_to_all(codes, group), all_to_all(scale, group))  # [n, N/n]
    return arrived.mean(dim=0), dequantize(codes, scale).flatten()


@recorded
def quantized_reduce_scatter_by_nodes(x: Tensor, lots, ranks_per_node: int, group) -> Tensor:
    """Reduce-scatter in two hops, inside each node and then between nodes (ZeRO++, section 3.3).

    Codes cannot be added on the way. With k ranks per node, one hop sends (n-k)/n of every rank's N
    codes out of its node. Here only the node's mean leaves it, a k-th of that. The values are
    rounded twice. k divides n, and n BLOCK divides N.
    """
    size, k = group.size(), ranks_per_node
    node, place = divmod(group.rank(), k)
    inner = Members(group, range(node * k, node * k + k))
    outer = Members(group, range(place, size, k))
    mean = x.view(size // k, k, -1).transpose(0, 1)  # [k, nodes, N/n]: receiver in each node
    for peers in (inner, outer):
        codes, scale = quantize(mean.contiguous(), lots)
        mean = dequantize(all_to_all(codes, peers), all_to_all(scale, peers)).mean(dim=0)
    return mean  # [N/n]


@recorded
def quantized_all_gather(chunk: Tensor, lots, group) -> Tensor:
    """Gather all ranks' chunks [N/n], rounded to codes by their owners -> [N], equal on all ranks.

    (n-1)/n (N + 4 N/BLOCK) bytes per rank; BLOCK divides N/n (ZeRO++, section 3.1).
    """
    codes, scale = quantize(chunk, lots)
    return dequantize(all_gather(codes, group), all_gather(scale, group))


@recorded
def quantized_mean(x: Tensor, lots, group) -> tuple[Tensor, Tensor]:
    """Average in int8 both ways: 2 (n-1)/n (N + 4 N/BLOCK) bytes per rank, x padded to n BLOCK.

    lots: this rank's generator, or None to round to nearest. If the ranks' generators are
    independent, their rounding errors partly cancel in the mean.
    """
    padded = torch.nn.functional.pad(x, (0, -len(x) % (group.size() * BLOCK)))
    chunk, sent = quantized_reduce_scatter(padded, lots, group)
    return quantized_all_gather(chunk, lots, group)[: len(x)], sent[: len(x)]


@recorded
def sign_mean(x: Tensor, group) -> tuple[Tensor, Tensor]:
    """Average signs and one size per rank, the mean of |x| (Karimireddy et al. 2019, section 4).

    A sum of bits is not a bit, so every rank gathers all signs: (n-1) (N/8 + 4) bytes per rank,
    which grows with n.
    """
    scale = x.abs().mean().view(1)
    bits = pack(x >= 0)
    signs = unpack(all_gather(bits.view(1, -1), group), len(x)) * 2.0 - 1  # [n, N]
    scales = all_gather(scale, group)  # [n]
    mean = scales.to(x.dtype) @ signs.to(x.dtype) / group.size()
    return mean, signs[group.rank()].to(x.dtype) * scale


@recorded
def majority(x: Tensor, group) -> Tensor:
    """Let the ranks vote on each element's sign: +1 or -1 (Bernstein et al. 2018, signSGD).

    Each rank counts the votes on 1/n of the elements and sends out the result, one bit per element
    both ways: 2 (n-1)/n N/8 bytes per rank, for N padded to 8 n. Its own vote breaks a tie.
    """
    rank, size = group.rank(), group.size()
    padded = torch.nn.functional.pad(x, (0, -len(x) % (8 * size)))
    chunks = padded.view(size, -1) >= 0
    votes = unpack(all_to_all(pack(chunks), group), chunks.shape[1])  # [n, N/n], one row per rank
    ups = 2 * votes.sum(dim=0)
    won = (ups > size) | ((ups == size) & votes[rank])
    return unpack(all_gather(pack(won), group), len(x)).to(x.dtype) * 2 - 1


@recorded
def one_bit_mean(x: Tensor, left: Tensor, group) -> tuple[Tensor, Tensor, Tensor]:
    """Average with one bit both ways, and keep separate errors for x and for the means.

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
    """Return the mean of |x| over the last dim, [..., 1], and whether each x is positive, bool."""
    return x.abs().mean(dim=-1, keepdim=True), x >= 0


def from_signs(scale: Tensor, up: Tensor) -> Tensor:
    return scale.where(up, -scale)


def pack(bits: Tensor) -> Tensor:
    """Pack eight bits per byte: bool [..., N] -> uint8 [..., N/8, rounded up]."""
    bits = torch.nn.functional.pad(bits, (0, -bits.shape[-1] % 8)).unflatten(-1, (-1, 8))
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.to(torch.uint8) << places).sum(dim=-1, dtype=torch.uint8)


def unpack(packed: Tensor, length: int) -> Tensor:
    """Invert `pack`: uint8 [..., N/8] -> bool [..., length]."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> places & 1).flatten(-2)[..., :length].bool()


@recorded
def top_k_mean(x: Tensor, k: int, group) -> tuple[Tensor, Tensor]:
    """Average the k elements of each rank that have the largest |x|; all others count as 0.

    Every rank picks different indices, so all indices and values are gathered: (n-1) 8k bytes per
    rank, which grows with n (Aji and Heafield 2017).
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
    """Average k random elements, drawn anew each call; all ranks' generators have the same state.

    All ranks know the indices, so only the values travel, by all-reduce: 2 (n-1)/n 4k bytes per
    rank.
    """
    check_k(k, x)
    places = torch.randperm(len(x), generator=generator, device=generator.device)[:k]
    places = places.to(x.device)
    values = all_reduce(x[places], group, op="mean")
    mean = torch.zeros_like(x).index_copy_(0, places, values)
    return mean, torch.zeros_like(x).index_copy_(0, places, x[places])


@recorded
def power_mean(x: Tensor, q: Tensor, group) -> tuple[Tensor, Tensor]:
    """Average the ranks' matrices x [A, B] by one step of the power method; also return the next q.

    q [B, r]: equal on all ranks; the result of the last step, or random numbers. The mean is
    p q.T, where p [A, r] has orthonormal columns. Sends 2 (n-1)/n 4 r (A + B) bytes per rank: the
    products of x are linear in x, so they can be summed (Vogels et al. 2019, PowerSGD, algorithm
    1).
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
    """Average x plus what was left out before; return the mean and what is left out this time.

    mean: (x, group) -> (mean, sent), a function of this page with its options bound. error: same
    shape as x, initially zero (Seide et al. 2014).
    """
    whole = x + error
    found, sent = mean(whole, group)
    return found, whole - sent
