"""What a teacher wants of each lesson, from the lessons and the tests: python tools/teaching.py

It writes, below "## Lesson by lesson" of TEACHING.md, the minutes, the cells and the exercises of
each lesson, and leaves what stands there from **Ask** on as it is. A new lesson gets a heading of
its own. docs/wrong_answers.md it writes whole: of each exercise the wrong answers that the tests
know, with what their hint says. tests/course/test_teaching.py compares both.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEACHING, WRONG = ROOT / "TEACHING.md", ROOT / "docs" / "wrong_answers.md"
BEGIN = "## Lesson by lesson\n"
TURN = re.compile(r"# YOUR TURN[^\n]*")
CHECKED = re.compile(r"^check\.(\w+)\((\w+)\)$", flags=re.M)

sys.path.insert(0, str(ROOT))
from tools.minutes import minutes_of  # noqa: E402

# ---- lessons -------------------------------------------------------------------------------------


def cells(notebook: Path) -> list[dict]:
    """The notebook's cells; each with its number among code cells, and whether it is optional."""
    found, level, number = [], None, 0
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        for line in text.splitlines() if cell["cell_type"] == "markdown" else ():
            heading = re.match(r"(#+) ", line)
            if heading and (level is None or len(heading[1]) <= level):
                level = len(heading[1]) if line.rstrip().endswith("(optional)") else None
        number += cell["cell_type"] == "code"
        found.append(dict(text=text, code=cell["cell_type"] == "code", number=number))
        found[-1]["optional"] = level is not None
    return found


def numbers(found: list[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7"."""
    parts: list[list[int]] = []
    for number in found:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def facts(lesson: Path) -> str:
    """The lines about one lesson: minutes, which cells are optional, the exercises."""
    of_all = cells(ROOT / "notebooks" / f"{lesson.stem}.ipynb")
    code = [cell for cell in of_all if cell["code"]]
    found = minutes_of(lesson)
    optional = numbers([cell["number"] for cell in code if cell["optional"]])
    times = f"{found['core']} minutes to read and run"
    if found["optional"]:
        times += f", {found['optional']} more for the optional sections"
    core = numbers([cell["number"] for cell in code if not cell["optional"]])
    told = f"{times}. Code cells {core} are the core"
    told += f", {optional} are optional." if optional else "; none is optional."
    names = [
        (name, turn)
        for cell in code
        for name, turn in zip(
            [name for name, _ in CHECKED.findall(cell["text"])], TURN.findall(cell["text"])
        )
    ]
    if names:
        listed = []
        for name, turn in names:
            size = re.search(r"(?:about )?\d+(?:-\d+| to \d+)? lines?", turn)
            listed.append(f"`{name}`" + (f" ({size[0]})" if size else ""))
        told += (
            f" About {found['exercises']} minutes for the exercises: {', '.join(listed)}; "
            f"[what goes wrong](docs/wrong_answers.md#{anchor(lesson)})."
        )
    return told


def title(lesson: Path) -> str:
    return lesson.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").strip()


def anchor(lesson: Path) -> str:
    """As GitHub makes one of a heading."""
    return re.sub(r"[^\w -]", "", title(lesson).lower()).replace(" ", "-")


def lessons() -> list[Path]:
    return [
        path
        for path in sorted((ROOT / "lessons").glob("[0-9]*.md"))
        if (ROOT / "notebooks" / f"{path.stem}.ipynb").is_file()
    ]


def teaching(before: str) -> str:
    """TEACHING.md with its last section made anew, the questions kept."""
    head, _, old = before.partition(BEGIN)
    intro, *sections = re.split(r"^### ", old, flags=re.M)
    asked = {}
    for section in sections:
        name, _, body = section.partition("\n")
        asked[name[:2]] = body[body.find("**Ask") :].strip() if "**Ask" in body else ""
    parts = [head + BEGIN, intro.strip("\n") + "\n"]
    for lesson in lessons():
        parts.append(f"### {title(lesson)}\n\n{facts(lesson)}\n")
        if question := asked.get(lesson.stem[:2]):
            parts.append(f"{question}\n")
    return "\n".join(parts)


# ---- wrong answers -------------------------------------------------------------------------------


def wrong_answers(module) -> dict[str, list[tuple[str, str]]]:
    """exercise -> (what is done wrong, a piece of the hint), as parametrized tests have them."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, test in vars(module).items():
        for mark in getattr(test, "pytestmark", ()) if name.startswith("test_") else ():
            if mark.name == "parametrize":
                source = inspect.getsource(test)
                for exercise, what, says in rows_of(module, mark, source):
                    found.setdefault(exercise, []).append((what, says))
    return found


def rows_of(module, mark, source: str):
    names, values = mark.args[0], list(mark.args[1])
    names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
    says = {"says", "hint"} & set(names)
    one = re.search(r"check\.(\w+)\.judge", source)
    if names == ["mistake"] and one:  # (lesson 15 keeps them as changes of the solution)
        for what in values:
            yield one[1], what, module.LINES[what][0].split("|")[0]
    answer = [n for n in names if n in ("fn", "answers")]
    if not says or not answer or not (one or "name" in names):
        return
    labels = mark.kwargs.get("ids")
    labels = list(labels) if labels is not None and not callable(labels) else [None] * len(values)
    for value, label in zip(values, labels):
        row = dict(zip(names, getattr(value, "values", value)))
        fn = row[answer[0]]
        named = getattr(fn, "__name__", str(fn))
        what = label if label and " " in label else named.replace("_", " ")
        yield (
            row.get("name", one and one[1]),
            what,
            row[says.pop() if len(says) > 1 else [*says][0]],
        )


def all_wrong_answers() -> str:
    parts = [
        "# Wrong answers, and what the hint says\n",
        "`tools/teaching.py` makes this page from the wrong answers in the tests "
        "(`tests/course/exercises/`). The right column shows a piece of the hint. These are the "
        "mistakes that we could think of, not statistics from a class.\n",
    ]
    for lesson in lessons():
        path = ROOT / f"tests/course/exercises/test_lesson_{lesson.stem[:2]}_exercises.py"
        if not path.is_file():
            continue
        module = importlib.import_module(f"tests.course.exercises.{path.stem}")
        parts.append(f"## {title(lesson)}\n")
        for exercise, answers in wrong_answers(module).items():
            rows = [f"| {plain(what)} | {plain(says)} |" for what, says in answers]
            parts.append(
                f"### {exercise}\n\n| the answer | what it is told |\n| --- | --- |\n"
                + "\n".join(rows)
            )
            parts[-1] += "\n"
    return "\n".join(parts)


def plain(text: str) -> str:
    """In a cell of a table, and in no other way than it is written."""
    text = " ".join(str(text).split()).strip(" ,;:")
    return re.sub(r"([|*_<\[\]`\\])", r"\\\1", text)


def main() -> None:
    TEACHING.write_text(teaching(TEACHING.read_text(encoding="utf-8")), encoding="utf-8")
    WRONG.write_text(all_wrong_answers(), encoding="utf-8")


if __name__ == "__main__":
    main()
