"""How an exercise is judged: run it on ranks, measure, and say the one thing that helps most.

An exercise is a function of the learner's. Right values are not enough: a ring that passes whole
tensors round gives the right sum, too. So the ledger of the run is judged with the values: bytes,
rounds, who sent to whom, and whether the learner's own code did the work.
"""

from __future__ import annotations

import html
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType

from ..launch import RankError, Run, launch
from ..ledger.table import Table
from ..lesson import show

RIGHT, WRONG, LIBRARY = "right", "wrong", "still the library's"

LENGTH = re.compile(r"(?:send|recv)\(\w+\[(\d+)\]")  # of a message, as a RankError tells it


class CheckFailed(AssertionError):
    """With MINI_DIST_STRICT=1: this exercise is not solved by the learner's own code."""


@dataclass
class Line:
    """One thing that was measured, beside what was expected; "" where nothing was."""

    what: str
    measured: object
    expected: object
    ok: bool

    @property
    def mark(self) -> str:
        if self.expected == "":
            return ""
        return "✓" if self.ok else "✗"


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
        return f"{mark} {self.name}: {self.state}"

    def table(self) -> Table:
        rows = [
            (line.what, str(line.measured), str(line.expected), line.mark) for line in self.lines
        ]
        return Table(["", "measured", "expected", ""], rows)

    def __repr__(self) -> str:
        parts = [self.title, str(self.table())] if self.lines else [self.title]
        return "\n".join([*parts, *([self.hint] if self.hint else [])])

    def _repr_html_(self) -> str:
        color = {RIGHT: "#2e7d32", WRONG: "#c62828", LIBRARY: "#666666"}[self.state]
        table = self.table()._repr_html_() if self.lines else ""
        hint = f"<p>{html.escape(self.hint)}</p>" if self.hint else ""
        title = html.escape(self.title)
        return f"<p style='color:{color};font-weight:bold'>{title}</p>{table}{hint}"


@dataclass
class Trial:
    """One run of the learner's function: a case of the exercise, and what came of it."""

    case: object
    run: Run | None


class Exercise:
    """`check.NAME`: call it with the learner's function; ask it for a hint, a skeleton, a solution.

    name: as in the library, whose function `solution` is. trial: what each rank runs, (fn, case,
    group) -> result. cases: pairs (world_size, case). judge: from all trials to lines and, for the
    first thing that is wrong, a hint. Both see only finished runs; a run that fails is told here.
    """

    def __init__(
        self,
        name: str,
        solution: Callable,
        trial: Callable,
        cases: Iterable[tuple[int, object]],
        judge: Callable[[list[Trial]], tuple[list[Line], str]],
        hints: list[str],
        skeleton: str,
        parts: frozenset[str] = frozenset(),
    ):
        self.name, self._solution, self._trial = name, solution, trial
        self._cases, self._judge = list(cases), judge
        self._hints, self._skeleton = hints, skeleton
        self._parts = parts  # functions of the library that a solution may use

    def __call__(self, fn: Callable) -> Verdict:
        """Judge `fn`; with MINI_DIST_STRICT=1 raise CheckFailed unless it is right."""
        verdict = self.judge(fn)
        if os.environ.get("MINI_DIST_STRICT") == "1" and verdict.state != RIGHT:
            raise CheckFailed(str(verdict))
        return verdict

    def judge(self, fn: Callable) -> Verdict:
        trials = []
        for world_size, case in self._cases:
            try:
                run = launch(self._trial, world_size, (fn, case), timeout=30, quiet=True)
            except RankError as error:
                return self._failed(trials, world_size, case, error)
            trials.append(Trial(case, run))
            if not all(line.ok for line in self._judge(trials)[0]):
                break  # one mistake at a time
        lines, hint = self._judge(trials)
        used = self.used(trials)
        if self._solution.__name__ in used:
            note = (
                f"These are the library's numbers. Replace its call in {fn.__name__} by your own."
            )
            return Verdict(self.name, LIBRARY, lines, note)
        if borrowed := sorted(used - self._parts):
            return Verdict(
                self.name,
                WRONG,
                lines,
                f"The work is done by the library's {', '.join(borrowed)}: write that part, too.",
            )
        right = all(line.ok for line in lines)
        return Verdict(self.name, RIGHT if right else WRONG, lines, "" if right else hint)

    def used(self, trials: list[Trial]) -> set[str]:
        """The library's functions that did the work: collectives, as the ledger has noted them."""
        return {comm.op for trial in trials for comm in trial.run.ledger.comms if not comm.is_leaf}

    def _failed(self, trials, world_size: int, case, error: RankError) -> Verdict:
        """The verdict for a run that did not end; what was wrong before it comes first."""
        lines, hint = self._judge(trials) if trials else ([], "")
        if not hint:
            here = f"With {world_size} ranks and {case}" if world_size > 1 else "With one rank"
            before = " and ".join(dict.fromkeys(ranks(trial.run.world_size) for trial in trials))
            hint = f"Right with {before}. " * bool(trials) + f"{here}: {advice(error)}{error}"
        return Verdict(self.name, WRONG, lines, hint)

    def hint(self, level: int = 1) -> None:
        """Print the first hint, or a later one that says more."""
        if not 1 <= level <= len(self._hints):
            raise ValueError(f"{self.name} has hints 1 to {len(self._hints)}, not {level}")
        print(self._hints[level - 1])

    def skeleton(self) -> None:
        """Print the frame of a solution, with gaps."""
        print(self._skeleton)

    def solution(self) -> None:
        """Show the library's own source."""
        show(self._solution)


@contextmanager
def calls_of(names: Collection[str], library: ModuleType) -> Iterator[set[str]]:
    """Those of the named functions of a module or package that are called from outside it.

    For what leaves nothing in the ledger: functions that send nothing, or that set things up.
    """
    home, called = library.__file__.removesuffix("__init__.py"), set()

    def note(frame, event, _):
        code, caller = frame.f_code, frame.f_back
        if event == "call" and code.co_name in names and code.co_filename.startswith(home):
            if caller is None or not caller.f_code.co_filename.startswith(home):
                called.add(code.co_name)
        if before:  # of a watch around this one
            before(frame, event, _)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(before)


def ranks(size: int) -> str:
    return f"{size} rank{'s' * (size > 1)}"


def advice(error: RankError) -> str:
    """What the usual failures mean."""
    text = str(error)
    if "'NoneType' object" in text:
        return (
            "something is None: the grad of a frozen parameter, or what gather returns elsewhere "
            "than on its root.\n"
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
    if len({after for line, after in zip(lines, lines[1:]) if " s in " in line}) > 1:
        return (
            "the ranks wait in different lines of your function. A collective needs all of them: "
            "every rank makes the same calls in the same order, also where its result is not "
            "used.\n"
        )
    if all(wait.startswith("send(") for wait in waits):
        return (
            "everyone sends first and waits for a receiver, but nobody has come to receive. "
            "exchange(x, to, source, group) does both at once.\n"
        )
    if all(wait.startswith("recv(") for wait in waits):
        return "everyone waits to receive, and nobody has sent.\n"
    return ""
