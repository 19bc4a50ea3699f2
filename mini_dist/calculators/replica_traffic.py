"""How long it takes replicas to exchange gradients, and parameters that ZeRO has sharded."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..config import Layout
from .kernels import collective_seconds, stream_seconds, together
from .parameters import Held, held_by_layer, held_outside, parameters_of_rank


def copies(held: Held, layout: Layout) -> list[tuple[float, int, int]]:
    """(numbers, ranks that hold copies of them, how far apart these stand).

    Those are all of dp * cp, and for experts every ep-th of them.
    """
    ways, tp, ep = layout.dp * layout.cp, layout.tp, layout.ep
    return [(float(held.dense), ways, tp), (float(held.experts), ways // ep, tp * ep)]


class Traffic(NamedTuple):
    """Seconds of one unit's messages under ZeRO-2 and 3, and of the copies around them."""

    gather: float  # of its parameters, before forward and before backward: ZeRO-3
    reduce: float  # of its gradients, after backward
    unpack: float  # from the gathered buffer into the parameters
    pack: float  # gradients into the buffer that leaves


def of_layer(config, layout, machine, how, moe) -> Traffic:
    """A layer is a unit."""
    return _of_unit(held_by_layer(config, layout, moe), layout, machine, how)


def of_root(config, layout, machine, how, pp_rank) -> Traffic:
    """And what is outside the layers, embedding and head, is another."""
    return _of_unit(held_outside(config, layout, pp_rank), layout, machine, how)


def _of_unit(held: Held, layout, machine, how) -> Traffic:
    parts = copies(held, layout)
    if layout.zero < 2 or parts[0][1] == 1:
        return Traffic(0.0, 0.0, 0.0, 0.0)
    g, e, device = how.reduce_bytes, how.activation_bytes, machine.device
    gather = _collective(machine, "all_gather", e, parts, layout) if layout.zero == 3 else 0.0
    reduce = _collective(machine, "reduce_scatter", g, parts, layout)
    if not how.copies_units:
        return Traffic(gather, reduce, 0.0, 0.0)
    numel = float(held.total)
    unpack = stream_seconds(device, 2 * e * numel) if gather else 0.0
    return Traffic(gather, reduce, unpack, stream_seconds(device, (e + g) * numel))


def gradient_seconds(config, layout, machine, how, slowest) -> tuple[float, str]:
    """Data-parallel traffic once a step that nothing hides (ZeRO-3 has none of that kind).

    Gradients travel behind the last micro-batch's backward, and ZeRO-1's and 2's new parameters
    behind the next step's first forward, where the framework does so.
    """
    parts = copies(parameters_of_rank(config, layout, 0), layout)
    g, e = how.reduce_bytes, how.activation_bytes
    reduces, gathers = {
        0: (("all_reduce", g), None),
        1: (("reduce_scatter", g), ("all_gather", e)),
        2: (None, ("all_gather", e)),
        3: (None, None),
    }[layout.zero]
    seconds, said = 0.0, []
    if reduces:
        op, each = reduces
        traffic = sum(
            _in_buckets(machine, op, each, *part, layout.world_size, how) for part in parts
        )
        seconds += _hidden(slowest.backward, traffic, how.overlaps_gradients)
        where = " behind the last backward" if how.overlaps_gradients else ""
        said.append(f"{op.replace('_', '-')} of {each:g} P{where}")
    if gathers:
        op, each = gathers
        traffic = _collective(machine, op, each, parts, layout)
        seconds += _hidden(slowest.forward, traffic, how.overlaps_parameters)
        where = " behind the first forward" if how.overlaps_parameters else ""
        said.append(f"{op.replace('_', '-')} of {each:g} P{where}")
    return seconds, ", ".join(said)


def average_seconds(config, layout, machine, how, local_steps: int) -> tuple[float, str]:
    """A step's share of averaging all parameters once in `local_steps`: local SGD and DiLoCo.

    As many bytes a number as gradients have. Nothing hides it: every rank waits for the average.
    """
    parts, each = copies(parameters_of_rank(config, layout, 0), layout), how.reduce_bytes
    seconds = sum(
        _in_buckets(machine, "all_reduce", each, *part, layout.world_size, how) for part in parts
    )
    return seconds / local_steps, f"all-reduce of {each:g} P every {local_steps} steps"


def _hidden(compute: float, traffic: float, behind: bool) -> float:
    return together(compute, traffic) - compute if behind else traffic


def _in_buckets(machine, op, each, numel, size, stride, world, how) -> float:
    """One message after the other: many small ones pay the latency of the ring many times."""
    messages = max(1, math.ceil(numel / max(how.bucket, how.bucket_a_rank * size)))
    one = collective_seconds(machine, op, each * numel / messages, size, stride, world)
    return messages * one


def _collective(machine, op, each, parts, layout) -> float:
    return sum(
        collective_seconds(machine, op, each * numel, size, stride, layout.world_size)
        for numel, size, stride in parts
    )
