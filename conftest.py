"""Harden nbval: a notebook that passes has really run, in time, and done what it says.

As shipped, nbval passes a cell that overruns its limit and swallows the interrupt, a cell tagged
for comparison that has nothing to compare with, and a cell that reports that its expected error
was not raised. It notices a dead kernel only after the whole cell timeout, and nothing limits a
notebook as a whole. tests/course/test_lessons.py checks that each of these is a failure here.
"""

import os
import subprocess
import time
from hashlib import md5
from pathlib import Path
from queue import Empty

import pytest
from nbval.kernel import RunningKernel
from nbval.plugin import IPyNbCell, IPyNbFile, NbCellError

NOTHING_RAISED = (
    "was expected here, but nothing was raised"  # the words of mini_dist.course.lesson.raises
)
# ATEN_CPU_CAPABILITY limits torch's own kernels to those of an older CPU (tools/everywhere.py).
# oneDNN must follow, or the two describe a CPU that does not exist, with AMX but without AVX-512.
# There, bf16 attention fails with "pack_vnni2 is only supported when avx512 is supported".
OLDER = {"default": "SSE41", "avx2": "AVX2"}
if (kernels := os.environ.get("ATEN_CPU_CAPABILITY")) in OLDER:
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", OLDER[kernels])

INTERRUPT_GRACE = 10  # seconds an interrupted cell gets to finish


def pytest_addoption(parser):
    parser.addoption(
        "--notebook-limit",
        type=float,
        default=90.0,
        help="seconds a whole notebook may take, kernel start included (default 90); see FairClock",
    )
    parser.addoption(
        "--long", action="store_true", help="more rounds of the tests that work by repetition"
    )
    parser.addoption(
        "--sample", action="store_true", help="of a test with many cases, a part (`make test`)"
    )
    parser.addoption(
        "--sample-seed", help="which part that is; by default the commit that is checked out"
    )


# ---- a sample of the cases -----------------------------------------------------------------------

SHARE = 8  # One in eight cases of a test runs, and at least one.
# The slowest files, slowest first: workers that begin with these end together. (By default, xdist
# begins with the files that have the most tests, so the slowest file came last.)
LONGEST = (
    *("test_site", "test_ledger", "test_trainer", "test_simulated", "test_grade"),
    *("test_gates", "test_lesson_18_exercises", "test_zero", "test_train", "test_all_axes"),
    *("test_lessons", "test_launch", "test_torchrun", "test_hosts", "test_faults", "test_lesson"),
    *("test_browser", "test_elsewhere", "test_training", "test_crash", "test_sweep"),
)


def seed_of(config) -> str:
    """Return the sample's seed: the commit, so that each commit runs another part of the cases."""
    if seed := config.getoption("sample_seed"):
        return seed
    command = ["git", "-C", str(config.rootpath), "rev-parse", "--short=8", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() or "no commit"


def pytest_report_header(config):
    if config.getoption("sample"):
        return f"sample of the cases: --sample-seed {seed_of(config)} (`make test-all` runs all)"


def pytest_collection_modifyitems(config, items):
    """With --sample, keep every test but only a part of its cases, chosen by the seed."""
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
    if not config.getoption("sample"):
        return
    seed, cases = seed_of(config), {}
    for item in items:
        if hasattr(item, "callspec"):
            cases.setdefault((item.path, item.originalname), []).append(item)
    left_out = set()
    for alike in cases.values():
        alike.sort(key=lambda item: md5(f"{seed} {item.name}".encode()).digest())
        left_out.update(alike[-(-len(alike) // SHARE) :])
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


# ---- notebooks -----------------------------------------------------------------------------------


class FairClock:
    """Count the seconds that two notebooks would need with nothing else on the machine.

    Two notebooks with four ranks each keep up to four threads per core ready to run. If other
    programs add to that, a second of this clock lasts longer in proportion, so a limit means the
    same on a busy machine. Only Linux tells how many threads are ready; elsewhere this is a plain
    clock.
    """

    OURS = 4  # Threads per core that are ready to run.

    def __init__(self):
        self.seconds, self.looked = 0.0, time.monotonic()

    def now(self) -> float:
        before, self.looked = self.looked, time.monotonic()
        self.seconds += (self.looked - before) / max(1.0, self.ready() / self.OURS)
        return self.seconds

    def ready(self) -> float:
        try:
            running = Path("/proc/loadavg").read_text().split()[3].split("/")[0]
        except OSError:
            return 0.0
        return int(running) / os.cpu_count()


def left(notebook):
    """Return the seconds left of this notebook's limit."""
    return notebook.config.getoption("notebook_limit") - notebook.clock.now()


def await_reply(kernel, msg_id, timeout=None):
    """Do as RunningKernel.await_reply, but watch the kernel while waiting, and keep time."""
    clock = getattr(kernel, "clock", None) or FairClock()
    deadline = clock.now() + (30 if timeout is None else timeout)
    while True:
        try:
            message = kernel.get_message(stream="shell", timeout=0.5)
        except Empty:
            if not kernel.is_alive():
                raise RuntimeError("the kernel died while it ran this cell") from None
            if clock.now() > deadline:
                raise
            continue
        if message["parent_header"].get("msg_id") == msg_id:
            if message["content"]["status"] == "aborted":
                raise RuntimeError("the kernel refused to run this cell")
            return


def setup_notebook(notebook):
    notebook.clock = FairClock()
    nbval_setup(notebook)
    notebook.kernel.clock = notebook.clock


def get_kernel_message(notebook, timeout=None, stream="iopub"):
    # Otherwise a cell that keeps printing after the interrupt would be read forever.
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
    """Print seconds per notebook, slowest first, to see which are near their limit."""
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
