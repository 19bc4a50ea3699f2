"""What each axis of the mesh sends in one step: payload bytes of one rank, as costs.py counts them.

All collectives as rings: (n - 1) / n of the tensor for an all-gather or a reduce-scatter, twice
that for an all-reduce.  Sources: [ZeRO] section 7; [N21] Narayanan et al. 2021 section 2.3 and 4.1;
[K22] Korthikanti et al. 2022 section 4.2.2; [Ring] Liu et al. 2023; [GShard] Lepikhin et al. 2020.
"""

from __future__ import annotations

from ..config import Layout, ModelConfig, cut_by
from ..fields import checks_kinds
from .frameworks import Framework, framework
from .lines import Breakdown, Line
from .models import model
from .parameters import (
    held_outside,
    layer_weights,
    layers_of_stage,
    outer_weights,
    parameters_of_rank,
    stages_of_rank,
)


@checks_kinds
def step_volume(
    config: ModelConfig | str,
    layout: Layout,
    how: str | Framework = "megatron-core",
    pp_rank: int = 0,
) -> Breakdown:
    """Bytes that a rank at pipeline position `pp_rank` sends in one optimizer step, axis by axis.

    Left out: the few bytes of `small_messages`.  Raises ValueError when the layout cannot cut the
    model.
    """
    config, how = model(config), framework(how)
    cut_by(layout, config)
    stages = stages_of_rank(layout, pp_rank)
    kinds = [pair for stage in stages for pair in layers_of_stage(config, layout, stage)]
    layers = sum(count for _, count in kinds)
    moe_layers = sum(count for moe, count in kinds if moe)
    tokens = layout.micro_batch_size * config.seq_len / layout.cp
    e, D, t, m = how.activation_bytes, config.d_model, layout.tp, layout.num_micro_batches
    message = e * tokens * D  # one activation [B, S/cp, D]
    recomputed = sum(layout.num_recomputed(count) for _, count in kinds)
    # Forward's collectives run once more; of a share of the layers where not all are recomputed.
    again = recomputed / layers if layout.recompute == "full" and layers else 0
    lines = _dp(config, layout, how, pp_rank)

    if t > 1:
        # Two regions a layer, entered and left by an all-reduce (or a gather and a scatter) each
        # way; embedding and head have one way only. One gather or scatter is a "pass". Experts that
        # are cut over the same ranks get the rows that all of these have for them, k a token.
        first, last = 0 in stages, layout.num_stages - 1 in stages
        shared = moe_layers if config.num_shared_experts else 0
        regions = 2 * layers - moe_layers + shared
        rows = moe_layers * config.top_k
        of_experts = rows if layout.etp == t else 0
        passes = 2 * ((2 + again) * (regions + of_experts) + first + last)
        if layout.sequence_parallel and not how.keeps_gathered:
            passes += regions + last  # backward gathers what the matrices need once more
        lines.append(
            Line(
                "tp",
                m * passes * (t - 1) / t * message,
                "bytes",
                f"{m} micro-batches * {passes:g} passes * (t - 1)/t * e B S D",
                "[N21] section 2.3, [K22] section 4.2.2",
            )
        )
    if 1 < layout.etp < t and moe_layers:  # the same of a t-th of the rows
        passes = 2 * (2 + again) * rows
        lines.append(
            Line(
                "etp",
                m * passes * (layout.etp - 1) / t * message,
                "bytes",
                f"{m} micro-batches * {passes:g} passes * (etp - 1)/t * e B S D",
                "[K22] section 4.2.2, balanced routing",
            )
        )
    if layout.cp > 1:
        kv = 2 * e * tokens * config.num_kv_heads / min(t, config.num_kv_heads) * config.head_dim
        passes = 1 + again + 2  # forward; backward sends keys and values, and their gradients
        lines.append(
            Line(
                "cp",
                m * layers * passes * (layout.cp - 1) * kv,
                "bytes",
                f"{m} * {layers} layers * {passes:g} (cp - 1) * 2 e B S/cp K H",
                "[Ring]",
            )
        )
    if layout.ep > 1 and moe_layers:
        cut = layout.ep * (t if layout.sequence_parallel else 1)
        exchanges = (4 + 2 * again) * moe_layers  # dispatch and combine, forward and backward
        lines.append(
            Line(
                "ep",
                m * exchanges * (layout.ep - 1) / cut * config.top_k * message,
                "bytes",
                f"{m} * {exchanges:g} all-to-alls * (ep - 1)/ep * k e B S D",
                "[GShard], balanced routing",
            )
        )
    if layout.pp > 1:
        forward = sum(stage < layout.num_stages - 1 for stage in stages)
        backward = sum(stage > 0 for stage in stages)
        if layout.num_chunks == 2 and layout.schedule != "interleaved":
            # The V turns on its last rank: that message stays inside.
            turns = pp_rank == layout.pp - 1
            forward, backward = forward - turns, backward - turns
        cut = t if layout.sequence_parallel else 1
        lines.append(
            Line(
                "pp",
                m * (forward + backward) * message / cut,
                "bytes",
                f"{m} * ({forward} forward + {backward} backward) * e B S D",
                "[N21] section 4.1",
            )
        )
    return Breakdown(f"bytes that pipeline rank {pp_rank} sends in a step", tuple(lines))


@checks_kinds
def small_messages(
    config: ModelConfig | str, layout: Layout, how: str | Framework = "course", pp_rank: int = 0
) -> Breakdown:
    """Bytes of the messages of a step that `step_volume` leaves out, as this library sends them.

    Payload bytes of one rank at pipeline position `pp_rank`, on average over the ranks there: an
    all-reduce of few bytes is a star, in which one rank sends more than the others.  "world" is
    all ranks together.  Left out: what balances experts.
    """
    config, how = model(config), framework(how)
    cut_by(layout, config)
    m, t, number = layout.num_micro_batches, layout.tp, 4  # bytes of a float32
    stages = stages_of_rank(layout, pp_rank)
    first, last = 0 in stages, layout.num_stages - 1 in stages
    lines = []

    def add(name: str, nbytes: float, ranks: int, formula: str) -> None:
        sent = 2 * (ranks - 1) / ranks * nbytes
        lines.append(Line(name, sent, "bytes", f"2 (n - 1)/n * {formula}"))

    if (ways := layout.dp * layout.cp) > 1:
        add("dp", 8 + number, ways, "the number of tokens (int64) and the loss")
    if layout.world_size > 1:
        add("world", number, layout.world_size, "the squares for the norm")
    if layout.pp > 1 and last:
        told = (layout.pp - 1) * m * number
        lines.append(Line("pp", told, "bytes", f"{layout.pp - 1} ranks are told {m} losses"))
    if layout.pp > 1 and config.tied_embedding and first != last:
        shared = how.reduce_bytes * config.vocab_size * config.d_model / t
        lines.append(Line("pp", shared, "bytes", "g V D / t, gradients of the tied embedding"))
    if t > 1 and last:
        tokens = layout.micro_batch_size * config.seq_len // layout.cp
        add("tp", 3 * number * tokens * m, t, f"{m} micro-batches * 3 numbers a token, the loss")
    if t > 1:
        # ZeRO leaves each rank of dp*cp only its share of these gradients to add up.
        g = how.reduce_bytes / (ways if layout.zero else 1)
        weights = [
            weight
            for stage in stages
            for moe, count in layers_of_stage(config, layout, stage)
            for weight in count * layer_weights(config, moe)
        ]
        weights += outer_weights(config, "first") if first else []
        weights += outer_weights(config, "last") if last else []
        if layout.sequence_parallel:
            partial = sum(weight.numel for weight in weights if weight.cut == "none")
            add("tp", g * partial, t, "g P of norms and biases, found in parts")
        if (holders := t // min(t, config.num_kv_heads)) > 1:
            shared = sum(weight.numel for weight in weights if weight.cut == "kv")
            add("tp", g * shared / config.num_kv_heads, holders, "g P of shared key/value heads")
    return Breakdown(f"small messages of pipeline rank {pp_rank} in a step", tuple(lines))


def crossing_tokens(config: ModelConfig | str, how: str | Framework = "megatron-core") -> float:
    """Tokens of a step from which n ranks send less with ZeRO-3 than as a pipeline of n stages.

    One micro-batch a replica, and x crosses n - 1 borders, forward and back:
    (g + 2 e) P - e P_outside = 2 e T D, times n - 1 on both sides, so n does not matter.
    Where each replica accumulates m micro-batches, m times as many.
    """
    config, how = model(config), framework(how)
    whole = Layout()
    held = float(parameters_of_rank(config, whole, 0).total)
    outside = float(held_outside(config, whole, 0).total)
    e = how.activation_bytes
    return ((how.reduce_bytes + 2 * e) * held - e * outside) / (2 * e * config.d_model)


def _dp(config, layout, how, pp_rank) -> list[Line]:
    """Gradients, and the parameters that ZeRO gathers ([ZeRO] section 7).

    ZeRO-3 gathers a layer once for forward and once for backward, but what is outside the layers
    (embedding, head) only once a micro-batch: it stays from one to the other. Not in a pipeline,
    where other micro-batches come in between: there it is a layer like any other.
    """
    held, outer = parameters_of_rank(config, layout, pp_rank), held_outside(config, layout, pp_rank)
    ways, m, g, e = (
        layout.dp * layout.cp,
        layout.num_micro_batches,
        how.reduce_bytes,
        how.activation_bytes,
    )
    stays = layout.pp == 1
    formula, each, once = {
        0: ("2 g P", 2 * g, 0),
        1: ("g P + e P", g + e, 0),
        2: (f"{m} g P + e P", m * g + e, 0),
        3: (
            f"{m} (g P + 2 e P{' - e P_outside' if stays else ''})",
            m * (g + 2 * e),
            m * e * stays,
        ),
    }[layout.zero]
    lines = []
    for name, numel, outside, size in (
        ("dp", float(held.dense), float(outer.dense), ways),
        ("dp of experts", float(held.experts), 0.0, layout.edp),
    ):
        if size > 1 and numel:
            lines.append(
                Line(
                    name,
                    (each * numel - once * outside) * (size - 1) / size,
                    "bytes",
                    f"({formula}) (n - 1)/n, g = {g:g}, e = {e:g}",
                    "[ZeRO] section 7",
                )
            )
    return lines
