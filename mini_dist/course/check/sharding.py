"""Exercises of lesson 23: shardings that need one all-reduce, a step of SUMMA, a quiz."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from mini_dist.collectives.mesh import Mesh
from mini_dist.collectives.sharding import placements, product
from mini_dist.strategies.tensor_parallel import grids

from .answers import one_all_reduce
from .clinic import Asked
from .engine import RIGHT, WRONG, Exercise, Line, Measured, Verdict, line, on_ranks
from .measures import close, plain
from .sharding_quiz import NOTHING, OPS, QUESTIONS, normal, questions, what_works

# ---- one all-reduce ------------------------------------------------------------------------------

TENSORS = {"x": "BD", "v": "DF", "w": "FD", "y": "BD"}


@dataclass(frozen=True)
class Sharded:
    """An MLP on a mesh dp x tp."""

    dp: int
    tp: int
    B: int = 64
    D: int = 16
    F: int = 64

    def __str__(self) -> str:
        return f"dp {self.dp} x tp {self.tp}, x [{self.B}, {self.D}], v [{self.D}, {self.F}]"

    @property
    def mesh(self) -> dict[str, int]:
        return {"dp": self.dp, "tp": self.tp}

    @property
    def sizes(self) -> dict[str, int]:
        return {"B": self.B, "D": self.D, "F": self.F}


def specs_trial(fn, case: Sharded, group):
    """Return the learner's specs as plain tuples, whatever class they have."""
    came = fn()
    if not isinstance(came, Mapping):
        return came
    return {
        name: spec if isinstance(spec, str) or not isinstance(spec, Iterable) else tuple(spec)
        for name, spec in came.items()
    }


def written(name: str, spec) -> str:
    """Write `("dp", None)` or `PartitionSpec("dp")` for x as `x[B_dp, D]`. Raises ValueError if the
    spec is no such pair."""
    dims = TENSORS[name]
    if isinstance(spec, str) or not isinstance(spec, Iterable) or len(spec := [*spec]) > len(dims):
        raise ValueError(
            f"{name}={spec!r} is no pair: give for each dim None or the name of an axis"
        )
    spec += [None] * (len(dims) - len(spec))  # as PartitionSpec does
    words = []
    for dim, axes in zip(dims, spec):
        axes = [axes] if isinstance(axes, str) else list(axes or ())
        words.append("_".join([dim, *map(str, axes)]))
    return f"{name}[{', '.join(words)}]"


class OneAllReduce(Measured):
    """The learner's placements, with the placement of h = x v that sends least."""

    def measure(self):
        self.wrong, self.plans = "", []
        came, case = self.results[0], self.case
        if not isinstance(came, dict) or set(came) != set(TENSORS):
            self.wrong = f"Return a dict with a pair for each of {', '.join(TENSORS)}."
            return
        try:
            x, v, w, y = (written(name, came[name]) for name in TENSORS)
            hidden = placements("h", ("B", "F"), case.mesh, case.sizes)
            self.plans = min(
                (pair for each in hidden if (pair := self.through(x, v, str(each), w, y))),
                key=lambda pair: (sum(p.sent for p in pair), sum(len(p.collectives) for p in pair)),
                default=[],
            )
        except (ValueError, TypeError) as error:
            self.wrong = f"{error}."
        self.moves = [move for plan in self.plans for move in plan.collectives]
        if not self.plans and not self.wrong:
            self.wrong = (
                "With these placements some ranks repeat the work of others: each axis has to "
                "cut the work of both products."
            )
        if self.plans:
            self.held = sum(plan.inputs[1].used >= {"tp"} for plan in self.plans)

    def through(self, x, v, h, w, y):
        case = self.case
        try:
            return [
                product(f"{a} . {b} -> {c}", case.mesh, share=True, **case.sizes)
                for a, b, c in ((x, v, h), (h, w, y))
            ]
        except ValueError as error:
            if "no product of pieces" in str(error):
                return None
            raise

    def lines(self) -> list[Line]:
        if self.wrong:
            return [Line("can be computed", "no", "yes", False)]
        case = self.case
        told = ", ".join(f"{move.op} over {'*'.join(move.axes)}" for move in self.moves)
        nbytes = case.B * case.D * 4 // case.dp
        alone = [move.op for move in self.moves] == ["all_reduce"]
        told_bytes = sum(move.nbytes for move in self.moves)
        return [
            line("collectives", told or "none", "all_reduce over tp"),
            Line("its bytes, B D 4 / dp", told_bytes, nbytes, told_bytes == nbytes and alone),
            line("weights sharded over tp", f"{self.held} of 2", "2 of 2"),
        ]

    def mistake(self) -> str:
        if self.wrong:
            return self.wrong
        ops = [move.op for move in self.moves]
        x, y = self.plans[0].inputs[0], self.plans[1].result
        if not ops:
            return "Nothing is sent, and every rank has all weights: tp has nothing to cut."
        if self.held < 2:
            return "A weight is whole on every rank of tp: cut both, each over tp."
        if "reduce_scatter" in ops or y.axes_of("D") or len(y.axes_of("B")) > 1:
            return (
                "y comes out in other pieces than x: give its batch cut over dp, and nothing "
                "else cut."
            )
        if x.axes_of("B") != ("dp",):
            return 'x goes in with its batch cut over dp, and whole along tp: ("dp", None).'
        v, w = (plan.inputs[1] for plan in self.plans)
        if all((each.axes_of("F"), each.axes_of("D")) == (("tp",), ()) for each in (v, w)):
            return (
                f"This sends {', '.join(ops)}. The weights are right, but you ask for y as {y}, so "
                "dp also has to move it: leave y's batch cut over dp, as x's is."
            )
        return (
            f"This sends {', '.join(ops)}. If h = x v comes out cut along F, the next weight needs "
            "no more than that part: which of its dims is F?"
        )


# ---- a step of SUMMA -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """Step `step` of a product A [I, J] B [J, K] on q x q ranks; blocks of I/q x J/q, J/q x K/q."""

    q: int
    step: int
    shape: tuple[int, int, int]
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        i, j, k = self.shape
        return f"step {self.step}, blocks [{i}, {j}] and [{j}, {k}] of {str(self.dtype)[6:]}"

    def block(self, name: str, row: int, column: int) -> torch.Tensor:
        i, j, k = self.shape
        dice = torch.Generator().manual_seed(100 * row + 10 * column + (name == "B"))
        shape = (i, j) if name == "A" else (j, k)
        return torch.randint(-64, 65, shape, generator=dice).to(self.dtype)


def step_trial(fn, case: Blocks, group):
    mesh = Mesh(group, i=case.q, j=case.q)
    at = mesh.index("i"), mesh.index("j")
    return fn(case.block("A", *at), case.block("B", *at), case.step, mesh["j"], mesh["i"])


class Step(Measured):
    def measure(self):
        case, q = self.case, self.case.q
        places = [divmod(rank, q) for rank in range(self.size)]
        self.expected = [
            case.block("A", row, case.step) @ case.block("B", case.step, column)
            for row, column in places
        ]
        self.own = [case.block("A", *at) @ case.block("B", *at) for at in places]
        self.whole = [
            sum(case.block("A", r, s) @ case.block("B", s, c) for s in range(q)) for r, c in places
        ]
        nbytes = sum(case.block(name, 0, 0).nbytes for name in "AB")
        self.wanted = q * (q - 1) * nbytes

    def are(self, others) -> list[bool]:
        return [
            isinstance(found, torch.Tensor)
            and found.shape == other.shape
            and close(found, other, 64 * 64 * self.case.shape[1])
            for found, other in zip(self.results, others)
        ]

    def lines(self) -> list[Line]:
        return [
            on_ranks("right blocks on", self.are(self.expected)),
            self.backend_line(),
            line("bytes sent, all ranks", self.sent, self.wanted),
        ]

    def mistake(self) -> str:
        if self.backend or self.barriers:
            return self.of_the_backend("Take broadcast(x, root, group).")
        if all(self.are(self.whole)):
            return "This is the whole product: return what this one step adds."
        if any(not isinstance(found, torch.Tensor) for found in self.results):
            return "Every rank returns what the step adds to its block, a tensor [I/q, K/q]."
        if all(self.are(self.own)) or self.sent == 0 and self.wanted:
            return (
                "Each rank has multiplied its own two blocks. Along its row the block of A that is "
                "needed is the one in column `step`, along its column the block of B in row `step`."
            )
        if all(self.are(self.expected)):
            return (
                f"Right, but {self.sent:,} bytes were sent where {self.wanted:,} do: one block of "
                "A goes to its row, one block of B to its column, and nothing else."
            )
        return (
            "Wrong blocks. A's block travels along the row, from the rank at place `step` of it; "
            "B's along the column; then a @ b."
        )


# ---- the missing collective ----------------------------------------------------------------------

SEED = 23


class FromTheQuiz(list):
    """The quiz's own answers, as a type that the judge recognizes."""


def missing_collective(seed: int = SEED) -> list[str]:
    """Return the answers to the quiz of this seed."""
    return FromTheQuiz(answer for _, _, answer in questions(seed))


class Quiz(Asked):
    """`check.missing_collective`: scores five answers to the questions of SEED."""

    def judge(self, fn: Callable) -> Verdict:
        if verdict := self.made_before(fn):
            return verdict
        came, verdict = self.ask(fn)
        if verdict:
            return verdict
        came = plain(came)
        if not isinstance(came, (list, tuple)) or len(came) != QUESTIONS:
            hint = f'Return a list of {QUESTIONS} answers, such as "all_reduce tp" or "nothing".'
            return Verdict(self.name, WRONG, hint=hint)
        lines, hint = [], ""
        for (text, axes, right), mine in zip(questions(SEED), came):
            ok = normal(mine) == right
            lines.append(Line(text, mine, "what sends least", ok))
            hint = hint or ("" if ok else self.why(text, axes, right, normal(mine)))
        points = sum(each.ok for each in lines)
        hint = f"{points} of {len(lines)}. {hint}" if hint else ""
        return Verdict(self.name, WRONG if hint else RIGHT, lines, hint)

    @staticmethod
    def why(text: str, axes: tuple[str, str], right: str, mine: str) -> str:
        op, works = mine.partition(" ")[0], what_works(text, axes)
        if op not in (*OPS, NOTHING):
            named = f"{op!r} is none of {', '.join(OPS)} and {NOTHING}"
            return f'{text}: {named}: write "{OPS[0]} {axes[0]}", say.'
        if mine in works:
            return (
                f"{text}: {mine} works, and sends {works[mine]} numbers; another one sends "
                f"{works[right]}."
            )
        if op == right.split()[0]:
            return f"{text}: the right collective. Over which axes, in which order?"
        return (
            f"{text}: not {mine}. Write down what the local product of the pieces is, by the four "
            "rules; then compare it with what is asked, axis by axis."
        )

    def solution(self) -> None:
        print(self.answer())

    def answer(self) -> str:
        rows = "\n".join(f'        "{answer}",  # {text}' for text, _, answer in questions(SEED))
        return f"def missing_collective():\n    return [\n{rows}\n    ]"


EXERCISES = [
    Exercise(
        "one_all_reduce",
        one_all_reduce,
        specs_trial,
        [(1, Sharded(2, 4)), (1, Sharded(4, 2)), (1, Sharded(2, 2, B=32, D=8, F=32))],
        OneAllReduce,
        hints=[
            "Which product can be done without sending anything, if v is cut by its outputs?",
            "h = x v is then cut along F, and y = h w sums over F. If w is cut along F as well, "
            "each rank has summands of y, and one all-reduce adds them up.",
        ],
        skeleton="""
def one_all_reduce():
    return {
        "x": ("dp", None),       # x [B, D]: the batch over dp
        "v": ...,                # v [D, F]
        "w": ...,                # w [F, D]
        "y": ("dp", None),
    }
""",
    ),
    Exercise(
        "summa_step",
        grids.summa_step,
        step_trial,
        [
            (4, Blocks(2, 0, (4, 4, 4))),
            (4, Blocks(2, 1, (3, 2, 5))),
            (1, Blocks(1, 0, (2, 3, 1))),
            (4, Blocks(2, 1, (1, 2, 3), torch.float32)),
        ],
        Step,
        hints=[
            "Block (i, k) of the product is the sum of A(i, s) B(s, k). Who has A(i, step), and "
            "who needs it?",
            "broadcast(a, step, row): the rank at place `step` of the row sends its block to the "
            "row. The same for b along the column.",
        ],
        skeleton="""
def summa_step(a, b, step, row, column):
    a = broadcast(...)
    b = ...
    return ...
""",
        refuses=[grids.summa],
    ),
    Quiz(
        "missing_collective",
        missing_collective,
        specs_trial,
        [],
        Measured,
        refuses={questions},
        makes=(FromTheQuiz,),
        hints=[
            "An axis that cuts the summed dim of both tensors leaves summands: all_reduce adds "
            "them up for all, reduce_scatter leaves each a part. One that cuts it in one tensor "
            "only: that tensor goes first (all_gather, or all_to_all if its axis is wanted on "
            "another dim), or the other is cut for nothing, and a sum is due. What sends less?",
            "An axis that cuts one dim before and another one after is an all_to_all. What is "
            "whole can be cut for nothing.",
        ],
        skeleton="""
def missing_collective():
    return ["all_reduce tp", "nothing", ..., ..., ...]
""",
    ),
]
