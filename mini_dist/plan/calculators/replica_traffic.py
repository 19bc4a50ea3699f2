"""How long it takes replicas to exchange gradients, and parameters that ZeRO has sharded."""

from __future__ import annotations

from typing import NamedTuple

from ..config import Layout
from ..schedule.sizes import round_size
from .collective_time import TWO_HOPS, collective_seconds
from .compression import shapes_of_matrices
from .frameworks import Framework
from .kernels import LayerPiece, matrices, stream_seconds, together
from .lines import Line
from .machines import SLOWED
from .parameters import HeldParameters, copies
from .timed_step import RankWork, TimedStep


class Traffic(NamedTuple):
    """Seconds of one unit's messages under ZeRO-2 and 3, and of the copies around them."""

    gather: float  # of its parameters, before forward and before backward: ZeRO-3
    reduce: float  # of its gradients, after backward
    unpack: float  # from the gathered buffer into the parameters
    pack: float  # gradients into the buffer that leaves


def of_layer(step: TimedStep, moe: bool) -> Traffic:
    """A layer is a unit."""
    return _of_unit(step, step.layers[moe])


def of_root(step: TimedStep, rank: RankWork) -> Traffic:
    """And what is outside the layers, embedding and head, is another."""
    return _of_unit(step, rank.outside)


def _of_unit(step: TimedStep, held: HeldParameters) -> Traffic:
    layout, machine, how = step.layout, step.machine, step.how
    parts, world = copies(held, layout), layout.world_size
    if layout.zero < 2 or parts[0][1] == 1:
        return Traffic(0.0, 0.0, 0.0, 0.0)
    g, e, device = how.reduce_bytes, how.activation_bytes, machine.device
    wire = how.unit_gather_bytes or e
    gather = _collective(machine, "all_gather", wire, parts, world) if layout.zero == 3 else 0.0
    reduce = _collective(machine, *_scatter(how), parts, world)
    if not how.copies_units:
        return Traffic(gather, reduce, 0.0, 0.0)
    numel = float(held.total)
    unpack = stream_seconds(device, 2 * e * numel) if gather else 0.0
    return Traffic(gather, reduce, unpack, stream_seconds(device, (e + g) * numel))


def _scatter(how: Framework) -> tuple[str, float]:
    """How gradients are scattered, and bytes of one: codes cannot be added on a ring's way."""
    if how.unit_scatter_bytes:
        return TWO_HOPS if how.unit_scatter_by_nodes else "all_to_all", how.unit_scatter_bytes
    return "reduce_scatter", how.reduce_bytes


def replica_lines(step: TimedStep, forward: float, backward: float) -> list[Line]:
    """What a step waits for between replicas: gradients, averages, and what compression costs.

    forward, backward: seconds of one micro-batch on the slowest stage, to hide messages behind.
    """
    lines = []
    seconds, formula = _gradients(step, forward, backward)
    if seconds:
        lines.append(Line("gradients over dp", seconds, "s", formula, "ZeRO section 7"))
    if step.local_steps > 1:
        seconds, formula = _averages(step)
        lines.append(Line("average over dp", seconds, "s", formula, "Stich 2019"))
    if step.compression:
        lines.append(_compressing(step))
    return lines


def _gradients(step: TimedStep, forward: float, backward: float) -> tuple[float, str]:
    """Data-parallel traffic once a step that nothing hides (ZeRO-3 has none of that kind).

    Gradients travel behind the last micro-batch's backward, and ZeRO-1's and 2's new parameters
    behind the next step's first forward, where the framework does so.
    """
    layout, machine, how = step.layout, step.machine, step.how
    parts, world = copies(step.ranks[0].held, layout), layout.world_size
    if step.compression and step.local_steps == 1 and not layout.zero:
        seconds, said = _compressed(step, parts)
        where = " behind the last backward" if how.overlaps_gradients else ""
        return _hidden(backward, seconds, how.overlaps_gradients), said + where
    g, e = how.reduce_bytes, how.unit_gather_bytes or how.activation_bytes
    reduces, gathers = {
        0: (("all_reduce", g), None),
        1: (_scatter(how), ("all_gather", e)),
        2: (None, ("all_gather", e)),
        3: (None, None),
    }[layout.zero]
    once = layout.zero == 3 and not how.in_every_micro_batch(layout)
    if once:  # as under ZeRO-1; the last backward waits for all gradients to be summed up
        reduces, gathers = _scatter(how), ("all_gather", e)
    seconds, said = 0.0, []
    if reduces:
        op, each = reduces
        traffic = sum(
            _in_buckets(machine, op, each, *part, world, messages)
            for part, messages in zip(parts, _messages(step, parts))
        )
        behind = how.overlaps_gradients and not once
        last = _of_embedding(step, op, each, *parts[0][1:]) if behind else 0.0
        seconds += _left(layout, backward, traffic - last, behind) + last
        where = " behind the last backward" if behind else ""
        said.append(f"{op.replace('_', '-')} of {each:g} P{where}")
    if gathers:
        op, each = gathers
        traffic = _collective(machine, op, each, parts, world)
        seconds += _left(layout, forward, traffic, how.overlaps_parameters)
        where = " behind the first forward" if how.overlaps_parameters else ""
        said.append(f"{op.replace('_', '-')} of {each:g} P{where}")
    return seconds, ", ".join(said)


def _of_embedding(step: TimedStep, op: str, each: float, size: int, stride: int) -> float:
    """Return the seconds of the last message. The embedding's gradient is ready last of all."""
    numel = step.config.vocab_size * step.config.d_model / step.layout.tp
    return collective_seconds(step.machine, op, each * numel, size, stride, step.layout.world_size)


def _averages(step: TimedStep) -> tuple[float, str]:
    """A step's share of averaging what the clusters step, once in `local_steps`: local SGD, DiLoCo.

    As many bytes per number as gradients have, or as the compression says. Nothing hides it: every
    rank waits for the average.
    """
    parts, each, layout = _averaged(step), step.how.reduce_bytes, step.layout
    shards = layout.dp * layout.cp if layout.zero else 1
    if step.compression:
        seconds, said = _compressed(step, parts)
    else:
        seconds = sum(
            _in_buckets(
                step.machine, "all_reduce", each, *part, step.num_devices, max(1, messages / shards)
            )
            for part, messages in zip(parts, _messages(step, parts))
        )
        said = f"all-reduce of {each:g} P"
    of_shards = f" / {shards}" if layout.zero else ""
    return seconds / step.local_steps, f"{said}{of_shards} every {step.local_steps} steps"


def _averaged(step: TimedStep) -> list[tuple[float, int, int]]:
    """(numbers that a rank averages, over how many clusters, how far apart its likes stand).

    The ranks of a cluster are neighbours. What ZeRO has sharded inside is averaged as shards.
    """
    layout = step.layout
    return [
        (numel / (ways if layout.zero else 1), step.clusters, layout.world_size)
        for numel, ways, _ in copies(step.ranks[0].held, layout)
    ]


def _compressing(step: TimedStep) -> Line:
    """The device's own passes over what it compresses."""
    layout, compression = step.layout, step.compression
    if step.local_steps > 1:
        each = compression.touched(0, layout.num_micro_batches) / step.local_steps
        numel = sum(numel for numel, _, _ in _averaged(step))
    else:
        each = compression.touched(layout.zero, layout.num_micro_batches)
        numel = float(step.ranks[0].held.total)
    seconds = stream_seconds(step.machine.device, each * numel)
    formula = f"{each:g} bytes * {numel:.3g} parameters / bandwidth"
    return Line("compressing", seconds, "s", formula, "passes over memory, counted")


def _compressed(step: TimedStep, parts) -> tuple[float, str]:
    compression, world = step.compression, step.num_devices
    shapes = shapes_of_matrices(step.config) if compression.name == "power" else []
    seconds, said = 0.0, []
    for numel, size, stride in parts:
        for op, num_bytes in compression.messages(numel, size, shapes) if numel else []:
            seconds += collective_seconds(step.machine, op, num_bytes, size, stride, world)
            said.append(f"{op.replace('_', '-')} of {num_bytes / numel:.2g} P")
    return seconds, ", ".join(said)


def _left(layout: Layout, compute: float, traffic: float, behind: bool) -> float:
    """Return the seconds of a step's data-parallel messages that computation does not hide.

    In an interleaved schedule, each of the v chunks sends a v-th of the gradients. After a chunk's
    last backward pass, all micro-batches of a round still pass backward through the next chunk. So
    only the last chunk's gradients have nothing but their own backward pass to hide behind. For
    parameters gathered in the forward pass, the same holds in reverse order.
    """
    if not behind or layout.schedule != "interleaved":
        return _hidden(compute, traffic, behind)
    v, round_of = layout.num_chunks, round_size(layout.pp, layout.num_micro_batches)
    all_but_last = compute * (1 + (v - 1) * round_of) / v
    return max(SLOWED * traffic, (traffic - compute) / v, traffic - all_but_last)


def _hidden(compute: float, traffic: float, behind: bool) -> float:
    return together(compute, traffic) - compute if behind else traffic


def _messages(step: TimedStep, parts) -> tuple[float, float]:
    """Return how many messages carry a rank's gradients, and how many its experts' gradients.

    What is larger than a bucket has one of its own, smaller tensors share them.
    """
    config, layout, how = step.config, step.layout, step.how
    sizes = [max(how.bucket, how.bucket_a_rank * size) for _, size, _ in parts]
    outside = config.vocab_size * config.d_model / layout.tp
    dense = 1.0 if layout.pp > 1 else 2.0 - config.tied_embedding
    dense *= min(1.0, outside / sizes[0])
    of_layer: dict[bool, float] = {}
    for moe, layers in (kind for stage in step.ranks[0].stages for kind in step.stages[stage]):
        if moe not in of_layer:
            piece = LayerPiece.of(config, layout, moe)
            each = [shape.k * shape.n for shape in matrices(config, piece) if shape.copies == 1]
            of_layer[moe] = sum(min(1.0, numel / sizes[0]) for numel in each)
        dense += layers * of_layer[moe]
    return max(1.0, dense), max(1.0, parts[1][0] / sizes[1])


def _in_buckets(machine, op, each, numel, size, stride, world, messages) -> float:
    """One message after the other: many small ones pay the latency of the ring many times."""
    one = collective_seconds(machine, op, each * numel / messages, size, stride, world)
    return messages * one


def _collective(machine, op, each, parts, world) -> float:
    return sum(
        collective_seconds(machine, op, each * numel, size, stride, world)
        for numel, size, stride in parts
    )
