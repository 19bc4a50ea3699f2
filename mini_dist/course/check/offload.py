"""Exercises of lesson 20: read the next weight ahead, and place tensors without fragments.

Waiting is judged in virtual time, without a clock: the case gives the seconds of each layer and of
each load. A weight counts as held from its request until nothing refers to it any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mini_dist.collectives.emulate import EmulatedLink
from mini_dist.strategies.offload import ideas
from mini_dist.strategies.offload.allocator import lifetimes, requests

from .engine import Exercise, Line, Measured, line, yes
from .measures import Alive, plain

# ---- read ahead ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    sizes: tuple[int, ...]  # elements of each layer's weight
    seconds: tuple[float, ...]  # of each layer's computation

    def __str__(self) -> str:
        if not self.sizes:
            return "no layer"
        same = len(set(self.sizes)) == 1 == len(set(self.seconds))
        return f"{len(self.sizes)} layers" + ", all of different sizes" * (not same)

    def weight(self, number: int) -> Tensor:
        return torch.arange(self.sizes[number], dtype=torch.float64) % 7 + number

    def expected(self) -> tuple[float, float]:
        """Return the seconds with one weight read ahead, and the seconds without."""
        device = link = ahead = 0.0
        for size, seconds in zip(self.sizes, self.seconds):
            link = max(link, ahead) + size
            begin = max(device, link)
            ahead, device = begin, begin + seconds  # the next load begins with this layer
        return device, sum(self.sizes) + sum(self.seconds)


class Weighty(Alive):
    """Count only storages of more than 64 bytes: a single number such as x is no weight."""

    def storages(self) -> dict[int, int]:
        return {place: size for place, size in super().storages().items() if size > 64}


@dataclass
class World:
    """A device, a link of one element per second, and the weights that are held."""

    case: Weights
    alive: Alive
    now: float = 0.0
    link: EmulatedLink = field(default_factory=lambda: EmulatedLink(0.0, 1.0))
    loads: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    most: int = 0  # elements held at once

    def load(self, number: int) -> Arriving:
        if not 0 <= number < len(self.case.sizes):
            raise IndexError(
                f"load({number}): there are layers 0 to {len(self.case.sizes) - 1} only"
            )
        self.loads.append(number)
        return Arriving(self, number)

    def layer(self, number: int):
        def compute(x: Tensor, weight: Tensor) -> Tensor:
            self.used.append(number)
            self.now += self.case.seconds[number]
            return after(x, number, weight)

        return compute


FIRST = torch.ones((), dtype=torch.float64)  # the input of the first layer


def after(x: Tensor, number: int, weight: Tensor) -> Tensor:
    """Return a layer's output, which depends on its input and its number."""
    return 2 * x + (number + 1) * weight.sum()


class Arriving:
    """A weight in flight. Its memory counts from the request on."""

    def __init__(self, world: World, number: int):
        self.world = world
        self.weight: Tensor | None = world.case.weight(number)
        self.there = world.link.send(self.weight.numel(), world.now)
        held = sum(size for size in world.alive.storages().values())
        world.most = max(world.most, held // 8)

    def wait(self) -> Tensor:
        if self.weight is None:
            raise RuntimeError("wait() was called twice for one load: it gives the weight once")
        self.world.now = max(self.world.now, self.there)
        weight, self.weight = self.weight, None
        return weight


@dataclass(eq=False)
class Read:
    found: object
    seconds: float
    most: int
    loads: list[int]
    used: list[int]


def read_trial(fn, case: Weights, group) -> Read:
    alive = Weighty()
    world = World(case, alive)
    layers = [world.layer(number) for number in range(len(case.sizes))]
    with alive:
        found = fn(FIRST.clone(), layers, world.load)
    return Read(found, world.now, world.most, world.loads, world.used)


class ReadAhead(Measured):
    def measure(self):
        self.read, case = self.results[0], self.case
        self.seconds, self.without = case.expected()
        self.right = FIRST
        for number in range(len(case.sizes)):
            self.right = after(self.right, number, case.weight(number))
        pairs = zip(case.sizes, [*case.sizes[1:], 0])
        self.room = max((a + b for a, b in pairs), default=0)

    def lines(self) -> list[Line]:
        read, number = self.read, len(self.case.sizes)
        right = isinstance(read.found, Tensor) and torch.equal(read.found, self.right)
        return [
            yes("the right result", right),
            line("weights loaded", read.loads, list(range(number))),
            Line("seconds", read.seconds, self.seconds, read.seconds <= self.seconds),
            Line("elements held at most", read.most, self.room, read.most <= self.room),
        ]

    def mistake(self) -> str:
        read, number = self.read, len(self.case.sizes)
        if read.used != list(range(number)):
            return "Each layer computes once, in order: x = layer(x, weight), from the first on."
        if not isinstance(read.found, Tensor) or not torch.equal(read.found, self.right):
            return "Wrong result. Each layer gets the x of the layer before it and its own weight."
        if read.loads != list(range(number)):
            again = len(read.loads) > len(set(read.loads))
            return (
                "A weight was loaded twice: load(number) goes over the link each time."
                if again
                else "Load each weight once, in the order in which the layers need them."
            )
        if read.most > self.room and read.seconds <= self.seconds:
            return (
                f"Loading is hidden, but {read.most} elements are held where {self.room} do: two "
                "weights at most, the one that computes and the next. Ask for a weight no earlier "
                "than when the layer before it begins, and free the last one before that "
                "(del weight)."
            )
        if read.most > self.room:
            return f"{read.most} elements are held at once where {self.room} do: two weights."
        if read.seconds >= self.without:
            return (
                f"Nothing is hidden: {read.seconds:g} s is the whole sum. load() only begins; what "
                "you do between it and wait() costs nothing. Ask for the next weight before this "
                "layer computes, and wait for it after."
            )
        return (
            f"{read.seconds:g} s where {self.seconds:g} do. As soon as a layer's weight is there, "
            "begin to load the next one, before this layer computes."
        )

    @staticmethod
    def raised(error: str) -> str:
        if "there are layers 0 to" in error or "list index out of range" in error:
            return "the last layer has no next layer, and an empty list has no first layer.\n"
        return ""


# ---- place tensors ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensors:
    """kind "given": `tensors`; "by lot": `number` random ones; "a step": a training step's."""

    kind: str
    tensors: tuple[tuple[int, int, int], ...] = ()
    number: int = 0

    def __str__(self) -> str:
        if self.kind == "a step":
            return "the tensors of a training step"
        number = len(self.all())
        return f"{number} tensor{'s' * (number != 1)}{', drawn by lot' * (self.kind == 'by lot')}"

    def all(self) -> list[tuple[int, int, int]]:
        if self.kind == "by lot":
            lots = torch.Generator().manual_seed(self.number)

            def draw(low, high):
                return int(torch.randint(low, high, (1,), generator=lots))

            begins = sorted(draw(0, 60) for _ in range(self.number))
            return [(draw(1, 9) * 10, b, b + draw(1, 12)) for b in begins]
        return list(self.tensors)


def place_trial(fn, case: Tensors, group):
    tensors = step_of_a_model() if case.kind == "a step" else case.all()
    return tensors, plain(fn(list(tensors)))


def step_of_a_model() -> list[tuple[int, int, int]]:
    """Return the tensors of one step of a small GPT, as the ledger's recorder sees them."""
    from mini_dist.model.gpt import GPT
    from mini_dist.model.loss import token_loss
    from mini_dist.plan.config import ModelConfig
    from mini_dist.ranks.ledger.memory import MemoryRecorder
    from mini_dist.ranks.ledger.phases import Phases

    config = ModelConfig(num_layers=2, d_model=32, num_heads=2, seq_len=16)
    model, tokens = GPT(config), torch.zeros(2, 17, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = MemoryRecorder(Phases())
    with recorder.hooks(), recorder:
        token_loss(model(tokens[:, :-1]), tokens[:, 1:]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return lifetimes(requests(recorder.export()))


def end_of(tensors, places) -> int:
    return max((place + size for place, (size, _, _) in zip(places, tensors)), default=0)


class Placed(Measured):
    def measure(self):
        self.tensors, self.places = self.results[0]
        self.room = end_of(self.tensors, ideas.offsets(self.tensors))
        moments = {begin for _, begin, _ in self.tensors}
        self.live = max(
            (sum(s for s, b, e in self.tensors if b <= t < e) for t in moments), default=0
        )
        self.are_places = (
            isinstance(self.places, (list, tuple))
            and len(self.places) == len(self.tensors)
            and all(isinstance(p, int) and not isinstance(p, bool) for p in self.places)
        )
        self.collisions = self.end = 0
        if self.are_places:
            self.end = end_of(self.tensors, self.places)
            spans = list(zip(self.places, self.tensors))
            for i, (p, (s, b, e)) in enumerate(spans):
                for q, (t, c, f) in spans[:i]:
                    together = b < f and c < e
                    self.collisions += together and p < q + t and q < p + s
            self.negative = min(self.places, default=0) < 0

    def lines(self) -> list[Line]:
        rows = [yes("an address for each tensor", self.are_places)]
        if self.are_places:
            rows += [
                line("pairs that overlap while both live", self.collisions, 0),
                line("places below 0", int(self.negative), 0),
                Line("memory", self.end, f"at most {self.room}", self.end <= self.room),
                Line("alive at once", self.live, "", True),
            ]
        return rows

    def mistake(self) -> str:
        if not self.are_places:
            return f"Return a list of {len(self.tensors)} whole numbers, an address per tensor."
        if self.negative:
            return "An address is counted from the begin of the memory: 0 or more."
        if self.collisions:
            return (
                f"{self.collisions} pairs of tensors overlap while both live. Two live together if "
                "each begins before the other ends (end itself is no longer part of a life)."
            )
        every = sum(size for size, _, _ in self.tensors)
        if self.end == every:
            return "Each tensor has its own memory. Reuse an address once its tensor has ended."
        told = f"{self.end} bytes where {self.room} do. "
        for order, words in ORDERS.items():
            if self.end == end_of(self.tensors, one_by_one(self.tensors, order)):
                return f"{told}{words} The largest goes first, wherever a smaller one began."
        return told + (
            "The largest tensor goes first, then the next; each to the lowest address that is free "
            "as long as it lives. Do you skip a gap, or look only at the last end?"
        )


def one_by_one(tensors, order) -> list[int]:
    """Return the lowest free address for each tensor. order: a sort key of (bytes, begin, end)."""
    places: dict[int, int] = {}
    for i in sorted(range(len(tensors)), key=lambda i: order(tensors[i])):
        size, begin, end = tensors[i]
        beside = [(places[j], places[j] + tensors[j][0]) for j in places
                  if tensors[j][1] < end and begin < tensors[j][2]]  # fmt: skip
        starts = sorted([0, *(stop for _, stop in beside)])
        places[i] = next(p for p in starts if all(p + size <= a or b <= p for a, b in beside))
    return [places[i] for i in range(len(tensors))]


ORDERS = {
    lambda tensor: tensor[1]: "This is the size if you go by the times when the tensors begin.",
    lambda tensor: 0: "This is the size if you go in the order of the list.",
    lambda tensor: tensor[0]: "This is the size if the smallest tensor comes first.",
    lambda tensor: tensor[1] - tensor[2]: "This is the size if the longest life comes first.",
}
FRAGMENTS = ((4, 0, 2), (2, 0, 6), (4, 1, 3), (2, 2, 6), (8, 3, 6), (3, 4, 5))

# Taking the lowest gap needs 49 bytes. Taking the smallest gap that is large enough needs 52.
LOWEST = (
    (15, 0, 3),
    (18, 4, 7),
    (9, 3, 4),
    (3, 1, 4),
    (13, 1, 4),
    (1, 8, 10),
    (20, 5, 7),
    (11, 1, 5),
)

EXERCISES = [
    Exercise(
        "read_ahead",
        ideas.read_ahead,
        read_trial,
        [
            (1, Weights((40,) * 4, (50.0,) * 4)),
            (1, Weights((40, 90, 20, 60, 50), (30.0, 20.0, 70.0, 10.0, 40.0))),
            (1, Weights((30, 80), (100.0, 10.0))),
            (1, Weights((25,), (5.0,))),
            (1, Weights((), ())),
        ],
        ReadAhead,
        hints=[
            "load(number) begins, wait() ends. Between the two, run the layer that has its weight.",
            "Before the loop: arriving = load(0). In it: weight = arriving.wait(), then arriving = "
            "load(number + 1) if there is one, and only then x = layer(x, weight).",
        ],
        skeleton="""\
def read_ahead(x, layers, load):
    arriving = load(0) if layers else None
    for number, layer in enumerate(layers):
        weight = ...
        if ...:                       # is there a next layer?
            arriving = ...
        x = layer(x, weight)
    return x""",
        again=False,
    ),
    Exercise(
        "offsets",
        ideas.offsets,
        place_trial,
        [
            (1, Tensors("given", FRAGMENTS)),
            (1, Tensors("by lot", number=12)),
            (1, Tensors("a step")),
            (1, Tensors("by lot", number=39)),
            (1, Tensors("given", LOWEST)),
            (1, Tensors("given", ((5, 0, 1),))),
            (1, Tensors("given", ((4, 0, 2), (4, 0, 2), (2, 1, 3), (4, 0, 2)))),
            (1, Tensors("given")),
        ],
        Placed,
        hints=[
            "Two tensors live together if begin < the other's end, both ways. Only these are in "
            "each other's way.",
            "Go through the tensors from the largest to the smallest. Sort the tensors that are "
            "placed and live together with this one by address, and take the first gap that is "
            "large enough, or the end of the last.",
        ],
        skeleton="""\
def offsets(tensors):
    place = {}
    for number in sorted(range(len(tensors)), key=...):
        nbytes, begin, end = tensors[number]
        beside = [i for i in place if ...]        # lives at the same time
        lowest = 0
        for start, stop in sorted(...):
            if start - lowest >= nbytes:
                break
            lowest = max(lowest, stop)
        place[number] = lowest
    return [place[number] for number in range(len(tensors))]""",
    ),
]
