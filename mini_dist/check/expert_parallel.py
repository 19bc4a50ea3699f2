"""Exercises of lesson 14: send tokens to their experts and back, balance all ranks' tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import expert_parallel as library
from ..expert_parallel import Trip
from ..launch import RankError
from ..model import load_balance_loss, route
from .exercise import Exercise, Line, Trial, Verdict

WIDTH = 4  # numbers a row
ITEM = 8  # bytes of a float64, and of an int64


@dataclass(frozen=True)
class Counts:
    """rows[r][e]: how many rows rank r has for expert e."""

    rows: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        return f"rows for {len(self.rows[0])} experts {[list(row) for row in self.rows]}"

    @property
    def per_rank(self) -> int:
        return len(self.rows[0]) // len(self.rows)

    def inputs(self, rank: int) -> Tensor:
        """[copies, WIDTH] sorted by expert; each row says where it is from and where it goes."""
        expert = torch.arange(len(self.rows[rank])).repeat_interleave(torch.tensor(self.rows[rank]))
        number = torch.arange(len(expert))
        parts = [torch.full_like(expert, rank + 1), expert, number, 7 * number + 3 * expert + rank]
        return torch.stack(parts, 1).double()

    def arrived(self, rank: int) -> Tensor:
        """What `dispatch` gives a rank: expert by expert, and within one rank by rank."""
        everything = torch.cat([self.inputs(source) for source in range(len(self.rows))])
        first = rank * self.per_rank
        mine = [everything[everything[:, 1] == first + e] for e in range(self.per_rank)]
        return torch.cat(mine)

    def trip(self, rank: int) -> Trip:
        first = rank * self.per_rank
        blocks = [row[first : first + self.per_rank] for row in self.rows]  # from each rank
        own = torch.tensor(self.rows[rank]).view(len(self.rows), -1)  # [to, expert there]
        came = torch.tensor([e for block in blocks for e, n in enumerate(block) for _ in range(n)])
        return Trip(
            own.sum(1).tolist(),
            [sum(block) for block in blocks],
            came.long().argsort(stable=True),
            [sum(block[e] for block in blocks) for e in range(self.per_rank)],
        )

    def leaving(self, rank: int) -> int:
        """Bytes of the rows that rank `rank` has for experts of other ranks."""
        sent = self.trip(rank).sent
        return (sum(sent) - sent[rank]) * WIDTH * ITEM

    def arriving(self, rank: int) -> int:
        received = self.trip(rank).received
        return (sum(received) - received[rank]) * WIDTH * ITEM


# The first shows the numbers. Then other ranks, a rank that sends nothing and an expert that nobody
# visits, and a group of one.
CASES = [
    (2, Counts(((3, 0, 2, 1), (1, 4, 2, 2)))),
    (3, Counts(((1, 2, 0), (0, 0, 0), (2, 0, 0)))),
    (4, Counts(((1, 0, 0, 2, 0, 0, 1, 3),) * 2 + ((0, 2, 1, 0, 0, 1, 0, 0),) * 2)),
    (1, Counts(((2, 0, 1),))),
]


@dataclass
class There:
    """What a rank saw of the learner's dispatch; None for what was not there."""

    arrived: object
    trip: object
    gradient: Tensor | None


def pair(result: object) -> tuple[object, object]:
    """The two things a function should return, in a tuple or a list; else it and nothing."""
    if isinstance(result, (tuple, list)) and len(result) == 2:
        return tuple(result)
    return result, None


def gradient_of(out: object, x: Tensor) -> Tensor | None:
    """Of x, with 2 out + 1 coming from above: every row its own."""
    if not isinstance(out, Tensor) or not out.requires_grad:
        return None
    (gradient,) = torch.autograd.grad(out, x, 2 * out.detach() + 1, allow_unused=True)
    return gradient


def dispatch_trial(fn: Callable, case: Counts, group):
    x = case.inputs(group.rank()).requires_grad_()
    result = fn(x, torch.tensor(case.rows[group.rank()]), group)
    arrived, trip = pair(result)
    gradient = gradient_of(arrived, x)
    return There(arrived.detach() if isinstance(arrived, Tensor) else None, trip, gradient)


def combine_trial(fn: Callable, case: Counts, group):
    x = case.inputs(group.rank())
    arrived, trip = library.dispatch(x, torch.tensor(case.rows[group.rank()]), group)
    answers = (10 * arrived).requires_grad_()
    back = fn(answers, trip, group)
    gradient = gradient_of(back, answers)
    return There(back.detach() if isinstance(back, Tensor) else None, trip, gradient)


def forward_bytes(run, rank: int, but: str = "") -> int:
    """What was sent in forward, but for what the library's function of that name did."""
    return sum(
        comm.sent
        for comm in run.ledger.leaves(rank=rank)
        if comm.phase != "backward" and all(outer.op != but for outer in comm.within())
    )


def natives(run) -> list[str]:
    return sorted({comm.op for comm in run.ledger.leaves() if comm.op not in ("send", "recv")})


def same(mine: object, wanted: Tensor) -> bool:
    return isinstance(mine, Tensor) and mine.shape == wanted.shape and torch.equal(mine, wanted)


def same_trip(mine: object, wanted: Trip) -> str:
    """The first field that is wrong, or nothing."""
    for field, value in zip(Trip._fields, wanted):
        found = getattr(mine, field, None)
        if isinstance(found, Tensor):
            found = found.tolist()
        if found != (value.tolist() if isinstance(value, Tensor) else value):
            return field
    return ""


def judge(of_one: Callable) -> Callable:
    """Lines of all trials, those of later ones only where they are wrong, and the first hint."""

    def of_all(trials: list[Trial]) -> tuple[list[Line], str]:
        lines, hint = [], ""
        for number, trial in enumerate(trials):
            found, said = of_one(trial)
            for line in found:
                if number == 0 or not line.ok:
                    line.what += f" ({trial.run.world_size} ranks)" * (number > 0)
                    lines.append(line)
            if said and not hint:
                before = f"Right with 2 ranks. With {trial.case}: " * (number > 0)
                hint = before + said
        return lines, hint

    return of_all


def dispatch_one(trial: Trial) -> tuple[list[Line], str]:
    run, case, size = trial.run, trial.case, trial.run.world_size
    wanted = [case.arrived(rank) for rank in range(size)]
    right = [same(result.arrived, rows) for result, rows in zip(run.results, wanted)]
    trips = [same_trip(result.trip, case.trip(rank)) for rank, result in enumerate(run.results)]
    gradients = [
        same(result.gradient, 2 * case.inputs(rank) + 1) for rank, result in enumerate(run.results)
    ]
    counts = (size - 1) * case.per_rank * ITEM
    sent = [forward_bytes(run, rank) for rank in range(size)]
    target = [counts + case.leaving(rank) for rank in range(size)]
    lines = [
        on_ranks("right rows, by expert, on", right),
        on_ranks("right trip on", [not field for field in trips]),
        on_ranks("gradients come back on", gradients),
        Line("bytes sent in forward", str(sent), str(target), sent == target),
        native_line(run),
    ]
    if all(line.ok for line in lines):
        return lines, ""
    return lines, dispatch_mistake(trial, wanted, right, trips, gradients, sent, target)


def on_ranks(what: str, right: list[bool]) -> Line:
    everywhere = f"{len(right)} of {len(right)} ranks"
    return Line(what, f"{sum(right)} of {len(right)} ranks", everywhere, all(right))


def native_line(run) -> Line:
    found = natives(run)
    return Line("calls of the backend's collectives", ", ".join(found) or "none", "none", not found)


def dispatch_mistake(trial, wanted, right, trips, gradients, sent, target) -> str:
    run, case, size = trial.run, trial.case, trial.run.world_size
    results = run.results
    if found := natives(run):
        return (
            f"The work is done by the backend's own {' and '.join(found)}. Use the library's: "
            "all_to_all for the counts, and ops.all_to_all, which has a gradient, for the rows."
        )
    if any(not isinstance(result.arrived, Tensor) for result in results):
        return "Return two things: the rows that arrived, a tensor, and a Trip."
    if any(not isinstance(result.trip, Trip) for result in results):
        return "Return (rows, Trip(...)): no Trip came back."
    if not all(right):
        everything = torch.cat([case.inputs(rank) for rank in range(size)])
        if size > 1 and all(len(result.arrived) == len(everything) for result in results):
            return (
                "Every rank has the rows of all ranks. Only those for its own experts should come: "
                "an all-to-all with splits, not an all-gather."
            )
        per_rank = case.per_rank
        for rank, result in enumerate(results):
            rows = result.arrived
            if rows.dim() != 2 or rows.shape[1] != WIDTH:
                return f"Rank {rank} returned a tensor of shape {list(rows.shape)}: rows go whole."
            foreign = rows[(rows[:, 1] // per_rank).long() != rank]
            if len(foreign):
                expert = int(foreign[0, 1])
                return (
                    f"Rank {rank} got rows for expert {expert}, which lives on rank "
                    f"{expert // per_rank}: with {per_rank} experts a rank, rank r has the experts "
                    f"r * {per_rank} to (r + 1) * {per_rank} - 1. The counts of rank r's experts "
                    "stand together: counts.view(n, -1)."
                )
            if sorted(rows.tolist()) != sorted(wanted[rank].tolist()):
                return f"Rank {rank} got {len(rows)} rows, and should have {len(wanted[rank])}."
        unsorted = [result.arrived[:, 0].diff() for result in results if len(result.arrived)]
        if all((steps >= 0).all() for steps in unsorted):
            return (
                "All rows are where they belong, in the order in which they came: by rank. An "
                "expert wants its rows in one piece, so sort them by expert before you return them."
            )
        return (
            "All rows are where they belong, but in another order. Sort by expert, and leave the "
            "rows of one expert in the order in which they came: argsort(stable=True)."
        )
    if not all(gradients):
        return (
            "The rows are right, but no gradient comes back: what collectives send, autograd does "
            "not see. The rows must go by the all_to_all of mini_dist.ops."
        )
    if any(trips):
        field = next(field for field in trips if field)
        rank = trips.index(field)
        return (
            f"The rows are right, but Trip.{field} of rank {rank} is not: it should be "
            f"{as_list(getattr(case.trip(rank), field))}. Without it `combine` cannot find back."
        )
    return (
        f"Rows, trip and gradients are right, but the ranks sent {sent} bytes in forward instead "
        f"of {target}. The rows go once; of the counts each rank needs only those for its own "
        "experts: all_to_all, not all_gather."
    )


def as_list(value) -> list:
    return value.tolist() if isinstance(value, Tensor) else value


def combine_one(trial: Trial) -> tuple[list[Line], str]:
    run, case, size = trial.run, trial.case, trial.run.world_size
    wanted = [10 * case.inputs(rank) for rank in range(size)]
    right = [same(result.arrived, rows) for result, rows in zip(run.results, wanted)]
    gradients = [
        same(result.gradient, 20 * case.arrived(rank) + 1)
        for rank, result in enumerate(run.results)
    ]
    sent = [forward_bytes(run, rank, but="dispatch") for rank in range(size)]
    target = [case.arriving(rank) for rank in range(size)]
    lines = [
        on_ranks("right answers, in order, on", right),
        on_ranks("gradients come back on", gradients),
        Line("bytes sent in forward", str(sent), str(target), sent == target),
        native_line(run),
    ]
    if all(line.ok for line in lines):
        return lines, ""
    return lines, combine_mistake(trial, wanted, right, gradients, sent, target)


def combine_mistake(trial, wanted, right, gradients, sent, target) -> str:
    results = trial.run.results
    if found := natives(trial.run):
        return (
            f"The work is done by the backend's own {' and '.join(found)}. Use the all_to_all of "
            "mini_dist.ops."
        )
    if any(not isinstance(result.arrived, Tensor) for result in results):
        return "Return the answers, a tensor."
    if not all(right):
        for rank, result in enumerate(results):
            rows = result.arrived
            if rows.shape != wanted[rank].shape:
                return (
                    f"Rank {rank} returned a tensor of shape {list(rows.shape)}, and sent out "
                    f"{len(wanted[rank])} rows. What it received then it sends now: the two splits "
                    "change places."
                )
            if (rows[:, 0] != 10 * (rank + 1)).any():
                return (
                    f"Rank {rank} has answers to rows of other ranks. Before they go back, they "
                    "must stand as they came: first those from rank 0, then those from rank 1. "
                    "`by_expert` sorted them, so undo that: out[trip.by_expert] = answers."
                )
        return (
            "Every answer is back at its rank, but not at the place of its row. Undo the sorting "
            "before the rows go: out[trip.by_expert] = answers, not answers[trip.by_expert]."
        )
    if not all(gradients):
        return (
            "The answers are right, but no gradient reaches the experts: what collectives send, "
            "autograd does not see. Use the all_to_all of mini_dist.ops."
        )
    return (
        f"The answers are right, but the ranks sent {sent} bytes instead of {target}: each row "
        "goes back once."
    )


# --- the balance loss ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """What the routers of all ranks say about `num_tokens` tokens each."""

    num_tokens: int
    num_experts: int
    top_k: int

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens a rank, {self.num_experts} experts, top {self.top_k}"

    def logits(self, rank: int) -> Tensor:
        """Each rank's tokens prefer experts of their own: alone no rank is balanced."""
        generator = torch.Generator().manual_seed(10 + rank)
        shape = (self.num_tokens, self.num_experts)
        logits = torch.randn(shape, generator=generator, dtype=torch.float64)
        logits[:, rank % self.num_experts] += 2.0
        return logits


BALANCE_CASES = [(4, Tokens(6, 4, 2)), (3, Tokens(5, 6, 1)), (1, Tokens(4, 3, 2))]


def balance_trial(fn: Callable, case: Tokens, group):
    logits = case.logits(group.rank()).requires_grad_()
    result = fn(route(logits, case.top_k), group)
    loss, visits = pair(result)
    gradient = None
    if isinstance(loss, Tensor) and loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss.sum(), logits, allow_unused=True)
    value = loss.detach() if isinstance(loss, Tensor) else None
    return value, visits.detach() if isinstance(visits, Tensor) else None, gradient


def balance_targets(case: Tokens, size: int) -> tuple[list[Tensor], Tensor, list[Tensor], Tensor]:
    """Each rank's loss and gradient, the visits, and the loss of the whole batch."""
    parts = [case.logits(rank).requires_grad_() for rank in range(size)]
    decision = route(torch.cat(parts), case.top_k)
    whole = load_balance_loss(decision)
    gradients = torch.autograd.grad(whole, parts)  # the mean over ranks of n times these
    visits = decision.experts.flatten().bincount(minlength=case.num_experts)
    share = visits / visits.sum()
    means = [chunk.mean(0) for chunk in decision.probabilities.detach().chunk(size)]
    losses = [case.num_experts * (share * mean).sum() for mean in means]
    return losses, visits, [size * gradient for gradient in gradients], whole.detach()


def near(mine: object, wanted: Tensor) -> bool:
    """To float32: a share of two counts is one, unless somebody makes them float64 first."""
    return (
        isinstance(mine, Tensor)
        and mine.shape == wanted.shape
        and torch.allclose(mine.double(), wanted.double(), rtol=1e-6, atol=1e-9)
    )


def balance_one(trial: Trial) -> tuple[list[Line], str]:
    run, case, size = trial.run, trial.case, trial.run.world_size
    losses, visits, gradients, whole = balance_targets(case, size)
    right = [near(value, loss) for (value, _, _), loss in zip(run.results, losses)]
    counted = [near(found, visits) for _, found, _ in run.results]
    graded = [near(found, wanted) for (_, _, found), wanted in zip(run.results, gradients)]
    sent = sum(run.ledger.total_bytes(rank=rank) for rank in range(size))
    limit = 2 * (size - 1) * case.num_experts * ITEM  # an all-reduce of the counts, all ranks
    lines = [
        on_ranks("right loss on", right),
        on_ranks("right visits on", counted),
        on_ranks("right gradient on", graded),
        Line("bytes sent, all ranks", sent, f"{limit} at most", sent <= limit),
        native_line(run),
    ]
    if all(line.ok for line in lines):
        return lines, ""
    return lines, balance_mistake(trial, losses, visits, whole, right, counted, graded, sent, limit)


def balance_mistake(trial, losses, visits, whole, right, counted, graded, sent, limit) -> str:
    run, case, size = trial.run, trial.case, trial.run.world_size
    values = [value for value, _, _ in run.results]
    if found := natives(run):
        return f"The work is done by the backend's own {' and '.join(found)}. Use all_reduce."
    if any(not isinstance(value, Tensor) for value in values):
        return "Return two things: the loss, a tensor, and the visits [E] of all ranks."

    def are(wanted: list[Tensor]) -> bool:
        return all(near(value, each) for value, each in zip(values, wanted))

    alone = [load_balance_loss(route(case.logits(rank), case.top_k)) for rank in range(size)]
    if size > 1 and are(alone):
        return (
            "This is the loss of each rank's own tokens. Each rank's tokens crowd one expert, "
            "and all ranks together are almost even: add up the visits of all ranks first."
        )
    if size > 1 and are([torch.stack(alone).mean()] * size):
        return (
            "This is the mean of the ranks' own losses, and a loss is no mean of products: sum the "
            "visits over the ranks, then multiply."
        )
    if size > 1 and are([whole] * size):
        if sent > limit:
            return (
                f"The value is the whole batch's, but {sent} bytes were sent where {limit} do: "
                "the probabilities can stay at home. With the visits of all and the probabilities "
                "of its own tokens, the mean of the ranks' losses is the loss of the whole."
            )
        return "Return this rank's part, whose mean over the ranks is the loss of the whole."
    for factor, said in (
        (1 / case.num_experts, "The factor E is missing: even routing should give 1."),
        (case.top_k, "Shares add up to 1: divide the visits by their sum, T k, not by T."),
        (size, "The visits are those of all ranks, so divide by the sum of all of them."),
    ):
        if factor != 1 and are([factor * loss for loss in losses]):
            return said
    if not all(right):
        return (
            "Compare with E * sum of (share of visits) * (mean probability): the visits of all "
            "ranks' tokens, the probabilities (not the weights) of this rank's."
        )
    if not all(graded):
        return (
            "The value is right, but no gradient reaches the router, or not all of it: the mean "
            "of `probabilities` must stay attached, and must not go through a collective."
        )
    if not all(counted):
        return "The loss is right, but the visits are not those of all ranks, [E]."
    return f"All right, but {sent} bytes were sent where {limit} do: only the E counts must travel."


class BalanceExercise(Exercise):
    """Ranks that add up counts of different lengths are told why these differ."""

    def _failed(self, trials, world_size: int, case, error: RankError) -> Verdict:
        verdict = super()._failed(trials, world_size, case, error)
        lengths = set(re.findall(r"int64\[(\d+)\]", str(error)))
        if len(lengths) > 1:
            verdict.hint += (
                "\nbincount needs minlength=E: without it, it ends at the last expert that this "
                "rank's tokens visit."
            )
        return verdict


# --- the exercises -------------------------------------------------------------------------------

ALL_TO_ALL = frozenset({"all_to_all", "pairwise_all_to_all"})
# The bytes refuse it, in words that help more than "write that part, too".
ALL_GATHER = frozenset({"all_gather", "recursive_doubling_all_gather", "ring_all_gather"})

EXERCISES = [
    Exercise(
        "dispatch",
        library.dispatch,
        dispatch_trial,
        CASES,
        judge(dispatch_one),
        hints=[
            "Two all-to-alls. The first carries the counts: afterwards each rank knows how many "
            "rows come from whom for which of its experts. The second carries the rows.",
            "theirs = all_to_all(counts, group).view(n, -1) is [n, E/n]: from rank r for my expert "
            "e. Row sums are what comes from each rank, column sums the visitors of each expert. "
            "counts.view(n, -1).sum(1) is what goes to each rank.",
            "The rows arrive rank by rank, and each rank's by expert. Write down each one's expert "
            "(0 1 2 0 1 2, each repeated as often as `theirs` says): its stable argsort is "
            "`by_expert`.",
        ],
        skeleton="""\
def my_dispatch(x, counts, group):
    n = group.size()
    theirs = all_to_all(counts, group).view(n, -1)     # [n, E/n]: from rank r, for my expert e
    sent, received = ..., ...                          # lists of n numbers of rows
    arrived = ops.all_to_all(x, group, sent, received)
    expert = ...                                       # of each row that arrived
    by_expert = expert.argsort(stable=True)
    return arrived[by_expert], Trip(sent, received, by_expert, ...)""",
        parts=ALL_TO_ALL | ALL_GATHER,
    ),
    Exercise(
        "combine",
        library.combine,
        combine_trial,
        CASES,
        judge(combine_one),
        hints=[
            "Two steps back: put the answers in the order in which their rows came, then send them "
            "where they came from.",
            "If sorted = rows[order], then rows = out with out[order] = sorted. And what this rank "
            "received then, it sends now.",
        ],
        skeleton="""\
def my_combine(answers, trip, group):
    as_they_came = torch.empty_like(answers)
    as_they_came[...] = ...
    return ops.all_to_all(as_they_came, group, ..., ...)""",
        parts=ALL_TO_ALL | {"dispatch"},
    ),
    BalanceExercise(
        "balance_loss",
        library.balance_loss,
        balance_trial,
        BALANCE_CASES,
        judge(balance_one),
        hints=[
            "Count the visits of this rank's tokens: decision.experts.flatten().bincount("
            "minlength=E). Then let all ranks add theirs.",
            "E * (share * decision.probabilities.mean(0)).sum(), where share is the visits of all "
            "ranks divided by their sum. Return the visits, too.",
        ],
        skeleton="""\
def my_balance_loss(decision, group):
    num_experts = decision.probabilities.shape[1]
    visits = all_reduce(..., group)                    # [E], of all ranks' tokens
    share = ...
    return num_experts * (...).sum(), visits""",
        parts=frozenset({"all_reduce", "star_all_reduce"}),
    ),
]
