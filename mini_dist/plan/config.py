"""The sizes of a model and of the rank grid it is trained on: validated once, read by everything.

Letters used in the whole course: B batch, S sequence, D model, F ffn, N heads, K kv heads, H head
dim, V vocab, E experts, L layers.  No torch in here: the calculators read the same two classes.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from .fields import checks_kinds, nearest_divisor, one_of, whole_number
from .schedule import SYNCHRONOUS, V_SHAPED, check_micro_batches

ACTIVATIONS = ("gelu", "swiglu")
NORMS = ("layernorm", "rmsnorm")
POSITIONS = ("rotary", "learned", "alibi")
ROUTERS = ("softmax", "sigmoid")
ZERO = (0, 1, 2, 3)  # the stages; 0 is none
# What the course's own GPT (model.py) can be; the calculators support the rest as well.
OURS = {
    "positions": ("rotary", "learned"),
    "norms_a_layer": (2,),
    **dict.fromkeys(("qk_norm", "embedding_norm", "attention_sinks"), (False,)),
    **dict.fromkeys(("shared_gate", "router_bias"), (False,)),
    "windowed_layers": (0,),
}
RECOMPUTE = ("none", "selective", "full")


@checks_kinds
@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer, from the course's GPT to DeepSeek-V3.

    The defaults are the course's model: bytes in, 4 layers x 256, trained in seconds on a CPU.
    A field left at None is derived from the others: read back, it holds the derived value.
    Raises ValueError in one sentence: the field, its value, what would be right.
    """

    vocab_size: int = 256  # V
    seq_len: int = 128  # S
    d_model: int = 256  # D
    num_layers: int = 4  # L
    num_heads: int = 8  # N
    num_kv_heads: int | None = None  # K: N unless given (K < N is GQA, K = 1 is MQA)
    head_dim: int | None = None  # H: D / N unless given
    d_ffn: int | None = None  # F: 4 D, or 8/3 D rounded up to 64 with swiglu (as many weights);
    # with experts: of dense layers, and of experts if d_expert is not given
    activation: str = "gelu"
    norm: str = "layernorm"
    positions: str = "rotary"
    bias: bool = True  # on every linear layer but the head, and on LayerNorm
    qkv_bias: bool | None = None  # as `bias` unless given (Qwen2 has these biases only)
    qk_norm: bool = False  # a norm over H on queries and keys, before attention (Qwen3)
    qk_norm_whole: bool = False  # over N H and K H instead (OLMo 2)
    norms_a_layer: int = 2  # 4: also after attention and ffn (Gemma 2)
    attention_sinks: bool = False  # a learned score a head that takes a share of softmax (gpt-oss)
    windowed_layers: int = 0  # of L: those that keep the last `window` tokens only (Gemma 3)
    window: int = 0  # (only the size of a server's cache knows both: calculators/serving.py)
    embedding_norm: bool = False  # a norm right after the embedding (BLOOM)
    tied_embedding: bool = False  # the head is the token embedding
    dropout: float = 0.0

    # Mixture of experts: used when num_experts > 0.  The first `first_dense_layers` stay dense.
    num_experts: int = 0  # E
    top_k: int = 0  # experts per token
    num_shared_experts: int = 0  # experts every token visits besides
    d_expert: int | None = None  # F of one expert: d_ffn unless given
    # F of all shared ones: num_shared_experts * d_expert unless given; else their number is unused.
    d_shared: int | None = None
    shared_gate: bool = False  # their output is weighted, by D numbers (Qwen2-MoE)
    router_bias: bool = False
    first_dense_layers: int = 0
    router: str = "softmax"

    # Multi-head latent attention: used when kv_lora_rank > 0.  head_dim is then the part of a
    # query or key without position, rope_head_dim the part with it (one shared key for all heads).
    kv_lora_rank: int = 0
    q_lora_rank: int = 0  # 0: queries are not compressed
    rope_head_dim: int = 0
    v_head_dim: int | None = None  # head_dim unless given

    def __post_init__(self):
        for field in ("vocab_size", "seq_len", "d_model", "num_layers", "num_heads"):
            whole_number(self, field, at_least=1)
        derived = {
            field: value for field, value in self._derive().items() if getattr(self, field) is None
        }
        for field, value in derived.items():
            object.__setattr__(self, field, value)
        object.__setattr__(self, "_derived", frozenset(derived))  # for replace()

        for field in ("num_kv_heads", "head_dim", "d_ffn", "d_expert", "v_head_dim"):
            whole_number(self, field, at_least=1)
        for field in (
            "num_experts",
            "top_k",
            "num_shared_experts",
            "first_dense_layers",
            "kv_lora_rank",
            "q_lora_rank",
            "rope_head_dim",
            "d_shared",
            "windowed_layers",
            "window",
        ):
            whole_number(self, field, at_least=0)
        for field, known in (
            ("activation", ACTIVATIONS),
            ("norm", NORMS),
            ("positions", POSITIONS),
            ("router", ROUTERS),
            ("norms_a_layer", (2, 4)),
        ):
            one_of(self, field, known)
        self._validate()

    def _derive(self) -> dict:
        """Return the value of each field that is left at None."""
        head_dim = self.head_dim
        if head_dim is None:
            if self.d_model % self.num_heads:
                raise ValueError(
                    f"num_heads={self.num_heads} does not divide d_model={self.d_model}: "
                    f"give {nearest_divisor(self.d_model, self.num_heads)} heads, or head_dim."
                )
            head_dim = self.d_model // self.num_heads
        swiglu_ffn = 64 * math.ceil(8 * self.d_model / 3 / 64)
        d_ffn = self.d_ffn or (swiglu_ffn if self.activation == "swiglu" else 4 * self.d_model)
        return {
            "num_kv_heads": self.num_heads,
            "head_dim": head_dim,
            "d_ffn": d_ffn,
            "qkv_bias": self.bias,
            "d_expert": d_ffn,
            "d_shared": self.num_shared_experts * (self.d_expert or d_ffn),
            "v_head_dim": head_dim,
        }

    def _validate(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}: "
                f"{nearest_divisor(self.num_heads, self.num_kv_heads)} would."
            )
        if self.positions == "rotary" and self.position_dim % 2:
            field = "rope_head_dim" if self.is_mla else "head_dim"
            raise ValueError(
                f"{field}={self.position_dim} is odd, and rotary positions turn pairs "
                f"of numbers: give {self.position_dim + 1}."
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"dropout={self.dropout!r} is not a probability below 1: "
                "give 0.0 for none, or something like 0.1."
            )
        if self.num_experts:
            if not 1 <= self.top_k <= self.num_experts:
                raise ValueError(
                    f"top_k={self.top_k} is not between 1 and "
                    f"num_experts={self.num_experts}: 2 is usual."
                )
            if self.first_dense_layers > self.num_layers:
                raise ValueError(
                    f"first_dense_layers={self.first_dense_layers} is more than "
                    f"num_layers={self.num_layers}: give at most that."
                )
        else:
            for field in ("top_k", "num_shared_experts", "first_dense_layers", "router_bias"):
                if getattr(self, field):
                    raise ValueError(
                        f"{field}={getattr(self, field)} needs experts: give "
                        f"num_experts as well, or {field}=0."
                    )
        for field, of in (
            ("d_shared", "num_shared_experts"),
            ("shared_gate", "num_shared_experts"),
            ("qk_norm_whole", "qk_norm"),
        ):
            if getattr(self, field) and not getattr(self, of):
                raise ValueError(f"{field}={getattr(self, field)} needs {of}: give that as well.")
        if self.windowed_layers > self.num_layers or (self.windowed_layers > 0) != (
            self.window > 0
        ):
            raise ValueError(
                f"windowed_layers={self.windowed_layers} with window={self.window}: give at most "
                f"num_layers={self.num_layers} of them and a window of 1 or more, or 0 for both."
            )
        if not self.is_mla:
            for field in ("q_lora_rank", "rope_head_dim"):
                if getattr(self, field):
                    raise ValueError(
                        f"{field}={getattr(self, field)} belongs to latent attention: "
                        f"give kv_lora_rank as well, or {field}=0."
                    )
        elif self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} has no meaning with latent "
                f"attention: leave it at num_heads={self.num_heads}."
            )
        elif self.qkv_bias != self.bias:
            raise ValueError(
                f"qkv_bias={self.qkv_bias} has no meaning with latent attention, which has no "
                f"biases: leave it at bias={self.bias}."
            )

    def replace(self, **changes) -> ModelConfig:
        """A copy with some fields changed; derived fields follow (`dataclasses.replace` cannot
        know which of them were derived, and would keep the old values)."""
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in self._derived
        }
        return ModelConfig(**{**fields, **changes})

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank > 0

    @property
    def position_dim(self) -> int:
        """How many numbers of each query and key carry the rotary position."""
        return self.rope_head_dim if self.is_mla else self.head_dim

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.first_dense_layers if self.num_experts else 0

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer number `layer` (from 0) has experts instead of a dense FFN."""
        return self.num_experts > 0 and layer >= self.first_dense_layers


@checks_kinds
@dataclass(frozen=True)
class Layout:
    """How the ranks share the work: the sizes of the mesh axes and what goes with them.

    The mesh is [pp, dp, cp, tp], tp innermost: neighbours in tp are neighbours in rank, on the
    fastest links.  Experts divide the dp * cp * tp ranks of a pipeline stage a second time, into
    [edp, ep, etp]: ep spreads the experts, etp cuts each expert's matrices, and the edp ranks that
    are left hold equal copies.  With etp = tp, the default, ep spreads experts inside dp * cp.
    Raises ValueError in one sentence: the field, its value, what would be right.
    """

    pp: int = 1  # pipeline stages: the layers are cut
    dp: int = 1  # data parallel replicas: the batch is cut
    cp: int = 1  # context parallel: the sequence is cut
    tp: int = 1  # tensor parallel: each matrix is cut
    ep: int = 1  # expert parallel: the experts are spread
    etp: int | None = None  # ranks that cut each expert's matrices: tp unless given; divides tp
    sequence_parallel: bool = False  # what tp leaves whole is cut along the sequence (if tp > 1)
    zero: int = 0  # over dp * cp: 1 shards optimizer states, 2 gradients too, 3 parameters too
    micro_batch_size: int = 1  # sequences in one forward pass of one replica
    num_micro_batches: int = 1  # forward passes of one replica in a step
    recompute: str = "none"  # "selective": attention scores only; "full": all but layer inputs
    schedule: str = "1f1b"
    num_chunks: int = 1  # stages a rank holds: any number with "interleaved", 2 with the V's
    recompute_every: int = 1  # of a stage's layers: 1 is all of them, 2 the first, third, fifth ...

    def __post_init__(self):
        if self.etp is None:
            object.__setattr__(self, "etp", self.tp)
        for field in (
            "pp",
            "dp",
            "cp",
            "tp",
            "ep",
            "etp",
            "micro_batch_size",
            "num_micro_batches",
            "num_chunks",
            "recompute_every",
        ):
            whole_number(self, field, at_least=1)
        one_of(self, "zero", ZERO)
        one_of(self, "recompute", RECOMPUTE)
        one_of(self, "schedule", tuple(SYNCHRONOUS))
        self._check_experts()
        if self.schedule in V_SHAPED and self.num_chunks != 2:
            raise ValueError(
                f"num_chunks={self.num_chunks} does not fit schedule="
                f"{self.schedule!r}, a V of two stages a rank: give 2."
            )
        if self.num_chunks > 1 and self.schedule not in ("interleaved", *V_SHAPED):
            raise ValueError(
                f"num_chunks={self.num_chunks} needs schedule='interleaved', not {self.schedule!r}."
            )
        if self.recompute_every > 1 and self.recompute == "none":
            raise ValueError(
                f"recompute_every={self.recompute_every} needs something to recompute: give "
                "recompute='full' or 'selective' as well, or recompute_every=1."
            )
        if self.num_chunks > 1 and self.pp == 1:
            raise ValueError(
                f"num_chunks={self.num_chunks} needs a pipeline: give pp of 2 or "
                "more, or num_chunks=1."
            )

    def _check_experts(self):
        ranks = self.dp * self.cp * self.tp
        if self.etp == self.tp:
            if self.dp * self.cp % self.ep == 0:
                return
            spans = ", or etp=1 with sequence_parallel=True" * (ranks % self.ep == 0)
            raise ValueError(
                f"ep={self.ep} does not divide dp*cp={self.dp * self.cp}: "
                f"{nearest_divisor(self.dp * self.cp, self.ep)} would{spans}."
            )
        if self.tp % self.etp:
            raise ValueError(
                f"etp={self.etp} does not divide tp={self.tp}: "
                f"{nearest_divisor(self.tp, self.etp)} would."
            )
        if ranks // self.etp % self.ep:
            raise ValueError(
                f"ep={self.ep} does not divide dp*cp*tp/etp={ranks // self.etp}: "
                f"{nearest_divisor(ranks // self.etp, self.ep)} would."
            )
        if self.etp < self.tp and not self.sequence_parallel:
            raise ValueError(
                f"etp={self.etp} below tp={self.tp} needs tp ranks with different tokens: give "
                f"sequence_parallel=True, or etp={self.tp}."
            )

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """How many ranks of a stage hold the same experts, or the same part of them."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def axes(self) -> dict[str, int]:
        """The axes of the mesh in order, outermost first."""
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}

    @property
    def global_batch_size(self) -> int:
        """Sequences in one optimizer step, over all replicas."""
        return self.dp * self.num_micro_batches * self.micro_batch_size

    def num_recomputed(self, num_layers: int) -> int:
        """Return how many of a stage's layers are recomputed."""
        return 0 if self.recompute == "none" else -(-num_layers // self.recompute_every)

    @property
    def num_stages(self) -> int:
        return self.pp * self.num_chunks

    def replace(self, **changes) -> Layout:
        """A copy with some fields changed; experts that are cut as tp cuts follow tp."""
        if self.etp == self.tp:
            changes = {"etp": None, **changes}
        return dataclasses.replace(self, **changes)

    def check(self, config: ModelConfig) -> Layout:
        """This layout, if `config` can be cut this way; else ValueError says what could."""
        cuts = [("tp", "num_heads", config.num_heads), ("tp", "d_ffn", config.d_ffn)]
        if config.num_kv_heads >= self.tp and not config.is_mla:  # fewer kv heads are copied
            cuts.append(("tp", "num_kv_heads", config.num_kv_heads))
        if config.num_experts:
            cuts += [
                ("ep", "num_experts", config.num_experts),
                ("etp", "d_expert", config.d_expert),
                ("tp", "d_shared", config.d_shared),  # 0, which all divide, without shared ones
            ]
        for axis, field, size in cuts:
            if size % getattr(self, axis):
                raise ValueError(
                    f"{axis}={getattr(self, axis)} does not divide {field}={size}: "
                    f"{nearest_divisor(size, getattr(self, axis))} would."
                )
        sequence_cuts = self.cp * (self.tp if self.sequence_parallel else 1)
        if config.seq_len % sequence_cuts:
            names = "cp*tp" if self.sequence_parallel else "cp"
            raise ValueError(
                f"{names}={sequence_cuts} does not divide seq_len={config.seq_len}: "
                f"{nearest_divisor(config.seq_len, sequence_cuts)} would."
            )
        if self.ep > 1 and not config.num_experts:
            raise ValueError(f"ep={self.ep} needs a model with experts: give ep=1, or num_experts.")
        if self.etp != self.tp and not config.num_experts:
            raise ValueError(
                f"etp={self.etp} needs a model with experts: leave it out, or give num_experts."
            )
        # Two more stages than layers also works: the embedding and the head get one each.
        if config.num_layers < self.num_stages != config.num_layers + 2:
            raise ValueError(
                f"pp*num_chunks={self.num_stages} is more than "
                f"num_layers={config.num_layers}: a stage needs at least one layer."
            )
        if self.pp > 1:
            check_micro_batches(self.schedule, self.pp, self.num_micro_batches)
        return self


def cut_by(layout: Layout, config: ModelConfig) -> Layout:
    """The layout, if it is one and can cut the model; ValueError says what would."""
    if not isinstance(layout, Layout):
        raise ValueError(f"layout={layout!r} is no Layout: give one, such as Layout(dp=8, zero=1).")
    return layout.check(config)
