"""What fills a device's memory while a model trains, byte by byte, as a waterfall.

    peak = model states (parameters, gradients, optimizer)                 all the time
         + saved activations of the micro-batches in flight                while a step runs
         + the larger of: the loss and its logits | one layer's backward   at the worst moment
         + buffers, and what lies outside the allocator                    the framework's

`rank_memory` does this for one rank, `peak_memory` for the fullest rank of the pipeline.  Bytes
here are the allocator's (torch.cuda.max_memory_allocated); `device_memory` adds what nvidia-smi
sees on top.  Of this library's own runs ("course") more is known: moments.py.

Sources: [ZeRO] Rajbhandari et al. 2020; [K22] Korthikanti et al. 2022, "Reducing activation
recomputation"; [N21] Narayanan et al. 2021; [Flash] Dao et al. 2022; [code] the framework's source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..config import Layout, ModelConfig, cut_by
from ..fields import at_least, checks_kinds
from .activations import (
    cut_of_whole,
    kept_of_layer,
    layer_activations,
    tokens_of_micro_batch,
)
from .frameworks import Framework, framework
from .lines import Breakdown, Line
from .models import model
from .moments import course_memory
from .parameters import (
    first_alike,
    held_outside,
    layers_of_rank,
    parameters_of_rank,
    stages_of_rank,
)
from .weight_gradients import weight_gradients

SHARDED_FROM = {"parameters": 3, "gradients": 2, "optimizer": 1}  # the ZeRO stage that cuts it


@checks_kinds
def model_states(
    parameters: float,
    shards: int = 1,
    zero: int = 0,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> Breakdown:
    """Return 2 Psi + 2 Psi + K Psi bytes, divided by the `shards` ranks of the data-parallel group
    as the ZeRO stage says ([ZeRO] figure 1 and table 1)."""
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={zero!r} is not a stage: give 0, 1, 2 or 3.")
    at_least("parameters", parameters, 0)
    at_least("shards", shards, 1)
    for kind, each in zip(SHARDED_FROM, (parameter_bytes, gradient_bytes, optimizer_bytes)):
        at_least(f"bytes of {kind}", each, 0)
    each = parameter_bytes, gradient_bytes, optimizer_bytes
    return Breakdown("model states", tuple(_state_lines("", parameters, shards, zero, each)))


def _state_lines(
    what: str, parameters: float, shards: int, zero: int, bytes_each
) -> Iterator[Line]:
    for (kind, stage), each in zip(SHARDED_FROM.items(), bytes_each):
        cut = shards if zero >= stage else 1
        formula = f"{each:g} P" + (f" / {shards}" if cut > 1 else "")
        value = each * parameters / cut
        yield Line(kind + what, value, "bytes", formula, "[ZeRO] section 3.1, table 1")


@checks_kinds
def micro_batches_in_flight(layout: Layout, pp_rank: int) -> float:
    """Micro-batches whose activations a pipeline rank holds at its fullest, in whole passes
    through the rank (a chunk of an interleaved schedule counts 1 / num_chunks)."""
    _checked_rank(layout, pp_rank)
    p, m, v = layout.pp, layout.num_micro_batches, layout.num_chunks
    behind = p - pp_rank
    if layout.schedule == "naive" or p == 1:
        return 1
    if layout.schedule == "gpipe":
        return m
    if layout.schedule == "interleaved":  # warmup: whole rounds of chunks, and the way there
        together = m // max(1, m // p)
        return min(m * v, 2 * (behind - 1) + (v - 1) * together + 1) / v
    if layout.schedule in AT_MOST_IN_FLIGHT:  # weight gradients put off keep activations alive
        return min(m, AT_MOST_IN_FLIGHT[layout.schedule](p))
    return min(m, behind)


def _checked_rank(layout: Layout, pp_rank: int) -> None:
    if not 0 <= pp_rank < layout.pp:
        raise ValueError(
            f"pp_rank={pp_rank!r} is not a stage of pp={layout.pp}: give 0 to {layout.pp - 1}."
        )


# Zero-bubble schedules hold as much on every rank (Qi et al. 2023 table 1; DualPipe's README).
AT_MOST_IN_FLIGHT = {
    "zb_h1": lambda p: p,
    "zb_h2": lambda p: 2 * p - 1,
    "zb_v": lambda p: p,
    "dualpipe_v": lambda p: p + 0.5,
}


@checks_kinds
def rank_memory(
    config: ModelConfig | str,
    layout: Layout,
    how: str | Framework = "megatron-core",
    pp_rank: int = 0,
) -> Breakdown:
    """The peak of one rank at position `pp_rank` of its pipeline, as a waterfall of lines.

    Raises ValueError when the layout cannot cut the model.
    """
    config = model(config)
    cut_by(layout, config)
    _checked_rank(layout, pp_rank)
    how = framework(how)
    how.check(config, layout)
    states = _states(config, layout, how, pp_rank)
    if how.own_runs:
        return course_memory(config, layout, how, pp_rank, states)
    if layout.zero == 3 and layout.dp * layout.cp > 1 or how.offload_parameters:
        states.append(_unsharded(config, layout, how, pp_rank))
    running = _saved_activations(config, layout, how, pp_rank) + _worst_moment(
        config, layout, how, pp_rank
    )
    return Breakdown(f"memory of pipeline rank {pp_rank}", (*states, *running))


def peak_memory(
    config: ModelConfig | str, layout: Layout, how: str | Framework = "megatron-core"
) -> Breakdown:
    """Return the waterfall of the fullest pipeline rank."""
    config = model(config)
    cut_by(layout, config)
    return max(
        (rank_memory(config, layout, how, rank) for rank in _of_each_kind(config, layout, how)),
        key=lambda waterfall: waterfall.total,
    )


def _of_each_kind(config, layout, how) -> list[int]:
    """Of the ranks with as many layers the first: no later one has more micro-batches in flight.
    (What this library holds besides is another on each.)"""
    if framework(how).own_runs:
        return list(range(layout.pp))
    return list(dict.fromkeys(first_alike(config, layout)))


def _ends(layout: Layout) -> tuple[int, int, int]:
    return 0, min(1, layout.pp - 1), layout.pp - 1


def states_of_all(
    config: ModelConfig, layouts: Sequence[Layout], how: str | Framework = "megatron-core"
) -> list[float]:
    """Bytes of model states on the fullest of three ranks, for each layout.

    No peak is below them, so a planner can drop most of what will not fit before it draws up a
    single waterfall.
    """
    how = framework(how)
    cuts: dict[tuple, list[tuple[float, float]]] = {}  # of each rank; the same at any ZeRO
    fullest = []
    for layout in layouts:
        cut = _cut(layout)
        if cut not in cuts:
            held = [parameters_of_rank(config, layout, rank) for rank in _ends(layout)]
            cuts[cut] = [(float(each.dense), float(each.experts)) for each in held]
        each = {
            "parameters": how.parameter_bytes,
            "gradients": how.gradient_bytes,
            "optimizer": how.optimizer_bytes + how.shard_bytes * (layout.zero in (1, 2)),
        }
        each |= dict.fromkeys(offloaded(how), 0)
        ways = layout.dp * layout.cp  # ranks that may share the states of what is dense
        dense = experts = 0.0  # bytes per parameter
        for kind, stage in SHARDED_FROM.items():
            shared = layout.zero >= stage
            dense += each[kind] / (ways if shared else 1)
            experts += each[kind] / (layout.edp if shared else 1)
        fullest.append(max(dense * of_all + experts * of_some for of_all, of_some in cuts[cut]))
    return fullest


def _cut(layout: Layout) -> tuple:
    return layout.pp, layout.num_chunks, layout.schedule, layout.tp, layout.ep, layout.etp


@checks_kinds
def device_memory(allocated: float, how: str | Framework = "megatron-core") -> float:
    """What the device must have for an allocator's peak of `allocated` bytes."""
    how = framework(how)
    at_least("allocated", allocated, 0)
    return allocated * (1 + how.fragmentation) + how.outside


def _states(config, layout, how, pp_rank) -> list[Line]:
    held = parameters_of_rank(config, layout, pp_rank)
    ways = layout.dp * layout.cp
    parts = [("", float(held.dense), ways)]
    if held.experts:
        parts.append((" of experts", float(held.experts), layout.edp))
    stepped = how.optimizer_bytes + (how.shard_bytes if layout.zero in (1, 2) else 0)
    each, away = (how.parameter_bytes, how.gradient_bytes, stepped), offloaded(how)
    lines = [
        line
        for what, numel, shards in parts
        for line in _state_lines(what, numel, shards, layout.zero, each)
        if line.name.split()[0] not in away
    ]
    if how.offload_gradients and not how.own_runs:  # of the layer that has them, and one's leaving
        value = 2 * how.gradient_bytes * float(held.largest_layer)
        formula = f"2 * {how.gradient_bytes:g} P_layer"
        lines.append(Line("gradients on their way", value, "bytes", formula, "Ren et al. 2021"))
    return lines


def offloaded(how: Framework) -> set[str]:
    """The kinds of model states that are not on the device."""
    kinds = {
        "optimizer": how.offload_optimizer,
        "gradients": how.offload_gradients,
        "parameters": how.offload_parameters,
    }
    return {kind for kind, away in kinds.items() if away}


def _unsharded(config, layout, how, pp_rank) -> Line:
    """ZeRO-3: the layer that computes, those on their way and, all the time, what is outside."""
    if layout.zero == 3 and not how.in_every_micro_batch(layout):  # all, and their gradients
        numel = float(parameters_of_rank(config, layout, pp_rank).total)
        each = how.activation_bytes + how.reduce_bytes
        said = f"{how.activation_bytes:g} P, and {how.reduce_bytes:g} P of gradients"
        return Line("whole in a pipeline", each * numel, "bytes", said, how.source)
    held, n = parameters_of_rank(config, layout, pp_rank), 1 + how.prefetch
    whole = n * held.largest_layer + held_outside(config, layout, pp_rank).total
    return Line(
        "unsharded parameters",
        how.activation_bytes * float(whole),
        "bytes",
        f"{how.activation_bytes:g} ({n} P_layer + P_outside)",
        how.source,
    )


def _saved_activations(config, layout, how, pp_rank) -> list[Line]:
    """Return what forward saves for backward, of all micro-batches in flight."""
    tokens, whole = tokens_of_micro_batch(config, layout), cut_of_whole(layout)
    stages, flight = stages_of_rank(layout, pp_rank), micro_batches_in_flight(layout, pp_rank)
    kinds = [kind for stage in layers_of_rank(config, layout, pp_rank) for kind in stage]
    layers = sum(count for _, _, count in kinds)
    kept = {kind[:2]: kept_of_layer(config, layout, how, *kind[:2]) for kind in set(kinds)}
    each = sum(count * kept[moe, again] for moe, again, count in kinds)
    mean = each / max(1, layers)
    lines = [
        Line(
            "activations",
            flight * tokens * each,
            "bytes",
            f"{flight:g} in flight * {layers} layers * {tokens:g} tokens * {mean:.0f}",
            "[K22] section 4, table 2",
        )
    ]
    if config.dropout and 0 in stages:
        lines.append(
            Line(
                "embedding dropout",
                how.mask_bytes * flight * tokens * config.d_model / whole,
                "bytes",
                f"{how.mask_bytes:g} D * in flight * tokens",
                "[K22] section 4.3",
            )
        )
    return lines


def _worst_moment(config, layout, how, pp_rank) -> list[Line]:
    """Return the extra bytes at the peak: the loss on the last stage, or one layer's backward."""
    tokens, whole = tokens_of_micro_batch(config, layout), cut_of_whole(layout)
    e, D, V, t = how.activation_bytes, config.d_model, config.vocab_size, layout.tp
    is_last = layout.num_stages - 1 in stages_of_rank(layout, pp_rank)
    each = (how.loss_bytes_cut if t > 1 else 0) or how.loss_bytes
    loss = Line(
        "loss and logits",
        tokens * (2 * e * D / whole + each * V / t) if is_last else 0.0,
        "bytes",
        f"tokens (2 e D + {each:g} V/t)",
        "[K22] section 4.3",
    )
    again = " + what the layer recomputes" if layout.recompute != "none" else ""
    layer = Line(
        "one layer's backward",
        tokens * _backward_of_layer(config, layout, how) if how.backward else 0.0,
        "bytes",
        f"gradients of the ffn's hidden{again}",
        "largest moment of backward [code]",
    )
    in_layer, of_head = weight_gradients(config, layout, how, is_last)
    at_loss = loss.value + of_head > layer.value
    lines = [loss if at_loss else layer]
    if t > 1 and layout.sequence_parallel and how.backward:
        lines.append(
            Line(
                "gathered sequence",
                2 * e * D * tokens,
                "bytes",
                "2 e D tokens",
                "[K22] section 4.2.2",
            )
        )
    passing = in_layer + (of_head if at_loss else 0.0)
    which = {"none": "", "largest": "largest matrix", "one_layer": "one layer's matrices"}
    lines.append(
        Line(
            "weight gradients in passing",
            passing,
            "bytes",
            which[how.weight_gradients] + (" + the head's" if at_loss and of_head else ""),
            how.source,
        )
    )
    return [line for line in lines if line.value]


def _backward_of_layer(config, layout, how) -> float:
    """Return the bytes per token while one layer runs backward, beyond what forward saved."""
    e, t = how.activation_bytes, layout.tp
    inner = 2 if config.activation == "swiglu" else 1
    hidden = config.d_ffn if config.num_moe_layers < config.num_layers else 0
    if config.num_moe_layers:
        hidden = max(hidden, config.top_k * config.d_expert)
    extra = inner * e * hidden / t + e * config.d_model / cut_of_whole(layout)
    if not how.flash_attention:
        extra = max(extra, 2 * e * config.num_heads * config.seq_len / t)
    if layout.recompute == "full":
        kinds = {config.is_moe_layer(0), config.is_moe_layer(config.num_layers - 1)}
        extra += max(
            sum(item.bytes_per_token for item in layer_activations(config, layout, how, moe))
            for moe in kinds
        )
    elif layout.recompute == "selective" and how.selective == "operators":
        moe = config.is_moe_layer(config.num_layers - 1)
        whole = sum(item.bytes_per_token for item in layer_activations(config, layout, how, moe))
        extra += max(0.0, whole - kept_of_layer(config, layout, how, moe))
    elif layout.recompute == "selective" and not how.flash_attention:
        each = e + (e + how.mask_bytes if config.dropout else 0)
        extra += each * config.num_heads * config.seq_len / t
    return extra
