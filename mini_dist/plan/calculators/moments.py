"""What a rank of this library holds at each moment of a training step, and its peak.

A framework's memory is known from outside, by a formula or two (memory.py). Our own programs can be
read: `course_memory` goes down the list of actions that the pipeline's executor goes down, and in
each backward down the layers, and writes at every moment that can be the worst what is alive then.
The answer is the fullest of these moments. Nothing here is measured, and nothing fitted.

What makes a moment, as torch's autograd and our files have it:

  * a parameter's gradient is new in the first backward of a step. Later ones make it a second time
    and add it up: then it is "in passing". Under ZeRO-2 and 3 every backward makes it new;
  * a node of the graph lets go of what it saved when it has run, before the next one runs;
  * messages of a pipeline arrive in buffers that wait two computations long, and what was sent is
    kept until the peer has used it (pipeline/messages.py);
  * ZeRO flattens a unit's gradients, and has one unit under way while the next computes its own;
    ZeRO-3 has the unit that computes, the next one, and what is in no unit (zero/stages.py).

Not counted, because small: indices and masks of tokens, losses, vectors of biases in passing, and
what a collective within tp needs while activations are few. Attention under cp is the ring's.

pipeline_in_flight.py says what a rank has in flight when it computes a backward, rank_sizes.py how
large everything is, backward_moments.py which moments a backward has.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..config import Layout, ModelConfig
from ..defaults import BUCKET_BYTES, IN_PLACE_BYTES
from .backward_moments import Backward, Moment
from .frameworks import Framework
from .lines import Breakdown, Line
from .pipeline_in_flight import flights_of
from .rank_sizes import RankSizes


def course_memory(
    config: ModelConfig, layout: Layout, how: Framework, pp_rank: int, states: list[Line]
) -> Breakdown:
    """The fullest moment of one rank, as a waterfall of lines. states: between two steps."""
    if config.dropout:  # torch's fused attention for CPUs has none: the scores are kept
        how = how.replace(flash_attention=False)
    rank = RankSizes(config, layout, how, pp_rank, states)
    fullest = max(moments(rank), key=lambda moment: moment.total)
    known = {line.name: line for line in states}
    lines = [
        Line(name, value, "bytes", *why(rank, name, value, known))
        for name, value in fullest.lines.items()
        if value
    ]
    return Breakdown(f"memory of pipeline rank {pp_rank}, fullest {fullest.when}", tuple(lines))


def moments(rank: RankSizes) -> Iterator[Moment]:
    """All moments of a step that can be the worst."""
    for flight in flights_of(rank.layout, rank.pp_rank):
        yield from Backward(rank, flight).moments()
    yield from after_backward(rank)


def after_backward(rank: RankSizes) -> Iterator[Moment]:
    """Averaging what is not sharded yet, and the optimizer's step."""
    states, how, layout = rank.resting(), rank.how, rank.layout
    gradients = how.gradient_bytes * float(rank.parameters.total)
    largest = how.gradient_bytes * rank.largest_matrix()
    if layout.zero == 0 and rank.ways > 1:
        bucket = min(gradients, BUCKET_BYTES)
        # The flat copy, and its mean. `Overlapped` drops gradients for their copy.
        mean = bucket if bucket <= IN_PLACE_BYTES else 2 * bucket / rank.ways
        both = max(bucket, mean) if layout.pp == 1 else bucket + mean
        yield Moment("while gradients are averaged", {**states, "flat gradients": both})
    if layout.zero == 1:
        layers = [moe for stage in rank.stages for moe, _ in rank.layers(stage)]
        flat = how.gradient_bytes * max(float(rank.held(moe).dense) for moe in layers)
        held = {**states, "gradients": 0.0, "gradients of experts": 0.0}
        held |= {"whole gradients": gradients, "leaving gradients": flat}
        yield Moment("while gradients are scattered", held)
    if how.offload_optimizer:  # the host steps
        return
    # The norm of 16-bit gradients is computed in float32: a copy, and its squares.
    wide = 8 * rank.largest_matrix() / (rank.ways if layout.zero else 1)
    if layout.zero:
        units = [rank.held(moe).dense for stage in rank.stages for moe, _ in rank.layers(stage)]
        largest = how.gradient_bytes * max(*map(float, units), rank.outside) / rank.ways
    temporaries = max(2 * largest, wide if how.gradient_bytes < 4 else 0.0)
    yield Moment("in the optimizer's step", {**states, "optimizer's temporaries": temporaries})


def why(rank: RankSizes, name: str, value: float, states: dict[str, Line]) -> tuple[str, str]:
    """Formula and source of one of the lines."""
    if name in states:
        return states[name].formula, states[name].source
    if name == "activations":
        each = rank.kept(*rank.layers_in_order(rank.stages[-1])[0]) / rank.tokens
        layers = value / rank.tokens / each if each else 0.0
        formula = f"{layers:.4g} layers' * {rank.tokens:g} tokens * {each:.0f}"
        return formula, "[K22] section 4, table 2"
    return WHY[name]


WHY = {
    "unsharded parameters": (
        "the unit that computes, the next, and what is in none",
        "zero/stages.py",
    ),
    "whole gradients": ("new ones, not yet added up or scattered", "autograd, zero/stages.py"),
    "leaving gradients": ("flat copy g P_unit + g P_unit (n-1)/n received", "zero/unit.py"),
    "gradients on their way": ("g P_unit / n, until they are on the host", "offload/gradients.py"),
    "new gradients": ("of the layer that computes; leaving, with a flat copy", "zero/unit.py"),
    "flat gradients": ("a bucket's copy and its mean", "data_parallel/wrappers.py"),
    "optimizer's temporaries": ("2 * largest tensor; its norm, 8 a number", "torch.optim [code]"),
    "recomputed layer": ("all that it keeps, and its output", "recompute/blocks.py"),
    "statistics and angles": ("in float32: 2 a norm and token; 2 S H/cp a layer", "gpt.py"),
    "loss and logits": ("kept: 2 e D + 4 V/t a token; on top 8 V, cut 12 V/t", "model.py, loss.py"),
    "loss and logits of others": ("kept: 2 e D + 4 V/t a token", "model.py, loss.py"),
    "put off": ("inputs of linears and gradients of their outputs", "pipeline/split_backward.py"),
    "messages": ("e b S D: arriving early, sent and not yet used", "pipeline/messages.py"),
    "received gradient": ("e b S D", "pipeline/messages.py"),
    "activation gradients": ("gradients of x and of what is computed now", "autograd [code]"),
    "gathered sequence": ("e D tokens", "[K22] section 4.2.2"),
    "weight gradients in passing": ("of the matrix just now, then added up", "autograd [code]"),
    "tokens and targets": ("8 a token, of all micro-batches", "torch.int64"),
}
