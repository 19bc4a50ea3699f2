"""Grade one learner: run each notebook in one sandbox, have its answers judged in another."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

from .alike import normalised
from .sandbox import Limits, Slot
from .submissions import Cell, Lesson, Submission, read_cells, which_lesson, written

# How an exercise may stand. Only the first earns a point.
RIGHT, WRONG, UNTOUCHED = "right", "wrong", "untouched"
MISSING, NOT_REACHED, NOT_JUDGED = "missing", "not reached", "not judged"
CANNOT_TRAVEL = "the function cannot be sent to another process"
MOST_OF_A_LESSON = 3  # notebooks of one learner: each may take as long as the limits let it
STATES = (RIGHT, WRONG, UNTOUCHED, MISSING, NOT_REACHED, NOT_JUDGED)


@dataclass
class Graded:
    """One exercise of one learner."""

    state: str
    lines: list[list[str]] = field(default_factory=list)  # what, measured, expected, mark
    hint: str = ""
    note: str = ""
    source: str = ""
    code: str = ""  # a short name of what the source says, see alike.py

    @property
    def rank(self) -> int:
        return STATES.index(self.state)


@dataclass
class Notebook:
    """One notebook of one learner. ended: why it did not run to its end, or "". executed: the file
    that shows it as it ran, or ""."""

    path: str
    lesson: str
    ended: str = ""
    executed: str = ""
    seconds: float = 0.0
    exercises: dict[str, Graded] = field(default_factory=dict)


@dataclass
class Record:
    """All of one learner, as it is kept between two calls of the command."""

    learner: str
    fingerprint: str
    notebooks: list[Notebook] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    progress: dict = field(default_factory=dict)

    def best(self, exercise: str) -> Graded | None:
        """Grade a learner who hands in a lesson twice by the better attempt."""
        found = [n.exercises[exercise] for n in self.notebooks if exercise in n.exercises]
        return min(found, key=lambda graded: graded.rank, default=None)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        early = path.with_suffix(".new")
        early.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        early.replace(path)

    @classmethod
    def read(cls, path: Path) -> Record | None:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            for notebook in found["notebooks"]:
                graded = {name: Graded(**each) for name, each in notebook["exercises"].items()}
                notebook["exercises"] = graded
            found["notebooks"] = [Notebook(**each) for each in found["notebooks"]]
            return cls(**found)
        except (OSError, ValueError, KeyError, TypeError):
            return None


def fingerprint(submission: Submission, limits: Limits) -> str:
    """Of what was handed in, of the limits and of the library that judges it."""
    library = Path(__file__).resolve().parents[2]
    code = [path.read_bytes() for path in sorted(library.rglob("*.py"))]
    handed_in = [submission.notebooks, submission.files, submission.problems, submission.progress]
    told = json.dumps([handed_in, asdict(limits)], sort_keys=True).encode()
    return hashlib.sha256(b"\0".join([told, *code])).hexdigest()


def grade(
    submission: Submission,
    known: list[Lesson],
    folder: Path,
    slot: Slot,
    done,
) -> Record:
    """Grade all notebooks of a submission; the executed ones go into `folder`."""
    record = Record(submission.learner, fingerprint(submission, slot.limits))
    record.problems, record.progress = [*submission.problems], submission.progress
    for path, text in submission.notebooks.items():
        try:
            cells = read_cells(text)
        except ValueError as error:
            record.problems.append(f"{path}: {error}")
            done(path)
            continue
        if (lesson := which_lesson(cells, known)) is None:
            record.problems.append(f"{path} is no lesson of the course")
        elif sum(lesson.stem == each.lesson for each in record.notebooks) == MOST_OF_A_LESSON:
            record.problems.append(f"{path} did not run: it is one too many of {lesson.stem}")
        elif lesson.functions:
            notebook = Notebook(path, lesson.stem)
            record.notebooks.append(notebook)
            began = time.monotonic()
            kept, executed = run(notebook, text, cells, submission, lesson, slot)
            judge(notebook, cells, lesson, kept, slot)
            notebook.seconds = round(time.monotonic() - began, 1)
            if executed:
                folder.mkdir(parents=True, exist_ok=True)
                notebook.executed = f"{len(record.notebooks)}-{lesson.stem}.ipynb"
                (folder / notebook.executed).write_bytes(executed)
        done(path)
    return record


def run(
    notebook: Notebook,
    text: str,
    cells: list[Cell],
    submission: Submission,
    lesson: Lesson,
    slot: Slot,
) -> tuple[dict[str, dict], bytes]:
    """What was kept of each exercise, and the executed notebook, where it came to its end."""
    beside = PurePosixPath(notebook.path).parent
    files = {
        str(PurePosixPath(path).relative_to(beside)): source
        for path, source in submission.files.items()
        if PurePosixPath(path).is_relative_to(beside)
    }
    job = dict(notebook=text, files=files, functions=lesson.functions, cell=slot.limits.cell)
    said = slot.run("worker", job, then="judge")
    kept, executed, last = {}, b"", -1
    for message in said.messages:
        exercise = message.get("kept")
        if isinstance(exercise, str) and exercise in lesson.functions:
            before = kept.get(exercise, {})
            if message.get("how") == "check" or before.get("how") != "check":
                kept[exercise] = message
        last = message["cell"] if type(message.get("cell")) is int else last
        if message.get("executed") is True and isinstance(message.get("payload"), bytes):
            executed = message["payload"]
        if isinstance(message.get("trouble"), str):
            notebook.ended = message["trouble"][:300]
    if said.cut_short:
        notebook.ended = f"{said.cut_short} ({where(cells, last)})"
    return kept, executed


def where(cells: list[Cell], last: int) -> str:
    """Say where a notebook was, by the number that JupyterLab shows next to a code cell. last: the
    index of the last cell that has run, -1 if none has."""
    runs = [cell.kind == "code" and bool(cell.source.strip()) for cell in cells]
    done = sum(runs[: last + 1]) if last >= 0 else 0
    return f"in code cell [{done + 1}]" if done < sum(runs) else "after its last cell"


def judge(
    notebook: Notebook,
    cells: list,
    lesson: Lesson,
    kept: dict[str, dict],
    slot: Slot,
) -> None:
    answers = {
        name: message["payload"].decode()
        for name, message in kept.items()
        if isinstance(message.get("payload"), bytes) and is_base64(message["payload"])
    }
    said = slot.run("judge", dict(answers=answers), then="worker") if answers else None
    judged = {message["judged"]: message for message in said.messages} if said else {}
    for name in lesson.functions:
        stands = written(cells, lesson, name)
        if name in judged:
            verdict = judged[name]
            graded = Graded(verdict["state"], verdict["lines"], verdict["hint"], stands.note)
        elif stands.missing:
            graded = Graded(MISSING, note=stands.note)
        elif name in answers:
            graded = Graded(NOT_JUDGED, note=f"the judging was ended: {said.cut_short}")
        elif name in kept:
            error = kept[name].get("error")
            graded = Graded(WRONG, hint=error[:1000] if isinstance(error, str) else CANNOT_TRAVEL)
        else:
            why = notebook.ended or "its cell ended in an error before the check"
            graded = Graded(NOT_REACHED, note=". ".join(filter(None, [stands.note, why])))
        graded.source = stands.source
        if not stands.as_shipped and graded.state in (RIGHT, WRONG):
            graded.code = normalised(stands.source)
        notebook.exercises[name] = graded


def is_base64(data: bytes) -> bool:
    try:
        return bool(base64.b64decode(data, validate=True))
    except ValueError:
        return False
