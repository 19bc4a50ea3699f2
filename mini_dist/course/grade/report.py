"""What the teacher gets: a page for each learner, to be handed out, and a page and a CSV of the
class, which also say what is odd and whose answers are alike."""

from __future__ import annotations

import csv
import html
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from .grading import RIGHT, Graded, Record
from .printable import cell, printable
from .submissions import Lesson

HEAD = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<title>{title}</title><style>
body{{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
table{{border-collapse:collapse;margin:.5rem 0}}
td,th{{padding:.15rem .8rem .15rem 0;text-align:left;vertical-align:top}}
pre{{white-space:pre-wrap;border-left:3px solid #8888;padding-left:1rem}}
.right{{color:#2e7d32}}.wrong{{color:#c62828}}.note{{opacity:.75}}
</style>"""
CODE = "\n\t"  # what a program may contain besides letters
OURS = ("grades.csv", "index.html")
INFORMATION = (
    "That answers are alike, or like the printed solution, is information and no verdict: an "
    "answer of a few lines has few right forms, and to use the printed solution is allowed."
)


def alike(records: list[Record], printed: dict[str, str]) -> dict[tuple[str, str], list[str]]:
    """(learner, exercise) -> who else has the same code; "the printed solution" may be among them.

    printed: of each exercise, the short name of its printed solution's code.
    """
    who = defaultdict(set)
    for record in records:
        for notebook in record.notebooks:
            for name, graded in notebook.exercises.items():
                if graded.code:
                    who[name, graded.code].add(record.learner)
    found = {}
    for (name, code), learners in who.items():
        for learner in learners:
            others = sorted(learners - {learner})
            others += ["the printed solution"] * (printed.get(name) == code)
            if others:
                found[learner, name] = others
    return found


def folder_of(learner: str, taken: dict[str, str]) -> str:
    """A folder's name for a learner that no other learner has."""
    plain = re.sub(r"[^\w.-]+", "_", learner).strip("._")[:60] or "learner"
    name, number = plain, 1
    while name.lower() in OURS or taken.setdefault(name.lower(), learner) != learner:
        number += 1
        name = f"{plain}-{number}"
    return name


def score(record: Record, lessons: list[Lesson]) -> tuple[int, int]:
    """Exercises that are right, of all that these lessons have."""
    names = [name for lesson in lessons for name in lesson.functions]
    found = [record.best(name) for name in names]
    return sum(each is not None and each.state == RIGHT for each in found), len(names)


@dataclass
class Row:
    """What the teacher's table says of one learner, in the CSV and on the page of the class."""

    right: int
    of: int
    states: list[str]  # of each exercise, "" where its lesson was not handed in
    alike: str
    notes: str
    guesses: str
    opened: str


def columns(lessons: list[Lesson]) -> list[str]:
    """Name the columns of the exercises."""
    return [f"{lesson.stem[:2]} {name}" for lesson in lessons for name in lesson.functions]


def row(record: Record, lessons: list[Lesson], same: dict) -> Row:
    found = {name: record.best(name) for lesson in lessons for name in lesson.functions}
    states = [each.state if each else "" for each in found.values()]
    copies = [
        f"{name}: {', '.join(same[record.learner, name])}"
        for name in found
        if (record.learner, name) in same
    ]
    told = "; ".join(copies), notes(record, found)
    return Row(*score(record, lessons), states, *told, *progress(record))


def write_csv(path: Path, records: list[Record], lessons: list[Lesson], same: dict) -> None:
    """A row a learner: points, the state of each exercise, what is to be looked at."""
    head = ["learner", "right", "of", *columns(lessons)]
    head += ["alike", "notes", "guesses", "lessons opened"]
    excel = "utf-8-sig"  # (so that it knows UTF-8)
    with path.open("w", newline="", encoding=excel) as file:
        rows = csv.writer(file)
        rows.writerow(head)
        for record in records:
            found = row(record, lessons, same)
            told = [record.learner, found.right, found.of, *found.states]
            told += [found.alike, found.notes, found.guesses, found.opened]
            rows.writerow([cell(each) for each in told])


def notes(record: Record, found: dict[str, Graded | None]) -> str:
    told = [*record.problems]
    told += [f"{n.path}: {n.ended}" for n in record.notebooks if n.ended]
    told += [f"{name}: {each.note}" for name, each in found.items() if each and each.note]
    if not record.notebooks and not record.problems:
        told.append("no notebook with an exercise was handed in")
    return "; ".join(told)


def progress(record: Record) -> list[str]:
    """Guesses and lessons, as the learner's own file has them, if one was handed in."""
    opened = record.progress.get("lessons")
    if not isinstance(opened, dict):
        return ["", ""]
    made = [each.get("guesses") for each in opened.values() if isinstance(each, dict)]
    guesses = sum(len(each) for each in made if isinstance(each, dict))
    return [str(guesses), " ".join(sorted(str(name)[:2] for name in opened))]


# ---- pages ---------------------------------------------------------------------------------------


def text(what: object, keep: str = "") -> str:
    """Return a learner's text for a page: nothing in it is HTML or controls how the rest looks."""
    return html.escape(printable(what, keep))


def page(record: Record, lessons: list[Lesson]) -> str:
    """Return the page that is handed out to the learner: it says nothing about others."""
    right, of = score(record, lessons)
    parts = [HEAD.format(title=text(record.learner))]
    parts.append(f"<h1>{text(record.learner)}</h1><p>{right} of {of} exercises right.</p>")
    parts += [f"<p class=note>{text(each)}</p>" for each in record.problems]
    for notebook in record.notebooks:
        about = f"{text(notebook.path)}, {notebook.seconds:g} s"
        parts.append(f"<h2>{notebook.lesson}</h2><p class=note>{about}.")
        if notebook.executed:
            link = f"<a href='{notebook.executed}'>{notebook.executed}</a>"
            parts.append(f"As it ran here: {link}")
        parts.append("</p>")
        if notebook.ended:
            parts.append(f"<p>It did not run to its end: {text(notebook.ended)}.</p>")
        parts += [exercise(name, graded) for name, graded in notebook.exercises.items()]
    return "\n".join([*parts, "</html>"])


def exercise(name: str, graded: Graded) -> str:
    parts = [f"<h3 class={css(graded.state)}>{name}: {graded.state}</h3>"]
    if graded.lines:
        rows = "".join(
            "<tr>" + "".join(f"<td>{text(part)}</td>" for part in line) + "</tr>"
            for line in graded.lines
        )
        parts.append(f"<table><tr><th><th>measured<th>expected<th></tr>{rows}</table>")
    if graded.hint:
        parts.append(f"<pre>{text(graded.hint, CODE)}</pre>")
    if graded.note:
        parts.append(f"<p class=note>{text(graded.note)}</p>")
    if graded.source:
        source = text(graded.source, CODE)
        parts.append(f"<details><summary>what was written</summary><pre>{source}</pre></details>")
    return "\n".join(parts)


def css(state: str) -> str:
    return state if state in ("right", "wrong") else "note"


def overview(
    records: list[Record], lessons: list[Lesson], folders: dict[str, str], same: dict
) -> str:
    """Return the teacher's page of the class: a row a learner, a column an exercise."""
    rows = []
    for record in records:
        found = row(record, lessons, same)
        link = f"<a href='{folders[record.learner]}/index.html'>{text(record.learner)}</a>"
        cells = [f"<td>{link}</td><td>{found.right} of {found.of}</td>"]
        cells += [f"<td class={css(state)}>{state}</td>" for state in found.states]
        alike = f"the same code, but for names: {found.alike}" if found.alike else ""
        odd = "; ".join(filter(None, [found.notes, alike]))
        cells.append(f"<td>{f'&#9888; {text(odd)}' if odd else ''}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f"<th>{name}" for name in ["learner", "right", *columns(lessons), "what is odd"])
    table = f"<table><tr>{head}</tr>{''.join(rows)}</table><p class=note>{INFORMATION}</p>"
    return f"{HEAD.format(title='grades')}<h1>Grades</h1>{table}</html>"
