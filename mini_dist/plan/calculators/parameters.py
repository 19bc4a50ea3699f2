"""Every weight of a model, once: counts, shards and FLOPs are all read from this inventory.

A weight is [rows, cols] (or [rows] for a norm or a bias).  `cut` says what tensor parallelism does
with it; `experts` how many copies of it there are, spread by expert parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from ..config import Layout, ModelConfig
from ..fields import checks_kinds
from ..schedule import V_SHAPED
from .lines import Breakdown, Line
from .models import model


class Cuts(NamedTuple):
    """The sizes that determine a rank's part of a layer's weights."""

    tp: int = 1
    ep: int = 1
    etp: int = 1

    @classmethod
    def of(cls, layout: Layout) -> Cuts:
        return cls(layout.tp, layout.ep, layout.etp)


@dataclass(frozen=True)
class Weight:
    kind: str  # "embedding", "attention", "ffn", "router", "experts", "norms", "head"
    name: str
    shape: tuple[int, ...]
    cut: str = "none"  # by tp: "column" and "row" (Megatron), "kv" (by heads), "vocab", "none"
    experts: int = 1  # copies, one an expert
    visits: int = 1  # copies that one token goes through
    is_matmul: bool = True  # multiplied with activations (2 FLOPs per number and token)

    @property
    def numel(self) -> int:
        """Numbers in all copies."""
        count = self.experts
        for size in self.shape:
            count *= size
        return count

    @property
    def numel_visited(self) -> int:
        """Numbers that one token meets."""
        return self.numel // self.experts * self.visits

    def numel_per_rank(self, cuts: Cuts, num_kv_heads: int) -> Fraction:
        """Return the numbers on one rank: sharded by tp; whole kv heads if tp > K replicates them.
        Experts' weights are spread by ep and sharded by etp."""
        tp, ep = (cuts.etp, cuts.ep) if self.experts > 1 else (cuts.tp, 1)
        ways = {"none": 1, "kv": min(tp, num_kv_heads)}.get(self.cut, tp)
        return Fraction(self.numel, ways * ep)


def layer_weights(config: ModelConfig, moe: bool = False) -> list[Weight]:
    """The weights of one transformer layer, dense or with experts."""
    return (
        _attention(config)
        + (_moe(config) if moe else _ffn(config, "ffn", config.d_ffn))
        + _norm(config, "attention_norm")
        + _norm(config, "ffn_norm")
        + (_norm(config, "attention_post_norm") if config.norms_a_layer == 4 else [])
        + (_norm(config, "ffn_post_norm") if config.norms_a_layer == 4 else [])
    )


def every_second(config: ModelConfig, moe: bool = False) -> list[Weight]:
    """The matrices of a layer whose outputs torchtitan's selective checkpointing does not keep, in
    the order of forward: of q, k, v, o, gate, up, down these are k, o and up."""
    return [weight for weight in layer_weights(config, moe) if weight.is_matmul][1::2]


def outer_weights(config: ModelConfig, side: str) -> list[Weight]:
    """The weights before the first layer (`side="first"`) or after the last (`"last"`).

    A tied head is listed among the last with no numbers of its own; a pipeline must hold it twice.
    """
    V, D = config.vocab_size, config.d_model
    if side == "first":
        weights = [Weight("embedding", "token_embedding", (V, D), "vocab", is_matmul=False)]
        if config.positions == "learned":
            weights.append(
                Weight("embedding", "position_embedding", (config.seq_len, D), is_matmul=False)
            )
        return weights + (_norm(config, "embedding_norm") if config.embedding_norm else [])
    head = Weight("head", "tied head" if config.tied_embedding else "head", (V, D), "vocab")
    return _norm(config, "final_norm") + [head]


def parameter_counts(config: ModelConfig) -> Breakdown:
    """Exact numbers of parameters by kind of module (the head is 0 when tied)."""
    dense, moe = config.num_layers - config.num_moe_layers, config.num_moe_layers
    kinds: dict[str, int] = {}
    for copies, weights in (
        (1, outer_weights(config, "first")),
        (dense, layer_weights(config)),
        (moe, layer_weights(config, moe=True) if moe else []),
        (1, outer_weights(config, "last")),
    ):
        for weight in weights:
            count = 0 if weight.name == "tied head" else copies * weight.numel
            kinds[weight.kind] = kinds.get(weight.kind, 0) + count
    formulas = _formulas(config)
    return Breakdown(
        "parameters",
        tuple(
            Line(kind, count, "parameters", formulas[kind], "the model's own weights")
            for kind, count in kinds.items()
        ),
    )


def num_parameters(config: ModelConfig | str) -> int:
    """Of a model, or of the model of that name."""
    return int(parameter_counts(model(config)).total)


def num_active_parameters(config: ModelConfig) -> int:
    """Parameters that one token meets: all but the experts it is not sent to."""
    unused = (
        sum(w.numel - w.numel_visited for w in layer_weights(config, moe=True))
        if config.num_experts
        else 0
    )
    return num_parameters(config) - config.num_moe_layers * unused


@checks_kinds
def split_layers(num_layers: int, num_stages: int) -> list[int]:
    """How many layers each stage gets: as even as can be.

    The remaining layers go to the middle stages first, because the first and last also hold
    the embedding and the head (BLOOM-176B: 70 layers over 12 stages are 5, ten times 6, 5).
    """
    base, extra = divmod(num_layers, num_stages)
    order = list(range(num_stages))
    if num_stages > 2:
        order = [*order[1:-1], order[0], order[-1]]
    counts = [base] * num_stages
    for stage in order[:extra]:
        counts[stage] += 1
    return counts


def stages_of_rank(layout: Layout, pp_rank: int) -> list[int]:
    """The stages that a pipeline rank holds: a V goes down and up the ranks, interleaved deals
    the stages out like cards."""
    if layout.schedule in V_SHAPED:
        return [pp_rank, 2 * layout.pp - 1 - pp_rank]
    return [chunk * layout.pp + pp_rank for chunk in range(layout.num_chunks)]


@dataclass(frozen=True)
class HeldParameters:
    """Numbers one rank holds: apart, because ZeRO shards them over different groups."""

    dense: Fraction = Fraction(0)  # sharded by ZeRO over dp * cp
    experts: Fraction = Fraction(0)  # sharded by ZeRO over edp
    largest_layer: Fraction = Fraction(0)  # what ZeRO-3 gathers at once

    @property
    def total(self) -> Fraction:
        return self.dense + self.experts

    def __add__(self, other: HeldParameters) -> HeldParameters:
        return HeldParameters(
            self.dense + other.dense,
            self.experts + other.experts,
            max(self.largest_layer, other.largest_layer),
        )


def copies(held: HeldParameters, layout: Layout) -> list[tuple[float, int, int]]:
    """(numbers, ranks that hold copies of them, how far apart these stand).

    Those are all of dp * cp, and for experts edp, every (etp * ep)-th rank of a stage.
    """
    return [
        (float(held.dense), layout.dp * layout.cp, layout.tp),
        (float(held.experts), layout.edp, layout.etp * layout.ep),
    ]


@checks_kinds
def parameters_of_rank(config: ModelConfig, layout: Layout, pp_rank: int = 0) -> HeldParameters:
    """The parameters that one rank of pipeline position `pp_rank` computes with, before ZeRO."""
    stages = tuple(stages_of_rank(layout, pp_rank))
    return _held_by_stages(config, Cuts.of(layout), layout.num_stages, stages)


def held_outside(config: ModelConfig, layout: Layout, pp_rank: int = 0) -> HeldParameters:
    """The part of that outside the layers: embedding on the first stage, head on the last."""
    stages = tuple(stages_of_rank(layout, pp_rank))
    return _held_outside(config, Cuts.of(layout), layout.num_stages, stages)


def held_by_layer(config: ModelConfig, layout: Layout, moe: bool) -> HeldParameters:
    """One layer's part of that."""
    return _held(config, "moe" if moe else "dense", Cuts.of(layout))


def layers_of_stage(config: ModelConfig, layout: Layout, stage: int) -> list[tuple[bool, int]]:
    """(with experts?, how many) of the layers of one stage; kinds it has none of are left out."""
    return list(_layers_of_stage(config, layout.num_stages, stage))


def layers_of_rank(
    config: ModelConfig, layout: Layout, pp_rank: int
) -> tuple[tuple[tuple[bool, bool, int], ...], ...]:
    """(with experts?, recomputed?, how many) for each stage of a rank; each kind for itself."""
    again = layout.recompute, layout.recompute_every
    return _layers_of_rank(config, layout.num_stages, tuple(stages_of_rank(layout, pp_rank)), again)


def first_alike(config: ModelConfig, layout: Layout) -> tuple[int, ...]:
    """For each pipeline rank the first one that holds as much: as many layers of each kind in each
    of its stages, and the embedding or the head if that one does."""
    return _first_alike(config, layout.pp, layout.num_chunks, layout.schedule)


def layers_of_stages(
    config: ModelConfig, layout: Layout
) -> tuple[tuple[tuple[bool, int], ...], ...]:
    """layers_of_stage of every stage."""
    return _layers_of_stages(config, layout.num_stages)


# The planner asks for the same parts of a model in hundreds of layouts.


@lru_cache(maxsize=4096)
def _layers_of_rank(
    config: ModelConfig, num_stages: int, stages: tuple[int, ...], again: tuple[str, int]
) -> tuple[tuple[tuple[bool, bool, int], ...], ...]:
    recompute, every = again
    rule, found = Layout(recompute=recompute, recompute_every=every), []
    for stage in stages:
        kinds = []
        for moe, count in _layers_of_stage(config, num_stages, stage):
            recomputed = rule.num_recomputed(count)
            kinds += [(moe, True, recomputed), (moe, False, count - recomputed)]
        found.append(tuple(kind for kind in kinds if kind[2]))
    return tuple(found)


@lru_cache(maxsize=4096)
def _first_alike(config: ModelConfig, pp: int, num_chunks: int, schedule: str) -> tuple[int, ...]:
    layout = Layout(pp=pp, num_chunks=num_chunks, schedule=schedule)
    first: dict[tuple, int] = {}
    alike = []
    for rank in range(pp):
        stages = stages_of_rank(layout, rank)
        layers = tuple(_layers_of_stage(config, layout.num_stages, stage) for stage in stages)
        holds = layers, 0 in stages, layout.num_stages - 1 in stages
        alike.append(first.setdefault(holds, rank))
    return tuple(alike)


@lru_cache(maxsize=4096)
def _layers_of_stages(
    config: ModelConfig, num_stages: int
) -> tuple[tuple[tuple[bool, int], ...], ...]:
    return tuple(_layers_of_stage(config, num_stages, stage) for stage in range(num_stages))


@lru_cache(maxsize=4096)
def _held_by_stages(
    config: ModelConfig, cuts: Cuts, num_stages: int, stages: tuple[int, ...]
) -> HeldParameters:
    held = _held_outside(config, cuts, num_stages, stages)
    for stage in stages:
        for moe, count in _layers_of_stage(config, num_stages, stage):
            layer = _held(config, "moe" if moe else "dense", cuts)
            held += HeldParameters(count * layer.dense, count * layer.experts, layer.largest_layer)
    return held


@lru_cache(maxsize=4096)
def _held_outside(
    config: ModelConfig, cuts: Cuts, num_stages: int, stages: tuple[int, ...]
) -> HeldParameters:
    held = HeldParameters()
    if 0 in stages:
        held += _held(config, "first", cuts)
    if num_stages - 1 in stages:
        # A tied head on the embedding's own rank is there already; elsewhere it is a copy.
        shared = config.tied_embedding and 0 in stages
        held += _held(config, "last, head elsewhere" if shared else "last", cuts)
    return held


@lru_cache(maxsize=4096)
def _layers_of_stage(
    config: ModelConfig, num_stages: int, stage: int
) -> tuple[tuple[bool, int], ...]:
    counts = split_layers(config.num_layers, num_stages)
    start = sum(counts[:stage])
    dense = max(0, min(start + counts[stage], config.num_layers - config.num_moe_layers) - start)
    kinds = ((False, dense), (True, counts[stage] - dense))
    return tuple((moe, count) for moe, count in kinds if count)


@lru_cache(maxsize=4096)
def _held(config: ModelConfig, part: str, cuts: Cuts) -> HeldParameters:
    if part in ("dense", "moe"):
        weights = layer_weights(config, moe=part == "moe")
    else:
        weights = outer_weights(config, part.split(",")[0])
        if part == "last, head elsewhere":
            weights = [weight for weight in weights if weight.kind != "head"]
    numels = [
        (weight.experts > 1, weight.numel_per_rank(cuts, config.num_kv_heads)) for weight in weights
    ]
    experts = sum((numel for routed, numel in numels if routed), Fraction(0))
    total = sum((numel for _, numel in numels), Fraction(0))
    return HeldParameters(
        total - experts, experts, total if part in ("dense", "moe") else Fraction(0)
    )


def _attention(config: ModelConfig) -> list[Weight]:
    D, N, K, H = config.d_model, config.num_heads, config.num_kv_heads, config.head_dim
    weights = []
    if config.is_mla:  # DeepSeek-V2 section 2.1: queries, keys and values through a small latent
        R, Hv = config.rope_head_dim, config.v_head_dim
        if config.q_lora_rank:
            weights += [
                Weight("attention", "q_down", (D, config.q_lora_rank)),
                Weight("norms", "q_norm", (config.q_lora_rank,), is_matmul=False),
                Weight("attention", "q_up", (config.q_lora_rank, N * (H + R)), "column"),
            ]
        else:
            weights.append(Weight("attention", "q", (D, N * (H + R)), "column"))
        weights += [
            Weight("attention", "kv_down", (D, config.kv_lora_rank + R)),
            Weight("norms", "kv_norm", (config.kv_lora_rank,), is_matmul=False),
            Weight("attention", "kv_up", (config.kv_lora_rank, N * (H + Hv)), "column"),
            Weight("attention", "out", (N * Hv, D), "row"),
        ]
    else:
        weights += [
            Weight("attention", "q", (D, N * H), "column"),
            Weight("attention", "k", (D, K * H), "kv"),
            Weight("attention", "v", (D, K * H), "kv"),
            Weight("attention", "out", (N * H, D), "row"),
        ]
        if config.qkv_bias:
            weights += [
                Weight("attention", "q_bias", (N * H,), "column", is_matmul=False),
                Weight("attention", "k_bias", (K * H,), "kv", is_matmul=False),
                Weight("attention", "v_bias", (K * H,), "kv", is_matmul=False),
            ]
    if config.bias:
        weights.append(Weight("attention", "out_bias", (D,), is_matmul=False))
    if config.qk_norm and config.qk_norm_whole:
        weights.append(Weight("norms", "q_norm", (N * H,), "column", is_matmul=False))
        weights.append(Weight("norms", "k_norm", (K * H,), "kv", is_matmul=False))
    elif config.qk_norm:
        weights.append(Weight("norms", "qk_norm", (2, H), is_matmul=False))
    if config.attention_sinks:
        weights.append(Weight("attention", "sinks", (N,), "column", is_matmul=False))
    return weights


def _ffn(
    config: ModelConfig, kind: str, d_ffn: int, experts: int = 1, visits: int = 1
) -> list[Weight]:
    D = config.d_model
    inner = ("gate", "up") if config.activation == "swiglu" else ("up",)
    weights = [Weight(kind, name, (D, d_ffn), "column", experts, visits) for name in inner]
    weights.append(Weight(kind, "down", (d_ffn, D), "row", experts, visits))
    if config.bias:
        weights += [
            Weight(kind, f"{name}_bias", (d_ffn,), "column", experts, visits, False)
            for name in inner
        ]
        weights.append(Weight(kind, "down_bias", (D,), "none", experts, visits, False))
    return weights


def _moe(config: ModelConfig) -> list[Weight]:
    weights = [Weight("router", "router", (config.d_model, config.num_experts))]
    if config.router_bias:
        weights.append(Weight("router", "router_bias", (config.num_experts,), is_matmul=False))
    weights += _ffn(config, "experts", config.d_expert, config.num_experts, config.top_k)
    if config.num_shared_experts:
        weights += _ffn(config, "shared experts", config.d_shared)
    if config.shared_gate:
        weights.append(Weight("router", "shared_gate", (config.d_model, 1)))
    return weights


def _norm(config: ModelConfig, name: str) -> list[Weight]:
    vectors = 2 if config.norm == "layernorm" and config.bias else 1  # scale, and shift
    return [Weight("norms", name, (vectors, config.d_model), is_matmul=False)]


def _formulas(config: ModelConfig) -> dict[str, str]:
    """In words, what each kind counts."""
    matrices = 3 if config.activation == "swiglu" else 2
    L = "L_dense" if config.num_moe_layers else "L"
    return {
        "embedding": "V D" + (" + S D" if config.positions == "learned" else ""),
        "attention": "L (latent projections + D N Hv)"
        if config.is_mla
        else "L (2 D N H + 2 D K H" + (" + biases)" if config.qkv_bias else ")"),
        "ffn": f"{L} ({matrices} D F" + (" + biases)" if config.bias else ")"),
        "router": "L_moe (D E" + " + E" * config.router_bias + " + D" * config.shared_gate + ")",
        "experts": f"L_moe E {matrices} D F_expert",
        "shared experts": f"L_moe {matrices} D F_shared",
        "norms": f"({config.norms_a_layer} L + 1) D"
        + (" * 2, scale and shift" if config.norm == "layernorm" and config.bias else "")
        + (" + norms inside attention" if config.is_mla or config.qk_norm else "")
        + (" + embedding norm" if config.embedding_norm else ""),
        "head": "0 (tied to the embedding)" if config.tied_embedding else "V D",
    }
