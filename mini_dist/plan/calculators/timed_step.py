"""One training step to be timed: the options are checked and the layout is read once, in here.

The files that time a part of the step (stage_time.py, bubble.py, replica_traffic.py and
optimizer_time.py) take a TimedStep. It contains all that a rank computes and holds, so they do not
need parameters.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..config import Layout, ModelConfig, cut_by
from ..fields import nearest_divisor, whole
from .compression import INT4, INT8, Compression
from .frameworks import Framework, framework
from .machines import Hardware, hardware
from .models import model
from .parameters import (
    HeldParameters,
    first_alike,
    held_by_layer,
    held_outside,
    layers_of_rank,
    layers_of_stages,
    parameters_of_rank,
    stages_of_rank,
)


class RankWork(NamedTuple):
    """What one pipeline rank computes and holds."""

    stages: list[int]  # the numbers of its stages
    layers: tuple  # for each of its stages: (with experts?, recomputed?, how many)
    outside: HeldParameters  # the embedding, the head
    held: HeldParameters  # the embedding, the head and all its layers


@dataclass(frozen=True)
class TimedStep:
    """What every part of a step's time is computed from.

    With local steps, `layout` is the layout of one cluster: the ranks that train synchronously.
    """

    config: ModelConfig
    layout: Layout
    machine: Hardware
    how: Framework
    first_alike: tuple[int, ...]  # for each pipeline rank the first one that holds as much
    ranks: dict[int, RankWork]  # of each of these first ones
    stages: tuple  # for each stage of the pipeline: (with experts?, how many layers)
    layers: dict[bool, HeldParameters]  # one layer: with experts, and without
    clusters: int = 1
    local_steps: int = 1  # 1: gradients are averaged at every step
    compression: Compression | None = None

    @property
    def num_devices(self) -> int:
        return self.layout.world_size * self.clusters

    @property
    def num_sequences(self) -> int:
        """In the batch of one step, over all ranks."""
        return self.layout.global_batch_size * self.clusters


def timed_step(
    config: ModelConfig | str,
    layout: Layout,
    machine: Hardware | str,
    how: Framework | str,
    local_steps: int = 1,
    clusters: int | None = None,
    compression: Compression | str | None = None,
) -> TimedStep:
    """Check the options of one step, and read off the layout what each rank computes and holds.

    Raises ValueError as step_time does.
    """
    config, machine, how = model(config), hardware(machine), framework(how)
    cut_by(layout, config)
    whole("local_steps", local_steps, why="1 averages gradients at every step")
    compression = _checked(compression, config, layout, local_steps)
    inside = _one_cluster(layout, clusters, local_steps)
    if local_steps == 1:
        how = compressed_units(how, layout, compression)
    alike, stages = first_alike(config, inside), layers_of_stages(config, inside)
    return TimedStep(
        config,
        inside,
        machine,
        how,
        first_alike=alike,
        ranks={rank: _rank_work(config, inside, rank) for rank in set(alike)},
        stages=stages,
        layers={
            moe: held_by_layer(config, inside, moe) for stage in set(stages) for moe, _ in stage
        },
        clusters=layout.dp // inside.dp,
        local_steps=local_steps,
        compression=compression,
    )


def _rank_work(config: ModelConfig, layout: Layout, pp_rank: int) -> RankWork:
    return RankWork(
        stages_of_rank(layout, pp_rank),
        layers_of_rank(config, layout, pp_rank),
        held_outside(config, layout, pp_rank),
        parameters_of_rank(config, layout, pp_rank),
    )


def _checked(
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


def _one_cluster(layout: Layout, clusters: int | None, local_steps: int) -> Layout:
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
    whole("clusters", clusters)
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
