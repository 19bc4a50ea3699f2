"""Exercises of lesson 19: stochastic rounding, top-k with error feedback, a power iteration step.

A right mean does not show what was sent for it, and a rounding that looks right may be biased. So
the exercises also judge bytes, and averages over thousands of random draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mini_dist.strategies.compression import ideas

from . import answers
from .engine import (
    NO_BARRIER,
    Exercise,
    Line,
    Measured,
    are_two,
    line,
    on_ranks,
    too_few_bytes,
    yes,
)
from .measures import close

# ---- rounding by lot ----------------------------------------------------------------------------

VALUES = (0.3, 0.6, -0.3, -1.75, 2.5, 40.02, 300.3, 0.0, 7.0, -3.0)
TRIES = 8000
ROOM = 5 * 0.5 / TRIES**0.5  # five times the largest standard deviation of a mean
SMALL, MANY = 1 / 1024, 200_000  # a number that needs more than 8 random bits; how often
TOGETHER = 5 / TRIES**0.5  # five standard deviations of a correlation of independent draws


@dataclass(frozen=True)
class Numbers:
    dtype: torch.dtype = torch.float32
    scale: float = 1.0

    def __str__(self) -> str:
        special = f" of {self.dtype}" * (self.dtype != torch.float32)
        return f"{len(VALUES)} numbers{special}, rounded {TRIES:,} times" + (
            f", {self.scale:g} times as large" * (self.scale != 1)
        )

    def x(self) -> Tensor:
        return (self.scale * torch.tensor(VALUES, dtype=self.dtype)).repeat(TRIES, 1)


SHAPES = [(), (0,), (3,), (2, 3, 4)]  # x may also have these shapes


@dataclass(eq=False)
class Rounded:
    found: object
    again: object  # from a generator in the same state
    other: object  # from a generator in another state
    next: object  # from the same generator, one call later
    untouched: bool  # whether torch's global generator is as it was
    odd: list[tuple]  # shapes of x for which the result is wrong
    small: float  # the mean result of many times SMALL


def rounding_trial(fn, case: Numbers, group) -> Rounded:
    before, lots = torch.get_rng_state(), torch.Generator().manual_seed(0)
    found, next = fn(case.x(), lots), fn(case.x(), lots)
    again, other = (fn(case.x(), torch.Generator().manual_seed(s)) for s in (0, 1))
    odd = []
    for shape in SHAPES:
        x = case.scale * torch.full(shape, 0.3, dtype=case.dtype)
        try:
            y = fn(x, lots)
            right = (y.shape, y.dtype) == (x.shape, x.dtype) and ((y == 0) | (y == 1)).all()
        except Exception:  # (the matrix above raised nothing)
            right = False
        odd += [shape] * (not right)
    untouched = torch.equal(before, torch.get_rng_state())
    small = fn(torch.full((MANY // 10, 10), SMALL, dtype=case.dtype), lots).double().mean().item()
    return Rounded(found, again, other, next, untouched, odd, small)


class Rounding(Measured):
    def measure(self):
        self.x, self.seen = self.case.x(), self.results[0]
        found = self.seen.found
        self.is_like = isinstance(found, Tensor) and (found.shape, found.dtype) == (
            self.x.shape,
            self.x.dtype,
        )
        if not self.is_like:
            return
        self.next_to = bool((found == found.round()).all() and ((found - self.x).abs() < 1).all())
        self.off = (found.double().mean(0) - self.x[0].double()).abs().max().item()
        ups = (found > self.x).double()
        ups = torch.nn.functional.normalize(ups - ups.mean(0), dim=0)
        self.together = (ups.T @ ups).fill_diagonal_(0).abs().max().item()
        self.same = torch.equal(found, self.seen.again)
        self.moves = not torch.equal(found, self.seen.other)
        self.goes_on = not torch.equal(found, self.seen.next)

    def lines(self) -> list[Line]:
        if not self.is_like:
            return [yes("a tensor with the shape and dtype of x", False)]
        room = f"<= {ROOM:.3f}"
        off = f"{self.off:.3f}"
        right = self.off <= ROOM
        lines = [
            yes("integers next to x", self.next_to),
            Line("largest error of a mean over all tries", off if not right else room, room, right),
            yes("the same random numbers give the same result", self.same),
            yes("other random numbers give other results", self.moves),
            yes("the next call draws new ones", self.goes_on),
            line("shapes of x with a wrong result", self.seen.odd, []),
            yes("1/1024 becomes 1 once in 1,024 times", abs(self.seen.small / SMALL - 1) < 0.4),
            yes("no other random numbers are drawn", self.seen.untouched),
        ]
        if self.together > TOGETHER:
            found, room = f"{self.together:.3f}", f"<= {TOGETHER:.3f}"
            lines.append(Line("largest correlation of two elements", found, room, False))
        return lines

    def mistake(self) -> str:
        if not self.is_like:
            return "Return a tensor with x's shape and dtype: whole numbers, still as floats."
        found, x = self.seen.found, self.x
        if self.moves and torch.equal(found, found[:1].expand_as(found)):
            return "Each element needs its own random number: torch.rand(x.shape, ...)."
        for rounding, name in (
            (torch.round, "round"),
            (torch.floor, "floor"),
            (torch.trunc, "int"),
        ):
            if torch.equal(found, rounding(x)):
                return (
                    f"This is {name}: 0.3 becomes 0 every time, and the rest is lost forever. "
                    "Decide at random: torch.rand(x.shape, generator=lots)."
                )
        whole = bool((found == found.round()).all())
        if whole and self.off > ROOM and self.leans_towards_zero():
            return (
                "Right above 0 and wrong below it: the fraction of -0.3 is "
                "0.7 above -1. Take floor, not int or trunc, and x - x.floor() for the fraction."
            )
        if not self.next_to and whole:
            return (
                "Some results are one or more away from x, or integers have changed: add a "
                "random number in 0...1 and take the floor. (For round it would be -0.5...0.5.)"
            )
        if not self.next_to:
            return "These are not integers: floor the sum of x and the random number."
        if self.off > ROOM:
            return (
                "The average of this is not x: 0.3 should go up in three of ten cases. A number "
                "goes up if its random number is below its fraction."
            )
        if self.together > TOGETHER:
            return "Elements share random numbers, so errors add up: torch.rand(x.shape, ...)."
        if self.seen.odd:
            return f"Right for a matrix, not for x of shape {list(self.seen.odd[0])}: allow any."
        if abs(self.seen.small / SMALL - 1) >= 0.4:
            return (
                f"1/1024 becomes 1 in {self.seen.small:.2%} of all cases, not in 0.10%. A random "
                "number of few bits is never that small: use torch.rand in x's dtype."
            )
        if self.moves and self.same and not self.goes_on:
            return (
                "A second call with the same generator draws the first call's numbers again: draw "
                "from `lots` itself, without a seed of your own."
            )
        return (
            "These numbers come from elsewhere: pass generator=lots to torch.rand. Then runs can "
            "be repeated, and dropout draws the numbers that it drew before."
        )

    def leans_towards_zero(self) -> bool:
        off = (self.seen.found.double().mean(0) - self.x[0].double()).abs()
        return bool((off[self.x[0] >= 0] <= ROOM).all())


# ---- top-k with feedback ------------------------------------------------------------------------

STEPS = 3


@dataclass(frozen=True)
class Top:
    length: int
    k: int
    dtype: torch.dtype = torch.float32
    ties: bool = False  # on even ranks all elements are equal

    def __str__(self) -> str:
        special = f" of {self.dtype}" * (self.dtype != torch.float32)
        ties = ", all as large on even ranks" * self.ties
        return f"{self.k} of {self.length} elements{special}{ties}"

    def x(self, step: int, rank: int) -> Tensor:
        """Return elements of different sizes, so that the k largest are unique; or equal ones."""
        if self.ties and rank % 2 == 0:
            return torch.full((self.length,), 1.0 + step, dtype=self.dtype)
        generator = torch.Generator().manual_seed(10 * step + rank)
        sizes = torch.randperm(self.length, generator=generator) + 1 + 0.25 * rank
        signs = torch.randint(0, 2, (self.length,), generator=generator) * 2 - 1
        return (sizes * signs).to(self.dtype) * (1 + step / 64)


def top_trial(fn, case: Top, group):
    error, found = torch.zeros(case.length, dtype=case.dtype), []
    for step in range(STEPS):
        result = fn(case.x(step, group.rank()), error, case.k, group)
        if not are_two(result, Tensor, Tensor):
            return type(result).__name__
        found.append((result[0].clone(), result[1].clone()))
        error = result[1]
    return found


class TopK(Measured):
    def measure(self):
        self.two = all(isinstance(found, list) for found in self.results)
        self.expected = self.with_feedback(1.0)
        self.itemsize = self.case.x(0, 0).itemsize
        self.wanted = STEPS * self.size * (self.size - 1) * self.case.k * (4 + self.itemsize)
        self.largest = 8.0 * self.case.length

    def choice(self, rank: int, step: int, whole: Tensor) -> Tensor:
        """Return the indices of the k largest elements; with ties, those that the rank chose."""
        if self.case.ties and self.two:
            left = self.results[rank][step][1]
            if left.shape == whole.shape and bool(((left == 0) | (left == whole)).all()):
                whole = torch.where(left == 0, whole, whole / 2)
        return whole.abs().topk(self.case.k).indices

    def with_feedback(self, kept: float, chosen_by=None) -> list:
        """Return [rank][step] -> (mean, error). kept: the share of the error that is added back."""
        errors = [torch.zeros(self.case.length, dtype=self.case.dtype)] * self.size
        steps = []
        for step in range(STEPS):
            wholes = [self.case.x(step, rank) + kept * errors[rank] for rank in range(self.size)]
            sent = []
            for rank, whole in enumerate(wholes):
                places = self.choice(rank, step, whole)
                if chosen_by:
                    places = chosen_by(whole).topk(self.case.k).indices
                sent.append(torch.zeros_like(whole).index_copy(0, places, whole[places]))
            errors = [whole - part for whole, part in zip(wholes, sent)]
            steps.append((sum(sent) / self.size, errors))
        return [[(mean, errors[rank]) for mean, errors in steps] for rank in range(self.size)]

    def same(
        self, expected: list, which: int, times: float = 1.0, steps: int = STEPS
    ) -> list[bool]:
        return [
            all(
                close(mine[step][which], times * theirs[step][which], self.largest)
                for step in range(steps)
            )
            for mine, theirs in zip(self.results, expected)
        ]

    def lines(self) -> list[Line]:
        if not self.two:
            return [yes("a mean and what is left out", False)]
        equal = [
            all(torch.equal(a[0], b[0]) for a, b in zip(mine, self.results[0]))
            for mine in self.results
        ]
        return [
            on_ranks(f"right means in {STEPS} steps on", self.same(self.expected, 0)),
            on_ranks("right rest on", self.same(self.expected, 1)),
            on_ranks("the same means as rank 0, to the last bit, on", equal),
            line("bytes sent by all ranks", self.sent, self.wanted),
            line("barriers", self.barriers, 0),
        ]

    def mistake(self) -> str:
        if not self.two:
            return "Return two tensors: the mean over the ranks, and what is left out of x + error."
        forgets = self.with_feedback(0.0)
        if self.size > 1 and all(self.same(self.expected, 0, self.size, steps=1)):
            return (
                "These are sums: divide by the number of all ranks, also at indices that only some "
                "of them have sent."
            )
        if all(self.same(forgets, 0)) and not all(self.same(self.expected, 0)):
            return (
                "What was left out is never sent: choose among x + error, not among x, and return "
                "what is left of that."
            )
        is_signed = all(self.same(self.with_feedback(1.0, lambda x: x), 0, steps=1))
        if is_signed and not all(self.same(self.expected, 0, steps=1)):
            return "Choose the largest in size, of either sign: whole.abs().topk(k)."
        if all(self.same(self.expected, 0, steps=1)) and not all(
            self.same(self.expected, 1, steps=1)
        ):
            return (
                "The first mean is right and the rest is not: it is x + error without the k "
                "elements that this rank has sent, not without the mean."
            )
        if (
            all(self.same(self.expected, 0, steps=2))
            and all(self.same(self.expected, 1, steps=1))
            and not all(self.same(self.expected, 1, steps=2))
        ):
            return "The rest is right in step 1 only: keep x + error, not x, minus what was sent."
        if self.sent < self.wanted and self.travelled("int8", "int16"):
            return "Send indices as int32: 16 bits end at 32,767, and tensors are longer."
        if 0 < self.sent < self.wanted and self.travelled("float16", "bfloat16"):
            return too_few_bytes(self.sent, self.wanted)
        if not all(self.same(self.expected, 0)) or not all(self.same(self.expected, 1)):
            return (
                "Wrong means. Each rank sends its own k indices and values; a rank with all of "
                "them adds up the values at their indices, which ranks may share, and divides."
            )
        if self.barriers:
            return NO_BARRIER
        dense = STEPS * 2 * (self.size - 1) * self.case.length * self.itemsize
        if self.sent == dense:
            return (
                f"Right, but {self.sent:,} bytes were sent, as for the whole gradient: a zero is "
                "as long as any other number. Send k values and their k indices."
            )
        if self.sent < self.wanted:
            return too_few_bytes(self.sent, self.wanted)
        places = STEPS * self.size * (self.size - 1) * 4 * self.case.k
        if self.sent == self.wanted + places:
            return (
                f"Right, but {self.sent:,} bytes were sent where {self.wanted:,} do: indices of "
                "topk are int64. No tensor here has 2^31 elements: send places.int()."
            )
        if self.sent != self.wanted:
            return f"Right, but {self.sent:,} bytes were sent where {self.wanted:,} do."
        return (
            "The ranks' means differ in their last bits: add up in the same order everywhere, "
            "rank 0's values first."
        )

    @staticmethod
    def raised(error: str) -> str:
        if not error.startswith("the ranks do not agree"):
            return ""
        return (
            "each rank sends k indices and k values, no more, no fewer. If several elements "
            "are as large as the k-th, topk(k) takes some of them, and a comparison takes all.\n"
        )

    def travelled(self, *dtypes: str) -> bool:
        """Return whether something was sent in one of these dtypes."""
        return bool({comm.dtype for comm in self.run.ledger.leaves()} & set(dtypes))


# ---- one step of the power method ---------------------------------------------------------------


@dataclass(frozen=True)
class Matrix:
    rows: int
    columns: int
    rank: int
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        special = f" of {self.dtype}" * (self.dtype != torch.float64)
        return f"matrices of {self.rows} x {self.columns}{special}, rank {self.rank}"

    def x(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.randn(self.rows, self.columns, generator=generator, dtype=self.dtype)

    def q(self) -> Tensor:
        generator = torch.Generator().manual_seed(99)
        return torch.randn(self.columns, self.rank, generator=generator, dtype=self.dtype)


def power_trial(fn, case: Matrix, group):
    """Run two steps, the second with the q that the first returned."""
    x, q, found = case.x(group.rank()), case.q(), []
    for _ in range(2):
        result = fn(x, q, group)
        if not are_two(result, Tensor, Tensor) or result[1].shape != q.shape:
            return type(result).__name__
        found.append((result[0].clone(), result[1].clone()))
        q = result[1]
    return found


class Power(Measured):
    def measure(self):
        xs = [self.case.x(rank) for rank in range(self.size)]
        self.mean = sum(xs) / self.size
        q, self.expected = self.case.q(), []
        for _ in range(2):
            p = torch.linalg.qr(self.mean @ q).Q
            q = self.mean.T @ p
            self.expected.append((p @ q.T, q))
        thin = self.case.rank * (self.case.rows + self.case.columns) * xs[0].itemsize
        self.wanted = 2 * 2 * (self.size - 1) * thin
        self.dense = 2 * 2 * (self.size - 1) * xs[0].nbytes
        self.room = (
            1e6 * torch.finfo(self.case.dtype).eps if self.case.dtype == torch.float64 else 1e-3
        )
        self.two = all(isinstance(found, list) for found in self.results)

    def near(self, a: Tensor, b: Tensor) -> bool:
        if not isinstance(a, Tensor) or (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        return bool((a - b).abs().max() <= self.room * b.abs().max())

    def right_means(self, step: int, times: float = 1.0) -> list[bool]:
        return [self.near(each[step][0], times * self.expected[step][0]) for each in self.results]

    def right_qs(self) -> list[bool]:
        """Compare q up to a rotation, since any orthonormal basis p of the same span is right."""
        return [
            all(
                self.near(each[step][1] @ each[step][1].T, q @ q.T)
                for step, (_, q) in enumerate(self.expected)
            )
            for each in self.results
        ]

    def lines(self) -> list[Line]:
        if not self.two:
            return [yes("a mean [A, B] and the next q [B, r]", False)]
        both = [a and b for a, b in zip(self.right_means(0), self.right_means(1))]
        equal = [
            all(torch.equal(a[0], b[0]) for a, b in zip(mine, self.results[0]))
            for mine in self.results
        ]
        return [
            on_ranks("right means in 2 steps on", both),
            on_ranks("right q on", self.right_qs()),
            on_ranks("the same means as rank 0, to the last bit, on", equal),
            line("bytes sent by all ranks", self.sent, self.wanted),
            line("barriers", self.barriers, 0),
        ]

    def mistake(self) -> str:
        if not self.two:
            return "Return two tensors: the mean p q.T, [A, B], and the next q, [B, r]."
        if self.barriers:
            return NO_BARRIER
        if self.size > 1 and all(self.right_means(0, self.size)):
            return "This is the sum of the ranks' matrices: average x.T @ p, op='mean'."
        if (
            all(self.near(each[0][0], self.mean) for each in self.results)
            and self.sent >= self.dense
        ):
            return "This is the whole mean, and whole matrices were sent: send x @ q and x.T @ p."
        if all(self.right_means(0)) and not all(self.right_means(1)):
            return (
                "The first mean is right, the second is not: the next step begins with the new q, "
                "x.T @ p averaged over the ranks, [B, r]."
            )
        without = self.without_orthonormal()
        if all(self.near(each[0][0], without) for each in self.results):
            return (
                "The columns of p are not orthonormal, so p q.T is far too large: "
                "torch.linalg.qr(p).Q makes them so."
            )
        kept = str(self.case.dtype).removeprefix("torch.")
        if 0 < self.sent < self.wanted and {c.dtype for c in self.run.ledger.leaves()} - {kept}:
            return too_few_bytes(self.sent, self.wanted)
        if not all(self.right_means(0)) and self.size > 1 and self.sent < self.wanted:
            return (
                "Both products must cover all ranks: p from the sum of their x @ q, or each rank "
                "has a p of its own, and then q from the mean of their x.T @ p."
            )
        if not all(self.right_means(0) + self.right_means(1)):
            return (
                "Wrong mean. p: all ranks' x @ q together, columns made orthonormal. q: all ranks' "
                "x.T @ p, averaged. The mean is p @ q.T."
            )
        if not all(self.right_qs()):
            return "The mean is right, but the returned q is not the q that it was made with."
        if self.sent < self.wanted:
            return too_few_bytes(self.sent, self.wanted)
        if self.sent > self.wanted:
            return (
                f"Right, but {self.sent:,} bytes were sent where {self.wanted:,} do: two "
                "all-reduces, of x @ q and of x.T @ p; a mean of q needs no gather."
            )
        return (
            "The ranks' means differ in their last bits: all of them must go on with the same p "
            "and the same q, as an all-reduce gives them."
        )

    def without_orthonormal(self) -> Tensor:
        p = self.mean @ self.case.q()
        return p @ (self.mean.T @ p).T


EXERCISES = [
    Exercise(
        "round_by_lot",
        ideas.round_by_lot,
        rounding_trial,
        [(1, Numbers()), (1, Numbers(torch.float64)), (1, Numbers(scale=0.5))],
        Rounding,
        refuses=[ideas.quantize, ideas.dequantize],
        contiguous=("x",),
        again=False,
        scales=False,  # a right answer may round the other way
        hints=[
            "0.3 should become 1 in three of ten cases. Let u be uniform from 0 to 1, each value "
            "as likely: how often is it below 0.3?",
            "torch.rand(x.shape, generator=lots, dtype=x.dtype) gives each element its u. x + u "
            "reaches the next integer exactly as often as it should: floor the sum. (In 16 bits "
            "the sum is rounded itself: compare u with the fraction, x - x.floor().)",
        ],
        skeleton="""\
def round_by_lot(x, lots):
    lot = torch.rand(..., generator=..., dtype=x.dtype)
    return ...""",
    ),
    Exercise(
        "top_k_with_feedback",
        ideas.with_feedback,
        top_trial,
        [
            (4, Top(40, 3)),
            (2, Top(7, 7)),
            (3, Top(100_000, 90_000)),
            (2, Top(9, 1, torch.float64)),
            (2, Top(6, 2, ties=True)),
            (1, Top(12, 5)),
        ],
        TopK,
        refuses=[ideas.top_k_mean],
        answer=(answers.top_k_with_feedback,),
        scales=False,  # after rounding, a right answer may choose another of two that tie
        hints=[
            "whole = x + error is what is due. Its k indices: whole.abs().topk(k).indices. What "
            "must travel so that every rank can add up all ranks' k values?",
            "all_gather(places.int(), group) and all_gather(whole[places], group), [n k] each; "
            "torch.zeros_like(x).index_add(0, all_places, all_values) adds them up. What is left "
            "is whole with 0 at this rank's own indices.",
        ],
        skeleton="""\
def top_k_with_feedback(x, error, k, group):
    whole = ...
    places = whole.abs().topk(k).indices
    everyones = all_gather(..., group)           # [n k], whole numbers of 4 bytes
    values = all_gather(..., group)              # [n k]
    mean = torch.zeros_like(x).index_add(0, ..., ...) / ...
    left = ...
    return mean, left""",
    ),
    Exercise(
        "power_mean",
        ideas.power_mean,
        power_trial,
        [
            (4, Matrix(12, 20, 2)),
            (3, Matrix(9, 5, 3)),
            (2, Matrix(16, 24, 4, torch.float32)),
            (1, Matrix(6, 8, 1)),
        ],
        Power,
        scales=False,  # any orthonormal basis is right, and q depends on it
        hints=[
            "A product can be added up as matrices can: the sum over ranks of x @ q is (sum of x) "
            "@ q. So nobody needs the whole sum to know p.",
            "p = all_reduce(x @ q, group), made orthonormal by torch.linalg.qr(p).Q; the new q = "
            "all_reduce(x.T @ p, group, op='mean'); the mean is p @ q.T.",
        ],
        skeleton="""\
def power_mean(x, q, group):
    p = torch.linalg.qr(all_reduce(..., group)).Q
    q = all_reduce(..., group, op="mean")
    return ..., q""",
    ),
]
