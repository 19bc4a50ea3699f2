"""Exercises of lesson 07: the sharded step, backward that frees, forward that gathers.

Right values are not enough: a step of the whole, sliced, gives them, too. So how much the optimizer
was given, how many gradients and weights were there at once, and the bytes are judged as well.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import nn

from .. import collectives
from ..zero.ideas import backward_in_units, forward_on_demand, sharded_step
from .exercise import Exercise, Line, Trial
from .fast_data_parallel import hooks_of

COLLECTIVES = frozenset(collectives.__all__)  # lesson 03's; which of them fits is the question


def line(what: str, measured, expected) -> Line:
    return Line(what, measured, expected, measured == expected)


def same(found, expected) -> bool:
    """Tensors of these shapes and values."""
    return len(found) == len(expected) and all(
        isinstance(a, torch.Tensor) and a.shape == b.shape and torch.allclose(a, b)
        for a, b in zip(found, expected)
    )


def judge_each(judge_one):
    """From a judge of one trial to one of all: the first mistake counts."""

    def judge(trials: list[Trial]) -> tuple[list[Line], str]:
        lines: list[Line] = []
        for number, one in enumerate(trials):
            found, hint = judge_one(one)
            lines += [each for each in found if number == 0 or not each.ok]
            if not all(each.ok for each in found):
                return lines, f"With {one.run.world_size} ranks: " * (number > 0) + hint
        return lines, ""

    return judge


# ---- the sharded step ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Flat:
    length: int

    def __str__(self) -> str:
        return f"{self.length} parameters"


def flat_and_gradient(rank: int, length: int):
    generator = torch.Generator().manual_seed(rank)
    return torch.arange(length) / 4, torch.randint(-80, 80, (length,), generator=generator) / 4


def step_trial(fn, case: Flat, group):
    flat, gradient = flat_and_gradient(group.rank(), case.length)
    given = []

    def update(shard, mean):
        given.append((len(shard), len(mean)))
        return shard - 0.5 * mean if len(shard) == len(mean) else shard  # the judge says more

    return fn(flat, gradient, update, group), given


def judge_step(one: Trial) -> tuple[list[Line], str]:
    run, size, length = one.run, one.run.world_size, one.case.length
    flat, _ = flat_and_gradient(0, length)
    total = sum(flat_and_gradient(rank, length)[1] for rank in range(size))
    new, of_sums = flat - 0.5 * total / size, flat - 0.5 * total
    results, given = zip(*run.results)
    right = sum(same([result], [new]) for result in results)
    part = length // size
    lines = [
        line("right parameters on", f"{right} of {size} ranks", f"{size} of {size} ranks"),
        line("elements given to the optimizer", given[0], [(part, part)]),
        line("bytes sent by all ranks", run.ledger.total_bytes(), 2 * (size - 1) * 4 * length),
    ]
    return lines, step_mistake(results, given, size, part, new, of_sums, run, length)


def step_mistake(results, given, size, part, new, of_sums, run, length) -> str:
    if any(len(calls) != 1 for calls in given):
        return "The optimizer, update(shard, mean), is to be called once on each rank."
    if any(calls[0] != (part, part) for calls in given):
        return (
            f"The optimizer was given {given[0][0]} elements. Each rank steps its own "
            f"{part} only: that is what makes the states of the others needless."
        )
    if size > 1 and all(same([result], [of_sums]) for result in results):
        return "These are steps with sums: reduce_scatter(gradient, group, op='mean')."
    if all(isinstance(result, torch.Tensor) and len(result) == part for result in results):
        return "Every rank returns its shard only: all_gather the new shards."
    if not all(same([result], [new]) for result in results):
        return (
            "Wrong parameters. Rank r owns chunk r of flat and gets chunk r of the mean gradient; "
            "what is gathered are the shards that update has returned."
        )
    return (
        f"Right, but {run.ledger.total_bytes():,} bytes were sent where "
        f"{2 * (size - 1) * 4 * length:,} do: an all-reduce hands everyone the whole gradient, of "
        "which each rank needs a part. reduce_scatter sends half."
    )


# ---- backward that frees ------------------------------------------------------------------------

PER_UNIT = 2


@dataclass(frozen=True)
class Units:
    count: int

    def __str__(self) -> str:
        return f"{self.count} units of {PER_UNIT} parameters"


def units_and_loss(rank: int, count: int):
    units = [
        [nn.Parameter(torch.linspace(0.5, 1 + i, 12).view(3, 4)), nn.Parameter(torch.ones(12))]
        for i in range(count)
    ]
    x = torch.randn(12, generator=torch.Generator().manual_seed(rank))
    for matrix, vector in units:
        x = (x * matrix.flatten() + vector).tanh()
    return units, x.sum()


def backward_trial(fn, case: Units, group):
    units, loss = units_and_loss(group.rank(), case.count)
    parameters = [p for unit in units for p in unit]
    held = []  # gradients there at once, whenever one more is complete

    def count(_):
        held.append(sum(p.grad is not None for p in parameters))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(count)
    before = hooks_of(parameters)
    parts = list(fn(loss, units, group) or [])
    left = sum(p.grad is not None for p in parameters)
    return parts, max(held, default=0), left, hooks_of(parameters) - before


def judge_backward(one: Trial) -> tuple[list[Line], str]:
    run, size = one.run, one.run.world_size
    everyones = []
    for rank in range(size):
        units, loss = units_and_loss(rank, one.case.count)
        loss.backward()
        everyones.append([torch.cat([p.grad.flatten() for p in unit]) for unit in units])
    totals = [sum(grads) for grads in zip(*everyones)]
    parts = [[total.chunk(size)[rank] / size for total in totals] for rank in range(size)]
    found, most, left, hooks = zip(*run.results)
    right = sum(map(same, found, parts))
    sent = (size - 1) * sum(total.nbytes for total in totals)
    lines = [
        line("right parts on", f"{right} of {size} ranks", f"{size} of {size} ranks"),
        line("gradients held at once", max(most), PER_UNIT),
        line("gradients held after it", max(left), 0),
        line("bytes sent by all ranks", run.ledger.total_bytes(), sent),
        line("hooks left behind", max(hooks), 0),
    ]
    sums = [[total.chunk(size)[rank] for total in totals] for rank in range(size)]
    return lines, backward_mistake(found, parts, sums, size, most, left, hooks, run, sent)


def backward_mistake(found, parts, sums, size, most, left, hooks, run, sent) -> str:
    if size > 1 and all(map(same, found, sums)):
        return "These are sums: reduce_scatter(whole, group, op='mean')."
    if all(map(same, found, [part[::-1] for part in parts])):
        return "The parts are in the order of backward: return them in the order of units."
    if not all(map(same, found, parts)):
        return (
            "Wrong parts. For each unit: torch.cat of its flattened gradients, in the order of its "
            "parameters; reduce_scatter gives this rank its part. A unit may leave when all its "
            "gradients are there."
        )
    if max(most) > PER_UNIT:
        return (
            f"{max(most)} gradients were there at once: {PER_UNIT} are enough. Scatter in a hook "
            "(register_post_accumulate_grad_hook), while backward is running, and set .grad to "
            "None at once."
        )
    if max(left):
        return "Gradients are still there after backward: set .grad to None when they have left."
    if max(hooks):
        return "Your hooks are still there in the next backward: keep the handles, .remove() them."
    return (
        f"Right, but {run.ledger.total_bytes():,} bytes were sent where {sent:,} do: "
        "reduce_scatter each unit once; an all-reduce sends twice that."
    )


# ---- forward that gathers -----------------------------------------------------------------------


@dataclass(frozen=True)
class Sharded:
    layers: int

    def __str__(self) -> str:
        return f"{self.layers} layers"


def weights(case: Sharded) -> list[torch.Tensor]:
    return [torch.linspace(-1, 1 + i, 24) for i in range(case.layers)]


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(24, generator=torch.Generator().manual_seed(rank))


def apply(x, weight):
    return (x * weight).sin()


def forward_trial(fn, case: Sharded, group):
    rank, size = group.rank(), group.size()
    storages: list[weakref.ref] = []  # of the weights that layers were given
    whole, sizes, before = [], [], []
    begin = group.recorder.begin

    def arriving(*args, **kwargs):  # one more, beside those that are still there
        whole.append(1 + sum(storage() is not None for storage in storages))
        return begin(*args, **kwargs)

    def layer(x, weight):
        sizes.append(len(weight))
        before.append(len(group.recorder.comms))
        storages.append(weakref.ref(weight.untyped_storage()))
        return apply(x, weight) if len(weight) == len(x) else x  # the judge says more

    shards = [weight.chunk(size)[rank].clone() for weight in weights(case)]
    group.recorder.begin = arriving
    result = fn(inputs(rank), [layer] * case.layers, shards, group)
    at_once = max([*whole, len(storages) if len(set(before)) == 1 and size > 1 else 1])
    return result, at_once, sizes, before


def judge_forward(one: Trial) -> tuple[list[Line], str]:
    run, size, case = one.run, one.run.world_size, one.case
    expected = []
    for rank in range(size):
        x = inputs(rank)
        for weight in weights(case):
            x = apply(x, weight)
        expected.append(x)
    results, most, sizes, before = zip(*run.results)
    right = sum(same([a], [b]) for a, b in zip(results, expected))
    sent = (size - 1) * sum(weight.nbytes for weight in weights(case))
    lines = [
        line("right outputs on", f"{right} of {size} ranks", f"{size} of {size} ranks"),
        line("elements of the weights", sorted(set(sizes[0])), [24]),
        line("whole weights at once", max(most), 1),
        line("bytes sent by all ranks", run.ledger.total_bytes(), sent),
    ]
    return lines, forward_mistake(results, expected, most, sizes, before, run, sent)


def forward_mistake(results, expected, most, sizes, before, run, sent) -> str:
    if any(length != 24 for each in sizes for length in each):
        return "A layer was given a shard, not the whole weight: all_gather it first."
    if not all(same([a], [b]) for a, b in zip(results, expected)):
        return (
            "Wrong outputs: each rank sends its own x through all layers in order, each with its "
            "own weight, gathered from all ranks' shards."
        )
    if max(most) > 1 and len(set(before[0])) == 1:
        return (
            "All weights are gathered before the first layer: then every rank holds the whole "
            "model. Gather inside the loop."
        )
    if max(most) > 1:
        return (
            f"{max(most)} whole weights were there at once. The name `weight` holds the last one "
            "until the next has arrived: `del weight` after use, and keep no list of them."
        )
    return f"Right, but {run.ledger.total_bytes():,} bytes were sent where {sent:,} do."


EXERCISES = [
    Exercise(
        "sharded_step",
        sharded_step,
        step_trial,
        [(4, Flat(20)), (2, Flat(6)), (1, Flat(5))],
        judge_each(judge_step),
        hints=[
            "Rank r owns chunk r: flat.chunk(size)[rank]. Which collective of lesson 03 gives rank "
            "r chunk r of the mean, and which puts everyone's chunk together?",
            "reduce_scatter(gradient, group, op='mean') gives the mean of this rank's chunk; "
            "update(shard, mean) the new shard; all_gather(new_shard, group) the whole.",
        ],
        skeleton="""\
def sharded_step(flat, gradient, update, group):
    shard = flat.chunk(...)[...]
    mean = ...(gradient, group, op="mean")
    return ...(update(shard, mean), group)""",
        parts=COLLECTIVES,
    ),
    Exercise(
        "backward_in_units",
        backward_in_units,
        backward_trial,
        [(4, Units(4)), (2, Units(1)), (1, Units(3))],
        judge_each(judge_backward),
        hints=[
            "p.register_post_accumulate_grad_hook(fn) calls fn(p) when p.grad is complete. In it: "
            "if all gradients of p's unit are there, flatten, free, scatter.",
            "whole = torch.cat([p.grad.flatten() for p in unit]); set each p.grad = None; "
            "parts[number] = reduce_scatter(whole, group, op='mean'). Remove the hooks after "
            "loss.backward().",
        ],
        skeleton="""\
def backward_in_units(loss, units, group):
    parts, hooks = [None] * len(units), []
    for number, unit in enumerate(units):
        def ready(_, number=number, unit=unit):
            if all(p.grad is not None for p in unit):
                ...                              # flatten, free, scatter
        hooks += [p.register_post_accumulate_grad_hook(ready) for p in unit]
    loss.backward()
    for hook in hooks:
        hook.remove()
    return parts""",
        parts=COLLECTIVES,
    ),
    Exercise(
        "forward_on_demand",
        forward_on_demand,
        forward_trial,
        [(4, Sharded(5)), (2, Sharded(2)), (1, Sharded(3))],
        judge_each(judge_forward),
        hints=[
            "all_gather(shard, group) gives the whole weight, layer(x, weight) the next x. Who "
            "still holds the weight of the layer before, while the next one arrives?",
            "In a loop: weight = all_gather(shard, group); x = layer(x, weight); del weight.",
        ],
        skeleton="""\
def forward_on_demand(x, layers, shards, group):
    for layer, shard in zip(layers, shards):
        weight = ...
        x = ...
        ...
    return x""",
        parts=COLLECTIVES,
    ),
]
