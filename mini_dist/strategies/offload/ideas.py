"""Borrowed memory in six functions: what moves where, and when, so that nobody waits for it.

    read_ahead         parameters: the next layer's arrive while this one computes
    step_behind        gradients leave while backward runs, and the host steps them (ZeRO-Offload)
    delayed            the host steps while the next batch computes: one step late
    blockwise, undo    an optimizer's state in 8 bits (Dettmers et al. 2021)
    offsets            tensors whose lifetimes are known, without fragments (ZeRO-R)

lanes.py, tier.py, states.py and allocator.py do this for real models; read tier.py first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def read_ahead(x: Tensor, layers: list[Callable], load: Callable) -> Tensor:
    """Run x through all layers; while one layer computes, the next layer's weight arrives.

    layers: each is a function (x, weight) -> x. load: (number) -> a handle whose wait() returns
    this layer's weight. At most two weights are held or in flight at a time (Rajbhandari et al.
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
    """Each gradient leaves as soon as backward has it; each step begins as soon as one has arrived.

    gradients: (number, gradient) in the order of backward. leave, update, back: begin to bring a
    gradient to the host, to step on the host what it comes `after`, to bring a parameter back; each
    returns what the next may come after. Returns the last of these, to be waited for before the
    parameters are used (Ren et al. 2021, section 4.1).
    """
    returning = []
    for number, gradient in gradients:
        there = leave(gradient)
        stepped = update(number, after=there)
        returning.append(back(number, after=stepped))
    return returning


def delayed(parameters: Tensor, gradient_of: Callable, update: Callable, steps: int) -> Tensor:
    """Train with gradients that are one step old, so the device computes while the host steps.

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
    """x [L] as places in a table of values, and a size for each block of it.

    code [256]: values from -1 to 1, ascending. Returns uint8 [L] and float32 [L / block]; block
    divides L (Dettmers et al. 2021, section 2.1).
    """
    blocks = x.view(-1, block)
    size = blocks.abs().amax(1).clamp(min=1e-38)
    between = (code[1:] + code[:-1]) / 2
    places = torch.bucketize(blocks / size[:, None], between)
    return places.to(torch.uint8).view(-1), size


def undo(places: Tensor, size: Tensor, code: Tensor, block: int) -> Tensor:
    """What `blockwise` has put away, to the nearest value of the table."""
    return (code[places.long()].view(-1, block) * size[:, None]).view(-1)


def offsets(tensors: list[tuple[int, int, int]]) -> list[int]:
    """Where each tensor begins in one piece of memory, so that it is short.

    tensors: of each (bytes, begin, end): it is there at the moments begin <= t < end. The largest
    first, each at the lowest place that is free as long as it lives (Pisarchyk and Lee 2020,
    "greedy by size"). Only who knows all lifetimes beforehand can do this.
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
