"""docs/cluster: one training as a script and under torchrun, which restarts it; files parse."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = ROOT / "docs/cluster"
LESSON = ROOT / "lessons/16_keep_it_running.md"
pytestmark = [pytest.mark.alone, pytest.mark.skipif(sys.platform != "linux", reason="gloo on lo")]

SAID = re.compile(r"^(?:\d+ ranks, from step \d+|step \d+: loss [\d.]+|rank \d+ kills .*)$", re.M)


def run(command, **environment):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


def alike(ours, theirs):
    """The same lines; losses agree as far as processors do."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        words, loss = one.partition(": loss ")[::2]
        their_words, their_loss = other.partition(": loss ")[::2]
        assert words == their_words
        if loss:
            assert float(loss) == pytest.approx(float(their_loss), abs=2e-3)


def shown_in_the_lesson():
    (block,) = re.findall(r"```console\n(\$ TORCH_.*?)```", LESSON.read_text(), re.DOTALL)
    return SAID.findall(block)


def test_torchrun_restarts_a_killed_rank_and_the_losses_are_those_of_the_lesson(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    done = run(
        [
            *(*torchrun, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"),
            *("docs/cluster/train.py", "--ranks", "2", "--directory", str(tmp_path)),
            *("--kill", "7"),
        ],
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        GLOO_SOCKET_IFNAME="lo",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = SAID.findall(done.stdout)
    assert sum("kills itself" in line for line in said) == 1
    twice = [line for line in said if line.startswith("step 6:")]
    assert len(twice) == 2 and len(set(twice)) == 1  # to the last digit that is shown
    alike(said, shown_in_the_lesson())


def test_the_same_script_without_torchrun_says_the_same(tmp_path):
    script = [sys.executable, "docs/cluster/train.py", "--ranks", "2", "--directory", str(tmp_path)]
    killed = run([*script, "--kill", "7"])
    assert "rank 1 of 2 was killed by SIGKILL" in killed.stderr
    resumed = run(script)
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    said = [line.removeprefix("[rank 0] ") for line in resumed.stdout.splitlines()]
    alike(said, shown_in_the_lesson()[-7:])


def test_the_files_that_could_not_be_run_here_say_so_and_parse():
    script = CLUSTER / "train.slurm"
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    assert "Not tested" in script.read_text()
    readme = (CLUSTER / "README.md").read_text()
    assert readme.count("ot tested here") == 2
    for text in (readme, script.read_text()):
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text
        options = set(re.findall(r"(?<=docs/cluster/train\.py )[^\n]*", text))
        known = re.findall(r'add_argument\("(--\w+)"', (CLUSTER / "train.py").read_text())
        for option in re.findall(r"--\w+", " ".join(options)):
            assert option in known
