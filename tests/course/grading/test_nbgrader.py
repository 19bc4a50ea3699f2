"""Test the export for nbgrader: its cells, and what nbgrader itself makes of them."""

import csv
import os
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest

from mini_dist import check
from mini_dist.course.grade import nbgrader
from tests.course.exercises.test_gates import WITH_EXERCISES

ROOT = Path(__file__).resolve().parents[3]


def cells_of(notebook, **kinds):
    return [
        cell
        for cell in notebook.cells
        if (about := cell.metadata.get("nbgrader"))
        and all(about[name] == value for name, value in kinds.items())
    ]


@pytest.mark.parametrize("path", WITH_EXERCISES, ids=lambda path: path.stem)
def test_every_exercise_gets_a_cell_for_the_answer_and_one_that_checks_it(path):
    shipped = nbformat.read(path, as_version=4)
    made = nbgrader.assignment(nbformat.read(path, as_version=4), points=5)
    nbformat.validate(made)
    names = [name for cell in shipped.cells for name, _ in nbgrader.CHECKED.findall(cell.source)]
    tests = cells_of(made, grade=True, solution=False)
    assert [cell.metadata.nbgrader.grade_id for cell in tests] == [f"check_{n}" for n in names]
    assert all(c.metadata.nbgrader.locked and c.metadata.nbgrader.points == 5 for c in tests)
    for cell in cells_of(made, solution=True, grade=False, locked=False):
        compile(cell.source, "<answer>", "exec")
        assert cell.source.count(nbgrader.BEGIN) == cell.source.count(nbgrader.END) == 1
        assert "check." not in cell.source.partition(nbgrader.BEGIN)[0]


@pytest.mark.parametrize("name", ["sharded_step", "zigzag", "layout_for_70b"])
def test_the_answer_in_the_cell_is_right(name):
    for path in WITH_EXERCISES:
        made = nbgrader.assignment(nbformat.read(path, as_version=4), points=5)
        for cell in cells_of(made, solution=True):
            if cell.metadata.nbgrader.grade_id == f"answer_{name}":
                names = {"__name__": "__main__"}
                exec(cell.source, names)
                assert check.exercises()[name].judge(names[name]).state == "right"
                return
    raise AssertionError(f"{name} is in no notebook")


def test_a_lesson_without_exercises_is_left_out(capsys):
    assert nbgrader.main([str(ROOT / "notebooks/00_start_here.ipynb"), "--out", "x"]) == 2
    assert "this notebook has no exercise" in capsys.readouterr().err


@pytest.mark.skipif(not shutil.which("nbgrader"), reason="nbgrader is not installed")
def test_nbgrader_gives_all_points_to_the_solution_and_none_to_what_it_releases(tmp_path):
    """Let nbgrader generate and autograde lesson 07, cut down to its first exercise."""

    def run(*command):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        found = subprocess.run(
            ["nbgrader", *command], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert found.returncode == 0, found.stderr[-3000:]

    made = nbgrader.assignment(nbformat.read(ROOT / "notebooks/07_zero.ipynb", 4), points=5)
    made.cells = [c for c in made.cells if "sharded_step" in str(c.metadata.get("nbgrader"))]
    source = tmp_path / "source/zero/07_zero.ipynb"
    source.parent.mkdir(parents=True)
    nbformat.write(made, source)
    (tmp_path / "nbgrader_config.py").write_text(
        "c = get_config()\nc.CourseDirectory.course_id = 'c'\n"
        f"c.CourseDirectory.root = {str(tmp_path)!r}\n"
        "c.ExecutePreprocessor.kernel_name = 'python3'\n"
    )
    run("generate_assignment", "zero")
    released = tmp_path / "release/zero/07_zero.ipynb"
    assert nbgrader.BEGIN not in released.read_text() and "exchange" not in released.read_text()
    for learner, path in {"solved": source, "released": released}.items():
        target = tmp_path / "submitted" / learner / "zero/07_zero.ipynb"
        target.parent.mkdir(parents=True)
        shutil.copy(path, target)
    run("autograde", "zero")
    run("export")
    rows = csv.DictReader((tmp_path / "grades.csv").open())
    assert {row["student_id"]: float(row["score"]) for row in rows} == {"solved": 5, "released": 0}
