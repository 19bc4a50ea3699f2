"""Exercises of lesson 03 (the ring's two halves, all-reduce, all-to-all) and of lesson 04."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch

from mini_dist import collectives
from mini_dist.collectives import (
    doubling_all_reduce,
    halving_doubling,
    messages,
    ops,
    pairwise,
    pairwise_all_to_all,
    ring,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from mini_dist.ranks.ledger.steps import count_rounds, steps
from mini_dist.strategies import data_parallel

from .adversities import ANYONE
from .engine import Exercise, Line, Measured, line, on_ranks, too_few_bytes, yes
from .watch import functions_of, started_when_possible

# A solution may use messages and checks of arguments. (A barrier gets a hint of its own.)
MAY_USE = functions_of(messages) | {
    inspect.unwrap(pairwise.barrier),
    halving_doubling.power_of_two,
    ring.check_sizes,
    pairwise.check_splits,
}
DO_THE_WORK = functions_of(collectives, ops, data_parallel) - MAY_USE

# Up to this size, whole numbers and their sums over 8 ranks are exact in any order. In a dtype with
# fewer digits they are not exact, so the judge notices a narrower dtype.
LARGEST = {torch.float64: 2**49, torch.int64: 2**58, torch.bfloat16: 2**4}


@dataclass(frozen=True)
class Case:
    """The input of each rank: whole numbers, whose sums are exact in any order; with `rounding`,
    random numbers, whose sums show in which order a rank adds."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    rounding: bool = False

    def __str__(self) -> str:
        kind = "random number" if self.rounding else "number"
        dtype = str(self.dtype).removeprefix("torch.")
        if not self.shape:
            return f"one {kind} of {dtype}, of no dimension"
        size = self.shape[0] if len(self.shape) == 1 else list(self.shape)
        return f"{size} {kind}s of {dtype}"

    def input(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 + rank)
        if self.rounding:
            return torch.randn(self.shape, generator=generator, dtype=self.dtype)
        largest = LARGEST[self.dtype]
        return torch.randint(-largest, largest, self.shape, generator=generator).to(self.dtype)

    def inputs(self, size: int) -> list[torch.Tensor]:
        return [self.input(rank) for rank in range(size)]


# The verdict shows the numbers of the first case. The others vary the number of ranks, the shape,
# the dtype, or the kind of numbers. A group of one rank is also a case.
FIRST, INTEGERS, ALONE = (4, Case((1000,))), (2, Case((10,), torch.int64)), (1, Case((5,)))
EQUAL = [FIRST, (3, Case((6,))), INTEGERS, (5, Case((10,), torch.bfloat16)), ALONE]
# A reduce-scatter must also handle lengths that do not divide, and fewer numbers than ranks.
UNEQUAL = [
    FIRST,
    (3, Case((7,))),
    INTEGERS,
    (5, Case((3,))),
    (3, Case((7,), torch.bfloat16)),
    ALONE,
]
# Where rows are only passed on, they may have any shape.
ROWS = [*EQUAL[:-1], (3, Case((6, 2, 3))), ALONE]
POWERS = [
    (8, Case((1000,))),
    (4, Case((10_000,), rounding=True)),
    INTEGERS,
    (4, Case((3, 5), torch.bfloat16)),
    (2, Case(())),
    ALONE,
]


def trial(fn, case: Case, group):
    x = case.input(group.rank())
    with started_when_possible(group.recorder):
        result = fn(x, group)
    alone = torch.equal(x, case.input(group.rank()))
    if isinstance(result, torch.Tensor) and result.numel():  # a result shares no memory with x
        alone = alone and result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    return result, alone


class Collective(Measured):
    """Measure all collectives in the same way. An exercise defines the result of every rank
    (`values`), the bytes it may send (`nbytes`), the number of rounds, and its typical mistakes."""

    is_a_ring = True

    def values(self) -> list[torch.Tensor]:
        raise NotImplementedError

    def nbytes(self) -> list[int]:
        raise NotImplementedError

    def rounds_wanted(self) -> int:
        raise NotImplementedError

    def own_mistakes(self) -> Iterator[str]:
        """Yield hints, the most helpful first; "" or False for a mistake that was not made."""
        raise NotImplementedError

    def measure(self) -> None:
        self.inputs = self.case.inputs(self.size)
        self.input_bytes = self.inputs[0].nbytes
        self.results, left_alone = zip(*self.run.results)
        self.left_alone = all(left_alone)
        self.expected = self.values()
        self.wanted = self.nbytes()
        agree = close if self.case.rounding else equal
        self.right = [agree(a, b) for a, b in zip(self.results, self.expected)]
        self.same_bits = all(equal(a, self.results[0]) for a in self.results[1:])
        ledger = self.run.ledger
        sends = [c for c in ledger.leaves() if c.op == "send"]
        self.by_rank = [ledger.total_bytes(rank=rank) for rank in range(self.size)]
        self.messages = [sum(c.rank == rank for c in sends) for rank in range(self.size)]
        self.largest = max((c.nbytes for c in sends), default=0)
        self.dtypes = {c.dtype for c in sends if c.nbytes}
        self.steps, self.rounds = steps(ledger), count_rounds(ledger)
        self.traffic = ledger.traffic()

    def lines(self) -> list[Line]:
        wanted = self.rounds_wanted()
        found = [on_ranks("right values on", self.right), yes("x is left alone", self.left_alone)]
        if self.case.rounding:
            found.append(yes("all ranks equal to the last bit", self.same_bits))
        found += [
            self.backend_line(),
            line("bytes sent by a rank", in_short(self.by_rank), in_short(self.wanted)),
            Line("rounds, one after the other", self.rounds, wanted, self.rounds <= wanted),
        ]
        if self.is_a_ring:
            to = "its neighbor" if self.to_neighbours else "several ranks"
            found.append(line("a rank sends to", to, "its neighbor"))
        return found

    def mistake(self) -> str:
        found = chain(self.usual_mistakes(), self.own_mistakes(), [self.wrong_bytes()])
        return next(filter(None, found))

    @property
    def directions(self) -> list[set[int]]:
        """Return how far around the ring the messages of each round go."""
        rounds = [
            {(m.target - m.source) % self.size for m in step if m.nbytes} for step in self.steps
        ]
        return [distances for distances in rounds if distances]

    @property
    def to_neighbours(self) -> bool:
        """Return whether in each round all ranks send to one neighbor, in the same direction."""
        return all(distances in ({1}, {self.size - 1}) for distances in self.directions)

    @property
    def hub(self) -> int | None:
        """Return the rank that every message comes from or goes to, if there is one."""
        for hub in range(self.size):
            others = [r for r in range(self.size) if r != hub]
            if self.size > 2 and all(self.traffic[a][b] == 0 for a in others for b in others):
                return hub
        return None

    def results_are(self, values: list[torch.Tensor]) -> bool:
        return all(close(a, b) for a, b in zip(self.results, values))

    # -- mistakes that can be made in any collective ---------------------------------------------

    def usual_mistakes(self) -> Iterator[str]:
        if self.backend or self.barriers:
            yield self.of_the_backend("Write it from messages: send, recv, exchange.")
        if any(result is None for result in self.results):
            yield "A rank returned None: every rank has to return its result."
        for result, x in zip(self.results, self.inputs):
            if not isinstance(result, torch.Tensor):
                yield f"A rank returned a {type(result).__name__}: return one tensor."
            if result.dtype != x.dtype:
                yield (
                    f"x is {x.dtype}, your result {result.dtype}. New tensors take their dtype "
                    "from x: torch.empty_like(x), x.new_zeros(...), x.clone()."
                )
        if not self.left_alone and self.size == 1:
            yield "You return x itself, or a piece of it. Begin with a copy: x.clone()."
        if not self.left_alone:
            yield (
                "Your function changes its input, or returns a piece of it. Work on new tensors "
                "(.clone(), a + b instead of a += b): the caller still needs x."
            )
        yield self.wrong_dtype() or self.from_anyone()

    def wrong_dtype(self) -> str:
        """Return the hint for messages in another dtype than x; "" if there are none."""
        x = str(self.case.dtype).removeprefix("torch.")
        if self.dtypes <= {x}:
            return ""
        if sum(self.by_rank) < sum(self.wanted):
            return too_few_bytes(sum(self.by_rank), sum(self.wanted))
        others = " and ".join(sorted(self.dtypes - {x}))
        return (
            f"x is {x}, and you send {others}. Send the dtype of x: another dtype costs "
            "more bytes, or loses digits. And the receiver knows the length, so do not send it."
        )

    def from_anyone(self) -> str:
        if all(self.right) or all(c.op != "recv_anysource" for c in self.run.ledger.leaves()):
            return ""
        return ANYONE

    def wrong_bytes(self) -> str:
        """Return the hint for an answer whose only flaw is the number of bytes."""
        if sum(self.by_rank) < sum(self.wanted):
            return too_few_bytes(sum(self.by_rank), sum(self.wanted))
        return (
            f"The values are right, but a rank sends {in_short(self.by_rank)} bytes where "
            f"{in_short(self.wanted)} do: something travels that nobody needs."
        )

    def wrong_shape(self) -> str:
        for rank, (result, expected) in enumerate(zip(self.results, self.expected)):
            if result.shape != expected.shape:
                return (
                    f"Rank {rank}'s result has shape {list(result.shape)}; "
                    f"{list(expected.shape)} is asked for."
                )
        return ""

    def wrong_number(self) -> str:
        """Return the hint for wrong values from ranks that did not send once in each round."""
        wanted = self.rounds_wanted()
        if all(self.right) or set(self.messages) == {wanted}:
            return ""
        return f"{self.size} ranks need {wanted} rounds; messages sent, by rank: {self.messages}."

    def too_slow(self) -> str:
        """Return the hint for right values that take too many rounds."""
        wanted = self.rounds_wanted()
        if not all(self.right) or self.rounds <= wanted:
            return ""
        if max(self.messages) > wanted:
            return (
                f"The values are right, but a rank sends {max(self.messages)} messages where "
                f"{wanted} would do: each one costs its latency."
            )
        return (
            f"The values are right, and so are the bytes, but {self.rounds} rounds follow each "
            f"other instead of {wanted}: ranks wait while others work. In every round *all* ranks "
            "send and receive at the same time (exchange does both)."
        )

    def whole_tensors(self) -> bool:
        return self.size > 2 and self.largest >= self.input_bytes

    def means(self) -> str:
        if self.size == 1 or not self.results_are([each / self.size for each in self.expected]):
            return ""
        return "These are means. Return the sum; a caller who wants the mean can divide."

    def no_way_through(self) -> str:
        """Return the hint if no rank sends anything, or if one rank takes part in all messages."""
        if self.size > 1 and self.input_bytes and not any(self.by_rank):
            return "No rank sent anything, so no rank can know the others' numbers."
        if self.hub is None or not self.input_bytes:
            return ""
        return (
            f"Every message goes to or from rank {self.hub}. A rank sends up to "
            f"{max(self.by_rank):,} bytes, and all wait for that rank. In a ring every rank only "
            "talks to its neighbors."
        )

    def both_ways(self) -> str:
        if self.size <= 2 or {1, self.size - 1} not in self.directions:
            return ""
        return (
            "You send round the ring in both directions. The values may be right and no byte too "
            "many, but then each rank uses two links at a time, with a part of the data on each. "
            "In this ring everyone sends to one neighbor, all in the same direction."
        )


def in_short(values: list[int]) -> object:
    """Return one number if all ranks have the same, else the list."""
    return values[0] if len(set(values)) == 1 else values


def equal(result, expected) -> bool:
    return (
        isinstance(result, torch.Tensor)
        and isinstance(expected, torch.Tensor)
        and result.dtype == expected.dtype
        and torch.equal(result, expected)
    )


def close(result, expected: torch.Tensor) -> bool:
    return (
        isinstance(result, torch.Tensor)
        and result.shape == expected.shape
        and torch.allclose(result.double(), expected.double())
    )


def sums(inputs: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(inputs).sum(0)


# -- reduce-scatter ---------------------------------------------------------------------------


class ReduceScatter(Collective):
    def values(self):
        return list(sums(self.inputs).tensor_split(self.size))

    def nbytes(self):  # all chunks but the rank's own
        return [self.input_bytes - chunk.nbytes for chunk in self.expected]

    def rounds_wanted(self):
        return self.size - 1

    def own_mistakes(self):
        n = self.size
        yield self.no_way_through()
        if self.whole_tensors():
            yield (
                "You send whole tensors around. Cut x into as many chunks as there are ranks and "
                "send one chunk per round."
            )
        yield self.means()
        if n > 1 and self.results_are([sums(self.inputs)] * n):
            yield "Every rank returns the whole sum. Rank r should return only chunk r of it."
        for shift in range(1, n):
            if self.results_are(self.expected[shift:] + self.expected[:shift]):
                yield (
                    f"Rank r returns chunk r+{shift} (mod {n}) instead of chunk r. A chunk ends "
                    "one rank before the one that sent it first: so what should rank r send "
                    "first?"
                )
        own = [x.tensor_split(n)[rank] for rank, x in enumerate(self.inputs)]
        if n > 1 and self.results_are(own):
            yield "Rank r returns its own chunk r: nothing was added to it."
        yield self.both_ways() or self.too_slow()
        yield self.wrong_number() or self.cut_by_chunk() or self.wrong_shape()
        if not all(self.right):
            yield (
                "The chunks lack some ranks' terms, or hold some twice. What arrives must be "
                "added to *the same* chunk of yours before it is sent on. Print the chunk's "
                "number in each round."
            )

    def cut_by_chunk(self) -> str:
        ours, theirs = (
            [len(part) for part in cut(self.inputs[0], self.size)]
            for cut in (torch.tensor_split, torch.chunk)
        )
        if theirs == ours or [result.numel() for result in self.results] != theirs:
            return ""
        return (
            f"x.chunk cuts {sum(ours)} numbers for {self.size} ranks into "
            f"{'+'.join(map(str, theirs))}; use x.tensor_split: {'+'.join(map(str, ours))}."
        )


# -- all-gather -------------------------------------------------------------------------------


class AllGather(Collective):
    def values(self):
        return [torch.cat(self.inputs)] * self.size

    def nbytes(self):
        return [(self.size - 1) * self.input_bytes] * self.size

    def rounds_wanted(self):
        return self.size - 1

    def own_mistakes(self):
        yield self.no_way_through()
        if not all(self.right) and all(map(self.has_all_parts, self.results)):
            yield (
                "The parts are all there, but not in rank order: rank 0 has "
                f"{self.parts_of(self.results[0])}. Put the part that started on rank s at index s."
            )
        once_a_round = set(self.messages) == {self.rounds_wanted()}
        if once_a_round and max(self.by_rank) > max(self.wanted):
            yield (
                "You pass on everything that you have so far. Pass on only what came in the round "
                "before: your neighbor already has the rest."
            )
        yield self.both_ways()
        if not self.to_neighbours:
            yield (
                "A rank sends to several others, so every link is used, including the slow ones. "
                "In a ring a part is passed on from neighbor to neighbor."
            )
        yield self.too_slow() or self.wrong_number() or self.wrong_shape()
        if not all(self.right):
            yield (
                "Some parts appear twice, others not at all. Send on what you *received*, not "
                "your own."
            )

    def has_all_parts(self, result: torch.Tensor) -> bool:
        ranks = set(range(self.size))
        return result.shape == self.expected[0].shape and set(self.parts_of(result)) == ranks

    def parts_of(self, result: torch.Tensor) -> list[int | None]:
        """Return the rank whose part is at each index of a gathered result; None for no rank's."""
        return [
            next((rank for rank, x in enumerate(self.inputs) if equal(part, x)), None)
            for part in result.split(len(self.inputs[0]))
        ]


# -- all-reduce -------------------------------------------------------------------------------


class AllReduce(Collective):
    def values(self):
        return [sums(self.inputs)] * self.size

    def nbytes(self):
        return [2 * (self.size - 1) * self.input_bytes // self.size] * self.size

    def rounds_wanted(self):
        return 2 * (self.size - 1)

    def own_mistakes(self):
        n = self.size
        yield self.no_way_through()
        if n > 2 and sum(self.right) == 1:
            yield f"Only rank {self.right.index(True)} has the sum: every rank needs it."
        if n > 2 and all(self.right) and sum(self.messages) <= self.rounds:
            yield (
                "The whole tensor goes down the line, so one rank works at a time and the others "
                "wait. Cut it into chunks that are all on their way at once."
            )
        if self.whole_tensors():
            yield (
                f"You send whole tensors around: {max(self.by_rank):,} bytes per rank. In a ring "
                f"of chunks it is 2 (n-1)/n of one tensor, {self.wanted[0]:,} bytes."
            )
        yield self.means()
        chunks = list(sums(self.inputs).tensor_split(n))
        if n > 1 and self.results_are(chunks):
            yield "You stopped half-way: rank r has the sum of chunk r. Now gather the chunks."
        yield self.both_ways()
        if not self.to_neighbours:
            yield "The values travel to several ranks. In a ring you only send to your neighbor."
        turned = (torch.cat(chunks[k:] + chunks[:k]) for k in range(1, n))
        if not all(self.right) and any(self.results_are([whole] * n) for whole in turned):
            yield "All the sums are right, but the chunks are not in x's order."
        yield self.too_slow() or self.wrong_shape()
        if not all(self.right):
            yield "Scatter the sums first (exercise 1), then gather them (exercise 2)."


# -- all-reduce in the fewest rounds ----------------------------------------------------------


class Doubling(Collective):
    is_a_ring = False

    def values(self):
        return [sums(self.inputs)] * self.size

    def nbytes(self):
        return [self.rounds_wanted() * self.input_bytes] * self.size

    def rounds_wanted(self):
        return self.size.bit_length() - 1  # log2

    def own_mistakes(self):
        n, wanted = self.size, self.rounds_wanted()
        yield self.no_way_through() or self.means()
        if all(self.right):
            if self.case.rounding and not self.same_bits:
                yield (
                    "Each rank adds in its own order, so the last bits differ (lesson 03, section "
                    "10). Partners rank ^ d add the same two numbers."
                )
            if self.to_neighbours and n > 2:
                yield (
                    f"A ring needs {self.rounds} rounds. Let partners get farther apart: after the "
                    "round with distance d, everyone knows 2 d ranks' terms."
                )
            if self.largest < self.input_bytes and self.rounds > wanted:
                yield (
                    f"You send the least bytes, in {self.rounds} rounds. Here only rounds count: "
                    f"exchange the whole tensor, then {wanted} are enough."
                )
            if max(self.messages) > wanted:
                yield (
                    f"A rank sends {max(self.messages)} messages where {wanted} would do: tell a "
                    "partner the sum of all that you know, not each term."
                )
            yield self.too_slow() or self.wrong_bytes()
        pairs = [self.inputs[rank] + self.inputs[rank ^ 1] for rank in range(n - n % 2)]
        if n > 2 and self.results_are(pairs):
            yield "You stopped after the first round: rank r has two terms."
        if max(self.messages) < wanted:
            yield (
                f"{n} ranks need {wanted} rounds, since each can at most double how many terms are "
                f"in your sum; messages sent, by rank: {self.messages}."
            )
        yield self.wrong_shape() or (
            "Some terms are missing, others are in twice. Partners at distance d are rank ^ d, for "
            "d = 1, 2, 4, ...; both add what the other had *before* this round."
        )


# -- all-to-all -------------------------------------------------------------------------------


class AllToAll(Collective):
    is_a_ring = False

    def values(self):
        return [self.parts_for(rank, range(self.size)) for rank in range(self.size)]

    def nbytes(self):
        return [(self.size - 1) * self.input_bytes // self.size] * self.size

    def rounds_wanted(self):
        return self.size - 1

    def parts_for(self, rank: int, sources: Iterable[int]) -> torch.Tensor:
        return torch.cat([self.inputs[s].tensor_split(self.size)[rank] for s in sources])

    def own_mistakes(self):
        n = self.size
        yield self.no_way_through()
        if self.whole_tensors():
            yield (
                "You send everything to everyone and throw most of it away. Rank d only needs "
                "part d of your x."
            )
        if all(self.right) and max(self.by_rank) > max(self.wanted):
            yield (
                "The values are right, but parts travel through the hands of ranks that do not "
                "need them, and each hop costs bytes. Send part d to rank d directly."
            )
        yield self.too_slow()
        if all(self.right):
            yield self.wrong_bytes()
        if self.results_are(self.inputs):
            yield "Every rank returns its own x: nothing was exchanged."
        sent_own = [x.tensor_split(n)[rank] for rank, x in enumerate(self.inputs)]
        if self.results_are([torch.cat(sent_own)] * n):
            yield "You send the part with *your* number to everyone. Rank d should get part d."
        arrived = [[(rank - k) % n for k in range(n)] for rank in range(n)]
        if self.results_are([self.parts_for(*each) for each in enumerate(arrived)]):
            yield ("All parts arrived, but they are in order of arrival. Put them in rank order.")
        if min(self.messages) < n - 1:
            yield (
                f"Each rank has something for {n - 1} others; one of them sent "
                f"{min(self.messages)} messages."
            )
        yield self.wrong_shape() or (
            "Part d of rank s belongs at index s of rank d's result. What is at index s of yours?"
        )


# -- the exercises ----------------------------------------------------------------------------

EXERCISES = [
    Exercise(
        "ring_reduce_scatter",
        ring_reduce_scatter,
        trial,
        UNEQUAL,
        ReduceScatter,
        refuses=DO_THE_WORK,
        hints=[
            "Cut x with x.tensor_split(size). In each of the n-1 rounds send one chunk to the next "
            "rank, receive one from the rank before, and add your own chunk of the same number.",
            "Chunk r has to end on rank r, so it has to start on rank r+1: rank r begins by "
            "sending chunk r-1. What it receives in round 1 is chunk r-2, and so on. Begin with a "
            "copy, chunks[rank - 1].clone(): with one rank you would return a part of x itself.",
        ],
        skeleton="""\
def ring_reduce_scatter(x, group):
    rank, size = group.rank(), group.size()
    chunks = x.tensor_split(size)
    partial = chunks[...].clone()
    for step in range(...):
        mine = chunks[...]                    # my chunk of the number that arrives now
        arrived = exchange(partial, ..., ..., group, like=mine)
        partial = ...
    return partial""",
    ),
    Exercise(
        "ring_all_gather",
        ring_all_gather,
        trial,
        ROWS,
        AllGather,
        refuses=DO_THE_WORK,
        hints=[
            "In round 1 send your own part to the next rank. In every later round send on what you "
            "received in the round before. After n-1 rounds you have seen all parts.",
            "What arrives in round k (1, 2, ...) started k ranks before you: it is the part of "
            "rank (r-k) % n. Keep a list by rank number and put it together at the end.",
        ],
        skeleton="""\
def ring_all_gather(x, group):
    rank, size = group.rank(), group.size()
    parts = [None] * size
    parts[rank] = x
    passing = x
    for step in range(...):
        passing = exchange(passing, ..., ..., group)
        parts[...] = passing
    return torch.cat(parts)""",
    ),
    Exercise(
        "ring_all_reduce",
        ring_all_reduce,
        trial,
        EQUAL,
        AllReduce,
        refuses=DO_THE_WORK - set(map(inspect.unwrap, (ring_reduce_scatter, ring_all_gather))),
        hints=[
            "After a reduce-scatter, rank r has chunk r of the sum. Which collective gives "
            "everyone everyone's chunk?",
            "One line: return ring_all_gather(ring_reduce_scatter(x, group), group).",
        ],
        skeleton="""\
def ring_all_reduce(x, group):
    chunk = ...       # one call: my chunk of the sum
    return ...        # one call: everyone's chunks""",
    ),
    Exercise(
        "doubling_all_reduce",
        doubling_all_reduce,
        trial,
        POWERS,
        Doubling,
        refuses=DO_THE_WORK,
        hints=[
            "In round 1 exchange x with rank ^ 1 and add. Now every pair has the same sum. With "
            "whom do you exchange that, so that four have the same?",
            "Begin with total = x.clone(). Then a loop: distance = 1, 2, 4, ... while it is below "
            "the number of ranks; in it, total = total + exchange(total, rank ^ distance, rank ^ "
            "distance, group).",
        ],
        skeleton="""\
def doubling_all_reduce(x, group):
    rank, size, distance = group.rank(), group.size(), 1
    total = x.clone()
    while ...:
        partner = rank ^ distance
        total = total + exchange(..., partner, partner, group)
        distance = ...
    return total""",
    ),
    Exercise(
        "all_to_all",
        collectives.all_to_all,
        trial,
        ROWS,
        AllToAll,
        refuses=DO_THE_WORK,
        answer=(pairwise_all_to_all,),
        hints=[
            "Cut x into n parts: part d is for rank d, and your own part stays with you. In round "
            "k exchange with two ranks: send to the one k further, receive from the one k before.",
            "Put the part from rank s at index s of a list; torch.cat(list) is the result.",
        ],
        skeleton="""\
def all_to_all(x, group):
    rank, size = group.rank(), group.size()
    parts = x.tensor_split(size)
    received = [None] * size
    received[rank] = ...
    for k in range(1, size):
        to, source = ..., ...
        received[source] = exchange(parts[to], to, source, group)
    return torch.cat(received)""",
    ),
]
