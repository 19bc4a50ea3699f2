"""How long it takes replicas to exchange gradients, and parameters that ZeRO has sharded."""

from __future__ import annotations

from typing import NamedTuple

from ..config import Layout, ModelConfig
from ..fields import nearest_divisor
from .compression import INT4, INT8, Compression, shapes_of_matrices
from .frameworks import Framework
from .kernels import TWO_HOPS, LayerPiece, collective_seconds, matrices, stream_seconds, together
from .numbers import at_least
from .parameters import (
    HeldParameters,
    held_by_layer,
    held_outside,
    layers_of_stages,
    parameters_of_rank,
    stages_of_rank,
)


def copies(held: HeldParameters, layout: Layout) -> list[tuple[float, int, int]]:
    """(numbers, ranks that hold copies of them, how far apart these stand).

    Those are all of dp * cp, and for experts edp, every (etp * ep)-th rank of a stage.
    """
    return [
        (float(held.dense), layout.dp * layout.cp, layout.tp),
        (float(held.experts), layout.edp, layout.etp * layout.ep),
    ]


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


def _of_unit(held: HeldParameters, layout, machine, how) -> Traffic:
    parts = copies(held, layout)
    if layout.zero < 2 or parts[0][1] == 1:
        return Traffic(0.0, 0.0, 0.0, 0.0)
    g, e, device = how.reduce_bytes, how.activation_bytes, machine.device
    wire = how.unit_gather_bytes or e
    gather = _collective(machine, "all_gather", wire, parts, layout) if layout.zero == 3 else 0.0
    reduce = _collective(machine, *_scatter(how), parts, layout)
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


def checked(
    compression: Compression | str | None, config: ModelConfig, layout: Layout, local_steps: int
) -> Compression | None:
    """The method that is named; ValueError where this layout's numbers cannot go that way."""
    if compression is None or isinstance(compression, str):
        compression = compression and Compression(compression)
    if not compression:
        return None
    name, scattered = compression.name, layout.zero and local_steps == 1
    if scattered and name != "int8":
        raise ValueError(
            f"compression={name!r} averages whole gradients, and zero={layout.zero} scatters them: "
            "give 'int8', or zero=0."
        )
    if compression.gradient_bits == 4 and not scattered:
        raise ValueError(
            "gradient_bits=4 is of what ZeRO's units scatter: give zero=1, 2 or 3 and "
            "local_steps=1, or gradient_bits=8."
        )
    if compression.by_hosts and not scattered:
        raise ValueError(
            "by_hosts=True is of what ZeRO's units scatter: give zero=1, 2 or 3 and local_steps=1, "
            "or by_hosts=False."
        )
    if name == "power" and (layout.tp * layout.pp > 1 or layout.zero or config.num_experts):
        raise ValueError(
            "compression='power' is counted for whole matrices, on every replica the same: give "
            "tp=1, pp=1, zero=0 and a model without experts."
        )
    return compression


def compressed_units(how: Framework, layout: Layout, compression: Compression | None) -> Framework:
    """The framework with what its ZeRO stages send in codes (ZeRO++), if so asked."""
    if not (compression and layout.zero):
        return how
    scatter = INT4 if compression.gradient_bits == 4 else INT8
    return how.replace(
        unit_gather_bytes=INT8,
        unit_scatter_bytes=scatter,
        unit_scatter_by_nodes=compression.by_hosts,
    )


def gradient_seconds(
    config, layout, machine, how, slowest, compression: Compression | None = None
) -> tuple[float, str]:
    """Data-parallel traffic once a step that nothing hides (ZeRO-3 has none of that kind).

    Gradients travel behind the last micro-batch's backward, and ZeRO-1's and 2's new parameters
    behind the next step's first forward, where the framework does so.
    """
    parts = copies(parameters_of_rank(config, layout, 0), layout)
    if compression and not layout.zero:
        seconds, said = _compressed(config, parts, layout, machine, compression)
        where = " behind the last backward" if how.overlaps_gradients else ""
        return _hidden(slowest.backward, seconds, how.overlaps_gradients), said + where
    g, e = how.reduce_bytes, how.unit_gather_bytes or how.activation_bytes
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


def cluster_of(layout: Layout, clusters: int | None, local_steps: int) -> Layout:
    """What trains synchronously: one of the clusters that step by themselves, each rank of dp if
    clusters is None; all where local_steps is 1. ValueError where dp cannot be cut so."""
    if local_steps == 1:
        if clusters is not None:
            raise ValueError(
                f"clusters={clusters} average once in local_steps=1 steps, as one cluster does: "
                "give local_steps above 1, or no clusters."
            )
        return layout
    clusters = layout.dp if clusters is None else clusters
    at_least("clusters", clusters, 1)
    if layout.dp % clusters:
        raise ValueError(
            f"clusters={clusters} does not divide dp={layout.dp}: "
            f"{nearest_divisor(layout.dp, clusters)} would."
        )
    inside = layout.dp // clusters
    if layout.zero and inside * layout.cp == 1:
        raise ValueError(
            f"zero={layout.zero} shards over the ranks of a cluster, and with local_steps="
            f"{local_steps} and clusters={clusters} of dp={layout.dp} each is one rank: give "
            "clusters below dp, or zero=0."
        )
    ranks = inside * layout.cp * layout.tp // layout.etp
    if ranks % layout.ep:
        of = "dp * cp" if layout.etp == layout.tp else "dp * cp * tp / etp"
        raise ValueError(
            f"ep={layout.ep} does not divide the {ranks} ranks of {of} in a "
            f"cluster: give fewer clusters than {clusters}, or ep=1."
        )
    return layout.replace(dp=inside)


def averaged(config, layout: Layout, inside: Layout) -> list[tuple[float, int, int]]:
    """(numbers that a rank averages, over so many clusters, how far apart its likes stand).

    The ranks of a cluster are neighbours. What ZeRO has sharded inside is averaged as shards.
    """
    clusters = layout.dp // inside.dp
    return [
        (numel / (ways if layout.zero else 1), clusters, inside.world_size)
        for numel, ways, _ in copies(parameters_of_rank(config, inside, 0), inside)
    ]


def average_seconds(
    config, layout, inside, machine, how, local_steps: int, compression: Compression | None
) -> tuple[float, str]:
    """A step's share of averaging what the clusters step, once in `local_steps`: local SGD, DiLoCo.

    As many bytes a number as gradients have, or as the compression says. Nothing hides it: every
    rank waits for the average.
    """
    parts, each = averaged(config, layout, inside), how.reduce_bytes
    shards = inside.dp * inside.cp if layout.zero else 1
    if compression:
        seconds, said = _compressed(config, parts, layout, machine, compression)
    else:
        seconds = sum(
            _in_buckets(
                machine, "all_reduce", each, *part, layout.world_size, max(1, messages / shards)
            )
            for part, messages in zip(parts, _messages(config, layout, how, parts))
        )
        said = f"all-reduce of {each:g} P"
    of_shards = f" / {shards}" if layout.zero else ""
    return seconds / local_steps, f"{said}{of_shards} every {local_steps} steps"


def _compressed(config, parts, layout, machine, compression) -> tuple[float, str]:
    shapes = shapes_of_matrices(config) if compression.name == "power" else []
    seconds, said = 0.0, []
    for numel, size, stride in parts:
        for op, num_bytes in compression.messages(numel, size, shapes) if numel else []:
            seconds += collective_seconds(machine, op, num_bytes, size, stride, layout.world_size)
            said.append(f"{op.replace('_', '-')} of {num_bytes / numel:.2g} P")
    return seconds, ", ".join(said)


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
    of_layer: dict[bool, float] = {}
    all_layers = layers_of_stages(config, layout)
    for moe, layers in (kind for stage in stages_of_rank(layout, 0) for kind in all_layers[stage]):
        if moe not in of_layer:
            cuts = layout.tp, layout.cp, layout.ep, layout.etp
            piece = LayerPiece(moe, *cuts, False, 1.0, layout.world_size)
            each = [shape.k * shape.n for shape in matrices(config, piece) if shape.copies == 1]
            of_layer[moe] = sum(min(1.0, numel / sizes[0]) for numel in each)
        dense += layers * of_layer[moe]
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
