"""A worker that runs a learner's notebook by papermill and passes on what `collect` has kept.

The job: {"notebook": text, "files": {name: text}, "functions": {exercise: function}, "cell": s}.
It prints {"kept": exercise, "how": ...} with the pickle in base64, or {"kept": ..., "error": why},
after the cell where it came up, {"cell": index} after each cell, and at the end {"executed": true}
with the notebook. All of it is the learner's word, because the notebook's processes could print it
as well. A notebook's output is cut while it comes in.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path

KEPT = Path("kept")  # next to the folder of the notebook
FUNCTIONS = Path("functions")  # of the lesson's exercises, which the kernel's start cannot know yet
COLLECT = """\
import sys
_before, sys.path = sys.path, [{course!r}, *(p for p in sys.path if p not in ("", {here!r}))]
from mini_dist.course.grade.collect import Collector as _Collector
_Collector(get_ipython(), {functions!r}, {kept!r}).start()
sys.path = _before
del _before, _Collector, sys
"""


def main() -> None:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    home, place = Path.cwd(), Path("notebook")
    for folder in (place, KEPT, Path("profile_default/startup")):
        folder.mkdir(parents=True)
    course = str(Path(__file__).resolve().parents[3])
    names = dict(course=course, here=str(home / place))
    names |= dict(kept=str(home / KEPT), functions=str(home / FUNCTIONS))
    Path("profile_default/startup/00-collect.py").write_text(COLLECT.format(**names))
    kernel = started_kernel(home, place)
    job = json.load(sys.stdin)
    FUNCTIONS.write_text(json.dumps(job["functions"]))
    for name, text in job["files"].items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (place / "submitted.ipynb").write_text(job["notebook"], encoding="utf-8")

    def say(payload: str = "", **message) -> None:
        data = payload.encode(errors="surrogatepass")
        out.write(json.dumps({"bytes": len(data)} | message).encode() + b"\n" + data)
        out.flush()

    def pass_on() -> None:
        for path in sorted(KEPT.glob("*.json")):
            record = json.loads(path.read_text())
            path.unlink()
            say(record.pop("pickle", ""), kept=path.stem, **record)

    def after_a_cell(cell, cell_index, **_) -> None:
        pass_on()
        say(cell=cell_index)

    os.chdir(place)
    trouble = execute(kernel, job["cell"], after_a_cell)
    os.chdir(home)
    pass_on()
    if (executed := place / "executed.ipynb").is_file():
        say(executed.read_text(encoding="utf-8"), executed=True)
    if trouble:
        say(trouble=trouble)


def started_kernel(home: Path, place: Path):
    """Start the notebook's kernel, which begins with loading what every lesson needs."""
    import papermill  # noqa: F401 (while the kernel starts, and before there is a job)
    from jupyter_client.manager import AsyncKernelManager

    from . import shown  # noqa: F401

    connection = f"{home}/kernel.json"
    kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", connection_file=connection)
    memory = ["--HistoryManager.hist_file=:memory:"]
    asyncio.run(kernel.start_kernel(cwd=str(home / place), extra_arguments=memory))
    return kernel


def execute(kernel, cell_seconds: float, after_a_cell) -> str:
    """Run all cells, also after one that ends in an error; what kept it from the end, or ""."""
    import papermill

    logging.getLogger("papermill").setLevel(logging.CRITICAL)
    logging.getLogger("traitlets").setLevel(logging.CRITICAL)
    try:
        papermill.execute_notebook(
            "submitted.ipynb",
            "executed.ipynb",
            engine_name="bounded",
            kernel_name="python3",
            progress_bar=False,
            execution_timeout=cell_seconds,
            on_cell_executed=after_a_cell,
            km=kernel,
        )
    except papermill.PapermillExecutionError:
        return ""  # (some cell has shown an error, and all cells after it have run)
    except Exception as error:  # a kernel that died, a cell that did not heed the interrupt
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return ""


if __name__ == "__main__":
    main()
