"""nbval, hardened: a notebook that pytest calls green did run, in time, and did what it says.

As shipped, nbval lets these pass: a cell that overruns its limit and swallows the interrupt, a cell
tagged for comparison that has nothing to compare with, and one that says itself that it has not
raised the error it is there for. A kernel that dies is noticed only when the whole cell timeout is
over. And nothing bounds a notebook as a whole. tests/course/test_lessons.py shows each of these to
be a failure here.
"""

import os
import time
from hashlib import md5
from queue import Empty

import pytest
from nbval.kernel import RunningKernel
from nbval.plugin import IPyNbCell, IPyNbFile, NbCellError

NOTHING_RAISED = (
    "was expected here, but nothing was raised"  # as mini_dist.course.lesson.raises says it
)
# ATEN_CPU_CAPABILITY holds torch's own kernels down to those of an older CPU (tools/everywhere.py).
# oneDNN must follow, or the two make a CPU that does not exist: with AMX and without AVX-512, where
# attention in bf16 ends in "pack_vnni2 is only supported when avx512 is supported".
OLDER = {"default": "SSE41", "avx2": "AVX2"}
if (kernels := os.environ.get("ATEN_CPU_CAPABILITY")) in OLDER:
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", OLDER[kernels])

INTERRUPT_GRACE = 10  # seconds an interrupted cell gets to finish


def pytest_addoption(parser):
    parser.addoption(
        "--notebook-limit",
        type=float,
        default=90.0,
        help="wall seconds a whole notebook may take, kernel start included (default 90)",
    )
    parser.addoption(
        "--long", action="store_true", help="more rounds of the tests that work by repetition"
    )
    parser.addoption(
        "--sample", action="store_true", help="a third of the cases of some tests, the same ones"
    )


def pytest_collection_modifyitems(config, items):
    """With --sample, as `make test` has it, a third of the cases of the tests that have many of
    one kind and take long: answers that a learner might write, right ones and wrong, and all that
    is marked `sampled`. Chosen by their names, so the same third each time, and one at least."""
    if not config.getoption("sample"):
        return
    cases = {}
    for item in items:
        if is_sampled(item):
            cases.setdefault((item.path, item.originalname), []).append(item)
    left_out = set()
    for alike in cases.values():
        alike.sort(key=lambda item: md5(item.name.encode()).digest())
        left_out.update(alike[-(-len(alike) // 3) :])
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def is_sampled(item) -> bool:
    answers = item.path.match("tests/course/exercises/test_lesson_*.py") and "[" in item.name
    return bool(answers or item.get_closest_marker("sampled"))


def left(notebook):
    """Seconds left of the limit of a notebook that nbval runs."""
    return notebook.started + notebook.config.getoption("notebook_limit") - time.monotonic()


def await_reply(kernel, msg_id, timeout=None):
    """As RunningKernel.await_reply, but it looks at the kernel while it waits, and keeps time."""
    deadline = time.monotonic() + (30 if timeout is None else timeout)
    while True:
        try:
            message = kernel.get_message(stream="shell", timeout=0.5)
        except Empty:
            if not kernel.is_alive():
                raise RuntimeError("the kernel died while it ran this cell") from None
            if time.monotonic() > deadline:
                raise
            continue
        if message["parent_header"].get("msg_id") == msg_id:
            if message["content"]["status"] == "aborted":
                raise RuntimeError("the kernel refused to run this cell")
            return


def setup_notebook(notebook):
    notebook.started = time.monotonic()
    nbval_setup(notebook)


def get_kernel_message(notebook, timeout=None, stream="iopub"):
    # A cell that goes on printing after the interrupt would be listened to for ever.
    if notebook.timed_out:
        notebook.interrupted = getattr(notebook, "interrupted", time.monotonic())
        if time.monotonic() > notebook.interrupted + INTERRUPT_GRACE:
            raise Empty
    return nbval_get_kernel_message(notebook, timeout=timeout, stream=stream)


def runtest(cell):
    notebook = cell.parent
    if notebook.timed_out:
        pytest.skip("an earlier cell of this notebook overran its limit")
    if cell.options["check"] and cell.cell.execution_count is None:
        cell.raise_cell_error("This cell is tagged for comparison but was never executed")

    limit, rest = cell.config.option.nbval_cell_timeout, left(notebook)
    cell.config.option.nbval_cell_timeout = min(limit, max(rest, 0))
    try:
        nbval_runtest(cell)
    except NbCellError:
        if not notebook.timed_out or rest >= limit:
            raise
    finally:
        cell.config.option.nbval_cell_timeout = limit
    if left(notebook) <= 0:
        allowed = cell.config.getoption("notebook_limit")
        cell.raise_cell_error(f"The whole notebook may take {allowed:g} s; this cell went past it")
    if notebook.timed_out:
        cell.raise_cell_error("This cell overran its limit and swallowed the interrupt")
    if any(NOTHING_RAISED in output.get("text", "") for output in cell.test_outputs):
        cell.raise_cell_error("This cell must raise an error but raised nothing")


nbval_setup, nbval_runtest = IPyNbFile.setup, IPyNbCell.runtest
nbval_get_kernel_message = IPyNbFile.get_kernel_message
RunningKernel.await_reply = await_reply
IPyNbFile.setup, IPyNbFile.get_kernel_message = setup_notebook, get_kernel_message
IPyNbCell.runtest = runtest


def pytest_terminal_summary(terminalreporter):
    """Seconds a notebook, slowest first: what is near its limit is seen before it fails."""
    seconds = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            path = getattr(report, "nodeid", "").split("::")[0]
            if path.endswith(".ipynb"):
                seconds[path] = seconds.get(path, 0) + getattr(report, "duration", 0)
    if seconds:
        terminalreporter.section("notebooks")
    for path, total in sorted(seconds.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{total:6.1f} s  {path}")
