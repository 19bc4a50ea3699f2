"""What the teacher gets: a page a learner, one page and one CSV for the class."""

from __future__ import annotations

import csv
import html
import re
from collections import defaultdict
from pathlib import Path

from .grading import RIGHT, UNPAIRED, Graded, Record
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


def safe(text: object) -> str:
    """A cell that no spreadsheet takes for a formula."""
    text = str(text)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def write_csv(path: Path, records: list[Record], lessons: list[Lesson], same: dict) -> None:
    """A row a learner: points, the state of each exercise, what is to be looked at."""
    names = [(lesson.stem[:2], name) for lesson in lessons for name in lesson.functions]
    head = ["learner", "right", "of", *(f"{number} {name}" for number, name in names)]
    head += ["alike", "notes", "guesses", "lessons opened"]
    excel = "utf-8-sig"  # (so that it knows UTF-8)
    with path.open("w", newline="", encoding=excel, errors=UNPAIRED) as file:
        rows = csv.writer(file)
        rows.writerow(head)
        for record in records:
            right, of = score(record, lessons)
            found = {name: record.best(name) for _, name in names}
            states = [found[name].state if found[name] else "" for _, name in names]
            copies = [
                f"{name}: {', '.join(same[record.learner, name])}"
                for _, name in names
                if (record.learner, name) in same
            ]
            row = [record.learner, right, of, *states, "; ".join(copies), notes(record, found)]
            rows.writerow([safe(cell) for cell in [*row, *progress(record)]])


def notes(record: Record, found: dict[str, Graded | None]) -> str:
    told = [*record.problems]
    told += [f"{n.path}: {n.ended}" for n in record.notebooks if n.ended]
    told += [f"{name}: {each.note}" for name, each in found.items() if each and each.note]
    if not record.notebooks and not record.problems:
        told.append("no notebook was handed in")
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


def page(record: Record, lessons: list[Lesson], same: dict) -> str:
    right, of = score(record, lessons)
    parts = [HEAD.format(title=html.escape(record.learner))]
    parts.append(f"<h1>{html.escape(record.learner)}</h1><p>{right} of {of} exercises right.</p>")
    parts += [f"<p class=note>{html.escape(each)}</p>" for each in record.problems]
    for number, notebook in enumerate(record.notebooks, 1):
        link = f"{number}-{notebook.lesson}.ipynb"
        about = f"{html.escape(notebook.path)}, {notebook.seconds:g} s"
        parts.append(f"<h2>{notebook.lesson}</h2><p class=note>{about}. As it ran here: ")
        parts.append(f"<a href='{link}'>{link}</a></p>")
        if notebook.ended:
            parts.append(f"<p>It did not run to its end: {html.escape(notebook.ended)}.</p>")
        for name, graded in notebook.exercises.items():
            parts.append(exercise(name, graded, same.get((record.learner, name), [])))
    return "\n".join([*parts, f"<p class=note>{INFORMATION}</p></html>"])


def exercise(name: str, graded: Graded, others: list[str]) -> str:
    kind = graded.state if graded.state in ("right", "wrong") else "note"
    parts = [f"<h3 class={kind}>{name}: {graded.state}</h3>"]
    if graded.lines:
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
            for row in graded.lines
        )
        parts.append(f"<table><tr><th><th>measured<th>expected<th></tr>{rows}</table>")
    if graded.hint:
        parts.append(f"<pre>{html.escape(graded.hint)}</pre>")
    if graded.note:
        parts.append(f"<p class=note>{html.escape(graded.note)}</p>")
    if others:
        told = html.escape(", ".join(others))
        parts.append(f"<p class=note>The same code, but for names: {told}.</p>")
    if graded.source:
        source = html.escape(graded.source)
        parts.append(f"<details><summary>what was written</summary><pre>{source}</pre></details>")
    return "\n".join(parts)


def overview(records: list[Record], lessons: list[Lesson], folders: dict[str, str]) -> str:
    rows = []
    for record in records:
        right, of = score(record, lessons)
        link = f"<a href='{folders[record.learner]}/index.html'>{html.escape(record.learner)}</a>"
        rows.append(f"<tr><td>{link}</td><td>{right} of {of}</td></tr>")
    table = f"<table><tr><th>learner<th>right</tr>{''.join(rows)}</table>"
    return f"{HEAD.format(title='grades')}<h1>Grades</h1>{table}</html>"
