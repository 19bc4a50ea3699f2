"""Grade with the command in TEACHING.md: a notebook as shipped, and a solved notebook.

Papermill runs each lesson as a whole, three times. `pytest --long
tests/course/exercises/test_grading.py` does so for all lessons. Without --long, two fast lessons
stand for them; one has exercises and errors shown on purpose. Cheaper tests cover all cells of all
lessons: nbval runs each notebook as shipped, test_gates.py runs each exercise both ways, and
test_lessons.py checks that no cell ends in an error.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.course.exercises.test_gates import CHECKED, NOTEBOOKS, WITH_EXERCISES, solve

ROOT = Path(__file__).resolve().parents[3]
COMMAND = re.search(
    r"^MINI_DIST_STRICT=1 (papermill) THEIRS/\S+ graded.ipynb (--cwd notebooks)$",
    (ROOT / "TEACHING.md").read_text(encoding="utf-8"),
    flags=re.MULTILINE,
)
SAMPLE = ("01_why_distribute", "03_ring_and_collectives")


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    if request.param.stem not in SAMPLE and not request.config.getoption("long"):
        pytest.skip("pytest --long grades every lesson")
    return request.param


def grade(notebook, graded, strict=True):
    """Return the exit status of TEACHING.md's command, with or without STRICT."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "MINI_"))}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= {"MINI_DIST_STRICT": "1"} if strict else {}
    papermill, where = COMMAND.groups()
    command = [papermill, str(notebook), str(graded), *shlex.split(where), "--no-progress-bar"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True).returncode


def errors(graded):
    cells = nbformat.read(graded, as_version=4).cells
    return [o.ename for c in cells for o in c.get("outputs", []) if o.output_type == "error"]


def test_as_shipped_a_notebook_runs_to_its_end(notebook, tmp_path):
    assert grade(notebook, tmp_path / "graded.ipynb", strict=False) == 0


def test_with_solutions_a_notebook_passes(notebook, tmp_path):
    theirs = nbformat.read(notebook, as_version=4)
    for cell in theirs.cells:
        if cell.cell_type == "code" and CHECKED.search(cell.source):
            cell.source = solve(cell.source)
    nbformat.write(theirs, tmp_path / "theirs.ipynb")
    assert grade(tmp_path / "theirs.ipynb", tmp_path / "graded.ipynb") == 0, errors(
        tmp_path / "graded.ipynb"
    )


def test_as_shipped_a_notebook_is_refused_where_there_is_something_to_solve(notebook, tmp_path):
    status = grade(notebook, tmp_path / "graded.ipynb")
    if notebook in WITH_EXERCISES:
        assert status == 1 and errors(tmp_path / "graded.ipynb") == ["CheckFailed"]
    else:
        assert status == 0  # TEACHING.md names these lessons


def test_teaching_names_the_lessons_that_have_nothing_to_grade():
    without = [path.stem[:2] for path in NOTEBOOKS if path not in WITH_EXERCISES]
    text = " ".join((ROOT / "TEACHING.md").read_text(encoding="utf-8").split())
    assert f"Lessons {', '.join(without[:-1])} and {without[-1]} have no exercise" in text
