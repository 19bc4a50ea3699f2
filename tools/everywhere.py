"""Does the course say the same on every machine? Run it as on others, and show what differs.

    python tools/everywhere.py                          all notebooks and tests, an hour or two
    python tools/everywhere.py notebooks/08*.ipynb      what you have changed, minutes
    make everywhere PYTHON=python3.10 VENV=.venv-3.10   under another Python

What another CPU or another number of threads changes is the order in which numbers are added, and
so their last bits. An output that is compared, or an equality that a test asserts, may not depend
on it. Exit status 1 if anything fails anywhere. A test that failed for want of time, not of truth,
is run again alone by hand.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()

# A CPU without AVX2: torch's own kernels, and with them MKL's, which multiply matrices. (oneDNN's
# are held to the same by conftest.py.)
DEFAULT = {"ATEN_CPU_CAPABILITY": "default"}
# One with AVX2 and without AVX-512, of a maker of whose CPUs MKL knows nothing.
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE"}
# 16 cores, as far as the order of additions goes. (Threads wait asleep, or none would get on.)
THREADS = {"OMP_NUM_THREADS": "16", "MKL_DYNAMIC": "FALSE", "OMP_WAIT_POLICY": "PASSIVE"}
# Random numbers that are other in their last bits: tools/dice/sitecustomize.py.
DICE = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tools/dice"), str(ROOT)])}

MACHINES = {  # name: environment, number of cores
    "default-1": (DEFAULT, 1),
    "default": (DEFAULT, CORES),
    "avx2-1": (AVX2, 1),
    "avx2": (AVX2, CORES),
    "threads-16": (THREADS, CORES),
    "dice": (DICE, CORES),
}
# generous: one core is asked here what it says, not how soon
PYTEST = [
    "-m",
    "pytest",
    "-q",
    "-m",
    "not alone and not solitary",
    "--dist=loadfile",
    "-p",
    "no:cacheprovider",
]
NBVAL = ["--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=300", "--notebook-limit=900"]


def run(paths, environment, cores, folder):
    """Run pytest as on a machine: (number of tests, {failed test: what it says})."""
    report = folder / "report.xml"
    command = [sys.executable, *PYTEST, *NBVAL, f"-n{min(cores, 2)}", f"--junitxml={report}"]
    pinned = cores < CORES
    if pinned:
        ours = os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(ours)[:cores])  # for the child to inherit
    try:
        ended = subprocess.run(
            [*command, *(Path(path).resolve() for path in paths)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    finally:
        if pinned:
            os.sched_setaffinity(0, ours)
    if ended.returncode > 1 or not report.exists():  # no tests, a crash, an interrupt
        return 0, {"pytest": ended.stdout}
    cases, failed = list(ElementTree.parse(report).iter("testcase")), {}
    for case in cases:
        for bad in [*case.iter("failure"), *case.iter("error")]:
            failed[f"{case.get('classname')}::{case.get('name')}"] = bad.text
    return len(cases), failed


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", help="notebooks and tests (default: all)")
    parser.add_argument("--on", nargs="+", choices=MACHINES, default=list(MACHINES), help="where")
    options = parser.parse_args(argv)
    paths = options.paths or [ROOT / "notebooks", ROOT / "tests"]

    where, said = defaultdict(list), {}
    print(f"{'machine':<12}{'tests':>7}{'failed':>8}{'seconds':>9}", flush=True)
    for name in options.on:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            count, failed = run(paths, *MACHINES[name], Path(folder))
        seconds = time.monotonic() - start
        print(f"{name:<12}{count:>7}{len(failed):>8}{seconds:>9.0f}", flush=True)
        for test, text in failed.items():
            where[test].append(name)
            said[test] = text
    for test, machines in sorted(where.items()):
        print(f"\n{test} fails on {', '.join(machines)}; there it says\n\n{said[test].strip()}")
    return 1 if where else 0


if __name__ == "__main__":
    sys.exit(main())
