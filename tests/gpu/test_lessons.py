"""Run each lesson's cells with ranks that share one GPU: no cell needs a change for that.

A cell before the first gives each launch its device. Runs over hosts, elastic runs and simulated
runs take none and stay as they are.
"""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
NotebookClient = pytest.importorskip("nbclient").NotebookClient

ROOT = Path(__file__).resolve().parents[2]
LESSONS = sorted(path.stem for path in ROOT.glob("notebooks/[0-9]*.ipynb"))
TITLES = "print(*_titles, sep='\\n')"
FIRST = """
import mini_dist

_titles, _launch = [], mini_dist.launch


def launch(*args, **how):
    if not how.keys() & {"hosts", "elastic", "simulate"}:
        how = {"device": "DEVICE"} | how
    run = _launch(*args, **how)
    _titles.append(run.title())
    return run


mini_dist.launch = launch
"""


def executed(lesson: str, device: str) -> tuple[list[str], list[str]]:
    """Return the cells that raised, with the error, and the titles of the runs."""
    notebook = nbformat.read(ROOT / f"notebooks/{lesson}.ipynb", as_version=4)
    new = nbformat.v4.new_code_cell
    notebook.cells = [new(FIRST.replace("DEVICE", device)), *notebook.cells, new(TITLES)]
    place = {"metadata": {"path": str(ROOT / "notebooks")}}
    NotebookClient(notebook, timeout=300, allow_errors=True, resources=place).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    raised = [
        f"{cell.source}\n{output.ename}: {output.evalue}"
        for cell in cells
        for output in cell.outputs
        if output.output_type == "error" and "raises-exception" not in cell.metadata.get("tags", [])
    ]
    return raised, "".join(output.get("text", "") for output in cells[-1].outputs).splitlines()


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_runs_on_a_shared_gpu(lesson):
    raised, titles = executed(lesson, "cuda:0")
    assert not raised, "\n\n".join(raised)
    assert any("on cuda:0" in title for title in titles)
