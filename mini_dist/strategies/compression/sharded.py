"""Units of ZeRO in 8 or 4 bits (Wang et al. 2023, ZeRO++: qwZ and qgZ).

    model = ZeRO3(gpt, group, adamw, units=gpt.blocks, messages=Quantized(8, 4))
    model = ZeRO3(..., inside=mesh["inside"], messages=Quantized(8, 4, by_hosts=True))

A gather sends (n-1)/n (bits/8 + 4/BLOCK) bytes per element, and a scatter as many; float32 sends 4
and bfloat16 2. In 8 bits it sends as much as the page. The codes and scales of a chunk are one
message, where the page sends two. They go directly to the rank that needs them, in the background.

Between hosts this sends more than necessary: the codes of all ranks of a host leave it. With
by_hosts, gradients take two hops, as in `quantized_reduce_scatter_by_nodes` on the page: each
host's sums are rounded once more, and only their codes pass its uplink, in the background; the hop
inside the host ends before backward continues. Gathers then send codes as collectives/by_hosts.py
sends numbers. The second line above is all of ZeRO++: `inside` is its third part (hpZ), which does
not compress.

Parameters are rounded to nearest: a step computes with values at most half a code away from the
shard, which stays in full precision. (If the shard were rounded as well, steps smaller than half a
code would always be lost.) Gradients are rounded at random, so their expectation is right.
ZeRO++ sends parameters in 8 bits and gradients in 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mini_dist.collectives import by_hosts as hierarchy
from mini_dist.collectives import in_flight
from mini_dist.collectives.hierarchical import places, two_levels
from mini_dist.collectives.in_flight import InFlight, cut
from mini_dist.collectives.messages import collective, start
from mini_dist.plan.fields import checks_kinds

from .engine import Lots, check_finite
from .ideas import BLOCK, dequantize, quantize


@checks_kinds
class Quantized:
    """How a ZeRO stage sends its units: bits per parameter (qwZ) and per gradient (qgZ).

    Each is 8 or 4, or None for no compression. seed: of the lots by which gradients are rounded.
    by_hosts: send as little as possible between hosts, which `launch(hosts=...)` defines and which
    must have equal sizes. Raises ValueError for other bits and other hosts. Gradients that are not
    finite raise FloatingPointError: no code stands for them.
    """

    def __init__(
        self,
        parameters: int | None = 8,
        gradients: int | None = 8,
        seed: int = 0,
        by_hosts: bool = False,
    ):
        for name, bits in (("parameters", parameters), ("gradients", gradients)):
            if isinstance(bits, bool) or bits not in (4, 8, None):
                raise ValueError(
                    f"{name}={bits!r}: give 8 or 4 bits, or None to send them as they are"
                )
        self.parameters, self.gradients, self.lots = parameters, gradients, Lots(seed)
        self.by_hosts, self.whole = by_hosts, hierarchy if by_hosts else in_flight

    def begin_all_gather_(self, whole: Tensor, group) -> InFlight:
        if not self.parameters:
            return self.whole.begin_all_gather_(whole, group)
        return begin_quantized_all_gather_(whole, self.parameters, group, self.whole)

    def begin_reduce_scatter(self, whole: Tensor, group, dtype: torch.dtype | None = None):
        if not self.gradients:
            return self.whole.begin_reduce_scatter(whole, group, dtype)
        check_finite(whole)
        begin = begin_by_hosts if self.by_hosts else begin_quantized_reduce_scatter
        return begin(whole, self.gradients, self.lots.of(whole, group), group, dtype)


@collective
def begin_quantized_all_gather_(whole: Tensor, bits: int, group, messages=in_flight) -> InFlight:
    """Begin to fill `whole` [n L] with all ranks' dequantized parts, this rank's own included, so
    that all ranks compute with the same numbers. Do not touch it until `wait` has returned.

    messages: the module that gathers the codes, in_flight or by_hosts of collectives.
    """
    parts, rank, _ = cut(whole, group)
    mine = encode(parts[rank], bits)
    coded = mine.new_empty(len(parts) * len(mine))
    codes = coded.chunk(len(parts))
    codes[rank].copy_(mine)

    def fill() -> Tensor:
        for part, message in zip(parts, codes):
            part.copy_(decode(message, len(part), bits))
        return whole

    return InFlight([messages.begin_all_gather_(coded, group)], fill)


@collective
def begin_quantized_reduce_scatter(
    whole: Tensor, bits: int, lots: torch.Generator, group, dtype: torch.dtype | None = None
) -> InFlight:
    """Begin to send every rank its part of `whole` [n L] as codes; `wait` returns their sum [L]."""
    parts, _, _ = cut(whole, group)
    sums = begin_sums([[part] for part in parts], bits, lots, group)
    return InFlight([], lambda: sums.wait()[0].to(dtype or whole.dtype))


@collective
def begin_by_hosts(
    whole: Tensor, bits: int, lots: torch.Generator, group, dtype: torch.dtype | None = None
) -> InFlight:
    """Reduce-scatter in two hops. First a rank gets its host's parts for all ranks with its own
    index on the h hosts, [h L], and sums them; then each of these ranks gets its own sum."""
    parts, _, _ = cut(whole, group)
    node, same_place = two_levels(group, None)
    for_place = [[parts[owner] for owner in place.ranks] for place in places(group, None)]
    of_host = begin_sums(for_place, bits, lots, node).wait()
    sums = begin_sums([[part] for part in of_host], bits, lots, same_place)
    return InFlight([], lambda: sums.wait()[0].to(dtype or whole.dtype))


def begin_sums(for_rank: list[list[Tensor]], bits: int, lots, group) -> InFlight:
    """Begin to send every rank its parts, each [L], as codes in one message; `wait` returns the
    sums of the parts for this rank."""
    rank, size = group.rank(), group.size()
    others = [(rank - k) % size for k in range(1, size)]  # nearest predecessor first, as in `cut`
    codes = [torch.cat([encode(part, bits, lots) for part in parts]) for parts in for_rank]
    arriving = {other: torch.empty_like(codes[rank]) for other in reversed(others)}
    receives = [(message, other) for other, message in arriving.items()]
    sends = [(codes[other], other) for other in reversed(others)]
    number, length = len(for_rank[rank]), len(for_rank[rank][0])

    def totals() -> list[Tensor]:
        sums = [decode(part, length, bits) for part in codes[rank].chunk(number)]
        for message in arriving.values():
            for total, part in zip(sums, message.chunk(number)):
                total += decode(part, length, bits)
        return sums

    return InFlight(start(group, receives, sends), totals)


def encode(part: Tensor, bits: int, lots: torch.Generator | None = None) -> Tensor:
    """Encode [L] as bytes, codes and scales: uint8 [bits/8 L + 4 L/BLOCK]. The last block may be
    short."""
    padded = torch.nn.functional.pad(part, (0, -len(part) % BLOCK))
    codes, scale = quantize(padded, lots, levels=2 ** (bits - 1) - 1)
    codes = codes.flatten()[: len(part)].view(torch.uint8)
    if bits == 4:  # -7..7, two per byte: the first in the lower half
        codes = torch.nn.functional.pad(codes, (0, len(codes) % 2)) & 15
        codes = codes[::2] | (codes[1::2] << 4)
    return torch.cat([codes, scale.float().flatten().view(torch.uint8)])


def decode(message: Tensor, length: int, bits: int) -> Tensor:
    """Decode the bytes to numbers, float32 [L]."""
    scales = 4 * -(-length // BLOCK)
    codes, scale = message[:-scales], message[-scales:]
    scale = scale.clone().view(torch.float32)  # (the copy is aligned to 4 bytes)
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten()[:length]
        codes = (codes ^ 8).view(torch.int8) - 8  # the fourth bit is the sign
    codes = torch.nn.functional.pad(codes.view(torch.int8), (0, -length % BLOCK))
    return dequantize(codes.unflatten(0, (-1, BLOCK)), scale.unsqueeze(-1))[:length]
