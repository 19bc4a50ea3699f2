"""Judge an exercise: run it on ranks, measure, and give the one hint that helps most.

The learner's answer is a function. Right values are not enough: a ring that passes whole tensors
round also gives the right sum. So the judge looks at values and at the ledger: bytes, rounds, which
rank sent to which, and whether the learner's own code did the work (watch.py). An answer that is
right so far is tried again in harder ways, which are the same for all exercises (adversities.py).

An exercise has four parts: its cases, a trial that calls the learner's function on a rank, a
`Measured` that compares the results with the expected ones, and its hints.
"""

from __future__ import annotations

import html
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from mini_dist.plan.tables import Table
from mini_dist.ranks.launch import RankError, Run

from .. import learner
from ..draw.svg import near_ink
from ..language import said
from ..lesson import show_to_paste, to_paste
from .adversities import mistake_in, once_started, told
from .form import mistake_of_form, stays_inside
from .watch import calls_of, handles_kept, learners, made_before
from .ways import Facts, LeavesLists, nothing_under_way

RIGHT, WRONG, LIBRARY = "right", "wrong", "still the library's"


class CheckFailed(AssertionError):
    """With MINI_DIST_STRICT=1: this exercise is not solved by the learner's own code."""


@dataclass
class Line:
    """One measurement and the value that was expected; "" where there is none."""

    what: str
    measured: object
    expected: object
    ok: bool

    @property
    def mark(self) -> str:
        if self.expected == "":
            return ""
        return "✓" if self.ok else "✗"


def line(what: str, measured, expected) -> Line:
    """Return a line that is right if both values are equal."""
    return Line(what, measured, expected, measured == expected)


def on_ranks(what: str, right: Iterable[bool]) -> Line:
    """Return a line that says on how many ranks something is right."""
    right = list(right)
    return line(what, f"{sum(right)} of {len(right)} ranks", f"{len(right)} of {len(right)} ranks")


def yes(what: str, ok: bool) -> Line:
    return Line(what, "yes" if ok else "no", "yes", bool(ok))


def are_two(came: object, *kinds: type) -> bool:
    """Return whether a function returned a tuple or list of two things of these kinds."""
    two = isinstance(came, (tuple, list)) and len(came) == 2
    return two and all(map(isinstance, came, kinds))


def too_few_bytes(sent: int, wanted: int) -> str:
    """Return the hint for a run that looks right and sent fewer bytes than it needs."""
    return (
        f"Only {sent:,} bytes were sent where {wanted:,} are needed: numbers travel in the dtype "
        "that they were given in. In 16 bits they lose digits, though these may not show it."
    )


NO_BARRIER = (
    "A barrier moves nothing and keeps everyone waiting: a collective waits by itself for what it "
    "needs. Leave it out."
)


@dataclass
class Verdict:
    """What `check` shows: the state, the measurements, and for a wrong answer one hint."""

    name: str
    state: str
    lines: list[Line] = field(default_factory=list)
    hint: str = ""

    @property
    def title(self) -> str:
        mark = {RIGHT: "✓", WRONG: "✗", LIBRARY: "·"}[self.state]
        return said(f"{mark} {self.name}: {self.state}")

    def table(self) -> Table:
        rows = [
            (said(line.what), said(str(line.measured)), said(str(line.expected)), line.mark)
            for line in self.lines
        ]
        return Table(["", said("measured"), said("expected"), ""], rows)

    def __repr__(self) -> str:
        parts = [self.title, str(self.table())] if self.lines else [self.title]
        return "\n".join([*parts, *([said(self.hint)] if self.hint else [])])

    def _repr_html_(self) -> str:
        color = {RIGHT: "#2e7d32", WRONG: "#c62828", LIBRARY: "#666666"}[self.state]
        table = self.table()._repr_html_() if self.lines else ""
        hint = html.escape(said(self.hint)).replace("\n", "<br>")
        hint = f"<p>{hint}</p>" if hint else ""
        title = html.escape(self.title)
        style = f"color:{color};color:{near_ink(color)};font-weight:bold"
        return f"<p style='{style}'>{title}</p>{table}{hint}"


class Measured:
    """The results of one case. An exercise lists its measurements in `lines`; if one of them is not
    right, `mistake` returns the hint that helps most."""

    def __init__(self, case, run: Run):
        self.case, self.run, self.results = case, run, run.results
        self.size = len(run.results)
        self.measure()

    def measure(self) -> None:
        """Compute what both `lines` and `mistake` need."""

    def lines(self) -> list[Line]:
        raise NotImplementedError

    def mistake(self) -> str:
        raise NotImplementedError

    @staticmethod
    def raised(error: str) -> str:
        """Return what an exception means in this exercise; "" if its own text is enough."""
        return ""

    @property
    def sent(self) -> int:
        """The bytes that all ranks sent."""
        return self.run.ledger.total_bytes()

    @property
    def backend(self) -> list[str]:
        """The operations of torch.distributed that were called, except messages."""
        messages = ("send", "recv", "recv_anysource")
        return sorted({c.op for c in self.run.ledger.leaves() if c.op not in messages})

    def backend_line(self) -> Line:
        found = sorted({*self.backend, *["barrier"] * (self.barriers > 0)})
        return line("calls of the backend's collectives", ", ".join(found) or "none", "none")

    def of_the_backend(self, instead: str) -> str:
        """Return the hint for an answer that called more than messages."""
        if self.barriers:
            return NO_BARRIER
        return f"The work is done by the backend's own {' and '.join(self.backend)}. {instead}"

    @property
    def barriers(self) -> int:
        """How often a rank stopped at a barrier, the backend's or ours."""
        return sum(comm.op == "barrier" for comm in self.run.ledger.comms)


class Exercise:
    """`check.NAME`: call it with the learner's function; ask it for a hint, a skeleton, a solution.

    solution: the library's function that does this; an answer may not call it. trial: what a
    rank runs, (fn, case, group) -> its result. cases: pairs (world_size, case); the first shows all
    its lines, the others those that are not right. refuses: functions of the library that do some
    of the asked work. answer: what `.solution()` shows, if it is not `solution`. changes: names of
    the arguments that the function is meant to change. again: a second call with the same arguments
    gives the same result (otherwise only a second trial is made). makes: types of objects that the
    call has to make, so none may exist before it. contiguous: names of arguments that are always
    contiguous. scales: with other numbers a right answer returns what the library's function
    returns, up to rounding.
    """

    def __init__(
        self,
        name: str,
        solution: Callable,
        trial: Callable,
        cases: Iterable[tuple[int, object]],
        measured: type[Measured],
        *,
        hints: list[str],
        skeleton: str,
        refuses: Collection[Callable] = (),
        answer: tuple[Callable, ...] = (),
        changes: Collection[str] = (),
        again: bool = True,
        makes: tuple[type, ...] = (),
        contiguous: Collection[str] = (),
        scales: bool = True,
        one_dtype: bool = False,
    ):
        self.name, self._solution, self._trial = name, inspect.unwrap(solution), trial
        self._answer = answer or (solution,)
        self._cases, self._measured = list(cases), measured
        self._hints, self._skeleton = hints, skeleton
        self._refuses = {*map(inspect.unwrap, [*refuses, *self._answer]), self._solution}
        self._refuses |= {type(self).answer, to_paste}  # they return the solution as text
        self._makes = makes
        kept = frozenset(changes), again, frozenset(contiguous)
        self._facts = Facts(self._answer[-1], *kept, scales, one_dtype)

    def __call__(self, fn: Callable) -> Verdict:
        """Judge `fn`; with MINI_DIST_STRICT=1 raise CheckFailed unless it is right."""
        verdict = self.judge(fn)
        learner.note(verdict=(self.name, verdict.state == RIGHT))
        if os.environ.get("MINI_DIST_STRICT") == "1" and verdict.state != RIGHT:
            raise CheckFailed(str(verdict))
        return verdict

    def judge(self, fn: Callable) -> Verdict:
        lines, passed = [], []
        if verdict := self.made_before(fn):
            return verdict
        for size, case in self._cases:
            args = (self._trial, fn, case, self._refuses, self._facts)
            try:
                run = once_started(watched, size, args)
            except RankError as error:
                means = self._measured.raised(str(error)) or advice(error)
                hint = f"{self._only_here(passed, size, case)}{told(error) or means + str(error)}"
                return Verdict(self.name, WRONG, lines, hint)
            used = set().union(*(called for _, called in run.results))
            run.results = [result for result, _ in run.results]
            one = self._measured(case, run)
            found = one.lines()
            lines += [each for each in found if not passed or not each.ok]
            if used:
                return self._not_the_learners(fn, used, lines)
            if not all(each.ok for each in found):
                hint = self._only_here(passed, size, case) * bool(passed) + one.mistake()
                return Verdict(self.name, WRONG, lines, hint)
            passed.append((case, run))
        hint = mistake_in(self._trial, fn, passed, self._facts)
        return Verdict(self.name, WRONG if hint else RIGHT, lines, hint)

    def made_before(self, fn: Callable) -> Verdict | None:
        """Return the verdict on what cannot be an answer or returns what an earlier cell made."""
        if hint := mistake_of_form(fn, self._answer[-1]):
            return Verdict(self.name, WRONG, hint=hint)
        name = made_before(fn, self._makes)
        return self.told_made_before(name) if name else None

    def told_made_before(self, name: str) -> Verdict:
        hint = (
            f"Your function uses {name}, which was there before it was called: what it returns is "
            "to be made inside of it."
        )
        return Verdict(self.name, WRONG, hint=hint)

    def _not_the_learners(self, fn: Callable, used: set[str], lines: list[Line]) -> Verdict:
        if used & {self.name, *(solution.__name__ for solution in (self._solution, *self._answer))}:
            note = (
                "These are the library's numbers. Replace its call in "
                f"{name_of(fn)} with your own code."
            )
            return Verdict(self.name, LIBRARY, lines, note)
        names = ", ".join(sorted(used))
        note = f"The work is done by the library's {names}: write that part yourself."
        return Verdict(self.name, WRONG, lines, note)

    def _only_here(self, passed: list, size: int, case) -> str:
        """Say which cases before were right and which one is not."""
        alone = all(size == 1 for size, _ in self._cases)  # ranks play no part
        where = str(case) if alone else f"{'one rank' if size == 1 else ranks(size)}, {case}"
        seen = [str(before) if alone else ranks(len(run.results)) for before, run in passed]
        before = " and ".join(dict.fromkeys(seen[:1] if alone else seen))
        return f"Right with {before}. With {where}: " if passed else f"With {where}: "

    def hint(self, level: int = 1) -> None:
        """Print the first hint, or a later one that says more."""
        if not 1 <= level <= len(self._hints):
            raise ValueError(f"{self.name} has hints 1 to {len(self._hints)}, not {level}")
        print(said(self._hints[level - 1]))

    def skeleton(self) -> None:
        """Print the frame of a solution, with gaps."""
        print(self._skeleton)

    def solution(self) -> None:
        """Show a right answer as source that can be pasted into a cell."""
        show_to_paste(*self._answer, name=self.name)

    def answer(self) -> str:
        """Return what `solution` shows."""
        return to_paste(*self._answer, name=self.name)


def watched(trial: Callable, fn: Callable, case, refuses: set[Callable], facts, group) -> tuple:
    """Return the result of the trial on this rank, and which of `refuses` the learner called."""
    stays_inside(fn)
    mine = LeavesLists(lambda *args, **kwargs: learners(fn, *args, **kwargs), facts)
    with calls_of(refuses) as called, handles_kept() as kept:
        result = trial(mine, case, group)
        nothing_under_way(group, kept)
    return result, called


def name_of(fn: Callable) -> str:
    return getattr(fn, "__name__", "your cell")


def ranks(size: int) -> str:
    return f"{size} rank{'s' * (size > 1)}"


LENGTH = re.compile(r"(?:send|recv)\(\w+\[(\d+)\]")  # of a message, in the text of a RankError

CALLED = re.compile(r"rank \d+ calls (\w+)\(")
MESSAGE = {"send", "recv"}


def advice(error: RankError) -> str:
    """Return what a common failure means; "" for any other."""
    text = str(error)
    if "ellipsis" in text:
        return "a gap of the skeleton, ..., is still in your function.\n"
    if "SIGABRT" in text:
        return (
            "torch ends the process where two ranks call one collective with other dtypes or "
            "lengths. What does each of them give it?\n"
        )
    if "'NoneType' object" in text:
        return (
            "something is None: the grad of a frozen parameter (one that was not used has none, "
            "either, though it requires_grad: ask for .grad is None), what gather returns "
            "elsewhere than on its root, or what a function without `return` gives.\n"
        )
    called = set(CALLED.findall(text))  # a send and a receive are two sides of one operation
    if text.startswith("the ranks do not agree") and len(called) > 1 and called != MESSAGE:
        return (
            "a collective needs all ranks: every rank makes the same calls in the same order, also "
            "where its result is not used.\n"
        )
    if text.startswith("the ranks do not agree") and len(set(LENGTH.findall(text))) == 2:
        return (
            "what arrives may be longer or shorter than what you send: exchange(..., like=a tensor "
            "as long as what arrives), such as your own chunk of the same number.\n"
        )
    lines = text.splitlines()
    waits = [line.split(" s in ")[1] for line in lines if " s in " in line]
    if not text.startswith("deadlock") or not waits:
        return ""
    sends, receives = (all(wait.startswith(op) for wait in waits) for op in ("send(", "recv("))
    messages = all(wait.startswith(("send(", "recv(")) for wait in waits)
    if messages and any("has returned" in line for line in lines):
        what = "sent that nobody receives" if sends else "waited for that nobody sends"
        return f"a message is {what}: the others have returned. Go through it for each rank.\n"
    if len({after for line, after in zip(lines, lines[1:]) if " s in " in line}) > 1:
        return (
            "the ranks wait in different lines of your function. A collective needs all of them: "
            "every rank makes the same calls in the same order, also where its result is not "
            "used. And of messages, each send needs its receive.\n"
        )
    if sends:
        return (
            "everyone sends first and waits for a receiver, but nobody has come to receive. "
            "exchange(x, to, source, group) does both at once.\n"
        )
    if receives:
        return "everyone waits to receive, and nobody has sent.\n"
    return ""
