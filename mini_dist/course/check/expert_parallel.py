"""Exercises of lesson 14: send tokens to their experts and back, balance all ranks' tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_dist.model.routing import load_balance_loss, route
from mini_dist.strategies import expert_parallel as library
from mini_dist.strategies.expert_parallel import Dispatched

from .engine import NO_BARRIER, Exercise, Line, Measured, are_two, line, on_ranks, too_few_bytes
from .watch import functions_of
from .ways import Complaint

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
COUNT = 8  # bytes of an int64


@dataclass(frozen=True)
class Counts:
    """rows[r][e]: how many rows rank r has for expert e. A row's numbers do not tell its expert."""

    rows: tuple[tuple[int, ...], ...]
    width: int = 4
    dtype: torch.dtype = F64

    def __str__(self) -> str:
        rows = [list(row) for row in self.rows]
        return f"rows for {len(rows[0])} experts {rows} in {str(self.dtype).removeprefix('torch.')}"

    @property
    def per_rank(self) -> int:
        return len(self.rows[0]) // len(self.rows)

    def experts(self, rank: int) -> list[int]:
        """Return the expert of each row that a rank has."""
        return [expert for expert, count in enumerate(self.rows[rank]) for _ in range(count)]

    def inputs(self, rank: int) -> Tensor:
        """Return a rank's rows [copies, width], sorted by expert."""
        generator = torch.Generator().manual_seed(rank)
        shape = (len(self.experts(rank)), self.width)
        return torch.randn(shape, generator=generator, dtype=F64).to(self.dtype)

    def owners(self) -> dict[tuple, tuple[int, int]]:
        """Return {numbers of a row: (the rank that has it, its expert)}."""
        return {
            tuple(row): (rank, expert)
            for rank in range(len(self.rows))
            for row, expert in zip(self.inputs(rank).tolist(), self.experts(rank))
        }

    def dispatched(self, rank: int) -> Dispatched:
        mine = range(rank * self.per_rank, (rank + 1) * self.per_rank)
        came = [expert for row in self.rows for expert in mine for _ in range(row[expert])]
        order = sorted(range(len(came)), key=came.__getitem__)
        return Dispatched(
            torch.tensor(self.rows[rank]).view(len(self.rows), -1).sum(1).tolist(),
            [sum(row[expert] for expert in mine) for row in self.rows],
            torch.tensor(order, dtype=torch.long),
            [came.count(expert) for expert in mine],
        )

    def arrived(self, rank: int) -> Tensor:
        """Return what `dispatch` gives a rank: sorted by expert, then by the rank it came from."""
        blocks = [self.inputs(r).split(list(row)) for r, row in enumerate(self.rows)]
        mine = range(rank * self.per_rank, (rank + 1) * self.per_rank)
        return torch.cat([block[expert] for expert in mine for block in blocks])

    def leaving(self, rank: int) -> int:
        """Return the bytes of the rows that a rank has for experts of other ranks."""
        return self.nbytes(self.dispatched(rank).sent, rank)

    def arriving(self, rank: int) -> int:
        return self.nbytes(self.dispatched(rank).received, rank)

    def nbytes(self, splits: list[int], rank: int) -> int:
        return (sum(splits) - splits[rank]) * self.width * self.dtype.itemsize


# The verdict shows the first case. In the second, a rank sends nothing and no row is for expert 2.
# The third has enough rows that an unstable sort mixes them up. The fourth has as many rows on each
# rank as the first, in another order. The last is a group of one rank.
CASES = [
    (2, Counts(((3, 0, 2, 1), (1, 4, 2, 2)))),
    (3, Counts(((1, 2, 0), (0, 0, 0), (2, 0, 0)), 5, F32)),
    (4, Counts(((11, 0, 0, 42, 0, 0, 31, 3),) * 2 + ((0, 52, 21, 0, 0, 41, 0, 0),) * 2, 3, BF16)),
    (2, Counts(((0, 3, 1, 2), (4, 1, 1, 3)))),
    (1, Counts(((2, 0, 1),), 2)),
]


def gradient_of(rows: Tensor, x: Tensor) -> Tensor | None:
    """Return the gradient of x if the rows' gradient is 2 rows + 1, different for each row."""
    if not rows.requires_grad:
        return None
    return torch.autograd.grad(rows, x, 2 * rows.detach() + 1, allow_unused=True)[0]


def numbers(value: object) -> list[int] | None:
    try:
        return [int(number) for number in value]
    except (TypeError, ValueError):
        return None


def columns(x: Tensor) -> Tensor:
    """Return the same rows, not contiguous in memory."""
    return x.mT.contiguous().mT


def dispatch_trial(fn, case: Counts, group):
    x = case.inputs(group.rank()).requires_grad_()
    came = fn(columns(x), torch.tensor(case.rows[group.rank()]), group)
    rows, dispatched = came if are_two(came, object, object) else (came, None)
    if not isinstance(rows, Tensor):
        raise Complaint("Return two things: the rows that arrived, a tensor, and a Dispatched.")
    if not isinstance(dispatched, Dispatched):
        raise Complaint("Return (rows, Dispatched(...)): no Dispatched came back.")
    return rows.detach(), gradient_of(rows, x), [*map(numbers, dispatched)]


def combine_trial(fn, case: Counts, group):
    answers = case.arrived(group.rank()).requires_grad_()
    rows = fn(columns(answers), case.dispatched(group.rank()), group)
    if not isinstance(rows, Tensor):
        raise Complaint("Return the answers, a tensor.")
    return rows.detach(), gradient_of(rows, answers)


def same(mine: Tensor | None, wanted: Tensor) -> bool:
    return mine is not None and mine.dtype == wanted.dtype and torch.equal(mine, wanted)


class Journey(Measured):
    """Rows that go to other ranks, and their gradients back."""

    def expect(self, before: list[Tensor], after: list[Tensor], there: list[int], back: list[int]):
        """Compare with each rank's rows before and after, and its bytes in forward and backward."""
        ledger, ranks = self.run.ledger, range(self.size)
        self.rows, gradients, *_ = zip(*self.results)
        self.after, self.right = after, [*map(same, self.rows, after)]
        self.gradients = [same(found, 2 * x + 1) for found, x in zip(gradients, before)]
        self.back = [ledger.total_bytes(phase="backward", rank=rank) for rank in ranks]
        self.there = [ledger.total_bytes(rank=rank) - self.back[rank] for rank in ranks]
        self.wanted_there, self.wanted_back = there, back
        owners = self.case.owners()
        self.owners = [  # (rank, expert) of each row; None if no rank sent it
            [owners.get(tuple(row)) for row in rows.tolist()] if rows.dim() == 2 else []
            for rows in self.rows
        ]

    def bytes_lines(self) -> list[Line]:
        return [
            line("bytes sent in forward", self.there, self.wanted_there),
            line("bytes sent in backward", self.back, self.wanted_back),
            line("barriers", self.barriers, 0),
        ]

    def mistake_on_the_way(self) -> str:
        """Return the hint for a mistake that dispatch and combine share; "" if there is none."""
        if self.barriers:
            return NO_BARRIER
        widths = {"int64", str(self.case.dtype).removeprefix("torch.")}
        others = {comm.dtype for comm in self.run.ledger.leaves()} - widths
        if others and sum(self.there) < sum(self.wanted_there):
            return too_few_bytes(sum(self.there), sum(self.wanted_there))
        for rank, (rows, wanted) in enumerate(zip(self.rows, self.after)):
            if rows.dim() != 2 or rows.shape[1] != wanted.shape[1]:
                return f"Rank {rank} returned a tensor of shape {list(rows.shape)}: rows go whole."
            if rows.dtype != wanted.dtype:
                return f"Rank {rank} returned {rows.dtype}: rows keep their dtype, {wanted.dtype}."
        return ""

    @staticmethod
    def raised(error: str) -> str:
        if "view size is not compatible" in error:
            return "rows need not be contiguous in memory: .reshape takes them, .view does not.\n"
        if "_splits=" in error or error.startswith("the ranks do not agree"):
            return (
                "a rank sends rank r its rows for the experts of rank r; what it gets "
                "from rank r only rank r knows: its counts for this rank's experts. A sum over "
                "the ranks does not say it, an all_to_all of the counts does.\n"
            )
        return ""


class There(Journey):
    def measure(self):
        case, ranks = self.case, range(self.size)
        counts = (self.size - 1) * case.per_rank * COUNT
        self.expect(
            [case.inputs(rank) for rank in ranks],
            [case.arrived(rank) for rank in ranks],
            [counts + case.leaving(rank) for rank in ranks],
            [case.arriving(rank) for rank in ranks],
        )
        self.found = [fields for _, _, fields in self.results]
        self.fields = [[*map(numbers, case.dispatched(rank))] for rank in ranks]

    def lines(self) -> list[Line]:
        return [
            on_ranks("right rows, by expert, on", self.right),
            on_ranks("right Dispatched on", map(list.__eq__, self.found, self.fields)),
            on_ranks("gradients come back on", self.gradients),
            *self.bytes_lines(),
        ]

    def mistake(self) -> str:
        if found := self.mistake_on_the_way():
            return found
        if not all(self.right):
            return self.mistake_in_rows()
        if not all(self.gradients):
            return (
                "The rows are right, but no gradient comes back: what collectives send, autograd "
                "does not see. The rows must go by the all_to_all of mini_dist.collectives.ops."
            )
        for rank, fields in enumerate(zip(self.found, self.fields)):
            for name, found, wanted in zip(Dispatched._fields, *fields):
                if found != wanted:
                    return (
                        f"The rows are right, but Dispatched.{name} of rank {rank} is not: it "
                        f"should be {wanted}. Without it `combine` cannot find the way back."
                    )
        return (
            f"Rows, Dispatched and gradients are right, but the ranks sent {self.there} bytes in "
            f"forward instead of {self.wanted_there}, and {self.back} in backward instead of "
            f"{self.wanted_back}. The rows go once, none is padded; of the counts each rank needs "
            "only those for its own experts: all_to_all, not all_gather."
        )

    def mistake_in_rows(self) -> str:
        per_rank = self.case.per_rank
        if self.size > 1 and {len(found) for found in self.owners} == {len(self.case.owners())}:
            return (
                "Every rank has the rows of all ranks. Only those for its own experts should come: "
                "an all-to-all with splits, not an all-gather."
            )
        for rank, found in enumerate(self.owners):
            if None in found:
                return (
                    f"Rank {rank} has a row that no rank has sent. Pad nothing: all_to_all takes "
                    "uneven parts, all_to_all(x, group, sent, received)."
                )
            foreign = [expert for _, expert in found if expert // per_rank != rank]
            if foreign:
                return (
                    f"Rank {rank} got rows for expert {foreign[0]}, which is on rank "
                    f"{foreign[0] // per_rank}: with {per_rank} experts per rank, rank r has the "
                    f"experts r * {per_rank} to (r + 1) * {per_rank} - 1. The counts of rank r's "
                    "experts stand together: counts.view(n, -1)."
                )
            wanted = self.after[rank].tolist()
            if sorted(self.rows[rank].tolist()) != sorted(wanted):
                return f"Rank {rank} got {len(found)} rows, and should have {len(wanted)}."
        if all(found == sorted(found, key=lambda owner: owner[0]) for found in self.owners):
            return (
                "All rows are on the right rank, in the order in which they came: by rank. An "
                "expert wants its rows in one piece, so sort them by expert before you return them."
            )
        return (
            "All rows are on the right rank, but in another order. Sort by expert, and leave the "
            "rows of one expert in the order in which they came: argsort(stable=True)."
        )


class Back(Journey):
    def measure(self):
        case, ranks = self.case, range(self.size)
        self.expect(
            [case.arrived(rank) for rank in ranks],
            [case.inputs(rank) for rank in ranks],
            [case.arriving(rank) for rank in ranks],
            [case.leaving(rank) for rank in ranks],
        )

    def lines(self) -> list[Line]:
        return [
            on_ranks("right answers, in order, on", self.right),
            on_ranks("gradients come back on", self.gradients),
            *self.bytes_lines(),
        ]

    def mistake(self) -> str:
        if found := self.mistake_on_the_way():
            return found
        for rank, found in enumerate(self.owners):
            if len(found) != len(self.after[rank]):
                return (
                    f"Rank {rank} returned {len(found)} rows, and sent out "
                    f"{len(self.after[rank])}. It sends now what it received then: the two splits "
                    "are exchanged."
                )
            if any(owner is None or owner[0] != rank for owner in found):
                return (
                    f"Rank {rank} has answers to rows of other ranks. Before they go back, they "
                    "must be in the order of arrival: first the rows from rank 0, then from rank "
                    "1. `by_expert` sorted them, so undo that: out[dispatched.by_expert] = answers."
                )
        if not all(self.right):
            return (
                "Every answer is back at its rank, but not at the index of its row. Undo the "
                "sorting before the rows go: out[dispatched.by_expert] = answers, and not "
                "answers[dispatched.by_expert]."
            )
        if not all(self.gradients):
            return (
                "The answers are right, but no gradient reaches the experts: what collectives "
                "send, autograd does not see. Use the all_to_all of mini_dist.collectives.ops."
            )
        return (
            f"The answers are right, but the ranks sent {self.there} bytes in forward instead of "
            f"{self.wanted_there}, and {self.back} in backward instead of {self.wanted_back}: each "
            "row goes back once."
        )


# --- the balance loss ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """The tokens of all ranks: `num_tokens` on rank 0, and `more` more on each next rank."""

    num_tokens: int
    num_experts: int
    top_k: int
    dtype: torch.dtype = F64
    more: int = 0

    def __str__(self) -> str:
        more = f", {self.more} more on each rank than on the one before" * (self.more > 0)
        tokens = f"{self.num_tokens} tokens {'on rank 0' if more else 'per rank'}{more}"
        return f"{tokens}, {self.num_experts} experts, top {self.top_k}"

    def logits(self, rank: int) -> Tensor:
        """Return a rank's logits. Its tokens prefer one expert, so no rank alone is balanced."""
        generator = torch.Generator().manual_seed(10 + rank)
        num_tokens = self.num_tokens + rank * self.more
        logits = torch.randn(num_tokens, self.num_experts, generator=generator)
        logits[:, rank % self.num_experts] += 2.0
        return logits.to(self.dtype)


def balance_trial(fn, case: Tokens, group):
    logits = case.logits(group.rank()).requires_grad_()
    came = fn(route(logits, case.top_k), group)
    if not are_two(came, Tensor, Tensor):
        raise Complaint("Return two things: the loss, a tensor, and the visits [E] of all ranks.")
    loss, visits = came
    gradient = None
    if loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss.sum(), logits, allow_unused=True)
    return loss.detach(), visits.detach(), gradient


def near(mine: Tensor | None, wanted: Tensor) -> bool:
    """Compare to float32's digits, because torch divides two integer counts in float32."""
    return (
        mine is not None
        and mine.shape == wanted.shape
        and torch.allclose(mine.double(), wanted.double(), rtol=1e-5, atol=1e-7)
    )


class Balance(Measured):
    def measure(self):
        case, size = self.case, self.size
        logits = [case.logits(rank).double().requires_grad_() for rank in range(size)]
        decision = route(torch.cat(logits), case.top_k)
        self.whole = load_balance_loss(decision).detach()
        self.visits = decision.experts.flatten().bincount(minlength=case.num_experts)
        share = self.visits / self.visits.sum()
        parts = decision.probabilities.split([len(of_rank) for of_rank in logits])
        losses = [case.num_experts * (share * part.mean(0)).sum() for part in parts]
        gradients = torch.autograd.grad(sum(losses), logits)
        self.losses = [loss.detach() for loss in losses]
        self.found, counts, found = zip(*self.results)
        self.right = [*map(near, self.found, self.losses)]
        self.counted = [near(count, self.visits) for count in counts]
        self.graded = [*map(near, found, gradients)]
        # The bytes that all ranks send to add up E counts, by a tree or a ring, or by doubling.
        self.least = 2 * (size - 1) * case.num_experts * COUNT
        doubling = size * (size - 1).bit_length() * case.num_experts * COUNT
        self.most = max(self.least, doubling)

    def lines(self) -> list[Line]:
        enough = self.least <= self.sent <= self.most
        return [
            on_ranks("right loss on", self.right),
            on_ranks("right visits on", self.counted),
            on_ranks("right gradient on", self.graded),
            Line("bytes sent, all ranks", self.sent, f"{self.least} to {self.most}", enough),
            line("barriers", self.barriers, 0),
        ]

    def are(self, wanted: list[Tensor]) -> bool:
        return all(map(near, self.found, wanted))

    def mistake(self) -> str:
        case, size, sent = self.case, self.size, self.sent
        if self.barriers:
            return NO_BARRIER
        alone = [load_balance_loss(route(case.logits(rank), case.top_k)) for rank in range(size)]
        if size > 1 and self.are(alone):
            return (
                "This is the loss of each rank's own tokens. Each rank's tokens crowd one expert, "
                "but all ranks together are almost even: add up the visits of all ranks first."
            )
        if size > 1 and self.are([torch.stack(alone).mean()] * size):
            return (
                "This is the mean of the ranks' own losses. The loss multiplies means over all "
                "tokens, so sum the visits over the ranks first, then multiply."
            )
        if size > 1 and self.are([self.whole] * size):
            if sent > self.most:
                return (
                    f"The value is the whole batch's, but {sent} bytes were sent where "
                    f"{self.least} do: the probabilities can stay at home. With the visits of all "
                    "and the probabilities of its own tokens, the mean of the ranks' losses is the "
                    "loss of the whole."
                )
            return "Return this rank's part, whose mean over the ranks is the loss of the whole."
        for factor, says in (
            (1 / case.num_experts, "The factor E is missing: even routing should give 1."),
            (case.top_k, "Shares add up to 1: divide the visits by their sum, T k, not by T."),
            (size, "The visits count all ranks, so divide by the sum of all of them."),
        ):
            if factor != 1 and self.are([factor * loss for loss in self.losses]):
                return says
        if not all(self.right):
            return (
                "Compare with E * sum of (share of visits) * (mean probability): the visits of all "
                "ranks' tokens, the probabilities (not the weights) of this rank's."
            )
        if not all(self.graded):
            return (
                "The value is right, but no gradient reaches the router, or not all of it: the "
                "mean of `probabilities` must stay attached, and must not go through a collective."
            )
        if not all(self.counted):
            return "The loss is right, but the visits, [E], do not count all ranks."
        if sent < self.least:
            return too_few_bytes(sent, self.least)
        return (
            f"All right, but {sent} bytes were sent where {self.least} do: only the E counts must "
            "travel, once. An all-gather hands every rank the counts of each, an all-reduce "
            "their sum."
        )

    @staticmethod
    def raised(error: str) -> str:
        if len(set(re.findall(r"int64\[(\d+)\]", error))) > 1 or "must match the size" in error:
            return (
                "bincount needs minlength=E: without it, it ends at the last expert that this "
                "rank's tokens visit.\n"
            )
        return ""


# --- the exercises -------------------------------------------------------------------------------

EXERCISES = [
    Exercise(
        "dispatch",
        library.dispatch,
        dispatch_trial,
        CASES,
        There,
        hints=[
            "Two all-to-alls. The first carries the counts: afterwards each rank knows how many "
            "rows come from each rank for each of its experts. The second carries the rows.",
            "theirs = all_to_all(counts, group).view(n, -1) is [n, E/n]: from rank r for my expert "
            "e. Row sums are what comes from each rank, column sums the visitors of each expert. "
            "counts.view(n, -1).sum(1) is what goes to each rank.",
            "The rows arrive rank by rank, and each rank's by expert. Write down each one's expert "
            "(0 1 2 0 1 2, each repeated as often as `theirs` says): its stable argsort is "
            "`by_expert`.",
        ],
        skeleton="""\
def dispatch(x, counts, group):
    n = group.size()
    theirs = all_to_all(counts, group).view(n, -1)     # [n, E/n]: from rank r, for my expert e
    sent, received = ..., ...                          # lists of n numbers of rows
    arrived = ops.all_to_all(x, group, sent, received)
    expert = ...                                       # of each row that arrived
    by_expert = expert.argsort(stable=True)
    return arrived[by_expert], Dispatched(sent, received, by_expert, ...)""",
        refuses=functions_of(library),
    ),
    Exercise(
        "combine",
        library.combine,
        combine_trial,
        CASES,
        Back,
        hints=[
            "Two steps back: put the answers in the order in which their rows came, then send them "
            "where they came from.",
            "If sorted = rows[order], then rows = out with out[order] = sorted. And what this rank "
            "received then, it sends now.",
        ],
        skeleton="""\
def combine(answers, dispatched, group):
    as_they_came = torch.empty_like(answers)
    as_they_came[...] = ...
    return ops.all_to_all(as_they_came, group, ..., ...)""",
        refuses=functions_of(library),
    ),
    Exercise(
        "balance_loss",
        library.balance_loss,
        balance_trial,
        [
            (4, Tokens(6, 4, 2)),
            (3, Tokens(5, 6, 1, F32)),
            (2, Tokens(3, 5, 2, more=4)),
            (1, Tokens(4, 3, 2)),
        ],
        Balance,
        hints=[
            "Count the visits of this rank's tokens: decision.experts.flatten().bincount("
            "minlength=E). Then let all ranks add theirs.",
            "E * (share * decision.probabilities.mean(0)).sum(), where share is the visits of all "
            "ranks divided by their sum. Also return the visits.",
        ],
        skeleton="""\
def balance_loss(decision, group):
    num_experts = decision.probabilities.shape[1]
    visits = all_reduce(..., group)                    # [E], of all ranks' tokens
    share = ...
    return num_experts * (...).sum(), visits""",
        refuses=functions_of(library),
    ),
]
