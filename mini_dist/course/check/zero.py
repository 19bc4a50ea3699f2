"""Exercises of lesson 07: the sharded step, backward that frees, forward that gathers.

Right values are not enough: a full step, sliced afterwards, also gives them. So the judge also
checks how much the optimizer got, how many gradients and weights existed at once, and the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from mini_dist.strategies.zero.ideas import backward_in_units, forward_on_demand, sharded_step

from .engine import NO_BARRIER, Exercise, Line, Measured, line, on_ranks, too_few_bytes
from .measures import Alive, all_close, mistake_of_dtype
from .ways import Complaint, hooks_of

LARGEST = 40.0  # of the terms that are added up here


def same(found, expected) -> bool:
    return all_close(found, expected, LARGEST)


def something(came):
    if came is None:
        raise Complaint("Your function returned None: return what it has made.")
    return came


def at_most(what: str, measured: int, most: int) -> Line:
    return Line(what, measured, f"<= {most}", measured <= most)


# ---- the sharded step ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Flat:
    length: int
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.length} parameters" + f" of {self.dtype}" * (self.dtype != torch.float32)

    def flat_and_gradient(self, rank: int):
        generator = torch.Generator().manual_seed(rank)
        gradient = torch.randint(-80, 80, (self.length,), generator=generator) / 4
        gradient[: self.length // 4] = 0  # all of a shard, with 4 ranks
        return (2.0**30 * torch.arange(self.length)).to(self.dtype), gradient.to(self.dtype)


def step_trial(fn, case: Flat, group):
    flat, gradient = case.flat_and_gradient(group.rank())
    given = []

    def update(shard, mean):
        given.append((len(shard), len(mean)))
        return stepped(shard, mean) if len(shard) == len(mean) else shard  # the judge says more

    return something(fn(flat, gradient, update, group)), given


def stepped(shard, mean):
    """Return a step's result with little of the old shard, so adding it to the old would show."""
    return shard / 2**40 - 0.5 * mean


class Step(Measured):
    def measure(self):
        length = self.case.length
        flat, _ = self.case.flat_and_gradient(0)
        total = sum(self.case.flat_and_gradient(rank)[1] for rank in range(self.size))
        self.new, self.of_sums = stepped(flat, total / self.size), stepped(flat, total)
        self.found, self.given = zip(*self.results)
        self.part = length // self.size
        self.wanted = 2 * (self.size - 1) * flat.nbytes

    def lines(self) -> list[Line]:
        return [
            on_ranks("right parameters on", (same([found], [self.new]) for found in self.found)),
            line("elements given to the optimizer", self.given[0], [(self.part, self.part)]),
            line("bytes sent by all ranks", self.sent, self.wanted),
            line("barriers", self.barriers, 0),
        ]

    def mistake(self) -> str:
        if any(len(calls) != 1 for calls in self.given):
            return "The optimizer, update(shard, mean), is to be called once on each rank."
        if any(calls[0] != (self.part, self.part) for calls in self.given):
            return (
                f"The optimizer was given {self.given[0][0]} elements. Each rank steps its own "
                f"{self.part} only: that is what makes the states of the others needless."
            )
        if wrong_dtype := mistake_of_dtype(self.run, self.case.dtype, self.wanted):
            return wrong_dtype
        if self.size > 1 and all(same([found], [self.of_sums]) for found in self.found):
            return "These are steps with sums: reduce_scatter(gradient, group, op='mean')."
        if all(isinstance(f, torch.Tensor) and len(f) == self.part for f in self.found):
            return "Every rank returns its shard only: all_gather the new shards."
        if not all(same([found], [self.new]) for found in self.found):
            return (
                "Wrong parameters. Rank r owns chunk r of flat and gets chunk r of the mean "
                "gradient; what is gathered are the shards that update has returned."
            )
        if self.barriers:
            return NO_BARRIER
        if self.sent < self.wanted:
            return too_few_bytes(self.sent, self.wanted)
        return (
            f"Right, but {self.sent:,} bytes were sent where {self.wanted:,} do: an all-reduce "
            "gives every rank the whole gradient, but each rank needs only a part. reduce_scatter "
            "sends half."
        )


# ---- backward that frees ------------------------------------------------------------------------

PER_UNIT = 3  # parameters, at most


@dataclass(frozen=True)
class Units:
    """turned: in each unit the last parameter's gradient is ready last, and the last unit is ready
    last. wide: parameters are this many times longer, so that the library chooses the ring for
    three ranks as well."""

    count: int
    turned: bool = False
    wide: int = 1

    def __str__(self) -> str:
        turned = ", in another order, also inside the units" * self.turned
        return f"{self.count} units of 2 or {PER_UNIT} parameters{turned}"

    def units_and_loss(self, rank: int):
        """Return units and a loss. Weights are large compared with what else backward allocates."""
        units = []
        for i in range(self.count):
            width = 60 * self.wide
            weight = torch.linspace(0.5, 1 + i, 12 * width).view(12, width).sin()
            if self.turned:
                weight = weight.t().contiguous().t()  # and so is its gradient
            matrix = nn.Parameter(weight)
            vectors = [nn.Parameter(torch.linspace(-1, 1, width)) for _ in range(1 + i % 2)]
            units.append([matrix, *vectors])
        x = torch.randn(12, generator=torch.Generator().manual_seed(rank))
        for matrix, *vectors in units:
            x = sum(vectors, x @ matrix / 4).view(-1, 12).mean(0).tanh()
        if self.turned:
            units = [unit[::-1] for unit in [*units[1:], units[0]]]
        return units, 100 * x.sum()  # so that every gradient is large beside its rounding


def is_there(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has a gradient that takes up memory."""
    return parameter.grad is not None and parameter.grad.untyped_storage().nbytes() > 0


def backward_trial(fn, case: Units, group):
    units, loss = case.units_and_loss(group.rank())
    parameters = [p for unit in units for p in unit]
    gradients, nbytes = [0], [0]  # held at once, noted for each complete gradient
    alive, recorder = Alive(), group.recorder
    begin = recorder.begin

    def count(_):
        gradients.append(sum(map(is_there, parameters)))
        nbytes.append(alive.nbytes())

    def leaving(*args, **kwargs):
        nbytes.append(alive.nbytes() if recorder.thread.parent is None else 0)
        return begin(*args, **kwargs)

    handles = [p.register_post_accumulate_grad_hook(count) for p in parameters]
    before, recorder.begin = hooks_of(parameters), leaving
    with alive:
        came = something(fn(loss, units, group))
    parts = came if isinstance(came, list) else []
    recorder.begin = begin
    unit = sum(p.nbytes for p in units[0])
    whole = round(max(nbytes) / unit - case.count / group.size())  # without the kept parts
    left = sum(map(is_there, parameters))
    hooks = hooks_of(parameters) - before
    for handle in handles:  # a handle keeps its parameter alive
        handle.remove()
    return parts, max(gradients), whole, left, hooks


class Backward(Measured):
    def measure(self):
        everyones = []
        for rank in range(self.size):
            units, loss = self.case.units_and_loss(rank)
            loss.backward()
            everyones.append([torch.cat([p.grad.flatten() for p in unit]) for unit in units])
        totals = [sum(grads) for grads in zip(*everyones)]
        self.sums = [[total.chunk(self.size)[r] for total in totals] for r in range(self.size)]
        self.parts = [[part / self.size for part in of_rank] for of_rank in self.sums]
        self.found, self.held, self.whole, self.left, self.hooks = zip(*self.results)
        self.wanted = (self.size - 1) * sum(total.nbytes for total in totals)

    def lines(self) -> list[Line]:
        return [
            on_ranks("right parts on", map(same, self.found, self.parts)),
            at_most("gradients held at once", max(self.held), PER_UNIT),
            at_most("units held whole, copies too", max(self.whole), 2),
            line("gradients held after it", max(self.left), 0),
            line("bytes sent by all ranks", self.sent, self.wanted),
            line("hooks left behind", max(self.hooks), 0),
            line("barriers", self.barriers, 0),
        ]

    def mistake(self) -> str:
        if wrong_dtype := mistake_of_dtype(self.run, torch.float32, self.wanted):
            return wrong_dtype
        if self.size > 1 and all(map(same, self.found, self.sums)):
            return "These are sums: reduce_scatter(whole, group, op='mean')."
        if all(map(same, self.found, [part[::-1] for part in self.parts])):
            return "The parts are in the order of backward: return them in the order of units."
        if not all(map(same, self.found, self.parts)):
            return (
                "Wrong parts. For each unit: torch.cat of its flattened gradients, in the order of "
                "its parameters; reduce_scatter gives this rank its part. A unit may leave when "
                "all its gradients are there."
            )
        if max(self.held) > PER_UNIT:
            return (
                f"{max(self.held)} gradients were there at once: {PER_UNIT} are enough. Scatter in "
                "a hook (register_post_accumulate_grad_hook), while backward is running, and set "
                ".grad to None at once."
            )
        if max(self.left):
            return "Gradients are still there after backward: set .grad to None when they left."
        if max(self.hooks):
            return "Your hooks are still there in the next backward: keep the handles, .remove()."
        if self.barriers:
            return NO_BARRIER
        if self.sent < self.wanted:
            return too_few_bytes(self.sent, self.wanted)
        if self.sent > self.wanted:
            return (
                f"Right, but {self.sent:,} bytes were sent where {self.wanted:,} do: "
                "reduce_scatter each unit once; an all-reduce sends twice that."
            )
        return (
            f"Whole gradients of {max(self.whole)} units are there at once, though not in "
            ".grad: in a list, or as copies. What a unit leaves behind is this rank's part: "
            "scatter in the hook, while backward is running, and keep that only."
        )

    @staticmethod
    def raised(error: str) -> str:
        if "NoneType" not in error:
            return ""
        return (
            "a gradient of the unit is not there yet when another parameter's is: which is "
            "the last, the order of the list does not say. Put a hook on each, and ask whether all "
            "are there.\n"
        )


# ---- forward that gathers -----------------------------------------------------------------------


@dataclass(frozen=True)
class Sharded:
    layers: int
    length: int = 24 * 12  # of a weight, large compared with x [24]
    nothing: bool = False  # the last rank's x is empty

    def __str__(self) -> str:
        return f"{self.layers} layers" + ", an empty x on the last rank" * self.nothing

    def inputs(self, rank: int, size: int) -> torch.Tensor:
        if self.nothing and rank == size - 1:
            return torch.empty(0, 24)
        return torch.randn(24, generator=torch.Generator().manual_seed(rank))


def weights(case: Sharded) -> list[torch.Tensor]:
    made = [torch.linspace(-1, 1 + i, case.length).sin() for i in range(case.layers)]
    made[-1][: case.length // 2] = 0  # with several ranks, all of rank 0's shard
    return made


def apply(x, weight):
    """Return the next x. Each of its elements uses another part of the weight, so parts that
    change places show. Like a linear, it takes no weight with fewer digits."""
    if x.dtype is torch.float64 is not weight.dtype:
        raise TypeError(f"a layer got x in float64 and its weight in {weight.dtype}")
    return (x * weight.view(24, -1).mean(1)).sin()


def forward_trial(fn, case: Sharded, group):
    rank, size, recorder = group.rank(), group.size(), group.recorder
    alive, whole = Alive(), weights(case)[0].nbytes
    arrivals: list[dict[int, int]] = []  # storages at the first gather after a layer
    nbytes, sizes, before = [0], [], []
    begin, started = recorder.begin, len(recorder.comms)

    def arriving(*args, **kwargs):
        if recorder.thread.parent is None and not arrivals:  # (a ring has several messages)
            arrivals.append(alive.storages())
        return begin(*args, **kwargs)

    def layer(x, weight):
        sizes.append(len(weight))
        before.append(len(recorder.comms) - started)
        nbytes.append(alive.nbytes())
        place = weight.untyped_storage()._cdata
        for there in arrivals:  # plus the arrived weight, unless it reuses memory
            nbytes.append(sum(there.values()) + whole * (place not in there))
        arrivals.clear()
        return apply(x, weight) if len(weight) == case.length else x  # the judge says more

    shards = [weight.chunk(size)[rank].clone() for weight in weights(case)]
    recorder.begin = arriving
    with alive:
        result = fn(case.inputs(rank, size), [layer] * case.layers, shards, group)
    recorder.begin = begin
    return something(result), int(max(nbytes) / whole + 0.1), sizes, before


class Forward(Measured):
    def measure(self):
        self.expected = []
        for rank in range(self.size):
            x = self.case.inputs(rank, self.size)
            for weight in weights(self.case):
                x = apply(x, weight)
            self.expected.append(x)
        self.found, self.most, self.lengths, self.before = zip(*self.results)
        self.wanted = (self.size - 1) * sum(weight.nbytes for weight in weights(self.case))

    def lines(self) -> list[Line]:
        right = (same([a], [b]) for a, b in zip(self.found, self.expected))
        return [
            on_ranks("right outputs on", right),
            line(
                "elements of the weights",
                sorted({n for e in self.lengths for n in e}),
                [self.case.length],
            ),
            at_most("whole weights at once", max(self.most), 1),
            line("bytes sent by all ranks", self.sent, self.wanted),
            line("barriers", self.barriers, 0),
        ]

    def mistake(self) -> str:
        if any(length != self.case.length for each in self.lengths for length in each):
            return "A layer was given a shard, not the whole weight: all_gather it first."
        if not all(same([a], [b]) for a, b in zip(self.found, self.expected)):
            return (
                "Wrong outputs: each rank sends its own x through all layers in order, each with "
                "its own weight, gathered from all ranks' shards."
            )
        if wrong_dtype := mistake_of_dtype(self.run, torch.float32, self.wanted, "weights"):
            return wrong_dtype
        if max(self.most) > 1 and len(set(self.before[0])) == 1:
            return (
                "All weights are gathered before the first layer: then every rank holds the whole "
                "model. Gather inside the loop."
            )
        if max(self.most) > 1:
            return (
                f"{max(self.most)} whole weights were there at once. The name `weight` holds the "
                "last one until the next has arrived: `del weight` after use, and keep no list of "
                "them, and no copy. Gather them one by one, each right before its layer."
            )
        if self.barriers:
            return NO_BARRIER
        if self.sent < self.wanted:
            return too_few_bytes(self.sent, self.wanted)
        return f"Right, but {self.sent:,} bytes were sent where {self.wanted:,} do."


EXERCISES = [
    Exercise(
        "sharded_step",
        sharded_step,
        step_trial,
        [
            (4, Flat(20)),
            (3, Flat(16800, torch.float64)),
            (2, Flat(6, torch.bfloat16)),
            (1, Flat(5)),
        ],
        Step,
        hints=[
            "Rank r owns chunk r: flat.chunk(size)[rank]. Which collective of lesson 03 gives rank "
            "r chunk r of the mean, and which puts everyone's chunk together?",
            "reduce_scatter(gradient, group, op='mean') gives the mean of this rank's chunk; "
            "update(shard, mean) the new shard; all_gather(new_shard, group) the whole.",
        ],
        again=False,
        skeleton="""\
def sharded_step(flat, gradient, update, group):
    shard = flat.chunk(...)[...]
    mean = ...(gradient, group, op="mean")
    return ...(update(shard, mean), group)""",
    ),
    Exercise(
        "backward_in_units",
        backward_in_units,
        backward_trial,
        [(4, Units(4)), (3, Units(3, turned=True, wide=60)), (2, Units(1)), (1, Units(3))],
        Backward,
        hints=[
            "p.register_post_accumulate_grad_hook(fn) calls fn(p) when p.grad is complete. In it: "
            "if all gradients of p's unit are there, flatten, free, scatter.",
            "whole = torch.cat([p.grad.flatten() for p in unit]); set each p.grad = None; "
            "parts[number] = reduce_scatter(whole, group, op='mean'). Remove the hooks after "
            "loss.backward().",
        ],
        again=False,
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
    ),
    Exercise(
        "forward_on_demand",
        forward_on_demand,
        forward_trial,
        [
            (4, Sharded(5)),
            (3, Sharded(1, 24 * 1500)),
            (2, Sharded(2, nothing=True)),
            (1, Sharded(3)),
        ],
        Forward,
        hints=[
            "all_gather(shard, group) gives the whole weight, layer(x, weight) the next x. Who "
            "still holds the weight of the layer before, while the next one arrives?",
            "In a loop: weight = all_gather(shard, group); x = layer(x, weight); del weight.",
        ],
        again=False,
        skeleton="""\
def forward_on_demand(x, layers, shards, group):
    for layer, shard in zip(layers, shards):
        weight = ...
        x = ...
        ...
    return x""",
    ),
]
