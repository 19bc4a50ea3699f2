"""The moments of one backward: down a stage, from the loss to the embedding, and in each layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..schedule import SPLIT
from .activations import layer_activations
from .pipeline_in_flight import HeldAtBackward
from .rank_sizes import RankSizes

OF_CORE = (
    "queries, keys",
    "values",
    "softmax statistics",
    "attention scores",
    "attention output",
    "output by heads",
)


class Moment(NamedTuple):
    when: str
    lines: dict[str, float]  # name -> bytes

    @property
    def total(self) -> float:
        return sum(self.lines.values())


class Backward:
    """Go down one stage, from the loss to the embedding, with what comes and goes on the way."""

    def __init__(self, rank: RankSizes, flight: HeldAtBackward) -> None:
        self.rank, self.base = rank, rank.base(flight)
        layout = rank.layout
        self.layers = rank.layers_in_order(flight.stage)
        self.has_head = flight.stage == layout.num_stages - 1
        self.has_embedding = flight.stage == 0
        self.splits = layout.pp > 1 and layout.schedule in SPLIT  # into B and W
        self.scatters = layout.zero >= 2
        self.is_new = self.scatters or not flight.again  # gradients come as new tensors
        self.first = not flight.again
        self.offloads = rank.how.offload_gradients
        # without a pipeline embedding and head are no units but the root
        self.has_root = layout.pp == 1
        self.left = len(self.layers)  # layers whose activations are there
        self.fresh = 0.0  # new gradients that are complete and whole
        self.leaving = 0.0  # bytes of the unit whose gradients are on their way
        self.shards = 0.0  # of gradients that came home in a first backward
        # Of the last unit's, that the device has until they are on the host. The root is the last.
        root = rank.how.gradient_bytes * rank.outside / rank.ways
        self.on_link = root if self.offloads and flight.again else 0.0
        self.put_off = 0.0

    def moments(self) -> Iterator[Moment]:
        if self.has_head:
            yield from self.head()
        while self.left:
            yield from self.layer(*self.layers[self.left - 1])
        yield from self.end()

    def moment(self, when: str, freed: float = 0.0, units: float = 0.0, **lines: float) -> Moment:
        """freed: of the activations of layers that are left. units: whole ones under ZeRO-3."""
        rank, held = self.rank, dict(self.base)
        left = self.layers[: self.left]
        held["activations"] += sum(rank.kept(*layer) for layer in left) - freed
        held["statistics and angles"] += sum(rank.small(again) for _, again in left)
        held["gradients"] = held.get("gradients", 0.0) + self.shards
        held["put off"] += self.put_off
        held["whole gradients"] = self.fresh
        held["leaving gradients"] = self.leaving * (2 - 1 / rank.ways)  # flat; the others' parts
        held["gradients on their way"] = self.on_link
        held["received gradient"] = 0.0 if self.has_head else rank.x  # until the stage is through
        if rank.layout.zero == 3 or rank.how.offload_parameters:
            root = rank.how.parameter_bytes * rank.outside if self.has_root else 0.0
            held["unsharded parameters"] = units + root
        return Moment(when, {**held, **{name.replace("_", " "): lines[name] for name in lines}})

    def head(self) -> Iterator[Moment]:
        rank = self.rank
        # Backward's own: the loss and its gradient; cut, there are two ways from it to the logits.
        softmax = (3 if rank.layout.tp > 1 else 2) * rank.logits
        last = self.layers[-2:] if rank.how.offload_parameters else []  # they stay for backward
        units = sum(rank.unit(moe) for moe, _ in last)
        yield self.moment("at the loss", units=units, loss_and_logits=rank.head_keeps + softmax)
        yield self.moment(
            "in the head's backward",
            units=rank.head + rank.unit(self.layers[-1][0]),
            loss_and_logits=2 * rank.x + rank.logits + rank.whole_x + rank.gathered,
            weight_gradients_in_passing=0.0 if self.splits else rank.table,
        )
        if self.splits:
            self.put_off += rank.logits + rank.x
        elif self.is_new:
            self.done(rank.head, scatter=self.scatters and not self.has_root)

    def done(self, unit: float, scatter: bool) -> None:
        """A unit's new gradients are complete: they stay, or leave (those before are home)."""
        if scatter:
            self.leaving = unit
            if self.rank.ways == 1:  # home at once
                for _ in self.come_home():
                    pass
        else:
            self.fresh += unit

    def come_home(self, **lines: float) -> Iterator[Moment]:
        """The unit's before are added up, and if they shall be on the host, begin to leave."""
        part = self.leaving / self.rank.ways
        if self.offloads and part:
            yield self.moment("when gradients are home", **lines)
            self.on_link = part
        elif self.first:  # later ones are added to what is there
            self.shards += part
        self.leaving = 0.0

    def layer(self, moe: bool, again: bool) -> Iterator[Moment]:
        rank, number = self.rank, self.left - 1
        passes = rank.x if self.has_head or self.left < len(self.layers) else 0.0  # gradient of x
        if number:
            next_unit = rank.unit(self.layers[number - 1][0])
        else:
            next_unit = rank.embedding if self.has_embedding and not self.has_root else 0.0
        units = rank.unit(moe) + next_unit
        if rank.how.offload_parameters and rank.ways > 1 and number > 1:  # this rank's part of one
            units += rank.unit(self.layers[number - 2][0]) / rank.ways
        recomputes = again and rank.layout.recompute == "full"
        remade = rank.kept(moe, again=False) + rank.x if recomputes else 0.0
        for part in parts_of_layer(rank, moe, self.splits):
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
        if self.scatters:  # their flat copy comes on top; the earlier ones are on the host
            yield from self.come_home(
                units=units, activation_gradients=2 * rank.x, new_gradients=unit
            )
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
            outside = rank.how.gradient_bytes * rank.outside
            self.fresh = 0.0
            yield from self.come_home(new_gradients=outside)
            yield self.moment("when the root's gradients leave", new_gradients=2 * outside)


# --- inside a layer ------------------------------------------------------------------------------


class Part(NamedTuple):
    """A moment inside a layer's backward; bytes."""

    when: str
    freed: float = 0.0  # of the layer's activations, by then
    on_top: float = 0.0  # gradients of what is computed here
    matrix: float = 0.0  # the weight gradient that comes just now
    gradients: float = 0.0  # of the layer's weights, there by now if they come new
    gathered: float = 0.0  # by sequence parallelism


def parts_of_layer(rank: RankSizes, moe: bool, splits: bool) -> Iterator[Part]:
    """The moments in a layer's backward that can be the worst, in their order.

    splits: what W will need of the activations is not let go of.
    """
    config, g = rank.config, rank.how.gradient_bytes
    items = {
        item.name: item.bytes_per_token * rank.tokens
        for item in layer_activations(config, rank.layout, rank.how, moe)
    }
    mask = rank.x if config.dropout else 0.0  # the gradient before its dropout, and after
    down, up = (g * rank.matrix(moe, name) for name in ("down", "up"))
    inner = 2 if config.activation == "swiglu" else 1
    if moe:  # expert after expert: each has its share of the rows
        share = rank.layout.ep / config.num_experts
        rows = rank.tokens * config.top_k * share
        hidden = rank.how.activation_bytes * rows * config.d_expert / rank.layout.tp
        answers = 2 * config.top_k * rank.whole_x + mask  # their gradients, weighted and not
        yield Part("in an expert's backward", on_top=answers + hidden * (1 + splits), matrix=down)
        yield Part("in an expert's backward", on_top=answers + hidden * inner, gradients=down)
        through = sum(items[name] for name in items if "expert" in name)
        through += items["dispatched tokens"]
        gradients = 0.0  # an expert's leave, or are there, when it is through
    else:
        hidden = items["ffn activated"]
        first = mask + hidden * (1 + splits)
        yield Part("in the ffn's backward", on_top=first, matrix=down, gathered=rank.gathered)
        yield Part("in the ffn's backward", on_top=mask + hidden * (inner + splits), gradients=down)
        through = items["ffn hidden"] + hidden
        second = mask + hidden * inner + rank.whole_x
        yield Part(
            "in the ffn's backward",
            through,
            second,
            matrix=up,
            gradients=down,
            gathered=rank.gathered,
        )
        gradients = down + inner * up
    through += items["ffn input"] + items["norm inputs"] / 2
    core = 2 * rank.heads + 2 * rank.keys  # gradients of the output, of q, k and v
    if rank.layout.cp > 1:
        core += rank.heads + ring(rank)
    if not rank.how.flash_attention:
        core += 2 * items["attention scores"] / (3 if config.dropout else 1)
    yield Part("in attention's backward", through, core, gradients=gradients)
    through += sum(items.get(name, 0.0) for name in OF_CORE)
    query = g * rank.matrix(moe, "q")
    yield Part(
        "in the queries' backward",
        through,
        rank.heads + 2 * rank.whole_x,  # of q; of the input, so far and from q
        matrix=query,
        gradients=rank.gradients(moe).dense - query,
        gathered=rank.gathered,
    )


def ring(rank: RankSizes) -> float:
    """Keys and values, and gradients of theirs, that ring attention's backward has at once
    besides: those that are here, that arrive, whose gradients are computed; our own; and, once
    gradients travel, those that leave and those that arrive (context_parallel/ring.py)."""
    return 2 * rank.keys * {2: 3, 3: 5}.get(rank.layout.cp, 6)
