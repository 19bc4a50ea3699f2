"""What a rank of this library holds at each moment of a training step, and when it holds most.

A framework's memory is known from outside, by a formula or two (memory.py). Our own programs can be
read: `course_memory` goes down the list of actions that the pipeline's executor goes down, and in
each backward down the layers, and writes at every moment that can be the worst what is alive then.
The answer is the fullest of these moments. Nothing here is measured, and nothing fitted.

What makes a moment, as torch's autograd and our files have it:

  * a parameter's gradient is new in the first backward of a step. Later ones make it a second time
    and add it up: then it is "in passing". Under ZeRO-2 and 3 every backward makes it new;
  * a node of the graph lets go of what it saved when it has run, before the next one runs;
  * messages of a pipeline arrive in buffers that wait two computations long, and what was sent is
    kept until the peer has used it (pipeline/execute.py);
  * ZeRO flattens a unit's gradients, and has one unit under way while the next computes its own;
    ZeRO-3 has the unit that computes, the next one, and what is in no unit (zero/stages.py).

Not counted, because small: indices and masks of tokens, losses, vectors of biases in passing, and
what a collective within tp needs while activations are few. Attention under cp is the ring's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..config import Layout, ModelConfig
from ..schedule import Schedule, add_communication, build
from ..schedule.action import receive_of, send_of
from .activations import (
    cut_of_whole,
    kept_of_layer,
    layer_activations,
    tokens_of_micro_batch,
)
from .frameworks import Framework
from .lines import Breakdown, Line
from .parameters import (
    Held,
    held_by_layer,
    held_outside,
    layer_weights,
    layers_of_stage,
    parameters_of_rank,
    stages_of_rank,
)

EARLY = 2  # computations that a receive is posted ahead (pipeline/execute.py, _Plan)
BUCKET_BYTES = 25 << 20  # of averaged gradients (data_parallel.py)
IN_PLACE = 4 << 20  # a larger bucket is averaged in its own memory (data_parallel.py, mean_)


class Moment(NamedTuple):
    when: str
    lines: dict[str, float]  # name -> bytes

    @property
    def total(self) -> float:
        return sum(self.lines.values())


def course_memory(
    config: ModelConfig, layout: Layout, how: Framework, pp_rank: int, states: list[Line]
) -> Breakdown:
    """The fullest moment of one rank, as a waterfall of lines. states: between two steps."""
    if config.dropout:  # torch's fused attention for CPUs has none: the scores are kept
        how = how.replace(flash_attention=False)
    rank = Rank(config, layout, how, pp_rank, states)
    fullest = max(rank.moments(), key=lambda moment: moment.total)
    known = {line.name: line for line in states}
    lines = [
        Line(name, value, "bytes", *rank.why(name, value, known))
        for name, value in fullest.lines.items()
        if value
    ]
    return Breakdown(f"memory of pipeline rank {pp_rank}, fullest {fullest.when}", tuple(lines))


# --- what is in flight between two computations --------------------------------------------------


class Flight(NamedTuple):
    """What a rank holds besides, when it computes a backward (or weight gradients)."""

    stage: int
    again: bool  # the stage has gradients of an earlier micro-batch
    forwards: tuple[int, ...]  # of other micro-batches, by this rank's stages
    put_off: tuple[int, ...]  # whose weight gradients are still to come
    messages: int  # buffers of an activation's size


def flights(schedule: Schedule, rank: int) -> set[Flight]:
    """The different situations in which this rank's backwards run."""
    schedule = add_communication(schedule, early=EARLY)
    mine, last = schedule.stages_of[rank], schedule.num_stages - 1
    place = {
        action.key: i
        for peer in range(schedule.num_ranks)
        for i, action in enumerate(schedule.actions(peer))
    }
    forwards, put_off = dict.fromkeys(mine, 0), dict.fromkeys(mine, 0)
    had_backward, arriving, sent, local = set(), 0, {}, 0
    found = set()
    for action in schedule.actions(rank):
        stage, kind, micro = action.key
        if kind.startswith("RECV"):
            arriving += 1
        elif kind.startswith("SEND"):
            receive = receive_of(action)
            local -= 1  # it was kept as a value until now
            used = place[receive.stage, kind[-1], micro]
            sent.setdefault(schedule.rank_of[receive.stage], []).append(used)
        elif kind in "FB":
            source = stage - 1 if kind == "F" else stage + 1
            if source in mine:
                local -= 1
            elif 0 <= source <= last:
                arriving -= 1
                send = send_of(action._replace(kind=f"RECV_{kind}"))
                now, peer = place[send.key], schedule.rank_of[source]
                sent[peer] = [used for used in sent.get(peer, []) if used >= now]
            if kind == "B":
                forwards[stage] -= 1
                messages = arriving + local + sum(map(len, sent.values()))
                again = stage in had_backward
                held = tuple(forwards.values()), tuple(put_off.values())
                found.add(Flight(stage, again, *held, messages))
                had_backward.add(stage)
                put_off[stage] += (stage, micro) in schedule.split
                local += stage > 0
            else:
                forwards[stage] += 1
                local += stage < last
        elif kind == "W":
            put_off[stage] -= 1
    return found


class Part(NamedTuple):
    """A moment inside a layer's backward; bytes."""

    when: str
    freed: float = 0.0  # of the layer's activations, by then
    on_top: float = 0.0  # gradients of what is computed here
    matrix: float = 0.0  # the weight gradient that comes just now
    gradients: float = 0.0  # of the layer's weights, there by now if they come new
    gathered: float = 0.0  # by sequence parallelism


# --- one rank ------------------------------------------------------------------------------------


class Rank:
    """Sizes of one rank, and its moments. All in bytes."""

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

    # -- all moments ------------------------------------------------------------------------------

    def moments(self) -> Iterator[Moment]:
        for flight in self.flights():
            yield from Backward(self, flight).moments()
        yield from self.after_backward()

    def flights(self) -> set[Flight]:
        layout = self.layout
        if layout.pp == 1:
            both = {False, layout.num_micro_batches > 1}
            return {Flight(0, again, (0,), (0,), 0) for again in both}
        options = {"chunks": layout.num_chunks} if layout.schedule == "interleaved" else {}
        schedule = build(layout.schedule, layout.pp, layout.num_micro_batches, **options)
        return flights(schedule, self.pp_rank)

    def after_backward(self) -> Iterator[Moment]:
        """Averaging what is not sharded yet, and the optimizer's step."""
        states, how, layout = self.resting(), self.how, self.layout
        gradients = how.gradient_bytes * float(self.parameters.total)
        largest = how.gradient_bytes * self.largest_matrix()
        if layout.zero == 0 and self.ways > 1:
            bucket = min(gradients, BUCKET_BYTES)
            # The flat copy, and the mean beside it. `Overlapped` drops gradients for their copy.
            mean = bucket if bucket <= IN_PLACE else 2 * bucket / self.ways
            both = max(bucket, mean) if layout.pp == 1 else bucket + mean
            yield Moment("while gradients are averaged", {**states, "flat gradients": both})
        if layout.zero == 1:
            layers = [moe for stage in self.stages for moe, _ in self.layers(stage)]
            flat = how.gradient_bytes * max(float(self.held(moe).dense) for moe in layers)
            held = {**states, "gradients": 0.0, "gradients of experts": 0.0}
            held |= {"whole gradients": gradients, "leaving gradients": flat}
            yield Moment("while gradients are scattered", held)
        if layout.zero:
            units = [self.held(moe).dense for stage in self.stages for moe, _ in self.layers(stage)]
            largest = how.gradient_bytes * max(*map(float, units), self.outside) / self.ways
        yield Moment("in the optimizer's step", {**states, "optimizer's temporaries": 2 * largest})

    # -- what is there all the time ---------------------------------------------------------------

    def resting(self) -> dict[str, float]:
        """Between two steps, but for gradients, which are zeroed then."""
        layout = self.layout
        parts = 1 + 1 / layout.cp if layout.cp > 1 else 1  # the whole sequences, and this rank's
        tokens = layout.num_micro_batches * layout.micro_batch_size * self.config.seq_len * parts
        return {**self.states, "tokens and targets": 2 * 8 * tokens}

    def base(self, flight: Flight) -> dict[str, float]:
        """Beside the micro-batch whose backward runs."""
        held = self.resting()
        if not flight.again:
            held |= {name: 0.0 for name in held if name.startswith("gradients")}
        kept = small = loss = put_off = 0.0
        for stage, forwards, waiting in zip(self.stages, flight.forwards, flight.put_off):
            layers = [moe for moe, count in self.layers(stage) for _ in range(count)]
            kept += forwards * sum(map(self.kept, layers))
            small += forwards * len(layers) * self.small
            put_off += waiting * sum(map(self.put_off, layers))
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

    def held(self, moe: bool) -> Held:
        return held_by_layer(self.config, self.layout, moe)

    def gradients(self, moe: bool) -> Held:
        held, g = self.held(moe), self.how.gradient_bytes
        return Held(g * float(held.dense), g * float(held.experts))

    @property
    def parameters(self) -> Held:
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

    def kept(self, moe: bool, recompute: str | None = None) -> float:
        layout = self.layout.replace(recompute=recompute) if recompute else self.layout
        return self.tokens * kept_of_layer(self.config, layout, self.how, moe)

    @property
    def small(self) -> float:
        """Of a layer: mean and deviation of each norm; cos and sin of each angle, for q and k."""
        if self.layout.recompute == "full":
            return 0.0
        numbers = 2 if self.config.norm == "layernorm" else 1
        norms = 2 * numbers * 4 * self.tokens / cut_of_whole(self.layout)
        angles = 2 * 4 * self.config.head_dim * self.config.seq_len / self.layout.cp
        return norms + (angles if self.config.positions == "rotary" else 0.0)

    def put_off(self, moe: bool) -> float:
        """What a split backward leaves for later: inputs of linears, gradients of outputs."""
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
                per_rank = weight.numel_per_rank(self.layout.tp, 1, self.config.num_kv_heads)
                return float(per_rank) / weight.experts
        return 0.0  # latent attention has no such matrix; our GPT has no latent attention

    # -- one layer's backward ---------------------------------------------------------------------

    def parts(self, moe: bool, splits: bool) -> Iterator[Part]:
        """The moments in a layer's backward that can be the worst, in their order.

        splits: what W will need of the activations is not let go of.
        """
        config, g = self.config, self.how.gradient_bytes
        items = {
            item.name: item.bytes_per_token * self.tokens
            for item in layer_activations(config, self.layout, self.how, moe)
        }
        mask = self.x if config.dropout else 0.0  # the gradient before its dropout, and after
        down, up = (g * self.matrix(moe, name) for name in ("down", "up"))
        inner = 2 if config.activation == "swiglu" else 1
        if moe:  # expert after expert: each has its share of the rows
            share = self.layout.ep / config.num_experts
            rows = self.tokens * config.top_k * share
            hidden = self.how.activation_bytes * rows * config.d_expert / self.layout.tp
            answers = 2 * config.top_k * self.whole_x + mask  # their gradients, weighted and not
            yield Part(
                "in an expert's backward", on_top=answers + hidden * (1 + splits), matrix=down
            )
            yield Part("in an expert's backward", on_top=answers + hidden * inner, gradients=down)
            through = sum(items[name] for name in items if "expert" in name)
            through += items["dispatched tokens"]
            gradients = 0.0  # an expert's leave, or are there, when it is through
        else:
            hidden = items["ffn activated"]
            first = mask + hidden * (1 + splits)
            yield Part("in the ffn's backward", on_top=first, matrix=down, gathered=self.gathered)
            yield Part(
                "in the ffn's backward", on_top=mask + hidden * (inner + splits), gradients=down
            )
            through = items["ffn hidden"] + hidden
            second = mask + hidden * inner + self.whole_x
            yield Part(
                "in the ffn's backward",
                through,
                second,
                matrix=up,
                gradients=down,
                gathered=self.gathered,
            )
            gradients = down + inner * up
        through += items["ffn input"] + items["norm inputs"] / 2
        core = 2 * self.heads + 2 * self.keys  # gradients of the output, of q, k and v
        if self.layout.cp > 1:
            core += self.heads + self.ring()
        if not self.how.flash_attention:
            core += 2 * items["attention scores"] / (3 if config.dropout else 1)
        yield Part("in attention's backward", through, core, gradients=gradients)
        through += sum(items.get(name, 0.0) for name in OF_CORE)
        query = g * self.matrix(moe, "q")
        yield Part(
            "in the queries' backward",
            through,
            self.heads + 2 * self.whole_x,  # of q; of the input, so far and from q
            matrix=query,
            gradients=self.gradients(moe).dense - query,
            gathered=self.gathered,
        )

    def ring(self) -> float:
        """Keys and values, and gradients of theirs, that ring attention's backward has at once
        besides: those that are here, that arrive, whose gradients are computed; our own; and, once
        gradients travel, those that leave and those that arrive (context_parallel/ring.py)."""
        return 2 * self.keys * {2: 3, 3: 5}.get(self.layout.cp, 6)

    # -- in words ---------------------------------------------------------------------------------

    def why(self, name: str, value: float, states: dict[str, Line]) -> tuple[str, str]:
        if name in states:
            return states[name].formula, states[name].source
        if name == "activations":
            moe = self.layers(self.stages[-1])[-1][0]
            each = self.kept(moe) / self.tokens
            layers = value / self.tokens / each if each else 0.0
            formula = f"{layers:.4g} layers' * {self.tokens:g} tokens * {each:.0f}"
            return formula, "[K22] section 4, table 2"
        return WHY[name]


# --- one backward --------------------------------------------------------------------------------


class Backward:
    """Down one stage, from the loss to the embedding, with what comes and goes on the way."""

    def __init__(self, rank: Rank, flight: Flight) -> None:
        self.rank, self.base = rank, rank.base(flight)
        layout = rank.layout
        self.layers = [moe for moe, count in rank.layers(flight.stage) for _ in range(count)]
        self.has_head = flight.stage == layout.num_stages - 1
        self.has_embedding = flight.stage == 0
        self.splits = layout.pp > 1 and layout.schedule in SPLIT  # into B and W
        self.scatters = layout.zero >= 2
        self.is_new = self.scatters or not flight.again  # gradients come as new tensors
        self.first = not flight.again
        # without a pipeline embedding and head are no units but the root
        self.has_root = layout.pp == 1
        self.left = len(self.layers)  # layers whose activations are there
        self.fresh = 0.0  # new gradients that are complete and whole
        self.leaving = 0.0  # bytes of the unit whose gradients are on their way
        self.shards = 0.0  # of gradients that came home in a first backward
        self.put_off = 0.0

    def moments(self) -> Iterator[Moment]:
        if self.has_head:
            yield from self.head()
        while self.left:
            yield from self.layer(self.layers[self.left - 1])
        yield from self.end()

    def moment(self, when: str, freed: float = 0.0, units: float = 0.0, **lines: float) -> Moment:
        """freed: of the activations of layers that are left. units: whole ones under ZeRO-3."""
        rank, held = self.rank, dict(self.base)
        held["activations"] += sum(map(rank.kept, self.layers[: self.left])) - freed
        held["statistics and angles"] += self.left * rank.small
        held["gradients"] += self.shards
        held["put off"] += self.put_off
        held["whole gradients"] = self.fresh
        held["leaving gradients"] = self.leaving * (2 - 1 / rank.ways)  # flat; the others' parts
        held["received gradient"] = 0.0 if self.has_head else rank.x  # until the stage is through
        if rank.layout.zero == 3 and rank.ways > 1:
            root = rank.how.parameter_bytes * rank.outside if self.has_root else 0.0
            held["unsharded parameters"] = units + root
        return Moment(when, {**held, **{name.replace("_", " "): lines[name] for name in lines}})

    def head(self) -> Iterator[Moment]:
        rank = self.rank
        # Backward's own: the loss and its gradient; cut, there are two ways from it to the logits.
        softmax = (3 if rank.layout.tp > 1 else 2) * rank.logits
        yield self.moment("at the loss", loss_and_logits=rank.head_keeps + softmax)
        yield self.moment(
            "in the head's backward",
            units=rank.head + rank.unit(self.layers[-1]),
            loss_and_logits=2 * rank.x + rank.logits + rank.whole_x + rank.gathered,
            weight_gradients_in_passing=0.0 if self.splits else rank.table,
        )
        if self.splits:
            self.put_off += rank.logits + rank.x
        elif self.is_new:
            self.done(rank.head, scatter=self.scatters and not self.has_root)

    def done(self, unit: float, scatter: bool) -> None:
        """A unit's new gradients are complete: they stay, or leave when those before are home."""
        if scatter:
            self.come_home()
            self.leaving = unit
        else:
            self.fresh += unit

    def come_home(self) -> None:
        if self.first:  # later ones are added to what is there
            self.shards += self.leaving / self.rank.ways
        self.leaving = 0.0

    def layer(self, moe: bool) -> Iterator[Moment]:
        rank, number = self.rank, self.left - 1
        passes = rank.x if self.has_head or self.left < len(self.layers) else 0.0  # gradient of x
        if number:
            next_unit = rank.unit(self.layers[number - 1])
        else:
            next_unit = rank.embedding if self.has_embedding and not self.has_root else 0.0
        units = rank.unit(moe) + next_unit
        recomputes = rank.layout.recompute == "full"
        remade = rank.kept(moe, recompute="none") + rank.x if recomputes else 0.0
        for part in rank.parts(moe, self.splits):
            yield self.moment(
                part.when,
                freed=0.0 if recomputes else part.freed,
                units=units,
                recomputed_layer=remade - part.freed if recomputes else 0.0,
                activation_gradients=passes + part.on_top,
                gathered_sequence=part.gathered,
                new_gradients=part.gradients if self.is_new and not self.splits else 0.0,
                weight_gradients_in_passing=0.0 if self.splits else part.matrix,
            )
        held, experts = rank.gradients(moe), rank.how.gradient_bytes * rank.one_expert(moe)
        unit = held.dense + (experts if self.scatters else held.experts)
        self.left -= 1
        if self.splits:
            self.put_off += rank.put_off(moe)
            return
        if recomputes:  # one node of the graph gives back all of a layer's gradients
            yield self.moment(
                "when a recomputed layer is through",
                units=units,
                activation_gradients=passes + rank.x,
                new_gradients=unit,
            )
        if self.scatters:  # beside them their flat copy; those before are home
            self.come_home()
            yield self.moment(
                "when a layer's gradients leave",
                units=units,
                activation_gradients=2 * rank.x,
                new_gradients=2 * held.dense + experts,
            )
        if self.is_new:
            self.done(unit, self.scatters)

    def end(self) -> Iterator[Moment]:
        rank = self.rank
        if self.has_embedding:
            yield self.moment(
                "in the embedding's backward",
                units=0.0 if self.has_root else rank.embedding,
                activation_gradients=rank.whole_x,
                weight_gradients_in_passing=rank.table,
            )
        if self.scatters and self.has_root:
            self.come_home()
            self.fresh = 0.0
            outside = rank.how.gradient_bytes * rank.outside
            yield self.moment("when the root's gradients leave", new_gradients=2 * outside)


OF_CORE = (
    "queries, keys",
    "values",
    "softmax statistics",
    "attention scores",
    "attention output",
    "output by heads",
)
SPLIT = ("zb_h1", "zb_h2", "zb_v", "dualpipe_v")

WHY = {
    "unsharded parameters": (
        "the unit that computes, the next, and what is in none",
        "zero/stages.py",
    ),
    "whole gradients": ("new ones, not yet added up or scattered", "autograd, zero/stages.py"),
    "leaving gradients": ("flat copy g P_unit + g P_unit (n-1)/n received", "zero/unit.py"),
    "new gradients": ("of the layer that computes; leaving, with a flat copy", "zero/unit.py"),
    "flat gradients": ("a bucket's copy and its mean", "data_parallel.py"),
    "optimizer's temporaries": ("2 * largest tensor", "torch.optim [code]"),
    "recomputed layer": ("all that it keeps, and its output", "recompute.py"),
    "statistics and angles": ("in float32: 2 a norm and token; 2 S H/cp a layer", "model.py"),
    "loss and logits": ("kept: 2 e D + 4 V/t a token; on top 8 V, cut 12 V/t", "model.py"),
    "loss and logits of others": ("kept: 2 e D + 4 V/t a token", "model.py"),
    "put off": ("inputs of linears and gradients of their outputs", "pipeline/stage.py"),
    "messages": ("e b S D: arriving early, sent and not yet used", "pipeline/execute.py"),
    "received gradient": ("e b S D", "pipeline/execute.py"),
    "activation gradients": ("gradients of x and of what is computed now", "autograd [code]"),
    "gathered sequence": ("e D tokens", "[K22] section 4.2.2"),
    "weight gradients in passing": ("of the matrix just now, then added up", "autograd [code]"),
    "tokens and targets": ("8 a token, of all micro-batches", "torch.int64"),
}
