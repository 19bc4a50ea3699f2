"""What a learner has done: lessons opened, guesses made, exercises right. One file, kept here.

    mini_dist.progress()             # shows it, and says where the file is
    mini_dist.progress(keep=False)   # forgets it, and keeps nothing from now on

Only a notebook of the course that a person has opened keeps anything: tests, nbval, papermill and
CI run the same cells and leave no trace. Nothing is ever sent; who wants to hands the file in.
"""

from __future__ import annotations

import datetime
import html
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .fields import checks_kinds

FILE = ".mini_dist-progress.json"  # in the learner's home
LESSON = re.compile(r"\d\d_\w+")
CHECKS = re.compile(r"\bcheck\.(\w+)\(\w+\)\"")  # the last line of an exercise cell, in JSON
AUTOMATIC = {"CI", "PYTEST_CURRENT_TEST"}  # who sets one of these is no person
NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


def current_lesson() -> str:
    """The lesson that a person has open in this kernel; "" elsewhere."""
    if AUTOMATIC & {*os.environ} or started_by_a_notebook():
        return ""
    path = os.environ.get("JPY_SESSION_NAME", "")  # the Jupyter server tells it, others do not
    if not path:
        with suppress(ImportError, AttributeError):
            from IPython import get_ipython

            path = get_ipython().user_ns.get("__vsc_ipynb_file__", "")
    stem = Path(str(path)).stem
    return stem if LESSON.fullmatch(stem) and (NOTEBOOKS / f"{stem}.ipynb").is_file() else ""


def started_by_a_notebook() -> bool:
    """Whether the name of the notebook has come from a kernel, as when a cell says !papermill."""
    with suppress(OSError):
        return b"JPY_SESSION_NAME=" in Path(f"/proc/{os.getppid()}/environ").read_bytes()
    return False


def read() -> dict:
    with suppress(OSError, ValueError):
        found = json.loads((Path.home() / FILE).read_text(encoding="utf-8"))
        if isinstance(found, dict) and isinstance(found.get("lessons"), dict):
            return found
    return {"lessons": {}}


def write(record: dict) -> None:
    with suppress(OSError):  # a home that cannot be written to keeps nothing
        early = Path.home() / f"{FILE}.{os.getpid()}"
        early.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        early.replace(Path.home() / FILE)


def note(guess: tuple[str, object] | None = None, verdict: tuple[str, bool] | None = None) -> None:
    """Keep that the open lesson was worked on; a guess (name, value); how an exercise stands, as
    (name, right). What was right once stays so."""
    if not (lesson := current_lesson()):
        return
    record = read()
    if record.get("off"):
        return
    before = json.dumps(record)
    today = datetime.date.today().isoformat()
    about = record["lessons"].setdefault(lesson, {"opened": today, "guesses": {}, "exercises": {}})
    if guess:
        name, value = guess
        about["guesses"][name] = value if isinstance(value, (int, float)) else str(value)
    if verdict:
        name, right = verdict
        about["exercises"][name] = bool(right or about["exercises"].get(name))
    if json.dumps(record) != before:
        write(record)


@dataclass
class Row:
    lesson: str
    opened: str
    guesses: int
    right: int
    exercises: int


@dataclass
class Progress:
    """A row for each lesson; of those not opened yet, how many exercises wait."""

    rows: list[Row]
    kept: bool

    def where(self) -> str:
        if not self.kept:
            return "Nothing is kept. mini_dist.progress(keep=True) begins again."
        return f"Kept as {FILE} in your home, and sent nowhere; progress(keep=False) ends that."

    def __repr__(self) -> str:
        opened = [row for row in self.rows if row.opened]
        lines = [
            f"{len(opened)} of {len(self.rows)} lessons opened, "
            f"{sum(row.right for row in self.rows)} of {sum(row.exercises for row in self.rows)} "
            f"exercises right, {sum(row.guesses for row in self.rows)} guesses made"
        ]
        for row in opened:
            done = f"{row.right} of {row.exercises} right" if row.exercises else "no exercise"
            lines.append(f"  {row.lesson:32} {row.opened}  {done:12}  {row.guesses} guesses")
        return "\n".join([*lines, self.where()])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr style='opacity:{1 if row.opened else 0.5}'>"
            f"<td style='text-align:left'>{html.escape(row.lesson)}</td>"
            f"<td><progress max='{max(row.exercises, 1)}' value='{self.share(row)}'></progress>"
            f"</td><td>{row.right} of {row.exercises}</td><td>{row.guesses or ''}</td></tr>"
            for row in self.rows
        )
        head = "<tr><th style='text-align:left'>lesson</th><th></th><th>right</th><th>guesses</th>"
        return f"<table>{head}</tr>{rows}</table><p>{html.escape(self.where())}</p>"

    @staticmethod
    def share(row: Row) -> float:
        return row.right if row.exercises else float(bool(row.opened))


@checks_kinds
def progress(keep: bool | None = None) -> Progress:
    """What this machine's learner has done in the course, as a table (in a terminal, as text).

    keep: False forgets all of it and keeps nothing from now on, True begins again.
    """
    if keep is not None:
        write({"lessons": {}} if keep else {"lessons": {}, "off": True})
    record = read()
    rows = []
    for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")):
        about = record["lessons"].get(path.stem, {})
        names = {*CHECKS.findall(path.read_text(encoding="utf-8"))}
        right = sum(bool(about.get("exercises", {}).get(name)) for name in names)
        guesses = len(about.get("guesses", {}))
        rows.append(Row(path.stem, about.get("opened", ""), guesses, right, len(names)))
    return Progress(rows, not record.get("off"))
