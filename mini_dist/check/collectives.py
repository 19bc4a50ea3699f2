"""Exercises of lesson 03 (the ring's two halves, all-reduce, all-to-all) and of lesson 04."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..collectives import (
    doubling_all_reduce,
    pairwise_all_to_all,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from ..ledger.steps import count_rounds
from .exercise import Exercise, Line, Trial, ranks


@dataclass(frozen=True)
class Case:
    """What each rank puts in: whole numbers, so that sums are exact in any order; or, to see in
    which order a rank adds, numbers whose sums are rounded."""

    length: int
    dtype: torch.dtype = torch.float64
    rounding: bool = False

    def __str__(self) -> str:
        kind = "random numbers" if self.rounding else "numbers"
        return f"{self.length} {kind} of {str(self.dtype).removeprefix('torch.')}"

    def input(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 + rank)
        if self.rounding:
            return torch.randn(self.length, generator=generator, dtype=self.dtype)
        return torch.randint(-50, 50, (self.length,), generator=generator).to(self.dtype)

    def inputs(self, size: int) -> list[torch.Tensor]:
        return [self.input(rank) for rank in range(size)]


# The first case is the one whose numbers are shown. Then one thing changes at a time: the number of
# ranks, the dtype, the kind of numbers. 7 numbers are no multiple of 3, which reduce-scatter has to
# bear; one rank is a group, too.
EQUAL = [(4, Case(1000)), (3, Case(6)), (2, Case(10, torch.int64)), (1, Case(5))]
CASES = [EQUAL[0], (3, Case(7)), *EQUAL[2:]]
ROUNDING = (8, Case(10_000, rounding=True))
POWERS = [(8, Case(1000)), ROUNDING, (4, Case(7)), (2, Case(10, torch.int64)), (1, Case(5))]


def trial(fn: Callable, case: Case, group):
    x = case.input(group.rank())
    result = fn(x, group)
    returned = result
    if isinstance(result, torch.Tensor):
        returned = result.clone()
        result.add_(1)  # whoever gets a result may change it, and x shall not change with it
    return returned, torch.equal(x, case.input(group.rank()))


@dataclass
class Target:
    """What a right answer gives for the inputs of all ranks, and what its run may cost.

    values: inputs -> results, rank by rank. chunks: how many n-ths of its input a rank sends.
    """

    values: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    nbytes: Callable[[int, int], float]  # (bytes of one rank's input, ranks) -> sent by a rank
    rounds: Callable[[int], int]
    mistakes: Callable[[Measured], str]
    ring: bool = True


class Measured:
    """The numbers of one trial, by the names that hints speak of."""

    def __init__(self, trial: Trial, target: Target):
        run, self.size = trial.run, trial.run.world_size
        self.inputs = trial.case.inputs(self.size)
        self.input_bytes = self.inputs[0].nbytes
        self.results = [result for result, _ in run.results]
        self.unchanged = all(unchanged for _, unchanged in run.results)
        self.expected = target.values(self.inputs)
        leaves = list(run.ledger.leaves())
        self.native = sorted({c.op for c in leaves if c.op not in ("send", "recv")})
        self.sent = [run.ledger.total_bytes(rank=rank) for rank in range(self.size)]
        self.messages = [
            sum(1 for c in leaves if c.rank == rank and c.op == "send") for rank in range(self.size)
        ]
        self.largest = max((c.nbytes for c in leaves if c.op == "send"), default=0)
        self.rounds, self.rounds_wanted = count_rounds(run.ledger), target.rounds(self.size)
        self.traffic = run.ledger.traffic()
        agree = close if trial.case.rounding else equal
        self.right = [agree(a, b) for a, b in zip(self.results, self.expected)]
        self.same_bits = all(equal(a, self.results[0]) for a in self.results[1:])
        self.compare_bits = trial.case.rounding

    @property
    def is_ring(self) -> bool:
        """Everyone sends to one neighbour, all in the same direction."""
        steps = {
            (to - rank) % self.size
            for rank, row in enumerate(self.traffic)
            for to, nbytes in enumerate(row)
            if nbytes
        }
        return steps <= {1} or steps <= {self.size - 1}

    @property
    def hub(self) -> int | None:
        """The rank that every message comes from or goes to, if there is one."""
        for hub in range(self.size):
            others = [r for r in range(self.size) if r != hub]
            if self.size > 2 and all(self.traffic[a][b] == 0 for a in others for b in others):
                return hub
        return None

    def results_are(self, values: list[torch.Tensor]) -> bool:
        return all(close(a, b) for a, b in zip(self.results, values))


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


def judge(target: Target):
    """Lines for the first case and whatever fails in the others; the first hint that fits."""

    def judge_trials(trials: list[Trial]) -> tuple[list[Line], str]:
        lines, hint = [], ""
        for number, one in enumerate(trials):
            measured = Measured(one, target)
            found = describe(measured, target)
            where = f" ({ranks(measured.size)}, {one.case.length} numbers)" * (number > 0)
            for line in found:
                if number == 0 or not line.ok:
                    line.what += where
                    lines.append(line)
            if not hint and not all(line.ok for line in found):
                hint = general_mistake(measured) or target.mistakes(measured)
                hint = only_here(trials[:number], one) + hint
        return lines, hint

    return judge_trials


def only_here(passed: list[Trial], failed: Trial) -> str:
    """Says what is special about a case that fails where all before it passed."""
    if not passed:
        return ""
    if failed.case.rounding:
        return "Right with whole numbers. "
    *sizes, last = dict.fromkeys(str(trial.run.world_size) for trial in passed)
    before = f"{', '.join(sizes)} and {last} ranks" if sizes else f"{last} ranks"
    if failed.case.dtype not in [trial.case.dtype for trial in passed]:
        return f"Right with {passed[0].case.dtype}, not with {failed.case.dtype}. "
    size, length = failed.run.world_size, failed.case.length
    return f"Right with {before}, not with {ranks(size)} and {length} numbers. "


def describe(measured: Measured, target: Target) -> list[Line]:
    size = measured.size
    bytes_wanted = target.nbytes(measured.input_bytes, size)
    exact = measured.input_bytes % size == 0
    lines = [
        Line(
            "right values on",
            f"{sum(measured.right)} of {size} ranks",
            f"{size} of {size} ranks",
            all(measured.right),
        ),
        Line("x is left alone", measured.unchanged, True, measured.unchanged),
    ]
    if measured.compare_bits:
        same = measured.same_bits
        lines.append(Line("all ranks equal to the last bit", same, True, same))
    lines.append(
        Line(
            "calls of the backend's collectives",
            ", ".join(measured.native) or "none",
            "none",
            not measured.native,
        )
    )
    if exact:
        lines.append(
            Line(
                "bytes sent by a rank, at most",
                max(measured.sent),
                round(bytes_wanted),
                max(measured.sent) <= bytes_wanted,
            )
        )
    lines.append(
        Line(
            "rounds, one after the other",
            measured.rounds,
            measured.rounds_wanted,
            measured.rounds <= measured.rounds_wanted,
        )
    )
    if target.ring:
        route = "its neighbour" if measured.is_ring else "several ranks"
        lines.append(Line("a rank sends to", route, "its neighbour", measured.is_ring))
    return lines


def general_mistake(m: Measured) -> str:
    if m.native:
        return (
            f"The work is done by the backend's own {' and '.join(m.native)}. "
            "Write it from messages: send, recv, exchange."
        )
    if any(result is None for result in m.results):
        return "A rank returned None: every rank has to return its result."
    for result, expected in zip(m.results, m.expected):
        if not isinstance(result, torch.Tensor):
            return f"A rank returned a {type(result).__name__}: one tensor is asked for."
        if result.dtype != expected.dtype:
            return (
                f"x is {expected.dtype}, your result {result.dtype}. New tensors take their dtype "
                "from x: torch.empty_like(x), x.new_zeros(...), x.clone()."
            )
    if not m.unchanged and m.size == 1:
        return "With one rank you return x itself, or a piece of it. Begin with a copy: x.clone()."
    if not m.unchanged:
        return (
            "Your function changes its input, or returns a piece of it. Work on new tensors "
            "(.clone(), a + b instead of a += b): the caller still needs x."
        )
    return ""


def wrong_shape(m: Measured) -> str:
    for rank, (result, expected) in enumerate(zip(m.results, m.expected)):
        if result.shape != expected.shape:
            return (
                f"Rank {rank}'s result has shape {list(result.shape)}; "
                f"{list(expected.shape)} is asked for."
            )
    return ""


def wrong_number(m: Measured) -> str:
    """Of rounds, each rank sending once in each."""
    if set(m.messages) == {m.rounds_wanted}:
        return ""
    return f"{m.size} ranks need {m.rounds_wanted} rounds; messages sent, by rank: {m.messages}."


def too_slow(m: Measured) -> str:
    """For what is right but for its schedule."""
    if not all(m.right) or m.rounds <= m.rounds_wanted:
        return ""
    if max(m.messages) > m.rounds_wanted:
        return (
            f"The values are right, but a rank sends {max(m.messages)} messages where "
            f"{m.rounds_wanted} would do: each one costs its latency."
        )
    return (
        f"The values are right, and so are the bytes, but {m.rounds} rounds follow each other "
        f"instead of {m.rounds_wanted}: ranks wait while others work. In every round *all* ranks "
        "send and receive at the same time (exchange does both)."
    )


def whole_tensors(m: Measured) -> bool:
    return m.size > 2 and m.largest >= m.input_bytes


def no_message(m: Measured) -> str:
    if m.size == 1 or any(m.sent):
        return ""
    return "No rank sent anything, so no rank can know of the others' numbers."


def through_one_rank(m: Measured) -> str:
    if m.hub is None:
        return ""
    return (
        f"Every message goes to or from rank {m.hub}. Its link carries {max(m.sent):,} bytes and "
        "the others wait for it. In a ring every rank only talks to its neighbours."
    )


# -- reduce-scatter ---------------------------------------------------------------------------


def sums(inputs: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(inputs).sum(0)


def summed_chunks(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(sums(inputs).tensor_split(len(inputs)))


def reduce_scatter_mistakes(m: Measured) -> str:
    if found := no_message(m) or through_one_rank(m):
        return found
    if whole_tensors(m):
        return (
            "You send whole tensors round. Cut x into as many chunks as there are ranks and send "
            "one chunk per round."
        )
    if m.results_are([chunk / m.size for chunk in m.expected]):
        return "These are means. The sum is asked for; who wants the mean can divide."
    if m.results_are([sums(m.inputs)] * m.size):
        return "Every rank returns the whole sum. Rank r is only asked for chunk r of it."
    for shift in range(1, m.size):
        if m.results_are(m.expected[shift:] + m.expected[:shift]):
            return (
                f"Rank r returns chunk r+{shift} (mod {m.size}) instead of chunk r. A chunk ends "
                "one rank before the one that sent it first: so what should rank r send first?"
            )
    if m.results_are([x.tensor_split(m.size)[rank] for rank, x in enumerate(m.inputs)]):
        return "Rank r returns its own chunk r: nothing was added to it."
    if slow := too_slow(m):
        return slow
    if found := wrong_number(m) or cut_by_chunk(m) or wrong_shape(m):
        return found
    return (
        "The chunks lack some ranks' terms, or hold some twice. What arrives must be added to *the "
        "same* chunk of yours before it is sent on. Print the chunk's number in each round."
    )


def cut_by_chunk(m: Measured) -> str:
    ours, theirs = (
        [len(part) for part in cut(m.inputs[0], m.size)]
        for cut in (torch.tensor_split, torch.chunk)
    )
    if theirs == ours or [result.numel() for result in m.results] != theirs:
        return ""
    return (
        f"x.chunk cuts {sum(ours)} numbers for {m.size} ranks into {'+'.join(map(str, theirs))}; "
        f"use x.tensor_split: {'+'.join(map(str, ours))}."
    )


reduce_scatter = Target(
    summed_chunks,
    lambda n_bytes, n: (n - 1) / n * n_bytes,
    lambda n: n - 1,
    reduce_scatter_mistakes,
)


# -- all-gather -------------------------------------------------------------------------------


def gathered(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.cat(inputs)] * len(inputs)


def all_gather_mistakes(m: Measured) -> str:
    if found := no_message(m) or through_one_rank(m):
        return found
    if not all(m.right) and all(
        len(result) == len(expected) and set(parts_of(result, m)) == set(range(m.size))
        for result, expected in zip(m.results, m.expected)
    ):
        return (
            "The parts are all there, but not in rank order: rank 0 has "
            f"{parts_of(m.results[0], m)}. Put what started on rank s at place s."
        )
    if set(m.messages) == {m.rounds_wanted} and max(m.sent) > (m.size - 1) * m.input_bytes:
        return (
            "You pass on everything that you have so far. Pass on only what came in the round "
            "before: the rest, your neighbour already has."
        )
    if not m.is_ring:
        return (
            "Each rank sends its part to every other rank. The bytes are right, but every link is "
            "used, also the slow ones. In a ring a part is passed on from neighbour to neighbour."
        )
    if slow := too_slow(m):
        return slow
    if found := wrong_number(m) or wrong_shape(m):
        return found
    return (
        "Some parts are there twice, others not at all. Send on what you *received*, not your own."
    )


def parts_of(result: torch.Tensor, m: Measured) -> list[int | None]:
    """Whose part is at each place of a gathered result; None where it is nobody's."""
    return [
        next((rank for rank, x in enumerate(m.inputs) if equal(part, x)), None)
        for part in result.split(len(m.inputs[0]))
    ]


all_gather = Target(
    gathered, lambda n_bytes, n: (n - 1) * n_bytes, lambda n: n - 1, all_gather_mistakes
)


# -- all-reduce -------------------------------------------------------------------------------


def summed(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [sums(inputs)] * len(inputs)


def all_reduce_mistakes(m: Measured) -> str:
    if found := no_message(m) or through_one_rank(m):
        return found
    if m.size > 2 and sum(m.right) == 1:
        return f"Only rank {m.right.index(True)} has the sum: everyone needs it."
    if m.size > 2 and all(m.right) and sum(m.messages) <= m.rounds:
        return (
            "The tensor goes down the line whole, so one rank works at a time and the others wait. "
            "Cut it into chunks that are all on their way at once."
        )
    if whole_tensors(m):
        least = round(2 * (m.size - 1) / m.size * m.input_bytes)
        return (
            f"You send whole tensors round: {max(m.sent):,} bytes a rank. In a ring of chunks it "
            f"is 2 (n-1)/n of one tensor, {least:,} bytes."
        )
    if m.results_are([total / m.size for total in m.expected]):
        return "These are means. The sum is asked for; who wants the mean can divide."
    if m.results_are(summed_chunks(m.inputs)):
        return "You stopped half-way: rank r has the sum of chunk r. Now gather the chunks."
    if not m.is_ring:
        return "The values travel to several ranks. In a ring you only send to your neighbour."
    if not all(m.right) and any(
        m.results_are([torch.cat(chunks[k:] + chunks[:k])] * m.size)
        for chunks in [summed_chunks(m.inputs)]
        for k in range(1, m.size)
    ):
        return "All the sums are there, but the chunks are in another order than in x."
    if slow := too_slow(m):
        return slow
    return wrong_shape(m) or "Scatter the sums first (exercise 1), then gather them (exercise 2)."


all_reduce = Target(
    summed, lambda n_bytes, n: 2 * (n - 1) / n * n_bytes, lambda n: 2 * (n - 1), all_reduce_mistakes
)


# -- all-reduce in the fewest rounds ----------------------------------------------------------


def doubling_mistakes(m: Measured) -> str:
    if found := no_message(m) or through_one_rank(m):
        return found
    if m.results_are([total / m.size for total in m.expected]):
        return "These are means. The sum is asked for; who wants the mean can divide."
    if all(m.right) and m.compare_bits and not m.same_bits:
        return (
            "Each rank adds in another order, so the last bits differ (lesson 03, section 10). "
            "Partners rank ^ d add the same two numbers."
        )
    if all(m.right) and m.is_ring and m.size > 2:
        return (
            f"A ring needs {m.rounds} rounds. Let partners get farther apart: after the round with "
            "distance d, everyone knows 2 d ranks' terms."
        )
    if m.largest < m.input_bytes and all(m.right):
        return (
            f"You send the least bytes, in {m.rounds} rounds. Here only rounds count: exchange the "
            f"whole tensor, then {m.rounds_wanted} are enough."
        )
    if all(m.right) and max(m.messages) > m.rounds_wanted:
        return (
            f"A rank sends {max(m.messages)} messages where {m.rounds_wanted} would do: tell a "
            "partner the sum of all that you know, not each term."
        )
    if slow := too_slow(m):
        return slow
    pairs = [m.inputs[rank] + m.inputs[rank ^ 1] for rank in range(m.size - m.size % 2)]
    if m.size > 2 and m.results_are(pairs):
        return "You stopped after the first round: rank r has the sum of r and its first partner."
    if max(m.messages) < m.rounds_wanted:
        return (
            f"{m.size} ranks need {m.rounds_wanted} rounds, since each can at most double how many "
            f"terms are in your sum; messages sent, by rank: {m.messages}."
        )
    if found := wrong_shape(m):
        return found
    return (
        "Some terms are missing, others are in twice. Partners at distance d are rank ^ d, for d = "
        "1, 2, 4, ...; both add what the other had *before* this round."
    )


def log2(n: int) -> int:
    return n.bit_length() - 1


doubling = Target(summed, lambda n_bytes, n: log2(n) * n_bytes, log2, doubling_mistakes, ring=False)


# -- all-to-all -------------------------------------------------------------------------------


def transposed(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    size = len(inputs)
    return [torch.cat([x.tensor_split(size)[rank] for x in inputs]) for rank in range(size)]


def all_to_all_mistakes(m: Measured) -> str:
    if found := no_message(m) or through_one_rank(m):
        return found
    if whole_tensors(m):
        return (
            "You send everything to everyone and throw most of it away. Rank d only needs part d "
            "of your x."
        )
    if all(m.right) and max(m.sent) > (m.size - 1) / m.size * m.input_bytes:
        return (
            "The values are right, but parts travel through the hands of ranks that do not need "
            "them, and are paid for each time. Send part d to rank d directly."
        )
    if m.results_are(m.inputs):
        return "Every rank returns its own x: nothing was exchanged."
    sent_own = [x.tensor_split(m.size)[rank] for rank, x in enumerate(m.inputs)]
    if m.results_are([torch.cat(sent_own)] * m.size):
        return "You send the part with *your* number to everyone. Rank d is to get part d."
    orders = [
        torch.cat([m.inputs[(rank - k) % m.size].tensor_split(m.size)[rank] for k in range(m.size)])
        for rank in range(m.size)
    ]
    if m.results_are(orders):
        return "The parts are all there, in the order in which they came. Put them in rank order."
    if slow := too_slow(m):
        return slow
    if min(m.messages) < m.size - 1:
        return (
            f"Each rank has something for {m.size - 1} others; it sent {min(m.messages)} messages."
        )
    if found := wrong_shape(m):
        return found
    return "Part d of rank s belongs at place s of rank d's result. What is at place s of yours?"


all_to_all = Target(
    transposed,
    lambda n_bytes, n: (n - 1) / n * n_bytes,
    lambda n: n - 1,
    all_to_all_mistakes,
    ring=False,
)


# -- the exercises ----------------------------------------------------------------------------

EXERCISES = [
    Exercise(
        "ring_reduce_scatter",
        ring_reduce_scatter,
        trial,
        CASES,
        judge(reduce_scatter),
        hints=[
            "Cut x with x.tensor_split(size). In each of the n-1 rounds send one chunk to the next "
            "rank, receive one from the rank before, and add your own chunk of the same number.",
            "Chunk r has to end on rank r, so it has to start on rank r+1: rank r begins by "
            "sending chunk r-1. What it receives in round 1 is chunk r-2, and so on. Begin with a "
            "copy, chunks[rank - 1].clone(): with one rank nothing is ever added to it.",
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
        EQUAL,
        judge(all_gather),
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
        judge(all_reduce),
        hints=[
            "After a reduce-scatter, rank r has chunk r of the sum. Which collective gives "
            "everyone everyone's chunk?",
            "One line: return ring_all_gather(ring_reduce_scatter(x, group), group).",
        ],
        skeleton="""\
def ring_all_reduce(x, group):
    chunk = ...       # one call: my chunk of the sum
    return ...        # one call: everyone's chunks""",
        parts=frozenset({"ring_reduce_scatter", "ring_all_gather"}),
    ),
    Exercise(
        "doubling_all_reduce",
        doubling_all_reduce,
        trial,
        POWERS,
        judge(doubling),
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
        pairwise_all_to_all,
        trial,
        EQUAL,
        judge(all_to_all),
        hints=[
            "Cut x into n parts: part d is for rank d, and your own part stays with you. In round "
            "k exchange with two ranks: send to the one k further, receive from the one k before.",
            "Put what comes from rank s at place s of a list; torch.cat(list) is the result.",
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
