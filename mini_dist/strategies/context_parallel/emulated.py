"""The ring on emulated devices: where its time goes if each rank had its own machine."""

from __future__ import annotations

import torch

from mini_dist.collectives.emulate import BusyInterval, Clock, EmulatedDevice, EmulatedLink
from mini_dist.plan.fields import checks_kinds

from .placement import num_scores
from .ring import Hop


@checks_kinds
def run_ring_emulated(
    positions: torch.Tensor, seconds_a_score: float, seconds_a_hop: float, group
) -> list[BusyInterval]:
    """Emulate one forward pass of the causal ring; return the times in which this rank computed,
    each named by the rank whose keys it used.

        run = launch(run_ring_emulated, 4, (zigzag(512, 4), 1e-6, 5e-3))

    positions [cp, S/cp]: a placement. A device is busy in proportion to the scores in its block.
    The messages carry the time at which keys and values would arrive, instead of keys and values.
    """
    rank, size = group.rank(), group.size()
    work = num_scores(positions)[rank]
    clock = Clock()
    device, link = EmulatedDevice(clock), EmulatedLink(latency=seconds_a_hop)
    clock.start(group)
    here = 0.0  # when the keys of this step arrived
    for step, scores in enumerate(work):
        begins = max(device.free, here)
        hop = None
        if step < size - 1:
            hop = Hop(torch.tensor([link.send(0, begins)], dtype=torch.float64), group)
        if scores:
            device.run(scores * seconds_a_score, here, (rank - step) % size)
        if hop:
            here = hop.arrived().item()
    return device.done
