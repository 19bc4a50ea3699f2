"""tools/everywhere.py finds what depends on the machine, and nothing else."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from nbformat.v4 import new_code_cell, new_notebook, new_output

from tools import everywhere

ROOT = Path(__file__).resolve().parents[2]
HERE = torch.backends.cpu.get_cpu_capability()
DRAWN = torch.randn(20, generator=torch.Generator().manual_seed(0)).tolist()
IMPORTS = "import os, torch\nfrom mini_dist import launch\n"
SEEN = "def seen(group):\n    import torch\n    return torch.backends.cpu.get_cpu_capability()\n"
DRAW = (
    "def draw(group):\n"
    "    return torch.randn(20, generator=torch.Generator().manual_seed(0)).tolist()\n"
)
ATTEND = (  # On a CPU with AMX, this needs the ONEDNN_MAX_CPU_ISA that conftest.py sets.
    "def attend(group):\n"
    "    q = torch.ones(2, 4, 128, 64, dtype=torch.bfloat16)\n"
    "    return torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().item()\n"
)
CELLS = [  # each cell with its stored output
    (f"{IMPORTS}{SEEN}{DRAW}{ATTEND}print(1 + 1)", 2),
    ("print(seen(None))", HERE),
    ("print(len(os.sched_getaffinity(0)))", everywhere.CORES),
    ("print(torch.get_num_threads())", "as many as there are"),
    ("print(launch(seen, 1).results)", [HERE]),
    ("one, other = launch(draw, 2).results\nprint(one)", DRAWN),
    ("print([round(x, 2) for x in one])", [round(x, 2) for x in DRAWN]),
    ("print(draw(None) == one == other)", True),
    ("print(attend(None), launch(attend, 1).results)", "65536.0 [65536.0]"),
]


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """Store the number of threads that a reader has; tests have one (tests/conftest.py)."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    threads = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    threads = subprocess.run(threads, text=True, stdout=subprocess.PIPE).stdout.strip()
    notebook = new_notebook()
    for source, printed in CELLS:
        printed = threads if "get_num_threads" in source else printed
        output = new_output("stream", text=f"{printed}\n")
        cell = new_code_cell(source, execution_count=1, outputs=[output])
        cell.metadata.tags = ["nbval-check-output"]
        notebook.cells.append(cell)
    shutil.copy(ROOT / "conftest.py", tmp_path)
    nbformat.write(notebook, tmp_path / "toy.ipynb")
    return tmp_path / "toy.ipynb"


PRETENDED = "ATEN_CPU_CAPABILITY" in os.environ or "tools/dice" in os.environ.get("PYTHONPATH", "")


@pytest.mark.skipif(everywhere.CORES == 1, reason="with one core, default-1 is this machine")
@pytest.mark.skipif(PRETENDED, reason="the stored outputs come from the real machine")
def test_a_cell_that_depends_on_the_machine_is_named_with_the_machines(notebook, capsys):
    """A setting in force in the kernel is also in force on the ranks."""
    assert everywhere.main([str(notebook), "--on", "default-1", "dice"]) == 1
    printed = capsys.readouterr().out
    rows = [line.split()[:3] for line in printed.splitlines()[1:3]]
    assert rows == [["default-1", "9", "5"], ["dice", "9", "1"]]
    fails = dict(re.findall(r"::Cell (\d) fails on (.+); there it says", printed))
    assert fails == {
        "1": "default-1",
        "2": "default-1",
        "3": "default-1",
        "4": "default-1",
        "5": "default-1, dice",
    }
    assert "DEFAULT" in printed


def test_a_run_that_cannot_be_is_no_success(notebook, capsys):
    notebook.write_text("no notebook")
    assert everywhere.main([str(notebook), "--on", "default"]) == 1
    assert "fails on default" in capsys.readouterr().out
