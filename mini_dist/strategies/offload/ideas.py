"""Borrowed memory in six functions: what moves where, and when, so that the device never waits.

    read_ahead         parameters: the next layer's weight arrives while this layer computes
    step_behind        gradients leave during backward, and the host updates (ZeRO-Offload)
    delayed            the host updates during the next batch, one step late
    blockwise, undo    an optimizer's states in 8 bits (Dettmers et al. 2021)
    offsets            places tensors with known lifetimes without fragmentation (ZeRO-R)

lanes.py, tier.py, states.py and allocator.py do this for real models; read tier.py first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def read_ahead(x: Tensor, layers: list[Callable], load: Callable) -> Tensor:
    """Run x through all layers; while one layer computes, load the next layer's weight.

    layers: functions (x, weight) -> x. load: number -> a handle whose wait() returns that layer's
    weight. At most two weights are resident or in flight at a time (Rajbhandari et al.
    2021, section 6.2).
    """
    arriving = load(0) if layers else None
    for number, layer in enumerate(layers):
        weight = arriving.wait()
        if number + 1 < len(layers):
            arriving = load(number + 1)
        x = layer(x, weight)
    return x


def step_behind(gradients, leave: Callable, update: Callable, back: Callable) -> list:
    """Send each gradient as soon as backward has computed it; update as soon as it has arrived.

    gradients: (number, gradient) in the order of backward. leave starts to copy a gradient to the
    host, update starts a host update, and back starts to copy a parameter back. Each takes the
    event it has to wait for, and returns its own. Returns the events of the copies back: wait for
    them before you use the parameters (Ren et al. 2021, section 4.1).
    """
    returning = []
    for number, gradient in gradients:
        there = leave(gradient)
        stepped = update(number, after=there)
        returning.append(back(number, after=stepped))
    return returning


def delayed(parameters: Tensor, gradient_of: Callable, update: Callable, steps: int) -> Tensor:
    """Train with gradients that are one step old, so that device and host compute at the same time.

    gradient_of: (parameters, step) -> gradient. update: (parameters, gradient) -> parameters. The
    last gradient is applied at the end (Ren et al. 2021, section 5.2).
    """
    waiting = None
    for step in range(steps):
        gradient = gradient_of(parameters, step)  # its parameters lack the latest update
        if waiting is not None:
            parameters = update(parameters, waiting)
        waiting = gradient
    return parameters if waiting is None else update(parameters, waiting)


def blockwise(x: Tensor, code: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Quantize x [L] to indices into a table of values, with one scale per block.

    code [256]: values from -1 to 1, ascending. Returns uint8 [L] and float32 [L / block]; block
    divides L (Dettmers et al. 2021, section 2.1).
    """
    blocks = x.view(-1, block)
    size = blocks.abs().amax(1).clamp(min=1e-38)
    between = (code[1:] + code[:-1]) / 2
    places = torch.bucketize(blocks / size[:, None], between)
    return places.to(torch.uint8).view(-1), size


def undo(places: Tensor, size: Tensor, code: Tensor, block: int) -> Tensor:
    """Dequantize the result of `blockwise`: nearest value of the table times the block's scale."""
    return (code[places.long()].view(-1, block) * size[:, None]).view(-1)


def offsets(tensors: list[tuple[int, int, int]]) -> list[int]:
    """Return where each tensor begins in one region of memory, so that the region is short.

    tensors: (bytes, begin, end); a tensor exists at times begin <= t < end. The largest tensor goes
    first, each to the lowest address that is free during its lifetime (Pisarchyk and Lee 2020,
    "greedy by size"). This requires that all lifetimes are known beforehand.
    """
    place: dict[int, int] = {}
    for number in sorted(range(len(tensors)), key=lambda i: -tensors[i][0]):
        nbytes, begin, end = tensors[number]
        beside = [i for i in place if tensors[i][1] < end and begin < tensors[i][2]]
        lowest = 0
        for start, stop in sorted((place[i], place[i] + tensors[i][0]) for i in beside):
            if start - lowest >= nbytes:
                break
            lowest = max(lowest, stop)
        place[number] = lowest
    return [place[number] for number in range(len(tensors))]
