"""Run a sample of the thousand random faults of many kinds in `benchmarks/faults.py`."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for leftovers in Linux's /proc"),
]


def test_sixty_random_faults_end_in_one_clear_error_each_and_leave_nothing():
    command = [sys.executable, "benchmarks/faults.py", "--cases", "60", "--seed", "16"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "60 cases of 60 kinds" in done.stdout, done.stdout + done.stderr
