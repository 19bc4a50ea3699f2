"""What a learner has done: lessons opened, guesses made, exercises right. One file, kept here.

    mini_dist.progress()             # shows it, and says where the file is (mini-dist progress)
    mini_dist.progress(keep=False)   # forgets it, and keeps nothing from now on
    mini_dist.language("zh")         # verdicts, predictions and this table in Chinese

Only a notebook of the course that a person has opened keeps anything: tests, nbval, papermill and
CI run the same cells and leave no trace. Nothing is ever sent; a learner may hand the file in.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mini_dist.plan.fields import checks_kinds
from mini_dist.plan.tables import Markup, escaped, html_table

from . import working_copy
from .language import LANGUAGES, said
from .working_copy import NOTEBOOKS

FOLDER, FILE = ".mini_dist", "mini_dist-progress.json"  # in the learner's home, private
FORMER = ".mini_dist-progress.json"  # where the file was until November 2026
PATIENCE = 2.0  # seconds
CHECKS = re.compile(r"\bcheck\.(\w+)\(\w+\)\"")  # the last line of an exercise cell, in JSON
AUTOMATIC = {"CI", "PYTEST_CURRENT_TEST"}  # set by CI and pytest, not by a person


def open_notebook() -> str:
    """Return the path of the notebook that a person has open in this kernel; "" elsewhere."""
    if AUTOMATIC & {*os.environ} or started_by_a_notebook():
        return ""
    path = os.environ.get("JPY_SESSION_NAME", "")  # only the Jupyter server sets it
    if not path:
        with suppress(ImportError, AttributeError):
            from IPython import get_ipython

            path = get_ipython().user_ns.get("__vsc_ipynb_file__", "")
    return str(path)


def current_lesson() -> str:
    """Return the lesson that a person has open in this kernel; "" elsewhere."""
    stem = Path(open_notebook()).stem.removesuffix(working_copy.NEW)
    return stem if stem in lessons() else ""


@cache  # reading the whole course takes 0.1 s, and `note` needs it each time
def lessons() -> dict[str, set[str]]:
    """Return the exercises of each lesson, by the lesson's name."""
    paths = [NOTEBOOKS / name for name in working_copy.notebooks(NOTEBOOKS) if "/" not in name]
    return {path.stem: {*CHECKS.findall(path.read_text(encoding="utf-8"))} for path in paths}


def started_by_a_notebook() -> bool:
    """Return whether the parent process also has that variable, as when a cell runs !papermill."""
    with suppress(OSError):
        return b"JPY_SESSION_NAME=" in Path(f"/proc/{os.getppid()}/environ").read_bytes()
    return False


# ---- the file ------------------------------------------------------------------------------------


def read() -> tuple[dict, bool]:
    """Return the record as far as it can be read, and whether that is all of the file."""
    path = Path.home() / FOLDER / FILE
    if not path.exists():
        path = Path.home() / FORMER
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"lessons": {}}, True
    except (OSError, ValueError, RecursionError):  # ValueError: not JSON or not UTF-8
        return {"lessons": {}}, False
    record = readable(found)
    return record, record == found


def readable(found: object) -> dict:
    """Return the parts of a record that have the shape in which `note` writes them."""
    record = dict(found) if isinstance(found, dict) else {}
    lessons = record.get("lessons")
    record["lessons"] = {
        lesson: about
        for lesson, about in (lessons.items() if isinstance(lessons, dict) else ())
        if isinstance(about, dict)
        and isinstance(about.get("opened"), str)
        and isinstance(about.get("guesses"), dict)
        and isinstance(about.get("exercises"), dict)
    }
    if not isinstance(record.get("off", False), bool):
        del record["off"]
    if record.get("language", "en") not in (*LANGUAGES,):
        del record["language"]
    return record


def change(edit: Callable[[dict], None]) -> None:
    """Let `edit` change the record, one process at a time, and write the record if it did.

    A file that is not readable in full is moved aside first. If the home is not writable, nothing
    is kept.
    """
    with suppress(OSError, RuntimeError):  # RuntimeError: the system knows no home
        folder = Path.home() / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)  # somebody may have made it by hand
        with locked(folder / "lock"):
            former = Path.home() / FORMER
            if former.exists() and not (folder / FILE).exists():
                former.replace(folder / FILE)
            record, whole = read()
            before = json.dumps(record)
            edit(record)
            if json.dumps(record) != before:
                if not whole:
                    keep_aside(folder / FILE)
                write(folder / FILE, record)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process is in this block, for at most PATIENCE seconds.

    Raises BlockingIOError after that, because a stopped kernel must not stop the others. A file
    system without locks gets none.
    """
    import fcntl  # (a page of the site has no such module)

    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.005)
                continue
            except OSError:  # this file system has no locks
                pass
            break
        yield
    finally:
        os.close(handle)


def write(path: Path, record: dict) -> None:
    early = path.with_suffix(f".{os.getpid()}")
    handle = os.open(early, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(handle, "w", encoding="utf-8") as file:
        os.fchmod(handle, 0o600)
        file.write(json.dumps(record, indent=1) + "\n")
    early.replace(path)


def keep_aside(path: Path) -> None:
    numbered = (path.with_suffix(f".unreadable-{n}") for n in itertools.count(1))
    aside = next(name for name in numbered if not name.exists())
    path.replace(aside)
    print(
        f"Your progress was not readable in full. The file is kept as {FOLDER}/{aside.name} in "
        "your home, and what could be read goes on in a new one.",
        file=sys.stderr,
    )


def note(guess: tuple[str, object] | None = None, verdict: tuple[str, bool] | None = None) -> None:
    """Note that the learner worked on the open lesson, and a guess (name, value) or how an exercise
    stands (name, right). An exercise that was right once stays right."""
    if not (lesson := current_lesson()):
        return

    def edit(record: dict) -> None:
        if record.get("off"):
            return
        today = datetime.date.today().isoformat()
        about = record["lessons"].setdefault(
            lesson, {"opened": today, "guesses": {}, "exercises": {}}
        )
        if guess:
            name, value = guess
            about["guesses"][name] = value if isinstance(value, (int, float)) else str(value)
        if verdict:
            name, right = verdict
            about["exercises"][name] = bool(right or about["exercises"].get(name))

    change(edit)


# ---- the language --------------------------------------------------------------------------------

_chosen = []  # in this process; the last one counts


@checks_kinds
def language(name: str | None = None) -> str:
    """Choose the language in which the library speaks to a learner, and return it.

    name: "en" or "zh"; None asks only. In a notebook that a person has open the choice is kept with
    the progress, and the next notebook begins with it; elsewhere it holds for this process. Errors
    stay English. Raises ValueError for a language that the library does not speak.
    """
    if name is not None:
        if name not in LANGUAGES:
            spoken = " or ".join(f'"{each}"' for each in LANGUAGES)
            raise ValueError(f"the library does not speak {name!r}; choose {spoken}")
        _chosen[:] = [name]
        if open_notebook():
            change(lambda record: None if record.get("off") else record.update(language=name))
    elif not _chosen:
        _chosen[:] = [read()[0].get("language", "en") if open_notebook() else "en"]
    return _chosen[-1]


# ---- what is shown -------------------------------------------------------------------------------


def _counted(guesses: int) -> str:
    return "1 guess" if guesses == 1 else f"{guesses} guesses"


@dataclass
class Row:
    lesson: str
    opened: str
    guesses: int
    right: int
    exercises: int


@dataclass
class Progress:
    """A row for each lesson, whether it was opened or not."""

    rows: list[Row]
    kept: bool
    whole: bool  # whether all of the file could be read

    def where(self) -> str:
        if not self.kept:
            return said("Nothing is kept. mini_dist.progress(keep=True) begins again.")
        where = (
            f"Kept as {FOLDER}/{FILE} in your home, and sent nowhere; progress(keep=False) ends "
            "that."
        )
        damaged = "" if self.whole else "Part of the file cannot be read, and is not shown."
        return " ".join(filter(None, [said(where), said(damaged)]))

    def __repr__(self) -> str:
        opened = [row for row in self.rows if row.opened]
        lines = [
            f"{len(opened)} of {len(self.rows)} lessons opened, "
            f"{sum(row.right for row in self.rows)} of {sum(row.exercises for row in self.rows)} "
            f"exercises right, {_counted(sum(row.guesses for row in self.rows))} made"
        ]
        for row in opened:
            done = f"{row.right} of {row.exercises} right" if row.exercises else "no exercise"
            lines.append(f"  {row.lesson:32} {row.opened}  {done:12}  {_counted(row.guesses)}")
        return "\n".join([*map(said, lines), self.where()])

    def _repr_html_(self) -> str:
        rows = [
            (_linked(row.lesson), self.bar(row), said(self.done(row)), row.guesses or "")
            for row in self.rows
        ]
        styles = [f"opacity:{1 if row.opened else 0.5}" for row in self.rows]
        sides = ["left", "right", "right", "right"]
        head = [said(word) for word in ("lesson", "", "right", "guesses")]
        table = html_table(rows, head, sides=sides, styles=styles)
        return f"{table}<p>{escaped(self.where())}</p>"

    @staticmethod
    def done(row: Row) -> str:
        if row.exercises:
            return f"{row.right} of {row.exercises}"
        return "read" if row.opened else ""

    def bar(self, row: Row) -> Markup:
        most = max(row.exercises, 1)
        return Markup(f"<progress max='{most}' value='{self.share(row)}'></progress>")

    @staticmethod
    def share(row: Row) -> float:
        return row.right if row.exercises else float(bool(row.opened))


def _linked(lesson: str) -> Markup | str:
    """Return a lesson's name, as a link to its notebook if a notebook is open."""
    if not (path := open_notebook()):
        return lesson
    up = "../" if Path(path).parent.name == "labs" else ""
    return Markup(f"<a href='{up}{lesson}.ipynb'>{escaped(lesson)}</a>")


@checks_kinds
def progress(keep: bool | None = None) -> Progress:
    """Return what this machine's learner has done in the course: a table, or text in a terminal.

    keep: False forgets all of it and keeps nothing from now on, True begins again.
    """
    if keep is not None:
        change(begin_again if keep else forget)
        for aside in (Path.home() / FOLDER).glob("*.unreadable-*") if keep is False else ():
            aside.unlink()
    record, whole = read()
    rows = []
    for lesson, names in lessons().items():
        about = record["lessons"].get(lesson, {})
        right = sum(bool(about.get("exercises", {}).get(name)) for name in names)
        guesses = len(about.get("guesses", {}))
        rows.append(Row(lesson, about.get("opened", ""), guesses, right, len(names)))
    return Progress(rows, not record.get("off"), whole)


def forget(record: dict) -> None:
    record.clear()
    record.update({"lessons": {}, "off": True})


def begin_again(record: dict) -> None:
    record.pop("off", None)


if __name__ == "__main__":
    print(progress())
