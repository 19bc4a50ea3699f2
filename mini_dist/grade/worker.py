"""A worker that runs a learner's notebook by papermill and passes on what `collect` has kept.

The job: {"notebook": text, "files": {name: text}, "functions": {exercise: function}, "cell": s}.
It says {"kept": exercise, "how": ..., "pickle": base64} or {"kept": ..., "error": why} after the
cell where it came up, {"cell": number} after each, and at the end {"executed": notebook}.
All of it is the learner's word, for the notebook's processes could say it as well.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import sys
from pathlib import Path

KEPT = Path("kept")  # beside the folder of the notebook
COLLECT = """\
import sys
_before, sys.path = sys.path, [{course!r}, *(p for p in sys.path if p not in ("", {here!r}))]
from mini_dist.grade.collect import Collector as _Collector
_Collector(get_ipython(), {functions!r}, {kept!r}).start()
sys.path = _before
del _before, _Collector, sys
"""


def main() -> None:
    job = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    home, place = Path.cwd(), Path("notebook")
    for folder in (place, KEPT, Path("profile_default/startup")):
        folder.mkdir(parents=True)
    for name, text in job["files"].items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (place / "submitted.ipynb").write_text(job["notebook"], encoding="utf-8")
    course = str(Path(__file__).resolve().parents[2])
    names = dict(course=course, here=str(home / place), kept=str(home / KEPT))
    Path("profile_default/startup/00-collect.py").write_text(
        COLLECT.format(functions=job["functions"], **names)
    )

    def say(**message) -> None:
        print(json.dumps(message), file=out, flush=True)

    def after_a_cell(cell, cell_index, **_) -> None:
        for path in sorted(KEPT.glob("*.json")):
            record = json.loads(path.read_text())
            path.unlink()
            say(kept=path.stem, **record)
        say(cell=cell_index)

    os.chdir(place)
    trouble = execute(Path("submitted.ipynb"), Path("executed.ipynb"), job["cell"], after_a_cell)
    os.chdir(home)
    after_a_cell(None, -1)
    if (executed := place / "executed.ipynb").is_file():
        say(executed=executed.read_text(encoding="utf-8"))
    if trouble:
        say(trouble=trouble)


def execute(notebook: Path, output: Path, cell_seconds: float, after_a_cell) -> str:
    """Run all cells, also after one that ends in an error; what kept it from the end, or ""."""
    import papermill
    from jupyter_client.manager import AsyncKernelManager

    logging.getLogger("papermill").setLevel(logging.CRITICAL)
    logging.getLogger("traitlets").setLevel(logging.CRITICAL)
    kernel = AsyncKernelManager(transport="ipc", connection_file=f"{Path.home()}/kernel.json")
    try:
        papermill.execute_notebook(
            notebook,
            output,
            kernel_name="python3",
            progress_bar=False,
            execution_timeout=cell_seconds,
            interrupt_on_timeout=True,
            allow_errors=True,
            on_cell_executed=after_a_cell,
            km=kernel,
        )
    except papermill.PapermillExecutionError:
        return ""  # (some cell has shown an error, and all cells after it have run)
    except Exception as error:  # a kernel that died, a cell that did not heed the interrupt
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return ""


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


if __name__ == "__main__":
    main()
