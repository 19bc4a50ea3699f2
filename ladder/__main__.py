"""List the rungs with `python ladder`; explain rung 4 and its changes with `python ladder 3 4`.

The first line of a rung says which rung it builds on and what it teaches; README.md explains it.
"""

import difflib
import re
import sys
from pathlib import Path
from typing import NamedTuple

HEAD = re.compile(r'"""Rung (\d+)(?:, from rung (\d+))?: (.+)"""')
RED, GREEN, CYAN, PLAIN = "\033[31m", "\033[32m", "\033[36m", "\033[0m"


class Rung(NamedTuple):
    name: str  # of the file, without .py
    lines: list[str]
    base: int | None  # the rung that this one builds on
    lesson: str


def read_rungs() -> dict[int, Rung]:
    """Read all rungs, by number."""
    rungs = {}
    for path in sorted(Path(__file__).parent.glob("[0-9][0-9]_*.py")):
        lines = path.read_text().splitlines()
        number, base, lesson = HEAD.fullmatch(lines[0]).groups()
        rungs[int(number)] = Rung(path.stem, lines, None if base is None else int(base), lesson)
    return rungs


def diff(before: Rung, after: Rung, context: int) -> list[str]:
    """Return the unified diff of two rungs, without the two lines that name the files."""
    return list(difflib.unified_diff(before.lines, after.lines, n=context, lineterm=""))[2:]


def changes(before: Rung, after: Rung) -> tuple[int, int]:
    """Count the lines that `after` adds and the lines that it removes."""
    signs = [line[0] for line in diff(before, after, context=0)]
    return signs.count("+"), signs.count("-")


def list_rungs(rungs: dict[int, Rung]) -> str:
    rows = ["rung  from  lines  added  removed  lesson"]
    for number, rung in rungs.items():
        base, added, removed = "", "", ""
        if rung.base is not None:
            base, (added, removed) = rung.base, changes(rungs[rung.base], rung)
        figures = f"{number:4}  {base:>4}  {len(rung.lines):5}  {added:>5}  {removed:>7}"
        rows.append(f"{figures}  {rung.lesson}")
    return "\n".join(rows)


def read_ideas() -> dict[int, str]:
    """Read what README.md says of each rung, by number."""
    _, *parts = re.split(
        r"^## Rung (\d+)\n", Path(__file__).with_name("README.md").read_text(), flags=re.M
    )
    return {int(number): text.strip() for number, text in zip(parts[::2], parts[1::2])}


def show_diff(before: Rung, after: Rung, colored: bool) -> str:
    colors = {"-": RED, "+": GREEN, "@": CYAN} if colored else {}
    lines = [
        f"{colors[line[0]]}{line}{PLAIN}" if line[0] in colors else line
        for line in diff(before, after, context=2)
    ]
    idea = read_ideas().get(int(after.name[:2]), after.lesson)
    return "\n".join([f"{before.name} -> {after.name}", "", idea, "", *lines])


def main(arguments: list[str]) -> str:
    rungs = read_rungs()
    if not arguments:
        return list_rungs(rungs)
    known = {str(number): rung for number, rung in rungs.items()}
    if len(arguments) != 2 or not set(arguments) <= set(known):
        sys.exit(
            f"python ladder takes no argument or two rungs, each 0 to {max(rungs)}, as in "
            f"`python ladder 3 4`; it got {' '.join(arguments)!r}"
        )
    return show_diff(*(known[number] for number in arguments), colored=sys.stdout.isatty())


if __name__ == "__main__":
    print(main(sys.argv[1:]))
