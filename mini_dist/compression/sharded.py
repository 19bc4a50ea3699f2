"""Units of ZeRO in int8 (Wang et al. 2023, ZeRO++: qwZ and qgZ).

    model = ZeRO3(gpt, group, adamw, units=gpt.blocks, messages=Quantized())

The bytes are those of the page: (n-1)/n (1 + 4/BLOCK) an element for a gather, and as many for a
scatter, where float32 sends 4 and bfloat16 2. Codes and scales of a chunk are one message, where
the page sends two, and go straight to the rank that they are for, while computing goes on.

Parameters are rounded to the nearest: what a step computes with is at most half a code away from
the shard, which is kept whole and stepped whole. (Were the shard rounded, too, a step smaller than
half a code would be lost every time.) Gradients are rounded by lot, so that their mean is right.
ZeRO++ sends gradients in 4 bits, and inside a node before it sends between nodes; its third part,
a copy of the parameters in each node (hpZ), is no compression.
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
    """How a ZeRO stage sends its units: parameters (qwZ) and gradients (qgZ) in int8.

    With False the one or the other travels as it is. Gradients that are not finite raise
    FloatingPointError: they have no code.
    """

    def __init__(self, parameters: bool = True, gradients: bool = True, seed: int = 0):
        self.parameters, self.gradients, self.lots = parameters, gradients, Lots(seed)

    def begin_all_gather_(self, whole: Tensor, group) -> InFlight:
        if not self.parameters:
            return begin_all_gather_(whole, group)
        return begin_quantized_all_gather_(whole, group)

    def begin_reduce_scatter(self, whole: Tensor, group, dtype: torch.dtype | None = None):
        if not self.gradients:
            return begin_reduce_scatter(whole, group, dtype)
        check_finite(whole)
        return begin_quantized_reduce_scatter(whole, self.lots.of(whole, group), group, dtype)


@collective
def begin_quantized_all_gather_(whole: Tensor, group) -> InFlight:
    """Begin to fill `whole` [n L] with what all ranks' parts are as codes, this rank's own, too:
    all compute with the same numbers. Until `wait` has returned, nobody may touch it."""
    parts, rank, others = cut(whole, group)
    messages = {rank: encode(parts[rank])}
    messages |= {other: torch.empty_like(messages[rank]) for other in others}
    receives = [(messages[other], other) for other in others]
    sends = [(messages[rank], other) for other in reversed(others)]

    def fill() -> Tensor:
        for source, part in enumerate(parts):
            part.copy_(decode(messages[source], len(part)))
        return whole

    return InFlight(start(group, receives, sends), fill)


@collective
def begin_quantized_reduce_scatter(
    whole: Tensor, lots: torch.Generator, group, dtype: torch.dtype | None = None
) -> InFlight:
    """Begin to send every rank its part of `whole` [n L] as codes; `wait` returns their sum [L]."""
    parts, rank, others = cut(whole, group)
    codes = [encode(part, lots) for part in parts]
    arriving = {other: torch.empty_like(codes[rank]) for other in reversed(others)}
    receives = [(message, other) for other, message in arriving.items()]
    sends = [(codes[other], other) for other in reversed(others)]

    def total() -> Tensor:
        result = decode(codes[rank], len(parts[rank])).to(dtype or whole.dtype)
        for message in arriving.values():
            result += decode(message, len(result))
        return result

    return InFlight(start(group, receives, sends), total)


def encode(part: Tensor, lots: torch.Generator | None = None) -> Tensor:
    """Codes and scales of [L] as bytes: uint8 [L + 4 L/BLOCK], the last block as short as it is."""
    codes, scale = quantize(torch.nn.functional.pad(part, (0, -len(part) % BLOCK)), lots)
    codes = codes.flatten()[: len(part)]
    return torch.cat([codes.view(torch.uint8), scale.float().flatten().view(torch.uint8)])


def decode(message: Tensor, length: int) -> Tensor:
    """The numbers that the bytes stand for, float32 [L]."""
    codes = message[:length].view(torch.int8)
    codes = torch.nn.functional.pad(codes, (0, -length % BLOCK)).unflatten(0, (-1, BLOCK))
    scale = (
        message[length:].clone().view(torch.float32)
    )  # (its own memory starts at a multiple of 4)
    return dequantize(codes, scale.unsqueeze(-1))[:length]
