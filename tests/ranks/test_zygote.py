"""Test the zygote: it loads what its parent would, and takes as long as it needs."""

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
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=150
    )
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
    """A clone is at the end of sys.path, so a learner's random.py doesn't replace Python's."""
    shutil.copytree(ROOT / "mini_dist", tmp_path / "mini_dist")
    for name in ("random", "inspect", "queue", "torch", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a file of the learner')")
    code = LAUNCH_FROM.format(course=str(tmp_path))
    assert run(code, [], ROOT) == "[2, 2]\n" * 2


# The process that makes the ranks cannot load torch until a file named "open" exists.
SHUT = """
import os, sys, time
class Shut:
    def find_spec(self, name, path=None, target=None):
        while name == "torch" and not os.path.exists({gate!r}):
            time.sleep(0.05)
sys.meta_path.insert(0, Shut())
"""
NOT_HERE = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if type(each).__name__ != "Shut"]
"""


def run_while_torch_is_loaded(code: str, directory: Path) -> None:
    gate = str(directory / "open")
    (directory / "sitecustomize.py").write_text(SHUT.format(gate=gate))
    try:
        run(NOT_HERE + code.replace("GATE", repr(gate)), [directory, ROOT], ROOT)
    finally:  # If the code fails, the process that makes the ranks would wait for it forever.
        Path(gate).touch()


IMPATIENT = """
from mini_dist import RankTimeout, launch
from mini_dist.ranks.launch import ZYGOTES
def once(timeout):
    try:
        launch(lambda group: group.rank(), 1, timeout=timeout)
    except RankTimeout as error:
        assert "No rank has started: torch is loaded first" in str(error), error
    else:
        assert timeout > 1, "there were ranks"
    keepers.add(ZYGOTES["fork", False].process.pid)
keepers = set()
once(0.5), once(0.5)
open(GATE, "w").close()
assert launch(lambda group: group.rank(), 1).results == [0]
once(30)
assert len(keepers) == 1, keepers
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each rank loads torch itself")
def test_launches_that_end_while_torch_is_loaded_do_not_make_it_load_again(tmp_path):
    """From a cold disk, loading torch can take longer than any of these launches waits."""
    run_while_torch_is_loaded(IMPATIENT, tmp_path)


INTERRUPTED = """
import os, signal, sys, threading
from mini_dist import launch
from mini_dist.ranks.diagnose import RankInterrupt
signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest & in a script ignores it
module = sys.modules["mini_dist.ranks.launch"]
take_world = module.take_world
def press(waits, done):
    waits.wait()
    seconds = 1.0
    while not done.wait(seconds):
        os.kill(os.getpid(), signal.SIGINT)
        seconds = 15.0  # again, because Python drops an interrupt that meets a callback
for _ in range(2):  # while it makes ranks, and while it waits for those on standby
    waits = threading.Event()  # before that, an interrupt is Python's own, or even dropped
    done = threading.Event()
    module.take_world = lambda *args, waits=waits: (waits.set(), take_world(*args))[1]
    threading.Thread(target=press, args=(waits, done), daemon=True).start()
    try:
        launch(lambda group: None, 2)
    except RankInterrupt as error:
        done.set()
        assert str(error).startswith("interrupted.")
    else:
        raise AssertionError("there were ranks")
open(GATE, "w").close()  # (on a busy machine to load torch has taken over a minute)
assert launch(lambda group: group.rank(), 2, timeout=110).results == [0, 1]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each rank loads torch itself")
def test_an_interrupt_while_torch_is_loaded_waits_for_nothing(tmp_path):
    run_while_torch_is_loaded(INTERRUPTED, tmp_path)


def test_a_rank_whose_launch_has_ended_before_it_could_start_is_not_started():
    here, there = socket.socketpair()
    with there:
        assert not zygote.hung_up(there.fileno())
        here.sendall(b"a job")
        here.close()
        assert zygote.hung_up(there.fileno())


def test_no_module_of_the_library_starts_a_thread_or_computes_with_tensors_when_it_is_imported():
    """The zygote loads any module and then forks, which needs a process with one thread."""
    code = """
import importlib, os, pkgutil
import mini_dist
from torch.utils._python_dispatch import TorchDispatchMode
class Computes(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert op._opname in ("empty", "ones"), f"{op} while {name} is imported"
        return op(*args, **(kwargs or {}))
threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
with Computes():
    for found in pkgutil.walk_packages(mini_dist.__path__, "mini_dist."):
        name = found.name
        if not name.endswith("__main__"):
            importlib.import_module(name)
if threads:
    assert len(os.listdir("/proc/self/task")) == threads
"""
    run(code, [ROOT], ROOT)
