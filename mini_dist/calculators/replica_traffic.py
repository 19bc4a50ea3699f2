"""How long it takes replicas to exchange gradients, and parameters that ZeRO has sharded."""

from __future__ import annotations

from typing import NamedTuple

from ..config import Layout, ModelConfig
from .compression import INT8, Compression, shapes_of_matrices
from .frameworks import Framework
from .kernels import Piece, collective_seconds, matrices, stream_seconds, together
from .parameters import (
    Held,
    held_by_layer,
    held_outside,
    layers_of_stage,
    parameters_of_rank,
    stages_of_rank,
)


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


def in_every_micro_batch(layout: Layout, how) -> bool:
    """Whether ZeRO-2's reduces and ZeRO-3's gathers come with each micro-batch, or once a step."""
    return layout.zero >= 2 and not (how.whole_in_pipeline and layout.zero == 3 and layout.pp > 1)


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
    wire = how.unit_bytes or e
    gather = _collective(machine, "all_gather", wire, parts, layout) if layout.zero == 3 else 0.0
    reduce = _collective(machine, *_scatter(how), parts, layout)
    if not how.copies_units:
        return Traffic(gather, reduce, 0.0, 0.0)
    numel = float(held.total)
    unpack = stream_seconds(device, 2 * e * numel) if gather else 0.0
    return Traffic(gather, reduce, unpack, stream_seconds(device, (e + g) * numel))


def _scatter(how: Framework) -> tuple[str, float]:
    """How gradients are scattered, and bytes of one: codes cannot be added on a ring's way."""
    return (
        ("all_to_all", how.unit_bytes) if how.unit_bytes else ("reduce_scatter", how.reduce_bytes)
    )


def checked(
    compression: Compression | str | None, config: ModelConfig, layout: Layout
) -> Compression | None:
    """The method that is named; ValueError where this layout's gradients cannot go that way."""
    if compression is None or isinstance(compression, str):
        compression = compression and Compression(compression)
    if not compression:
        return None
    name = compression.name
    if layout.zero and name != "int8":
        raise ValueError(
            f"compression={name!r} averages whole gradients, and zero={layout.zero} scatters them: "
            "give 'int8', or zero=0."
        )
    if name == "power" and (layout.tp * layout.pp > 1 or config.num_experts):
        raise ValueError(
            "compression='power' is counted for whole matrices, on every replica the same: give "
            "tp=1, pp=1 and a model without experts."
        )
    return compression


def compressed_units(how: Framework, layout: Layout, compression: Compression | None) -> Framework:
    """The framework with what its ZeRO stages send in int8 (ZeRO++), if so asked."""
    return how.replace(unit_bytes=INT8) if compression and layout.zero else how


def gradient_seconds(
    config, layout, machine, how, slowest, compression: Compression | None = None
) -> tuple[float, str]:
    """Data-parallel traffic once a step that nothing hides (ZeRO-3 has none of that kind).

    Gradients travel behind the last micro-batch's backward, and ZeRO-1's and 2's new parameters
    behind the next step's first forward, where the framework does so.
    """
    parts = copies(parameters_of_rank(config, layout, 0), layout)
    if compression and not layout.zero:
        return _compressed(config, layout, machine, how, slowest, compression)
    g, e = how.reduce_bytes, how.unit_bytes or how.activation_bytes
    reduces, gathers = {
        0: (("all_reduce", g), None),
        1: (_scatter(how), ("all_gather", e)),
        2: (None, ("all_gather", e)),
        3: (None, None),
    }[layout.zero]
    once = layout.zero == 3 and not in_every_micro_batch(layout, how)
    if once:  # as under ZeRO-1; the last backward waits for all gradients to be summed up
        reduces, gathers = _scatter(how), ("all_gather", e)
    seconds, said = 0.0, []
    if reduces:
        op, each = reduces
        traffic = sum(
            _in_buckets(machine, op, each, *part, layout.world_size, messages)
            for part, messages in zip(parts, _messages(config, layout, how, parts))
        )
        behind = how.overlaps_gradients and not once
        seconds += _hidden(slowest.backward, traffic, behind)
        where = " behind the last backward" if behind else ""
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
        _in_buckets(machine, "all_reduce", each, *part, layout.world_size, messages)
        for part, messages in zip(parts, _messages(config, layout, how, parts))
    )
    return seconds / local_steps, f"all-reduce of {each:g} P every {local_steps} steps"


def _compressed(config, layout, machine, how, slowest, compression) -> tuple[float, str]:
    shapes = shapes_of_matrices(config) if compression.name == "power" else []
    seconds, said = 0.0, []
    for numel, size, stride in copies(parameters_of_rank(config, layout, 0), layout):
        for op, num_bytes in compression.messages(numel, size, shapes) if numel else []:
            seconds += collective_seconds(machine, op, num_bytes, size, stride, layout.world_size)
            said.append(f"{op.replace('_', '-')} of {num_bytes / numel:.2g} P")
    where = " behind the last backward" if how.overlaps_gradients else ""
    return _hidden(slowest.backward, seconds, how.overlaps_gradients), ", ".join(said) + where


def _hidden(compute: float, traffic: float, behind: bool) -> float:
    return together(compute, traffic) - compute if behind else traffic


def _messages(config, layout, how, parts) -> tuple[float, float]:
    """Into how many messages the gradients of a rank go, and those of its experts.

    What is larger than a bucket has one of its own, smaller tensors share them.
    """
    sizes = [max(how.bucket, how.bucket_a_rank * size) for _, size, _ in parts]
    outside = config.vocab_size * config.d_model / layout.tp
    dense = 1.0 if layout.pp > 1 else 2.0 - config.tied_embedding
    dense *= min(1.0, outside / sizes[0])
    for stage in stages_of_rank(layout, 0):
        for moe, layers in layers_of_stage(config, layout, stage):
            piece = Piece(moe, layout.tp, layout.cp, layout.ep, False, 1.0, layout.world_size)
            each = [shape.k * shape.n for shape in matrices(config, piece) if shape.copies == 1]
            dense += layers * sum(min(1.0, numel / sizes[0]) for numel in each)
    return max(1.0, dense), max(1.0, parts[1][0] / sizes[1])


def _in_buckets(machine, op, each, numel, size, stride, world, messages) -> float:
    """One message after the other: many small ones pay the latency of the ring many times."""
    one = collective_seconds(machine, op, each * numel / messages, size, stride, world)
    return messages * one


def _collective(machine, op, each, parts, layout) -> float:
    return sum(
        collective_seconds(machine, op, each * numel, size, stride, layout.world_size)
        for numel, size, stride in parts
    )
