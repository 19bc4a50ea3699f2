"""Where ranks come from: it loads what the parent would, and takes the time that it needs."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mini_dist.ranks import zygote

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, path: list, directory: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


LAUNCH_FROM = """
import os, sys
sys.path[:] = [p for p in sys.path if not os.path.exists(os.path.join(p, "mini_dist"))]
sys.path.append({course!r})
import mini_dist
assert mini_dist.__file__.startswith({course!r}), mini_dist.__file__
for start in ("fork", "spawn"):
    print(mini_dist.launch(lambda group: group.size(), 2, start=start).results)
"""


def test_files_beside_the_package_hide_nothing_that_is_installed(tmp_path):
    """A clone is at the end of sys.path: there a learner's random.py is not Python's."""
    shutil.copytree(ROOT / "mini_dist", tmp_path / "mini_dist")
    for name in ("random", "inspect", "queue", "torch", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a file of the learner')")
    code = LAUNCH_FROM.format(course=str(tmp_path))
    assert run(code, [], ROOT) == "[2, 2]\n" * 2


SLOW = """
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            time.sleep(4)
sys.meta_path.insert(0, Slow())
"""
IMPATIENT = """
import sys, time
from mini_dist import RankTimeout, launch
from mini_dist.ranks.launch import ZYGOTES
def once(timeout):
    began = time.monotonic()
    try:
        results = launch(lambda group: group.rank(), 1, timeout=timeout).results
    except RankTimeout as error:
        assert "No rank has started: torch is loaded first" in str(error), error
        assert time.monotonic() - began < 3, time.monotonic() - began
    keepers.add(ZYGOTES["fork", False].process.pid)
keepers = set()
once(0.5), once(0.5)
assert launch(lambda group: group.rank(), 1).results == [0]
once(30)
assert len(keepers) == 1, keepers
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each rank loads torch itself")
def test_launches_that_end_while_torch_is_loaded_do_not_make_it_load_again(tmp_path):
    """From a cold disk it can take longer than any of them would wait."""
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    run(IMPATIENT, [tmp_path, ROOT], ROOT)


INTERRUPTED = """
import os, signal, threading, time
from mini_dist import launch
from mini_dist.ranks.diagnose import RankInterrupt
for _ in range(2):  # while it makes ranks, and while it waits for those on standby
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    try:
        launch(lambda group: None, 2)
    except RankInterrupt as error:
        assert str(error).startswith("interrupted.")
    assert time.monotonic() - began < 3
assert launch(lambda group: group.rank(), 2).results == [0, 1]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each rank loads torch itself")
def test_an_interrupt_while_torch_is_loaded_waits_for_nothing(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    run(INTERRUPTED, [tmp_path, ROOT], ROOT)


def test_a_rank_whose_launch_has_ended_before_it_could_start_is_not_started():
    here, there = socket.socketpair()
    with there:
        assert not zygote.hung_up(there.fileno())
        here.sendall(b"a job")
        here.close()
        assert zygote.hung_up(there.fileno())
