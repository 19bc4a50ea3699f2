"""What forward saves of a layer for its backward, tensor by tensor, in bytes per token.

Sources: [K22] Korthikanti et al. 2022, "Reducing activation recomputation"; [Flash] Dao et al.
2022; for the course's own model, its ledger.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..config import Layout, ModelConfig
from .frameworks import Framework, framework
from .models import model
from .parameters import every_second, layer_weights


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that forward saves for backward, in bytes per token of this rank."""

    name: str
    bytes_per_token: float
    formula: str
    is_scores: bool = False  # selective recomputation does not save it


def layer_activations(
    config: ModelConfig | str,
    layout: Layout,
    how: str | Framework = "megatron-core",
    moe: bool = False,
) -> tuple[SavedTensor, ...]:
    """Return what one layer saves without recomputation ([K22] section 4, generalized).

    For GPT (K = N, F = 4 D, gelu, dropout, eager attention) the sum is [K22]'s
    s b h (34 + 5 a s / h), and with tp and sequence parallel its table 2.
    """
    cuts = layout.tp, layout.etp, layout.sequence_parallel
    return _layer_activations(model(config), *cuts, framework(how), moe)


@lru_cache(maxsize=4096)
def _layer_activations(config, tp, etp, sequence_parallel, how, moe) -> tuple[SavedTensor, ...]:
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
        SavedTensor("norm inputs", 2 * e * D / whole, f"2 e D{cut}"),
        SavedTensor("attention input", e * D / inputs, f"e D{cut_in}"),
    ]
    if config.is_mla:
        R, Hv, latent = config.rope_head_dim, config.v_head_dim, config.kv_lora_rank
        saved += [
            SavedTensor(
                "latents",
                e * (2 * config.q_lora_rank + 2 * latent + R) / whole,
                f"e (2 r_q + 2 r_kv + R){cut}, before and after their norms",
            ),
            SavedTensor("queries, keys", 2 * e * N * (H + R) / t, "2 e N (H + R)/t"),
            SavedTensor("values", e * N * Hv / t, "e N Hv/t"),
        ]
        out = N * Hv
    else:
        saved += [
            SavedTensor("queries, keys", e * (N * H / t + K * H / t_kv), "e (N + K) H/t"),
            SavedTensor("values", e * K * H / t_kv, "e K H/t"),
        ]
        out = N * H
    if how.flash_attention:
        saved.append(SavedTensor("softmax statistics", 4 * N / t, "4 N/t [Flash]", is_scores=True))
    else:
        each = e + (e + mask if config.dropout else 0)
        saved.append(
            SavedTensor("attention scores", each * N * S / t, f"{each:g} N S/t", is_scores=True)
        )
    saved.append(SavedTensor("attention output", e * out / t, "e N H/t"))

    def ffn(name: str, d_ffn: float, visits: float = 1) -> list[SavedTensor]:
        inner = 1 if config.activation == "gelu" else 2 if how.fused_activation else 3
        k = f"{visits:g} " if visits != 1 else ""
        return [
            SavedTensor(f"{name} hidden", visits * inner * e * d_ffn / t, f"{k}{inner} e F/t"),
            SavedTensor(f"{name} activated", visits * e * d_ffn / t, f"{k}e F/t"),
        ]

    saved.append(SavedTensor("ffn input", e * D / inputs, f"e D{cut_in}"))
    if moe:
        k = config.top_k
        rows = t // etp if how.plain_modules else whole  # ours keep what is gathered for an expert
        # Balanced routing: a rank's experts see as many token copies as the rank sent out.
        saved += [
            SavedTensor("router", 3 * 4 * config.num_experts / whole, f"3 * 4 E{cut}, in fp32"),
            SavedTensor("dispatched tokens", e * k * D / rows, f"e k D{cut if rows > 1 else ''}"),
            *ffn("experts", config.d_expert, k),
            SavedTensor("expert outputs", e * k * D / whole, f"e k D{cut}"),
        ]
        if config.num_shared_experts:
            saved += ffn("shared experts", config.d_shared)
    else:
        saved += ffn("ffn", config.d_ffn)
    if mask:
        saved.append(SavedTensor("dropout masks", mask * 2 * D / whole, f"{2 * mask:g} D{cut}"))
    if how.plain_modules:
        saved += _plain_modules(config, how, whole, t, moe)
    return tuple(saved)


def _plain_modules(config, how, whole, t, moe) -> list[SavedTensor]:
    """List what fused kernels would not save, found by the ledger of the course's own model."""
    saved, e = [], how.activation_bytes
    if config.norm == "rmsnorm":
        saved.append(SavedTensor("normalised inputs", 2 * e * config.d_model / whole, "2 e D"))
    if config.positions == "rotary" and how.flash_attention and config.num_heads > t:
        # With rotated heads the kernel saves its output head by head, in addition to the rows made
        # from it; with a single head both are the same memory.
        each = e * config.num_heads * config.head_dim / t
        saved.append(SavedTensor("output by heads", each, "e N H/t [Flash]", is_scores=True))
    if moe:
        saved.append(
            SavedTensor(
                "weighted expert outputs", e * config.top_k * config.d_model / whole, "e k D"
            )
        )
    return saved


def kept_of_layer(config, layout, how, moe, again: bool = True) -> float:
    """Return the bytes per token that a layer saves under the layout's recomputation."""
    recompute = layout.recompute if again else "none"
    if recompute == "full":  # its input
        return (
            0.0
            if how.offload_activations
            else how.activation_bytes * config.d_model / cut_of_whole(layout)
        )
    if recompute == "selective" and how.selective == "operators":
        return _every_second_output(config, layout, how, moe)
    return sum(
        item.bytes_per_token
        for item in layer_activations(config, layout, how, moe)
        if recompute == "none" or not item.is_scores
    )


def _every_second_output(config, layout, how, moe) -> float:
    """Return the layer's input, the attention's output and statistics, and the output of every
    second matrix (parallelize_llama.py of torchtitan [code])."""
    e, t = how.activation_bytes, layout.tp
    dropped = every_second(config, moe)
    kept = e * config.d_model / cut_of_whole(layout)
    kept += (
        e * config.num_heads * (config.v_head_dim or config.head_dim) + 4 * config.num_heads
    ) / t
    for weight in layer_weights(config, moe):
        if weight.is_matmul and weight not in dropped:
            ways = cut_of_whole(layout) if weight.cut == "row" else t
            kept += weight.visits * e * weight.shape[1] / ways
    return kept


def tokens_of_micro_batch(config, layout) -> float:
    """Return the tokens of one micro-batch on one rank."""
    return layout.micro_batch_size * config.seq_len / layout.cp


def cut_of_whole(layout) -> int:
    """Return the divisor of activations that tp leaves whole; only sequence parallelism has one."""
    return layout.tp if layout.sequence_parallel else 1
