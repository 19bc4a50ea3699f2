"""The time of one pipeline rank on one micro-batch: its layers, and where it waits.

Under ZeRO-2 and 3 (`_hidden`, `_at_the_ends`) a layer is a unit. While it computes forward, the
next layer's parameters are gathered; while it computes backward, the previous layer's parameters
are gathered and the following layer's gradients reduced: one ahead, as in FSDP and DeepSpeed. Each
layer takes as long as the slower of the two, in every micro-batch. At the ends nothing overlaps:
the step waits for the first gather and the last reduce.
"""

from __future__ import annotations

from dataclasses import dataclass

from .activations import cut_of_whole
from .kernels import LayerPiece, every_second_seconds, head_seconds, layer_time, together
from .parameters import copies
from .replica_traffic import of_layer, of_root
from .timed_step import RankWork, TimedStep


@dataclass(frozen=True)
class StageTime:
    """One rank's work on one micro-batch."""

    parts: dict[str, float]
    forward: float
    backward: float  # with what it recomputes and the weights' gradients
    weight: float  # the part of backward that may wait (zero-bubble)
    chunks: tuple[tuple[float, float, float], ...] = ()  # these three of each stage that it holds

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def of_chunk(self, number: int, num_chunks: int) -> tuple[float, float, float]:
        """Forward, backward and weight of one of its stages; its even share, if none are given."""
        if self.chunks:
            return self.chunks[number]
        return self.forward / num_chunks, self.backward / num_chunks, self.weight / num_chunks


def stages_of_pipeline(step: TimedStep) -> list[StageTime]:
    """Time the work of each pipeline rank; ranks that hold as much share one StageTime."""
    stages = [stage for rank in step.ranks.values() for stage in rank.layers]
    kinds = {(moe, again) for stage in stages for moe, again, _ in stage}
    layers = {kind: _layer(step, *kind) for kind in kinds}
    times = {first: _rank(step, rank, layers) for first, rank in step.ranks.items()}
    return [times[first] for first in step.first_alike]


def _rank(step: TimedStep, rank: RankWork, of_kind: dict[tuple, StageTime]) -> StageTime:
    """of_kind: the times of one layer, by (with experts?, recomputed?)."""
    parts: dict[str, float] = {}
    chunks = []
    for number, stage in zip(rank.stages, rank.layers):
        forward = backward = weight = 0.0
        for moe, again, layers in stage:
            each = of_kind[moe, again]
            for name, seconds in each.parts.items():
                parts[name] = parts.get(name, 0.0) + layers * seconds
            forward += layers * each.forward
            backward += layers * each.backward
            weight += layers * each.weight
        if number == step.layout.num_stages - 1:
            piece = LayerPiece.of(step.config, step.layout, moe=False)
            f, b = head_seconds(step.config, piece, step.machine.device, step.how)
            parts["head and loss"] = f + b
            forward, backward = forward + f, backward + b
        chunks.append((forward, backward, weight))
    if step.how.in_every_micro_batch(step.layout):
        wait_f, wait_b = _at_the_ends(step, rank)
        parts["zero traffic"] = parts.get("zero traffic", 0.0) + wait_f + wait_b
        (f, b, w), *others = chunks
        chunks = [(f + wait_f, b + wait_b, w), *others]
    return StageTime(parts, *map(sum, zip(*chunks)), tuple(chunks))


def _at_the_ends(step: TimedStep, rank: RankWork) -> tuple[float, float]:
    """Seconds of ZeRO's messages that have nothing to hide behind, forward and backward.

    Parameters outside the layers are gathered once without a pipeline: they stay whole from
    forward to backward, and the head computes while the last layer is gathered again.
    """
    root = of_root(step, rank)
    stays = step.layout.pp == 1
    forward = root.gather + root.unpack
    backward = root.reduce + root.pack + (0.0 if stays else forward)
    if not step.how.overlaps_gradients:  # every layer's are waited for already
        return forward, backward
    for stage in filter(None, rank.layers):
        first, last = (of_layer(step, moe=stage[i][0]) for i in (0, -1))
        forward += first.gather
        backward += first.reduce + (0.0 if stays else last.gather)
    return forward, backward


def _layer(step: TimedStep, moe: bool, recomputes: bool) -> StageTime:
    """One layer, recomputed or not, and what it waits for: ZeRO's messages, the host."""
    config, layout, machine, how = step.config, step.layout, step.machine, step.how
    piece = LayerPiece.of(config, layout, moe)
    time = layer_time(config, piece, machine, how)
    forward, backward = sum(time.forward.values()), sum(time.backward.values())
    again = 0.0
    if recomputes and layout.recompute == "full":
        again = forward
    elif recomputes and layout.recompute == "selective":
        if how.selective == "operators":
            again = every_second_seconds(config, piece, machine, how)
        elif not how.flash_attention:
            again = time.forward["attention"]
    parts = {name: time.forward[name] + time.backward[name] for name in time.forward}
    if again:
        parts["recomputed"] = again
    backward += again
    if how.in_every_micro_batch(layout):
        unit = of_layer(step, moe)
        forward, backward = forward + unit.unpack, backward + unit.unpack + unit.pack
        wait_f = _hidden(how, forward, unit.gather)
        wait_b = _hidden(how, backward, unit.gather + unit.reduce)
        parts["zero copies"] = 2 * unit.unpack + unit.pack
        parts["zero traffic"] = wait_f + wait_b
        forward, backward = forward + wait_f, backward + wait_b
    if recomputes and layout.recompute == "full" and how.offload_activations:
        # The layer's input leaves behind its forward, and comes back behind another's backward.
        size = how.activation_bytes * config.d_model * piece.tokens
        away = machine.host_seconds(size / cut_of_whole(layout))
        wait_f, wait_b = max(0.0, away - forward), max(0.0, away - backward)
        parts["waiting for offloads"] = wait_f + wait_b
        forward, backward = forward + wait_f, backward + wait_b
    if how.offload_parameters:
        # A layer's parameters come behind the one before it, in forward and in backward.
        arrive = _parameters_arrive(step, moe)
        hidden = how.offload_overlaps
        wait_f = max(0.0, arrive - forward) if hidden else arrive
        wait_b = max(0.0, arrive - backward) if hidden else arrive
        parts["waiting for offloads"] = parts.get("waiting for offloads", 0.0) + wait_f + wait_b
        forward, backward = forward + wait_f, backward + wait_b
    # Kernels are launched ahead, and the queue is deep: the slower of both sets the pace.
    passes = 1 if recomputes and layout.recompute == "full" else 0
    more = how.more_launches(config, layout)
    waits_f = max(0.0, how.host_seconds + more - forward)
    waits_b = max(0.0, (2 + passes) * how.host_seconds + (1 + passes) * more - backward)
    parts["waiting for the host"] = waits_f + waits_b
    weight = time.backward["matrices"] / 2
    return StageTime(parts, forward + waits_f, backward + waits_b, weight)


def _parameters_arrive(step: TimedStep, moe: bool) -> float:
    """Seconds in which this rank's part of a layer's parameters comes to the device, from the host
    or through it from files."""
    layout, machine, how = step.layout, step.machine, step.how
    parts = copies(step.layers[moe], layout)
    numel = sum(numel / (ways if layout.zero == 3 else 1) for numel, ways, _ in parts)
    size = how.activation_bytes * numel
    files = size / machine.file_bandwidth if how.offload_to_files else 0.0
    return max(machine.host_seconds(size), files)


def _hidden(how, compute: float, traffic: float) -> float:
    """What messages behind a layer's computation add to it."""
    return together(compute, traffic) - compute if how.overlaps_gradients else traffic
