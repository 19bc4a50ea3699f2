"""Make an assignment for nbgrader out of a lesson.

    python -m mini_dist.course.grade.nbgrader notebooks/03_ring_and_collectives.ipynb --out
    course/source

writes course/source/03_ring_and_collectives/03_ring_and_collectives.ipynb. Each exercise becomes a
cell for the answer, which holds the printed solution between nbgrader's marks, and a cell with the
check, read-only and worth points. `nbgrader generate_assignment` takes the solutions out, and
`nbgrader autograde` runs the checks. They run in the learner's own kernel, so who redefines
`check` there can forge points; `python -m mini_dist.course.grade` judges elsewhere.

The cells' metadata is nbgrader's, schema 3.
"""

from __future__ import annotations

import argparse
import ast
import sys
import textwrap
from pathlib import Path

import nbformat

from .submissions import CHECKED

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"


def answer_cell(source: str, exercise: str, printed: str) -> str:
    """An exercise's cell without its check, with the printed solution in the function's body."""
    match = next(m for m in CHECKED.finditer(source) if m[1] == exercise)
    source = source[: match.start()] + source[match.end() :]
    (node,) = [
        n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == match[2]
    ]
    first = node.body[0]
    has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    lines = source.splitlines()
    last = first.end_lineno if has_docstring else first.lineno - 1
    names = [arg.arg for arg in [*node.args.posonlyargs, *node.args.args]]
    names += [f"{arg.arg}={arg.arg}" for arg in node.args.kwonlyargs]
    solution = [BEGIN, *printed.splitlines(), f"return {exercise}({', '.join(names)})", END]
    body = textwrap.indent("\n".join(solution), "    ").splitlines()
    return "\n".join([*lines[:last], *body, *lines[node.end_lineno :]]).rstrip()


def metadata(grade_id: str, **kinds) -> dict:
    plain = dict(grade=False, solution=False, locked=False, task=False)
    return {"grade_id": grade_id, "schema_version": 3, **plain, **kinds}


def assignment(notebook: nbformat.NotebookNode, points: int) -> nbformat.NotebookNode:
    """The notebook with nbgrader's cells. ValueError if there is nothing to solve in it."""
    from ..check import exercises

    printed = {name: exercise.answer() for name, exercise in exercises().items()}
    cells = []
    for cell in notebook.cells:
        found = CHECKED.findall(cell.source) if cell.cell_type == "code" else []
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        if not found:
            cells.append(cell)
            continue
        source, tests = cell.source, []
        for exercise, function in found:
            source = answer_cell(source, exercise, printed[exercise])
            test = nbformat.v4.new_code_cell(
                f"verdict = check.{exercise}({function})\n"
                'assert verdict.state == "right", str(verdict)',
                id=f"check-{exercise}"[:64],
            )
            kinds = dict(grade=True, locked=True, points=points)
            test.metadata["nbgrader"] = metadata(f"check_{exercise}", **kinds)
            tests.append(test)
        cell.source = source
        cell.metadata["nbgrader"] = metadata(f"answer_{found[0][0]}", solution=True)
        cells += [cell, *tests]
    if not any("nbgrader" in cell.metadata for cell in cells):
        raise ValueError("this notebook has no exercise")
    notebook.cells = cells
    return notebook


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mini_dist.course.grade.nbgrader",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("notebooks", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="the course's folder `source`")
    parser.add_argument("--points", type=int, default=5, help="of an exercise (5)")
    options = parser.parse_args(argv)
    status = 2
    for path in options.notebooks:
        try:
            made = assignment(nbformat.read(path, as_version=4), options.points)
        except (ValueError, OSError) as error:
            print(f"left out: {path}: {error}", file=sys.stderr)
            continue
        target = options.out / path.stem / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(made, target)
        print(f"written: {target}")
        status = 0
    return status


if __name__ == "__main__":
    sys.exit(main())
