"""The notebooks' exercise cells: green as shipped, green when solved, red for a grader if not.

Only these cells run, notebook by notebook in one process, each in the state that the notebook's
other exercise cells have left.
"""

import ast
import inspect
import re
from pathlib import Path

import cloudpickle
import nbformat
import pytest

from mini_dist import check
from tests.exercises import solutions

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
CHECKED = re.compile(r"^check\.(\w+)\((\w+)\)$", flags=re.MULTILINE)  # check.NAME(function)

cloudpickle.register_pickle_by_value(solutions)


def exercise_cells(notebook: Path) -> list[str]:
    cells = nbformat.read(notebook, as_version=4).cells
    return [c.source for c in cells if c.cell_type == "code" and CHECKED.search(c.source)]


WITH_EXERCISES = [path for path in NOTEBOOKS if exercise_cells(path)]
each_notebook = pytest.mark.parametrize("notebook", WITH_EXERCISES, ids=lambda path: path.stem)


def solve(cell: str) -> str:
    """The cell with the learner's solution in place of the function that it defines."""
    defined = {n.name: n for n in ast.parse(cell).body if isinstance(n, ast.FunctionDef)}
    lines = cell.splitlines()
    for _, name in CHECKED.findall(cell):
        node = defined[name]
        assert "YOUR TURN" in "\n".join(lines[node.lineno - 1 : node.end_lineno]), name
        lines[node.lineno - 1 : node.end_lineno] = inspect.getsource(
            getattr(solutions, name)
        ).splitlines()
    return "\n".join(lines)


def run(cells: list[str]) -> list[check.Verdict]:
    """Execute exercise cells as a notebook does; what their checks said."""
    names = {"__name__": "exercise cells"}  # no module: ranks get its functions by value
    verdicts = []
    for cell in cells:
        *body, last = ast.parse(cell).body
        exec(compile(ast.Module(body, []), "<exercise>", "exec"), names)
        verdicts.append(eval(compile(ast.Expression(last.value), "<exercise>", "eval"), names))
    return verdicts


def test_every_exercise_is_in_one_notebook_and_has_a_solution():
    found = [
        name
        for path in NOTEBOOKS
        for cell in exercise_cells(path)
        for name, _ in CHECKED.findall(cell)
    ]
    assert sorted(found) == sorted(check.exercises())
    for name in found:
        assert hasattr(solutions, name)


@each_notebook
def test_as_shipped_the_exercise_cells_pass(notebook, monkeypatch):
    monkeypatch.delenv("MINI_DIST_STRICT", raising=False)
    assert {verdict.state for verdict in run(exercise_cells(notebook))} == {"still the library's"}


@each_notebook
def test_with_solutions_a_grader_passes_them(notebook, monkeypatch):
    monkeypatch.setenv("MINI_DIST_STRICT", "1")
    cells = [solve(cell) for cell in exercise_cells(notebook)]
    assert {verdict.state for verdict in run(cells)} == {"right"}


@each_notebook
def test_as_shipped_a_grader_refuses_each_of_them(notebook, monkeypatch):
    monkeypatch.setenv("MINI_DIST_STRICT", "1")
    cells = exercise_cells(notebook)
    imports = "\n".join(  # a cell may use what an earlier exercise cell has imported
        line for cell in cells for line in cell.splitlines() if re.match(r"(from|import) ", line)
    )
    for cell in cells:
        with pytest.raises(check.CheckFailed, match="still the library's"):
            run([f"{imports}\n{cell}"])
