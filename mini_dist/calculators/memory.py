"""What fills a device's memory while a model trains, byte by byte, as a waterfall.

    peak = model states (parameters, gradients, optimizer)                 all the time
         + saved activations of the micro-batches in flight                while a step runs
         + the larger of: the loss and its logits | one layer's backward   at the worst moment
         + buffers, and what lies outside the allocator                    the framework's

`rank_memory` does this for one rank, `peak_memory` for the fullest rank of the pipeline.  Bytes
here are the allocator's (torch.cuda.max_memory_allocated); `device_memory` adds what nvidia-smi
sees on top.

Sources: [ZeRO] Rajbhandari et al. 2020; [K22] Korthikanti et al. 2022, "Reducing activation
recomputation"; [N21] Narayanan et al. 2021; [Flash] Dao et al. 2022; [code] the framework's source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..config import Layout, ModelConfig
from .frameworks import Framework, framework
from .lines import Breakdown, Line
from .parameters import (
    held_by_layer,
    held_outside,
    layer_weights,
    layers_of_stage,
    parameters_of_rank,
    stages_of_rank,
)

SHARDED_FROM = {"parameters": 3, "gradients": 2, "optimizer": 1}  # the ZeRO stage that cuts it


def model_states(
    parameters: float,
    shards: int = 1,
    zero: int = 0,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> Breakdown:
    """2 Psi + 2 Psi + K Psi bytes, and what each ZeRO stage divides by the `shards` ranks of the
    data-parallel group ([ZeRO] figure 1 and table 1)."""
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={zero!r} is not a stage: give 0, 1, 2 or 3.")
    if not shards >= 1:
        raise ValueError(f"shards={shards!r} is too small: give 1 or more.")
    lines = []
    for (kind, stage), each in zip(
        SHARDED_FROM.items(), (parameter_bytes, gradient_bytes, optimizer_bytes)
    ):
        cut = shards if zero >= stage else 1
        lines.append(
            Line(
                kind,
                each * parameters / cut,
                "bytes",
                f"{each:g} P" + (f" / {shards}" if cut > 1 else ""),
                "[ZeRO] section 3.1, table 1",
            )
        )
    return Breakdown("model states", tuple(lines))


@dataclass(frozen=True)
class Saved:
    """One tensor that forward keeps for backward, in bytes a token of this rank."""

    name: str
    bytes_per_token: float
    formula: str
    is_scores: bool = False  # selective recompute does not keep it


def layer_activations(
    config: ModelConfig, layout: Layout, how: str | Framework = "megatron-core", moe: bool = False
) -> tuple[Saved, ...]:
    """What one layer keeps without recompute ([K22] section 4, generalised).

    For GPT (K = N, F = 4 D, gelu, dropout, eager attention) the sum is [K22]'s
    s b h (34 + 5 a s / h), and with tp and sequence parallel its table 2.
    """
    return _layer_activations(config, layout.tp, layout.sequence_parallel, framework(how), moe)


@lru_cache(maxsize=4096)
def _layer_activations(config, tp, sequence_parallel, how, moe) -> tuple[Saved, ...]:
    e, t = how.activation_bytes, tp
    D, N, K, H, S = (
        config.d_model,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.seq_len,
    )
    t_kv = min(t, K)
    whole = t if sequence_parallel else 1  # tp leaves these whole unless the sequence is cut
    cut = "/t" if whole > 1 else ""
    mask = how.mask_bytes if config.dropout else 0
    inputs, cut_in = (1, "") if how.keeps_gathered else (whole, cut)
    saved = [
        Saved("norm inputs", 2 * e * D / whole, f"2 e D{cut}"),
        Saved("attention input", e * D / inputs, f"e D{cut_in}"),
    ]
    if config.is_mla:
        R, Hv, latent = config.rope_head_dim, config.v_head_dim, config.kv_lora_rank
        saved += [
            Saved(
                "latents",
                e * (2 * config.q_lora_rank + 2 * latent + R) / whole,
                f"e (2 r_q + 2 r_kv + R){cut}, before and after their norms",
            ),
            Saved("queries, keys", 2 * e * N * (H + R) / t, "2 e N (H + R)/t"),
            Saved("values", e * N * Hv / t, "e N Hv/t"),
        ]
        out = N * Hv
    else:
        saved += [
            Saved("queries, keys", e * (N * H / t + K * H / t_kv), "e (N + K) H/t"),
            Saved("values", e * K * H / t_kv, "e K H/t"),
        ]
        out = N * H
    if how.flash_attention:
        saved.append(Saved("softmax statistics", 4 * N / t, "4 N/t [Flash]", is_scores=True))
    else:
        each = e + (e + mask if config.dropout else 0)
        saved.append(Saved("attention scores", each * N * S / t, f"{each:g} N S/t", is_scores=True))
    saved.append(Saved("attention output", e * out / t, "e N H/t"))

    def ffn(name: str, d_ffn: float, visits: float = 1) -> list[Saved]:
        inner = 1 if config.activation == "gelu" else 2 if how.fused_activation else 3
        k = f"{visits:g} " if visits != 1 else ""
        return [
            Saved(f"{name} hidden", visits * inner * e * d_ffn / t, f"{k}{inner} e F/t"),
            Saved(f"{name} activated", visits * e * d_ffn / t, f"{k}e F/t"),
        ]

    saved.append(Saved("ffn input", e * D / inputs, f"e D{cut_in}"))
    if moe:
        k = config.top_k
        # Balanced routing: a rank's experts see as many token copies as the rank sent out.
        saved += [
            Saved("router", 3 * 4 * config.num_experts / whole, f"3 * 4 E{cut}, in fp32"),
            Saved("dispatched tokens", e * k * D / whole, f"e k D{cut}"),
            *ffn("experts", config.d_expert, k),
            Saved("expert outputs", e * k * D / whole, f"e k D{cut}"),
        ]
        if config.num_shared_experts:
            saved += ffn("shared experts", config.num_shared_experts * config.d_expert)
    else:
        saved += ffn("ffn", config.d_ffn)
    if mask:
        saved.append(Saved("dropout masks", mask * 2 * D / whole, f"{2 * mask:g} D{cut}"))
    if how.plain_modules:
        saved += _plain_modules(config, how, whole, t, moe)
    return tuple(saved)


def _plain_modules(config, how, whole, t, moe) -> list[Saved]:
    """What fused kernels would not keep, found by the ledger of the course's own model."""
    saved, e = [], how.activation_bytes
    if config.norm == "rmsnorm":
        saved.append(Saved("normalised inputs", 2 * e * config.d_model / whole, "2 e D"))
    if config.positions == "rotary" and how.flash_attention:
        # Of turned heads the kernel keeps its output head by head, beside the rows made from it.
        each = e * config.num_heads * config.head_dim / t
        saved.append(Saved("output by heads", each, "e N H/t", is_scores=True))
    if moe:
        saved.append(
            Saved("weighted expert outputs", e * config.top_k * config.d_model / whole, "e k D")
        )
    return saved


def micro_batches_in_flight(layout: Layout, pp_rank: int) -> float:
    """Micro-batches whose activations a pipeline rank holds at its fullest, in whole passes
    through the rank (a chunk of an interleaved schedule counts 1 / num_chunks)."""
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


# Zero-bubble schedules hold as much on every rank (Qi et al. 2023 table 1; DualPipe's README).
AT_MOST_IN_FLIGHT = {
    "zb_h1": lambda p: p,
    "zb_h2": lambda p: 2 * p - 1,
    "zb_v": lambda p: p,
    "dualpipe_v": lambda p: p + 0.5,
}


def rank_memory(
    config: ModelConfig, layout: Layout, how: str | Framework = "megatron-core", pp_rank: int = 0
) -> Breakdown:
    """The peak of one rank at position `pp_rank` of its pipeline, as a waterfall of lines.

    Raises ValueError when the layout cannot cut the model.
    """
    layout.check(config)
    if not 0 <= pp_rank < layout.pp:
        raise ValueError(
            f"pp_rank={pp_rank} is not a stage of pp={layout.pp}: give 0 to {layout.pp - 1}."
        )
    how = framework(how)
    states = _states(config, layout, how, pp_rank)
    running = _saved_activations(config, layout, how, pp_rank) + _worst_moment(
        config, layout, how, pp_rank
    )
    if not how.gradient_buffers and layout.num_micro_batches == 1:
        states, running = _gradients_in_turn(config, layout, how, states, running)
    return Breakdown(f"memory of pipeline rank {pp_rank}", (*states, *running))


def peak_memory(
    config: ModelConfig, layout: Layout, how: str | Framework = "megatron-core"
) -> Breakdown:
    """The waterfall of the fullest pipeline rank.

    Only the first, the second and the last can be it: towards the end ranks hold fewer
    micro-batches, and no rank holds more layers than the first two.
    """
    return max(
        (rank_memory(config, layout, how, rank) for rank in {*_fullest(layout)}),
        key=lambda waterfall: waterfall.total,
    )


def _fullest(layout: Layout) -> tuple[int, int, int]:
    return 0, min(1, layout.pp - 1), layout.pp - 1


def states_of_all(
    config: ModelConfig, layouts: Sequence[Layout], how: str | Framework = "megatron-core"
) -> np.ndarray:
    """Bytes of model states on the fullest rank of each layout: [len(layouts)], all at once.

    No peak is below them, so a planner can drop most of what will not fit before it draws up a
    single waterfall.
    """
    how = framework(how)
    cuts: dict[tuple, list[list[float]]] = {}  # [ranks, (dense, experts)], the same at any ZeRO
    for layout in layouts:
        cut = _cut(layout)
        if cut not in cuts:
            held = [parameters_of_rank(config, layout, rank) for rank in _fullest(layout)]
            cuts[cut] = [[float(each.dense), float(each.experts)] for each in held]
    numel = np.array([cuts[_cut(layout)] for layout in layouts])  # [layouts, ranks, 2]
    ways = np.array([(x.dp * x.cp, x.dp * x.cp // x.ep) for x in layouts])[:, None, :]
    zero = np.array([layout.zero for layout in layouts])[:, None, None]
    copies = np.where((zero == 1) | (zero == 2), how.shard_bytes, 0)
    each = {
        "parameters": how.parameter_bytes,
        "gradients": how.gradient_bytes,
        "optimizer": 0 if how.offload_optimizer else how.optimizer_bytes + copies,
    }
    states = sum(
        each[kind] * numel / np.where(zero >= stage, ways, 1)
        for kind, stage in SHARDED_FROM.items()
    )
    return states.sum(-1).max(-1)


def _cut(layout: Layout) -> tuple:
    return layout.pp, layout.num_chunks, layout.schedule, layout.tp, layout.ep


def device_memory(allocated: float, how: str | Framework = "megatron-core") -> float:
    """What the device must have for an allocator's peak of `allocated` bytes."""
    how = framework(how)
    return allocated * (1 + how.fragmentation) + how.outside


def _kept(config, layout, how, moe) -> float:
    """Bytes a token that one layer keeps under the layout's recompute."""
    if layout.recompute == "full":  # its input
        return (
            0.0
            if how.offload_activations
            else how.activation_bytes * config.d_model / _whole(layout)
        )
    return sum(
        item.bytes_per_token
        for item in layer_activations(config, layout, how, moe)
        if layout.recompute == "none" or not item.is_scores
    )


def _states(config, layout, how, pp_rank) -> list[Line]:
    held = parameters_of_rank(config, layout, pp_rank)
    ways = layout.dp * layout.cp
    parts = [("", float(held.dense), ways)]
    if held.experts:
        parts.append((" of experts", float(held.experts), ways // layout.ep))
    stepped = how.optimizer_bytes + (how.shard_bytes if layout.zero in (1, 2) else 0)
    lines = []
    for what, numel, shards in parts:
        for line in model_states(
            numel, shards, layout.zero, how.parameter_bytes, how.gradient_bytes, stepped
        ):
            if line.name == "optimizer" and how.offload_optimizer:
                continue
            lines.append(dataclasses.replace(line, name=line.name + what))
    if layout.zero == 3 and ways > 1:
        # The layer that computes and those on their way; and, all the time, what is outside.
        n = 1 + how.prefetch
        whole = n * held.largest_layer + held_outside(config, layout, pp_rank).total
        lines.append(
            Line(
                "unsharded parameters",
                how.activation_bytes * float(whole),
                "bytes",
                f"{how.activation_bytes:g} ({n} P_layer + P_outside)",
                how.source,
            )
        )
    return lines


def _saved_activations(config, layout, how, pp_rank) -> list[Line]:
    """What forward keeps for backward, of all micro-batches in flight."""
    tokens, whole = _tokens(config, layout), _whole(layout)
    stages, flight = stages_of_rank(layout, pp_rank), micro_batches_in_flight(layout, pp_rank)
    kinds = [pair for stage in stages for pair in layers_of_stage(config, layout, stage)]
    layers = sum(count for _, count in kinds)
    each = sum(count * _kept(config, layout, how, moe) for moe, count in kinds)
    lines = [
        Line(
            "activations",
            flight * tokens * each,
            "bytes",
            f"{flight:g} in flight * {layers} layers * {tokens:g} tokens * {each / layers:.0f}",
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
    """What comes on top when most is held: the loss on the last stage, or one layer's backward."""
    tokens, whole = _tokens(config, layout), _whole(layout)
    e, D, V, t = how.activation_bytes, config.d_model, config.vocab_size, layout.tp
    is_last = layout.num_stages - 1 in stages_of_rank(layout, pp_rank)
    loss = Line(
        "loss and logits",
        tokens * (2 * e * D / whole + how.loss_bytes * V / t) if is_last else 0.0,
        "bytes",
        f"tokens (2 e D + {how.loss_bytes:g} V/t)",
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
    in_layer, of_head = _weight_gradients(config, layout, how, is_last)
    # Without gradient buffers the first gradients come with the layer.
    early = (
        0.0
        if how.gradient_buffers or layout.num_micro_batches > 1
        else how.gradient_bytes * sum(_gradient_sizes(config, layout, is_last))
    )
    at_loss = loss.value + of_head > layer.value + early
    lines = [loss if at_loss else layer]
    if early and not at_loss:
        lines.append(
            Line(
                "gradients",
                early,
                "bytes",
                "the head's and one matrix's: the others come as activations go",
                "autograd [code]",
            )
        )
    scattered = _scattering(config, layout, how, is_last)
    if scattered.value > sum(line.value for line in lines):
        lines = [scattered]
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


def _scattering(config, layout, how, is_last) -> Line:
    """ZeRO-2 and 3 without buffers: a layer's gradients, their flat copy and its reduction, at the
    moment when the layer's own activations are gone."""
    value = 0.0
    if layout.zero >= 2 and not how.gradient_buffers:
        moe = config.is_moe_layer(config.num_layers - 1)
        layer = float(held_by_layer(config, layout, moe).total)
        _, head = _gradient_sizes(config, layout, is_last)
        value = how.gradient_bytes * (3 * layer + head) - _tokens(config, layout) * _kept(
            config, layout, how, moe
        )
    return Line(
        "a layer's gradients, scattered",
        max(0.0, value),
        "bytes",
        "3 g P_layer + g P_head - the layer's activations",
        "mini_dist/zero.py",
    )


def _gradients_in_turn(config, layout, how, states, running) -> tuple[list[Line], list[Line]]:
    """Without buffers gradients come as activations go: most is held either when backward begins,
    or in the optimizer step, when all gradients are there and no activations."""
    others = [line for line in states if not line.name.startswith("gradients")]
    gradients = sum(line.value for line in states) - sum(line.value for line in others)
    largest, head = _gradient_sizes(config, layout, is_last=True)
    step = Line(
        "optimizer's temporaries",
        2 * how.gradient_bytes * max(largest, head),
        "bytes",
        "2 * largest matrix",
        "torch.optim [code]",
    )
    if gradients + step.value > sum(line.value for line in running):
        return states, [step]
    return others, running


def _tokens(config, layout) -> float:
    """Tokens of one micro-batch on one rank."""
    return layout.micro_batch_size * config.seq_len / layout.cp


def _whole(layout) -> int:
    """What divides activations that tp leaves whole: only sequence parallel does."""
    return layout.tp if layout.sequence_parallel else 1


def _backward_of_layer(config, layout, how) -> float:
    """Bytes a token while one layer runs backward, beyond what forward saved."""
    e, t = how.activation_bytes, layout.tp
    inner = 2 if config.activation == "swiglu" else 1
    hidden = config.d_ffn if config.num_moe_layers < config.num_layers else 0
    if config.num_moe_layers:
        hidden = max(hidden, config.top_k * config.d_expert)
    extra = inner * e * hidden / t + e * config.d_model / _whole(layout)
    if not how.flash_attention:
        extra = max(extra, 2 * e * config.num_heads * config.seq_len / t)
    if layout.recompute == "full":
        kinds = {config.is_moe_layer(0), config.is_moe_layer(config.num_layers - 1)}
        extra += max(
            sum(item.bytes_per_token for item in layer_activations(config, layout, how, moe))
            for moe in kinds
        )
    elif layout.recompute == "selective" and not how.flash_attention:
        each = e + (e + how.mask_bytes if config.dropout else 0)
        extra += each * config.num_heads * config.seq_len / t
    return extra


def _weight_gradients(config, layout, how, is_last) -> tuple[float, float]:
    """Bytes of weight gradients on their way: in a layer, and of the head at the loss."""
    if how.weight_gradients == "none":
        return 0.0, 0.0
    each = min(how.parameter_bytes, how.activation_bytes)
    largest, head = _gradient_sizes(config, layout, is_last)
    if how.weight_gradients == "largest":
        return each * max(largest, head), 0.0
    kinds = {config.is_moe_layer(0), config.is_moe_layer(config.num_layers - 1)}
    return each * sum(_matrix_sizes(config, layout.tp, moe)[1] for moe in kinds), each * head


def _gradient_sizes(config, layout, is_last: bool) -> tuple[float, float]:
    """Numbers of the largest matrix of a layer, and of the head where it is."""
    kinds = {config.is_moe_layer(0), config.is_moe_layer(config.num_layers - 1)}
    return (
        max(_matrix_sizes(config, layout.tp, moe)[0] for moe in kinds),
        config.vocab_size * config.d_model / layout.tp if is_last else 0.0,
    )


@lru_cache(maxsize=4096)
def _matrix_sizes(config, tp, moe) -> tuple[float, float]:
    """Numbers of the largest matrix of a layer, and of one of each (experts share theirs)."""
    sizes = [
        float(weight.numel_per_rank(tp, 1, config.num_kv_heads)) / weight.experts
        for weight in layer_weights(config, moe)
        if weight.is_matmul
    ]
    return max(sizes), sum(sizes)
