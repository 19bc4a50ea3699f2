"""How long a lesson takes, from how long it is: python tools/minutes.py [lessons/NN_topic.md ...]

Fresh readers walked twelve lessons and said how long it took (70 to 120 minutes). A least-squares
fit to their lengths gives 80 words of prose, or 8 lines of code, a minute, and 8 minutes an
exercise; nine of the twelve walks are within 20 % of it. A lesson's first line states these
minutes, rounded up to 5, and tests/course/test_lessons.py compares. What stands below a heading
that ends in "(optional)", up to the next heading of its level, is optional.
"""

import math
import re
import sys
from pathlib import Path

WORDS_A_MINUTE, LINES_A_MINUTE, MINUTES_AN_EXERCISE = 80, 8, 8
CODE = re.compile(r"^```python.*?\n(.*?)^```", re.M | re.S)


def core_and_optional(markdown: str) -> tuple[str, str]:
    """The text of a lesson that everyone reads, and the rest."""
    parts, level = {"core": [], "optional": []}, None
    in_code = False
    for line in markdown.splitlines(keepends=True):
        in_code ^= line.startswith("```")
        heading = not in_code and re.match(r"(#+) ", line)
        if heading and (level is None or len(heading[1]) <= level):
            level = len(heading[1]) if line.rstrip().endswith("(optional)") else None
        parts["core" if level is None else "optional"].append(line)
    return "".join(parts["core"]), "".join(parts["optional"])


def reading(text: str) -> float:
    code = CODE.findall(text)
    lines = sum(bool(line.strip()) for cell in code for line in cell.splitlines())
    words = len(re.sub(r"```.*?```", "", text, flags=re.S).split())
    return words / WORDS_A_MINUTE + lines / LINES_A_MINUTE


def minutes(markdown: str) -> dict[str, int]:
    """{"core", "exercises", "optional"}: minutes, rounded up to 5."""
    core, optional = core_and_optional(markdown)
    exercises = markdown.count("# YOUR TURN")
    found = {
        "core": reading(core),
        "exercises": MINUTES_AN_EXERCISE * exercises,
        "optional": reading(optional),
    }
    return {name: 5 * math.ceil(value / 5) for name, value in found.items()}


def stated(found: dict[str, int]) -> str:
    """What the first line of a lesson says: "45 minutes, exercises 10, optional 5"."""
    rest = [f", {name} {found[name]}" for name in ("exercises", "optional") if found[name]]
    return f"{found['core']} minutes{''.join(rest)}"


def main() -> None:
    lessons = Path(__file__).resolve().parent.parent / "lessons"
    for path in map(Path, sys.argv[1:] or sorted(lessons.glob("[0-9]*.md"))):
        print(f"{path.name:32} {stated(minutes(path.read_text()))}")


if __name__ == "__main__":
    main()
