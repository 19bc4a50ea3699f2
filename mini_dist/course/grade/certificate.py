"""Certificates for a class that has been graded, as one HTML file to print: a page per learner.

    mini-dist certificate grades/grades.csv --course "Half a day of distributed training"

A learner gets a page if enough exercises are right (--share, default 0.7). The name on it is the
column `learner`, so correct names in grades.csv first. TEACHING.md says what a grade means.
"""

from __future__ import annotations

import argparse
import csv
import html
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from .grading import RIGHT

HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Certificates</title><style>
:root { color-scheme: light } @page { size: A4 landscape; margin: 0 }
body { margin: 0; font: 17px/1.5 system-ui, sans-serif; color: #222 }
section { box-sizing: border-box; width: 297mm; height: 209mm; padding: 24mm 28mm;
          break-after: page; border: 5mm solid #756bb1; display: flex; flex-direction: column }
h1 { font-weight: 400; margin: 0 } h2 { font-size: 40px; margin: 10mm 0 2mm } p { margin: 2mm 0 }
code { font-size: 14px } .sign { margin-top: auto; display: flex; justify-content: space-between }
.sign span { border-top: 1px solid #222; padding-top: 2mm; width: 70mm }
</style>
"""
PAGE = """<section><h1>{course}</h1><p>mini_dist: distributed training, learned by running it</p>
<h2>{name}</h2>
<p>has {right} of {of} exercises right. Each was judged by running it:</p>
<p>{exercises}</p>
<p class="sign"><span>{day}</span><span>{teacher}</span></p></section>
"""


@dataclass(frozen=True)
class Learner:
    """A row of grades.csv: the name, and which exercises are right of how many."""

    name: str
    right: list[str]
    of: int


def learners(path: Path) -> list[Learner]:
    """Read grades.csv. Raise ValueError if it is not one."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        heads = [*(rows.fieldnames or [])]
        if heads[:3] != ["learner", "right", "of"] or "alike" not in heads:
            raise ValueError(f"{path} is not the grades.csv that `mini-dist grade` writes")
        exercises = heads[3 : heads.index("alike")]
        return [
            Learner(row["learner"], [each for each in exercises if row[each] == RIGHT], whole(row))
            for row in rows
        ]


def whole(row: dict[str, str]) -> int:
    try:
        return int(row["of"])
    except (TypeError, ValueError):
        raise ValueError(f"of {row['learner']}: {row['of']!r} is no number of exercises") from None


def certificates(of_class: list[Learner], course: str, teacher: str, day: date) -> str:
    """Return the HTML of these learners' certificates."""
    pages = [
        PAGE.format(
            course=html.escape(course),
            name=html.escape(each.name),
            right=len(each.right),
            of=each.of,
            exercises=" · ".join(f"<code>{html.escape(name)}</code>" for name in each.right),
            day=f"{day:%d %B %Y}",
            teacher=html.escape(teacher),
        )
        for each in of_class
    ]
    return HEAD + "".join(pages)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="mini-dist certificate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("grades", type=Path, help="the grades.csv of `mini-dist grade`")
    parser.add_argument("--course", default="A course in distributed training", help="the title")
    parser.add_argument("--teacher", default="", help="the name below the line to sign")
    parser.add_argument("--share", type=float, default=0.7, help="of exercises right (0.7)")
    options = parser.parse_args(argv)
    if not 0 < options.share <= 1:
        parser.error(f"--share {options.share}: expected a share above 0 and up to 1")
    try:
        of_class = learners(options.grades)
    except OSError as error:
        why = f"{options.grades}: {error.strerror}"
        parser.error(f"{why}. Give the grades.csv that `mini-dist grade` has written.")
    except ValueError as error:
        parser.error(str(error))
    enough = [each for each in of_class if len(each.right) >= options.share * each.of]
    target = options.grades.with_name("certificates.html")
    page = certificates(enough, options.course, options.teacher, date.today())
    target.write_text(page, encoding="utf-8")
    print(f"written: {target}, {len(enough)} of {len(of_class)} learners")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
