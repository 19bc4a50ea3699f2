"""A plain GPT on one device: every strategy of the course shards it and is checked against it.

    model = GPT(ModelConfig(d_model=128, num_layers=3), seed=0)
    logits = model(tokens)                                  # [B, S] -> [B, S, V]
    token_loss(logits, targets).mean().backward()           # from loss.py

Nothing in this file knows about ranks. Later lessons cut it at these seams:
  * pipeline: the model is `embed`, `blocks[i]` and `head`; between them travels x [B, S, D];
  * ZeRO-3 and recomputation: the unit is a block, a function of (x, positions);
  * tensor parallel: `q`, `k`, `v`, `o`, `up`, `gate`, `down` are separate linears, weight
    [features out, features in]. Rows n*H..(n+1)*H of `q` are head n, and the number of heads
    follows from the weights, so cutting these rows is enough. Where several of them read the same
    x, `qkv` and `gate_and_up`, a rank can gather it once for all;
  * context parallel: positions are an argument, and so is the attention function;
  * experts: `experts[e]` is a whole MLP, and `route` of routing.py decides which tokens visit it.

Letters: B batch, S sequence, D model, F ffn, N heads, K kv heads, H head dim, V vocab, E experts,
L layers; T = B*S tokens, k experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from mini_dist.plan.config import OURS, ModelConfig

from .initial_values import initial_value, named_tensors
from .routing import Routing, route
from .vocabulary import check_tokens


class GPT(nn.Module):
    """A decoder-only transformer, tokens [B, S] to logits [B, S, V].

    Each block adds attention and then an MLP (or experts) to x, with a norm before each of them
    ("pre-norm"; Radford et al. 2019, section 2.3).

    Args:
        seed: determines each parameter's value, together with its name (see `initial_value`);
            torch's own random state is neither read nor changed.
        attention: "sdpa" (torch's fused kernel), "explicit" (the formula, scores in memory), or a
            function (q, k, v, positions, dropout) -> out like `explicit_attention`.
        device: with "meta" the model has shapes and no memory until `init_weights_`.
    Raises ValueError for a config that only the calculators support.
    """

    def __init__(
        self,
        config: ModelConfig,
        seed: int = 0,
        *,
        attention: str | Callable = "sdpa",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        _refuse_what_only_calculators_know(config)
        self.config = config
        with torch.device("meta"):  # shapes only: torch's own initial values would be overwritten
            self.embed = Embed(config)
            self.blocks = nn.ModuleList(
                Block(config, layer, attention) for layer in range(config.num_layers)
            )
            self.head = Head(config)
        self.to(dtype)
        self._tie()
        device = torch.get_default_device() if device is None else torch.device(device)
        if device.type != "meta":
            self.init_weights_(seed, device)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        routing: list[Routing] | None = None,
    ) -> Tensor:
        """Compute logits: tokens [B, S] int64 -> [B, S, V].

        positions: [S] or [B, S], each token's position in its sequence (0..S-1 by default, distinct
            in a row); a token sees itself and tokens with smaller positions.
        routing: a list to which each MoE layer appends its router's decision.
        """
        if tokens.shape[-1] > self.config.seq_len:
            raise ValueError(
                f"tokens are {tokens.shape[-1]} long, but this model was made for "
                f"seq_len={self.config.seq_len}: cut them, or make the config longer."
            )
        x = self.embed(tokens, positions)
        for block in self.blocks:
            x = block(x, positions, routing)
        return self.head(x)

    def num_parameters(self) -> int:
        """Return the number of parameters; a tied embedding counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @torch.no_grad()
    def init_weights_(self, seed: int, device: torch.device | str | None = None) -> GPT:
        """Set each parameter and buffer to its `initial_value`, in new memory on `device` (by
        default torch's default device)."""
        self.to_empty(device=torch.get_default_device() if device is None else device)
        self._tie()  # to_empty separated tied parameters
        for name, tensor in named_tensors(self):
            tensor.copy_(initial_value(name, tensor.shape, self.config, seed))
        return self

    def _tie(self):
        if self.config.tied_embedding:
            self.head.out.weight = self.embed.token.weight


class Embed(nn.Module):
    """Map tokens [B, S] to x [B, S, D]: look up each token, and its position if it is learned."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.vocab_size = config.vocab_size
        self.token = nn.Embedding(config.vocab_size, config.d_model)
        self.position = None  # rotary positions enter in attention
        if config.positions == "learned":
            self.position = nn.Embedding(config.seq_len, config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        check_tokens(tokens, self.vocab_size)
        x = self.token(tokens)  # [B, S, D]
        if self.position is not None:
            if positions is None:
                positions = torch.arange(tokens.shape[-1], device=tokens.device)
            x = x + self.position(positions)
        return self.dropout(x)


class Block(nn.Module):
    """Apply one layer, x [B, S, D] to x [B, S, D]."""

    def __init__(self, config: ModelConfig, layer: int, attention: str | Callable = "sdpa"):
        super().__init__()
        self.attn_norm = make_norm(config)
        self.attn = Attention(config, attention)
        self.ffn_norm = make_norm(config)
        self.ffn = MoE(config) if config.is_moe_layer(layer) else MLP(config, config.d_ffn)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        routing: list[Routing] | None = None,
    ) -> Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x), positions))
        return x + self.dropout(self.ffn(self.ffn_norm(x), routing))


class Head(nn.Module):
    """Map x [B, S, D] to logits [B, S, V]: the last norm, then a linear without bias."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = make_norm(config)
        self.out = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, eps=1e-5)
    return nn.LayerNorm(config.d_model, eps=1e-5, bias=config.bias)


# --- attention ---------------------------------------------------------------------------------


class Attention(nn.Module):
    """Let each token attend to those before it: N query heads share K pairs of kv heads.

    K = N is multi-head attention, K = 1 multi-query (Shazeer 2019), between them grouped-query
    (Ainslie et al. 2023): query head n reads key/value head n // (N/K).
    """

    def __init__(self, config: ModelConfig, attention: str | Callable = "sdpa"):
        super().__init__()
        D, H = config.d_model, config.head_dim
        self.q = nn.Linear(D, config.num_heads * H, bias=config.qkv_bias)
        self.k = nn.Linear(D, config.num_kv_heads * H, bias=config.qkv_bias)
        self.v = nn.Linear(D, config.num_kv_heads * H, bias=config.qkv_bias)
        self.o = nn.Linear(config.num_heads * H, D, bias=config.bias)
        self.head_dim = H
        self.rotary = config.positions == "rotary"
        self.dropout = config.dropout
        if not callable(attention) and attention not in ATTENTIONS:
            raise ValueError(
                f"attention is {attention!r}: give one of {sorted(ATTENTIONS)}, or a function "
                "(q, k, v, positions, dropout) -> out."
            )
        self.attend = attention if callable(attention) else ATTENTIONS[attention]

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        q, k, v = (  # [B, N, S, H], and twice [B, K, S, H]
            # -1, not N: this stays right if the weights have only some heads' rows
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for y in self.qkv(x)
        )
        if self.rotary:
            q, k = rotate(q, positions), rotate(k, positions)
        out = self.attend(q, k, v, positions, self.dropout if self.training else 0.0)
        return self.o(out.transpose(1, 2).flatten(-2))  # [B, N, S, H] -> [B, S, N*H] -> [B, S, D]

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map x [B, S, D] -> queries [B, S, N*H], keys and values [B, S, K*H]."""
        return self.q(x), self.k(x), self.v(x)


def explicit_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Compute softmax(q kᵀ / √H) v over the tokens that each may see (Vaswani et al. 2017, 3.2.1).

    q [B, N, S, H], k and v [B, K, S, H] -> [B, N, S, H]; the scores take [B, N, S, S] memory.
    """
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))  # [B, N, S, H]
    scores = q @ k.mT / math.sqrt(q.shape[-1])  # [B, N, S, S]
    scores = scores.masked_fill(~may_see(q, positions), -math.inf)
    return functional.dropout(scores.softmax(-1), dropout) @ v


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Attend with torch's fused kernel, which stores no scores (Dao et al. 2022)."""
    k, v = heads_for_kernel(q, k, v)
    # without positions no mask is needed, and the kernel skips everything above the diagonal
    mask = None if positions is None else may_see(q, positions)
    return functional.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal=mask is None, enable_gqa=True
    )


def heads_for_kernel(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values as torch's fused kernel takes them: on CUDA in float32 with a copy for
    every query head that reads them. Without the copies, torch 2.11 stores all scores there."""
    if q.is_cuda and q.dtype == torch.float32 and k.shape[1] < q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    return k, v


ATTENTIONS = {"explicit": explicit_attention, "sdpa": sdpa_attention}


def may_see(q: Tensor, positions: Tensor | None) -> Tensor:
    """Return True at [query, key] if the key is at or before the query: [1 or B, 1, S, S]."""
    if positions is None:
        positions = torch.arange(q.shape[-2], device=q.device)
    allowed = positions[..., :, None] >= positions[..., None, :]  # [S, S] or [B, S, S]
    return allowed.unsqueeze(-3).reshape(-1, 1, *allowed.shape[-2:])


def rotate(x: Tensor, positions: Tensor | None = None, base: float = 10_000.0) -> Tensor:
    """Rotate each pair (x[i], x[i + H/2]) by the angle position * base^(-2i/H), so that a dot
    product depends only on the distance (Su et al. 2021, section 3.2.2; halves are paired as
    in GPT-NeoX and Llama's published code for Hugging Face).

    x [B, N, S, H], positions [S] or [B, S] -> [B, N, S, H].
    """
    if positions is None:
        positions = torch.arange(x.shape[-2], device=x.device)
    return turn(x, *cosines_and_sines(positions, x.shape[-1], x.dtype, base))


def cosines_and_sines(
    positions: Tensor, head_dim: int, dtype: torch.dtype, base: float = 10_000.0
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles of `rotate`, for positions [S] or [B, S]: both
    [1, S, H/2] or [B, 1, S, H/2]."""
    half = head_dim // 2
    # in bf16, neighboring positions of a long sequence would get the same angle
    dtype = torch.promote_types(dtype, torch.float32)
    frequency = base ** (-torch.arange(half, device=positions.device, dtype=dtype) / half)  # [H/2]
    angle = (positions[..., None] * frequency).unsqueeze(-3)  # [1, S, H/2] or [B, 1, S, H/2]
    return angle.cos(), angle.sin()


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, N, S, H] by the angles with these cosines and sines."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


# --- feed-forward: one MLP, or experts ---------------------------------------------------------


class MLP(nn.Module):
    """Transform each token on its own, [..., D] -> [..., F] -> [..., D]: GELU (Hendrycks & Gimpel
    2016) or SwiGLU, where one linear gates the other (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, d_ffn: int):
        super().__init__()
        D, bias = config.d_model, config.bias
        self.gate = nn.Linear(D, d_ffn, bias=bias) if config.activation == "swiglu" else None
        self.up = nn.Linear(D, d_ffn, bias=bias)
        self.down = nn.Linear(d_ffn, D, bias=bias)

    def forward(self, x: Tensor, routing: list[Routing] | None = None) -> Tensor:
        # `routing` is unused: an MLP routes nothing, but can replace an MoE
        gate, up = self.gate_and_up(x)
        hidden = functional.gelu(up) if gate is None else functional.silu(gate) * up
        return self.down(hidden)

    def gate_and_up(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """Map x [..., D] -> [..., F] twice; the first is None without a gate."""
        return None if self.gate is None else self.gate(x), self.up(x)


class MoE(nn.Module):
    """Experts instead of the MLP, all on one device: each token visits k of E, no token is
    dropped, and every token visits the shared expert (DeepSeekMoE: Dai et al. 2024, section 3.2).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.top_k, self.gate = config.top_k, config.router
        self.router = nn.Linear(config.d_model, config.num_experts, bias=False)
        # changed by how crowded an expert is, not by a gradient: see expert_parallel/
        bias = torch.zeros(config.num_experts) if self.gate == "sigmoid" else None
        self.register_buffer("balance_bias", bias)
        self.experts = nn.ModuleList(
            MLP(config, config.d_expert) for _ in range(config.num_experts)
        )
        self.shared = None  # n shared experts equal one n times as wide
        if config.num_shared_experts:
            self.shared = MLP(config, config.num_shared_experts * config.d_expert)

    def forward(self, x: Tensor, routing: list[Routing] | None = None) -> Tensor:
        tokens = x.flatten(0, -2)  # [T, D]
        decision = route(self.router(tokens), self.top_k, self.gate, self.balance_bias)
        if routing is not None:
            routing.append(decision)
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            # an expert without tokens runs as well, on [0, D]: its gradients are zeros, not None
            token, slot = torch.where(decision.experts == e)  # [visits], [visits]
            answer = expert(tokens[token]) * decision.weights[token, slot, None]  # [visits, D]
            out = out.index_add(0, token, answer.to(out.dtype))
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out.view_as(x)


# --- what only the calculators support ---------------------------------------------------------


def _refuse_what_only_calculators_know(config: ModelConfig):
    if config.is_mla:
        raise ValueError(
            f"kv_lora_rank={config.kv_lora_rank}: this GPT has no latent attention, only the "
            "calculators know it. Give kv_lora_rank=0; few num_kv_heads also save key/value memory."
        )
    for field, works in (
        *OURS.items(),
        ("d_shared", (config.num_shared_experts * config.d_expert,)),
    ):
        if getattr(config, field) not in works:
            raise ValueError(
                f"{field}={getattr(config, field)!r}: this GPT has no such thing, only the "
                f"calculators know it. Give {field}={' or '.join(map(repr, works))}."
            )
