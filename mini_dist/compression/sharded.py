"""Units of ZeRO in 8 or 4 bits (Wang et al. 2023, ZeRO++: qwZ and qgZ).

    model = ZeRO3(gpt, group, adamw, units=gpt.blocks, messages=Quantized(8, 4))

The bytes are (n-1)/n (bits/8 + 4/BLOCK) an element for a gather, and as many for a scatter, where
float32 sends 4 and bfloat16 2; in 8 bits those of the page. Codes and scales of a chunk are one
message, where the page sends two, and go straight to the rank that they are for, while computing
goes on.

Parameters are rounded to the nearest: what a step computes with is at most half a code away from
the shard, which is kept whole and stepped whole. (Were the shard rounded, too, a step smaller than
half a code would be lost every time.) Gradients are rounded by lot, so that their mean is right.
ZeRO++ sends parameters in 8 bits and gradients in 4, these inside a node before between nodes
(`quantized_reduce_scatter_by_nodes` on the page); its third part, a copy of the parameters in each
node (hpZ), is no compression.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..collectives.in_flight import (
    InFlight,
    begin_all_gather_,
    begin_reduce_scatter,
    cut,
)
from ..collectives.messages import collective, start
from .engine import Lots, check_finite
from .ideas import BLOCK, dequantize, quantize


class Quantized:
    """How a ZeRO stage sends its units: the bits of a parameter (qwZ) and of a gradient (qgZ).

    Each 8 or 4, or None: then it travels as it is. Raises ValueError for other bits. Gradients
    that are not finite raise FloatingPointError: they have no code.
    """

    def __init__(self, parameters: int | None = 8, gradients: int | None = 8, seed: int = 0):
        for name, bits in (("parameters", parameters), ("gradients", gradients)):
            if isinstance(bits, bool) or bits not in (4, 8, None):
                raise ValueError(
                    f"{name}={bits!r}: give 8 or 4 bits, or None to send them as they are"
                )
        self.parameters, self.gradients, self.lots = parameters, gradients, Lots(seed)

    def begin_all_gather_(self, whole: Tensor, group) -> InFlight:
        if not self.parameters:
            return begin_all_gather_(whole, group)
        return begin_quantized_all_gather_(whole, self.parameters, group)

    def begin_reduce_scatter(self, whole: Tensor, group, dtype: torch.dtype | None = None):
        if not self.gradients:
            return begin_reduce_scatter(whole, group, dtype)
        check_finite(whole)
        lots = self.lots.of(whole, group)
        return begin_quantized_reduce_scatter(whole, self.gradients, lots, group, dtype)


@collective
def begin_quantized_all_gather_(whole: Tensor, bits: int, group) -> InFlight:
    """Begin to fill `whole` [n L] with what all ranks' parts are as codes, this rank's own, too:
    all compute with the same numbers. Until `wait` has returned, nobody may touch it."""
    parts, rank, others = cut(whole, group)
    messages = {rank: encode(parts[rank], bits)}
    messages |= {other: torch.empty_like(messages[rank]) for other in others}
    receives = [(messages[other], other) for other in others]
    sends = [(messages[rank], other) for other in reversed(others)]

    def fill() -> Tensor:
        for source, part in enumerate(parts):
            part.copy_(decode(messages[source], len(part), bits))
        return whole

    return InFlight(start(group, receives, sends), fill)


@collective
def begin_quantized_reduce_scatter(
    whole: Tensor, bits: int, lots: torch.Generator, group, dtype: torch.dtype | None = None
) -> InFlight:
    """Begin to send every rank its part of `whole` [n L] as codes; `wait` returns their sum [L]."""
    parts, rank, others = cut(whole, group)
    codes = [encode(part, bits, lots) for part in parts]
    arriving = {other: torch.empty_like(codes[rank]) for other in reversed(others)}
    receives = [(message, other) for other, message in arriving.items()]
    sends = [(codes[other], other) for other in reversed(others)]

    def total() -> Tensor:
        result = decode(codes[rank], len(parts[rank]), bits).to(dtype or whole.dtype)
        for message in arriving.values():
            result += decode(message, len(result), bits)
        return result

    return InFlight(start(group, receives, sends), total)


def encode(part: Tensor, bits: int, lots: torch.Generator | None = None) -> Tensor:
    """Codes and scales of [L] as bytes: uint8 [bits/8 L + 4 L/BLOCK], the last block as short as
    it is."""
    padded = torch.nn.functional.pad(part, (0, -len(part) % BLOCK))
    codes, scale = quantize(padded, lots, levels=2 ** (bits - 1) - 1)
    codes = codes.flatten()[: len(part)].view(torch.uint8)
    if bits == 4:  # -7..7, two a byte: the first in the lower half
        codes = torch.nn.functional.pad(codes, (0, len(codes) % 2)) & 15
        codes = codes[::2] | (codes[1::2] << 4)
    return torch.cat([codes, scale.float().flatten().view(torch.uint8)])


def decode(message: Tensor, length: int, bits: int) -> Tensor:
    """The numbers that the bytes stand for, float32 [L]."""
    scales = 4 * -(-length // BLOCK)
    codes, scale = message[:-scales], message[-scales:]
    scale = scale.clone().view(torch.float32)  # (its own memory starts at a multiple of 4)
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten()[:length]
        codes = (codes ^ 8).view(torch.int8) - 8  # the fourth bit is the sign
    codes = torch.nn.functional.pad(codes.view(torch.int8), (0, -length % BLOCK))
    return dequantize(codes.unflatten(0, (-1, BLOCK)), scale.unsqueeze(-1))[:length]
