"""How long a lesson takes, from what is in it.

    python tools/minutes.py [--notebooks FOLDER] [lessons/NN_topic.md ...]

Fresh readers worked through eleven lessons and wrote down their minutes. The coefficients below
were chosen by hand from round values so that their mean error over these lessons is close to
zero. Minutes of the core, readers' estimate -> formula (the lessons of November 2026, before
they were cut):

    00 45 -> 59    17 102 -> 88    18 90 -> 83    19 88 -> 83    20 83 -> 82    21 70 -> 80
    22 105 -> 97   23 95 -> 91     24 85 -> 88    25 85 -> 82    26 80 -> 87

The root mean square error is 12 % and the mean error 1 %. The formula misses only lesson 00 by more
than 14 %: its prose is the easiest. For exercises: 17 32 -> 11, 18 38 -> 51, 19 28 -> 38,
20 25 -> 29, 21 35 -> 23, 22 20 -> 14, 23 40 -> 35, 24 52 -> 42, 25 40 -> 42, 26 47 -> 39. (The
length of a solution says little where the work is a search or a diagnosis, as in 17 and 21.)

Outputs and shown sources are counted in the built notebook, so a changed lesson is built before its
minutes are final. The first line of a lesson states these minutes, rounded up to 5, and
tests/course/test_lessons.py compares. Everything below a heading that ends in "(optional)", up to
the next heading of the same level, is optional.
"""

import argparse
import contextlib
import io
import json
import math
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

WORDS_PER_MINUTE = 60  # technical prose, read to be understood
CODE_LINES_PER_MINUTE = 8
OUTPUT_LINES_PER_MINUTE = 12  # printed lines and rows of tables
SHOWN_LINES_PER_MINUTE = 10  # library source that a cell shows
MINUTES_PER_PICTURE = 0.5
MINUTES_PER_QUESTION = 1  # a prediction or a question of the quiz
MINUTES_PER_EXERCISE = 9
MINUTES_PER_SOLUTION_LINE = 0.35

CODE = re.compile(r"^```python(.*?)\n(.*?)^```", re.M | re.S)
REFERENCE = re.compile(
    r"^\*\*(Words|Sources)\.\*\*.*?(?=^\s*$|\Z)", re.M | re.S
)  # looked up, not read
SHOWS = re.compile(r"^show(_diff)?\(", re.M)
CHECKED = re.compile(r"^check\.(\w+)\(\w+\)$", re.M)


def core_and_optional(markdown: str) -> tuple[str, str]:
    """Split a lesson into the text that everyone reads and the optional rest."""
    parts, level = {"core": [], "optional": []}, None
    in_code = False
    for line in markdown.splitlines(keepends=True):
        in_code ^= line.startswith("```")
        heading = not in_code and re.match(r"(#+) ", line)
        if heading and (level is None or len(heading[1]) <= level):
            level = len(heading[1]) if line.rstrip().endswith("(optional)") else None
        parts["core" if level is None else "optional"].append(line)
    return "".join(parts["core"]), "".join(parts["optional"])


def shown_outputs(notebook: Path | None) -> dict[str, tuple[int, int]]:
    """Map the source of each code cell to what it shows: (lines of text, pictures)."""
    found = {}
    if notebook is None or not notebook.is_file():
        return found
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        lines = pictures = 0
        for output in cell["outputs"]:
            data = output.get("data", {})
            pictures += "image/png" in data or "image/svg+xml" in data
            text = "".join(output.get("text") or data.get("text/plain", ""))
            if not any(kind.startswith("image/") for kind in data):
                lines += sum(bool(line.strip()) for line in text.splitlines())
        found["".join(cell["source"]).strip()] = (lines, pictures)
    return found


def reading(text: str, outputs: dict[str, tuple[int, int]]) -> float:
    """Return the minutes for prose, code, outputs, pictures and questions of a part of a lesson."""
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    pictures = len(re.findall(r"^!\[", prose, flags=re.M))
    questions = len(re.findall(r"^\s*predict\(", text, flags=re.M))
    quiz = prose.partition("**Quiz.**")[2]
    questions += len(re.findall(r"^\d\. ", quiz, flags=re.M))
    found = len(REFERENCE.sub("", prose).split()) / WORDS_PER_MINUTE
    for options, code in CODE.findall(text):
        if "source_hidden" not in options:
            found += sum(bool(line.strip()) for line in code.splitlines()) / CODE_LINES_PER_MINUTE
        lines, drawn = outputs.get(code.strip(), (0, 0))
        pictures += drawn
        found += lines / (SHOWN_LINES_PER_MINUTE if SHOWS.search(code) else OUTPUT_LINES_PER_MINUTE)
    return found + MINUTES_PER_PICTURE * pictures + MINUTES_PER_QUESTION * questions


@cache
def solution_lines(name: str) -> int:
    """Count the lines of code in the solution that `check.NAME.solution()` prints."""
    from mini_dist import check

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        getattr(check, name).solution()
    lines = (line.strip() for line in printed.getvalue().splitlines())
    return sum(bool(line) and not line.startswith("#") for line in lines)


def minutes(markdown: str, notebook: Path | None = None) -> dict[str, int]:
    """Return {"core", "exercises", "optional"}: minutes, rounded up to 5."""
    core, optional = core_and_optional(markdown)
    outputs = shown_outputs(notebook)
    exercises = CHECKED.findall(markdown)
    lines = sum(solution_lines(name) for name in exercises)
    found = {
        "core": reading(core, outputs),
        "exercises": MINUTES_PER_EXERCISE * len(exercises) + MINUTES_PER_SOLUTION_LINE * lines,
        "optional": reading(optional, outputs),
    }
    return {name: 5 * math.ceil(value / 5) for name, value in found.items()}


def minutes_of(lesson: Path, notebooks: Path = ROOT / "notebooks") -> dict[str, int]:
    """Return the minutes of a lesson file, with its outputs as they stand in `notebooks`."""
    return minutes(lesson.read_text(encoding="utf-8"), notebooks / f"{lesson.stem}.ipynb")


def stated(found: dict[str, int]) -> str:
    """Return the minutes as the first line of a lesson states them: "45 minutes, plus 10
    (exercises) and 5 (optional)"."""
    more = [f"{found[name]} ({name})" for name in ("exercises", "optional") if found[name]]
    return f"{found['core']} minutes" + (f", plus {' and '.join(more)}" if more else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("lessons", nargs="*", type=Path, help="default: all")
    parser.add_argument("--notebooks", type=Path, default=ROOT / "notebooks")
    options = parser.parse_args()
    for path in options.lessons or sorted((ROOT / "lessons").glob("[0-9]*.md")):
        print(f"{path.name:32} {stated(minutes_of(path, options.notebooks))}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
