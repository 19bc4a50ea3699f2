"""How large, on one rank of this library, are the things that a training step holds, in bytes."""

from __future__ import annotations

from ..config import Layout, ModelConfig
from .activations import (
    cut_of_whole,
    kept_of_layer,
    layer_activations,
    tokens_of_micro_batch,
)
from .frameworks import Framework
from .lines import Line
from .parameters import (
    Cuts,
    HeldParameters,
    held_by_layer,
    held_outside,
    layer_weights,
    layers_of_stage,
    parameters_of_rank,
    stages_of_rank,
)
from .pipeline_in_flight import HeldAtBackward


class RankSizes:
    """Sizes of one rank, all in bytes."""

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        how: Framework,
        pp_rank: int,
        states: list[Line],
    ) -> None:
        self.config, self.layout, self.how, self.pp_rank = config, layout, how, pp_rank
        self.states = {line.name: line.value for line in states}
        self.tokens = tokens_of_micro_batch(config, layout)
        self.stages = stages_of_rank(layout, pp_rank)
        self.last = layout.num_stages - 1
        self.ways = layout.dp * layout.cp  # what ZeRO divides by
        e, t = how.activation_bytes, layout.tp
        self.whole_x = self.tokens * e * config.d_model  # [b, S/cp, D]
        self.x = self.whole_x / cut_of_whole(layout)  # with sequence parallelism S/(cp tp)
        self.heads = self.tokens * e * config.num_heads * config.head_dim / t  # q, [b, N/t, S, H]
        kv_ways = min(t, config.num_kv_heads)
        self.keys = self.tokens * e * config.num_kv_heads * config.head_dim / kv_ways  # k, or v
        self.logits = self.tokens * 4 * config.vocab_size / t  # in float32
        self.table = how.gradient_bytes * config.vocab_size * config.d_model / t
        self.gathered = self.whole_x if layout.sequence_parallel and t > 1 else 0.0
        self.head_keeps = 2 * self.x + self.logits  # its norm's input and output, and for the loss

    # -- what is there all the time ---------------------------------------------------------------

    def resting(self) -> dict[str, float]:
        """Between two steps, but for gradients, which are zeroed then."""
        layout = self.layout
        parts = 1 + 1 / layout.cp if layout.cp > 1 else 1  # the whole sequences, and this rank's
        tokens = layout.num_micro_batches * layout.micro_batch_size * self.config.seq_len * parts
        return {**self.states, "tokens and targets": 2 * 8 * tokens}

    def base(self, flight: HeldAtBackward) -> dict[str, float]:
        """What is in flight in addition to the micro-batch whose backward runs."""
        held = self.resting()
        if not flight.again:
            held |= {name: 0.0 for name in held if name.startswith("gradients")}
        kept = small = loss = put_off = 0.0
        for stage, forwards, waiting in zip(self.stages, flight.forwards, flight.put_off):
            layers = self.layers_in_order(stage)
            kept += forwards * sum(self.kept(*layer) for layer in layers)
            small += forwards * sum(self.small(again) for _, again in layers)
            put_off += waiting * sum(self.put_off(moe) for moe, _ in layers)
            if stage == self.last:
                loss += forwards * self.head_keeps
                put_off += waiting * (self.logits + self.x)
        return {
            **held,
            "activations": kept,
            "statistics and angles": small,
            "loss and logits of others": loss,
            "put off": put_off,
            "messages": flight.messages * self.x,
        }

    # -- sizes of parts ---------------------------------------------------------------------------

    def layers(self, stage: int):
        return layers_of_stage(self.config, self.layout, stage)

    def layers_in_order(self, stage: int) -> list[tuple[bool, bool]]:
        """(with experts?, recomputed?) of each layer of a stage."""
        kinds = [moe for moe, count in self.layers(stage) for _ in range(count)]
        some, every = self.layout.recompute != "none", self.layout.recompute_every
        return [(moe, some and number % every == 0) for number, moe in enumerate(kinds)]

    def held(self, moe: bool) -> HeldParameters:
        return held_by_layer(self.config, self.layout, moe)

    def gradients(self, moe: bool) -> HeldParameters:
        held, g = self.held(moe), self.how.gradient_bytes
        return HeldParameters(g * float(held.dense), g * float(held.experts))

    @property
    def parameters(self) -> HeldParameters:
        return parameters_of_rank(self.config, self.layout, self.pp_rank)

    @property
    def outside(self) -> float:
        return float(held_outside(self.config, self.layout, self.pp_rank).total)

    @property
    def head(self) -> float:
        """Bytes of its parameters (and of their gradients)."""
        tied = self.config.tied_embedding and 0 in self.stages
        norm = 2 if self.config.norm == "layernorm" and self.config.bias else 1
        return (0.0 if tied else self.table) + self.how.gradient_bytes * norm * self.config.d_model

    @property
    def embedding(self) -> float:
        positions = self.config.seq_len if self.config.positions == "learned" else 0
        return self.table + self.how.gradient_bytes * positions * self.config.d_model

    def unit(self, moe: bool) -> float:
        """What ZeRO-3 gathers for a layer: of its experts the one that computes, and the next."""
        return self.how.parameter_bytes * (float(self.held(moe).dense) + self.one_expert(moe))

    def one_expert(self, moe: bool) -> float:
        if not moe:
            return 0.0
        return float(self.held(moe).experts) * self.layout.ep / self.config.num_experts

    def kept(self, moe: bool, again: bool) -> float:
        return self.tokens * kept_of_layer(self.config, self.layout, self.how, moe, again)

    def small(self, again: bool) -> float:
        """Of a layer: mean and deviation of each norm; cos and sin of each angle, for q and k."""
        if again and self.layout.recompute == "full":
            return 0.0
        numbers = 2 if self.config.norm == "layernorm" else 1
        norms = 2 * numbers * 4 * self.tokens / cut_of_whole(self.layout)
        angles = 2 * 4 * self.config.head_dim * self.config.seq_len / self.layout.cp
        return norms + (angles if self.config.positions == "rotary" else 0.0)

    def put_off(self, moe: bool) -> float:
        """What a split backward stores for later: inputs of linears, gradients of outputs."""
        items = {
            item.name: item.bytes_per_token * self.tokens
            for item in layer_activations(self.config, self.layout, self.how, moe)
        }
        inputs = ("attention input", "attention output", "ffn input", "ffn activated")
        outputs = 2 * self.x + self.heads + 2 * self.keys + items.get("ffn activated", 0.0)
        return sum(items.get(name, 0.0) for name in inputs) + outputs

    def largest_matrix(self) -> float:
        layers = {moe for stage in self.stages for moe, _ in self.layers(stage)}
        matrices = [self.matrix(moe, "down") for moe in layers]
        if self.outside:
            matrices.append(self.table / self.how.gradient_bytes)
        return max(matrices)

    def matrix(self, moe: bool, name: str) -> float:
        """Numbers of this matrix on this rank; of experts, one's."""
        for weight in layer_weights(self.config, moe):
            if weight.name == name:
                cuts = Cuts(self.layout.tp, 1, self.layout.etp)
                per_rank = weight.numel_per_rank(cuts, self.config.num_kv_heads)
                return float(per_rank) / weight.experts
        return 0.0  # latent attention has no such matrix; our GPT has no latent attention
