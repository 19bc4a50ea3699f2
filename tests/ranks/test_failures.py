"""Test runs that fail: one clear error, nothing left behind, the next launch as warm as ever.

Every fault of `ranks/faults.py` runs twice: in this plain process and in a notebook's kernel,
where the error has to name the cell and its line.
"""

import inspect
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from mini_dist import RankError, RankTimeout, launch
from mini_dist.ranks import diagnose
from tests.ranks import faults, leftovers, sound
from tests.ranks.notebook import PATIENCE, Notebook

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for leftovers in Linux's /proc"),
]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    with Notebook(tmp_path_factory.mktemp("notebook")) as notebook:
        notebook.run(
            "import os, signal, subprocess, sys, threading, torch, torch.distributed as dist\n"
            "from pathlib import Path\n"
            "from mini_dist import launch\n"
            "from tests.ranks import leftovers"
        )
        yield notebook


AGREE = "the ranks do not agree on an operation that they enter together:"
DEADLOCK = "deadlock: ranks 0 and 1 wait for what can no longer happen."

# Maps each fault to the strings that its error must contain, in this order. AT marks a line of the
# fault, which the error must quote together with its location.
AT = "@ "
SAID = {
    faults.raises: [
        "rank 1 of 2 raised ValueError: on purpose",
        AT + 'raise ValueError("on purpose")',
        "rank 0 has waited",
        "in all_reduce(float32[2]) for rank 1",
        AT + "dist.all_reduce(torch.ones(2), group=group)",
    ],
    faults.raises_while_handling: [
        "rank 0 of 2 raised ValueError: on purpose",
        "while handling ZeroDivisionError: first",
    ],
    faults.raises_what_cannot_be_printed: [
        "rank 0 of 2 raised Unprintable: (its __str__ raised RuntimeError)",
        AT + "raise one",
        "rank 1 raised the same.",
    ],
    faults.never_returns_from_itself: [
        "rank 0 of 2 raised RecursionError: maximum recursion depth exceeded",
        AT + "never_returns_from_itself(group)",
        "times in a row]",
    ],
    faults.is_killed: ["rank 1 of 2 was killed by SIGKILL"],
    faults.exits: ["rank 1 of 2 raised SystemExit: 3", AT + "sys.exit(3)"],
    faults.exits_at_once: ["rank 1 of 2 ended its process with exit code 0 instead of returning."],
    faults.exits_and_leaves_a_child: ["of 2 ended its process with exit code 5"],
    faults.leaves_others_in_an_asynchronous_wait: [
        "deadlock: rank 0 waits for what can no longer happen.",
        "in all_reduce(float32[2]) for rank 1",
        AT + "work.wait()",
        "rank 1 has returned, after 0 collectives",
    ],
    faults.returns_early: [
        "deadlock: rank 0 waits for what can no longer happen.",
        "rank 0 has waited",
        "in all_reduce(float32[2]) for rank 1",
        AT + "dist.all_reduce(torch.ones(2), group=group)",
        "rank 1 has returned, after 0 collectives",
    ],
    faults.skips_one: [
        AGREE,
        "rank 0 calls all_reduce(float32[2]) as its collective number 1",
        "rank 1 calls broadcast(float32[2], root 0) as its collective number 1",
    ],
    faults.skips_the_last: [
        DEADLOCK,
        "rank 0 has waited",
        "in all_reduce(float32[2]) for rank 1",
        "rank 1 has waited",
        "in recv(float32[3], from rank 0) for rank 0",
        AT + "dist.recv(torch.ones(3), 1 - group.rank(), group=group)",
    ],
    faults.disagrees_on_the_operation: [
        AGREE,
        "rank 0 calls all_reduce(float32[2]) as its collective number 1",
        "rank 1 calls barrier() as its collective number 1",
    ],
    faults.disagrees_on_the_shape: [
        AGREE,
        "rank 0 calls all_reduce(float32[2]) as its collective number 1",
        "rank 1 calls all_reduce(float32[3]) as its collective number 1",
    ],
    faults.disagrees_on_the_dtype: [
        AGREE,
        "rank 0 calls all_reduce(float32[2]) as its collective number 1",
        "rank 1 calls all_reduce(float64[2]) as its collective number 1",
    ],
    faults.disagrees_on_the_reduction: [
        AGREE,
        "rank 0 calls all_reduce(float32[2])",
        "rank 1 calls all_reduce(float32[2], MAX)",
    ],
    faults.disagrees_on_the_root: [
        AGREE,
        "rank 0 calls reduce(float32[2], root 0)",
        "rank 1 calls reduce(float32[2], root 1)",
    ],
    faults.receives_less_than_is_sent: [
        AGREE,
        "rank 0 calls send(float32[4], to rank 1) as its message number 1 on this route",
        "rank 1 calls recv(float32[2], from rank 0) as its message number 1 on this route",
    ],
    faults.everyone_sends_first: [
        DEADLOCK,
        "in send(float32[2], to rank 1) for rank 1",
        AT + "dist.send(torch.ones(2), peer, group=group)",
        "in send(float32[2], to rank 0) for rank 0",
        AT + "dist.send(torch.ones(2), peer, group=group)",
    ],
    faults.serves_one_request_too_many: [
        DEADLOCK,
        "in recv_anysource(float32[2])",
        AT + "dist.recv(torch.ones(2), group=group)",
        "in recv(float32[2], from rank 0) for rank 0",
        AT + "dist.recv(torch.ones(2), 0, group=group)",
    ],
    faults.overflows_native_memory: ["was killed by SIGSEGV", AT + "ctypes.string_at(0)"],
    faults.returns_what_cannot_travel: [
        "rank 0 of 2 raised PicklingError: the result of rank 0 cannot be sent to another process",
        "'generator'",
    ],
    faults.launches_again: ["launch was called inside a rank"],
}
each_fault = pytest.mark.parametrize("fault", SAID, ids=lambda fault: fault.__name__)


def assert_said(message: str, fault, place) -> None:
    """Check the error; `place(line)` is how it refers to that line of the fault."""
    source = inspect.getsource(fault).splitlines()
    rest = message
    for words in SAID[fault]:
        if words.startswith(AT):
            quoted = words.removeprefix(AT)
            (number, *_) = [n for n, line in enumerate(source) if line.strip() == quoted]
            named = re.search(re.escape(place(number)) + r"\b[^\n]*\s+" + re.escape(quoted), rest)
            assert named, f"{place(number)} and {quoted!r} expected in:\n{message}"
            rest = rest[named.end() :]
        else:
            assert words in rest, f"{words!r} expected in:\n{message}"
            rest = rest.partition(words)[2]
    assert len(message.splitlines()) < 20


def assert_next_launch_is_warm_and_right():
    before = leftovers.zygote().process.pid
    leftovers.assert_only_standby()
    assert launch(lambda group: group.rank(), 2).results == [0, 1]
    assert leftovers.zygote().process.pid == before


NEXT = inspect.getsource(assert_next_launch_is_warm_and_right)


# ---- every fault, twice ------------------------------------------------------------------------


@each_fault
def test_fault_in_a_plain_process(fault):
    with pytest.raises(RankError) as caught:
        launch(fault, 2, quiet=True, timeout=PATIENCE)
    assert not isinstance(caught.value, RankTimeout)  # detected, not timed out
    file, first = os.path.relpath(faults.__file__), inspect.getsourcelines(fault)[1]
    assert_said(str(caught.value), fault, lambda line: f'File "{file}", line {first + line}')
    assert_next_launch_is_warm_and_right()


@each_fault
def test_fault_in_a_notebook(fault, notebook):
    name = fault.__name__
    cell = notebook.try_to_run(
        f"{inspect.getsource(fault)}\nlaunch({name}, 2, quiet=True, timeout={PATIENCE})"
    )
    assert cell.error.startswith("RankError: ")  # none of our own frames is above it
    assert_said(cell.error, fault, lambda line: f"Cell In[{cell.number}], line {line + 1}")
    notebook.run(f"{NEXT}\nassert_next_launch_is_warm_and_right()")


# ---- hangs, interrupts and kills ---------------------------------------------------------------


def test_a_hang_ends_at_the_timeout_and_says_where_everybody_was():
    with pytest.raises(RankTimeout) as caught:
        launch(faults.hangs, 2, timeout=0.5)
    message = str(caught.value)
    assert message.startswith("not done after 0.5 s, the timeout of this launch.")
    assert message.count("signal.pause()") == 2
    assert isinstance(caught.value, TimeoutError)
    assert_next_launch_is_warm_and_right()


@pytest.mark.parametrize("native", [False, True])
def test_a_rank_that_prints_without_end_meets_its_timeout(native):
    def print_on(native, group):
        while True:
            os.write(1, b"x" * 65536) if native else print("x" * 100)

    with pytest.raises(RankTimeout) as caught:
        launch(print_on, 2, (native,), timeout=1, quiet=True)
    assert all(0 < len(output) < 2_000_000 for output in caught.value.outputs)
    assert_next_launch_is_warm_and_right()


def wait_for_ranks(path):
    """Wait until both ranks have written their process id there and sleep in the next line."""

    def sleeps(rank):
        told = Path(f"{path}-{rank}")
        pid = told.read_text() if told.exists() else ""
        return pid and psutil.Process(int(pid)).status() == psutil.STATUS_SLEEPING

    leftovers.wait_until(lambda: sleeps(0) and sleeps(1), lambda: "the ranks do not start")


@pytest.fixture
def interruptible():
    """Handle SIGINT even if a shell without job control started pytest in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupt_ends_the_run_and_a_second_one_does_not_end_the_clearing_up(
    tmp_path, interruptible, times
):
    def interrupt():
        wait_for_ranks(tmp_path / "told")
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        launch(faults.hangs_and_tells, 2, (tmp_path / "told",))
    thread.join()
    assert isinstance(caught.value, RankError)
    message = str(caught.value)
    assert "rank 0 has waited" in message and "dist.barrier(group=group)" in message
    assert "rank 1 is running" in message and "signal.pause()" in message
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_next_launch_is_warm_and_right()


def test_a_kernel_interrupt_ends_the_run_and_names_the_cells_lines(notebook, tmp_path):
    told = tmp_path / "told"
    cell = notebook.start(
        "def work(group):\n"
        f"    Path(f'{told}-{{group.rank()}}').write_text(str(os.getpid()))\n"
        "    if group.rank() == 0:\n"
        "        dist.barrier()\n"
        "    signal.pause()\n"
        "launch(work, 2)"
    )
    wait_for_ranks(told)
    notebook.interrupt()
    cell = notebook.finish(cell)
    assert "interrupted." in cell.error and "RankInterrupt" in cell.error
    assert f"Cell In[{cell.number}], line 4: dist.barrier()" in cell.error
    assert f"Cell In[{cell.number}], line 5: signal.pause()" in cell.error
    notebook.run(f"{NEXT}\nassert_next_launch_is_warm_and_right()")


def test_nothing_survives_a_kernel_that_is_killed_during_a_run(tmp_path):
    told = tmp_path / "told"
    with Notebook(tmp_path) as notebook:
        cell = notebook.run(
            "from mini_dist import launch\n"
            "from tests.ranks import leftovers\n"
            "import os, signal, subprocess\n"
            "from pathlib import Path\n"
            "launch(lambda group: None, 2)\n"
            "print(leftovers.zygote().process.pid, leftovers.zygote().directory)"
        )
        session, directory = cell.printed.split()
        notebook.start(
            "def work(group):\n"
            "    subprocess.Popen(['sleep', '1000'])\n"
            f"    Path(f'{told}-{{group.rank()}}').write_text(str(os.getpid()))\n"
            "    signal.pause()\n"
            "launch(work, 2)"
        )
        wait_for_ranks(told)
        os.kill(notebook.process_id, signal.SIGKILL)
        leftovers.assert_all_gone(int(session), directory)


def test_nothing_survives_a_process_that_is_killed_during_a_run(tmp_path):
    code = f"""
from pathlib import Path
from mini_dist import launch
from tests.ranks import leftovers
from tests.ranks.faults import hangs_and_tells
launch(lambda group: None, 2)
print(leftovers.zygote().process.pid, leftovers.zygote().directory, flush=True)
launch(hangs_and_tells, 2, (Path({str(tmp_path / "told")!r}),))
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        session, directory = parent.stdout.readline().decode().split()
        wait_for_ranks(tmp_path / "told")
        parent.kill()
    leftovers.assert_all_gone(int(session), directory)


def kill_the_zygote(group):
    if group.rank() == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def test_a_zygote_killed_during_a_run_is_one_error_and_a_new_zygote():
    launch(lambda group: None, 2)
    keeper = leftovers.zygote()
    with pytest.raises(RuntimeError, match="the process that starts ranks ended with status -9"):
        launch(kill_the_zygote, 2)
    leftovers.assert_all_gone(keeper.process.pid, keeper.directory)
    assert_next_launch_is_right_with_another_zygote(keeper)


def test_a_zygote_killed_during_a_run_in_a_notebook(notebook):
    notebook.run("launch(lambda group: None, 2); keeper = leftovers.zygote()")
    cell = notebook.try_to_run(f"{inspect.getsource(kill_the_zygote)}\nlaunch(kill_the_zygote, 2)")
    assert "the process that starts ranks ended with status -9" in cell.error
    notebook.run(
        "leftovers.assert_all_gone(keeper.process.pid, keeper.directory)\n"
        "assert launch(lambda group: group.rank(), 2).results == [0, 1]\n"
        "leftovers.assert_only_standby()"
    )


def test_a_cell_is_named_by_an_ipython_that_keeps_no_names():
    """IPython 7.34, which Colab has, names a cell by a hash of its text."""
    raw = ["", "import torch", "1 / 0", "x = 2"]
    compiler = SimpleNamespace(get_code_name=lambda raw, parsed, number: f"/tmp/{raw}.py")
    history = SimpleNamespace(input_hist_raw=raw, input_hist_parsed=raw)
    shell = SimpleNamespace(compile=compiler, history_manager=history)
    assert diagnose.name_of_cell(shell, "/tmp/1 / 0.py") == "Cell In[2]"
    assert diagnose.name_of_cell(shell, "/tmp/train.py") == ""


def test_a_zygote_killed_between_runs_is_replaced_unseen():
    launch(lambda group: None, 2)
    keeper = leftovers.zygote()
    keeper.process.kill()
    keeper.process.wait()
    assert_next_launch_is_right_with_another_zygote(keeper)
    leftovers.assert_all_gone(keeper.process.pid, keeper.directory)


def assert_next_launch_is_right_with_another_zygote(keeper):
    assert launch(lambda group: group.rank(), 2).results == [0, 1]
    assert leftovers.zygote() is not keeper
    leftovers.assert_only_standby()


def test_a_rank_that_dies_on_standby_is_no_failure_of_the_next_run():
    launch(lambda group: None, 2)
    keeper = leftovers.zygote()
    leftovers.assert_only_standby()
    victim = max(leftovers.processes(keeper.process.pid) - {keeper.process.pid})
    os.kill(victim, signal.SIGKILL)
    # (A zombie may still have threads that are ending, and then nobody can know of its death.)
    leftovers.wait_until(lambda: not Path(f"/proc/{victim}").exists(), lambda: "it lives")
    assert launch(lambda group: group.rank(), 2).results == [0, 1]
    assert leftovers.zygote() is keeper
    leftovers.assert_only_standby()


def test_a_stopped_zygote_is_replaced_unseen_and_its_ranks_end():
    launch(lambda group: None, 2)
    keeper = leftovers.zygote()
    os.kill(keeper.process.pid, signal.SIGSTOP)
    assert_next_launch_is_right_with_another_zygote(keeper)
    leftovers.assert_all_gone(keeper.process.pid, keeper.directory)


def test_a_zygote_stopped_during_a_run_is_named_at_the_timeout():
    def stop_it_and_hang(group):
        os.kill(os.getppid(), signal.SIGSTOP)
        signal.pause()

    launch(lambda group: None, 2)
    keeper = leftovers.zygote()
    with pytest.raises(RankTimeout, match="Somebody has stopped the process that starts ranks"):
        launch(stop_it_and_hang, 2, timeout=0.5)
    assert_next_launch_is_right_with_another_zygote(keeper)
    leftovers.assert_all_gone(keeper.process.pid, keeper.directory)


def test_a_child_in_a_session_of_its_own_ends_with_its_rank(tmp_path):
    def leave_children(folder, group):
        script = f"sleep 1000 & echo $! > {folder}/grandchild; echo $$ > {folder}/child; wait"
        subprocess.Popen(["sh", "-c", script], start_new_session=True)
        daemon = f"setsid sh -c 'echo $$ > {folder}/daemon; exec sleep 1000' &"
        subprocess.run(["sh", "-c", daemon])  # its parent ends at once
        names = ("child", "grandchild", "daemon")
        files = [Path(f"{folder}/{name}") for name in names]
        leftovers.wait_until(
            lambda: all(file.exists() and file.read_text() for file in files), lambda: "slow"
        )
        pids = [int(file.read_text()) for file in files]
        assert all(psutil.pid_exists(pid) for pid in pids)  # a live rank's children stay alive
        return pids

    (pids,) = launch(leave_children, 1, (tmp_path,)).results
    for pid in pids:
        leftovers.wait_until(lambda pid=pid: not psutil.pid_exists(pid), lambda: "it lives")
    assert_next_launch_is_warm_and_right()


# ---- errors name exhausted resources -----------------------------------------------------------


def in_a_process(code: str, *arguments, **options) -> subprocess.CompletedProcess:
    code = "import sys\nfrom mini_dist import RankError, launch\n" + code
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


def test_too_few_descriptors_is_one_error_and_leaves_none_open():
    done = in_a_process("""
import os, resource
launch(lambda group: None, 2)
now = len(os.listdir("/proc/self/fd"))
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
for room in range(1, 60, 4):
    resource.setrlimit(resource.RLIMIT_NOFILE, (now + room, most))
    try:
        results = launch(lambda group: group.rank(), 16).results
        assert room > 40 and results == list(range(16)), (room, results)
    except RankError as error:
        assert "could not run 16 ranks: [Errno 24] Too many open files" in str(error), error
        assert "ulimit -n" in str(error)
resource.setrlimit(resource.RLIMIT_NOFILE, (now + 100, most))
assert launch(lambda group: group.rank(), 2).results == [0, 1]
assert len(os.listdir("/proc/self/fd")) <= now + 4, os.listdir("/proc/self/fd")
""")
    assert done.returncode == 0, done.stderr


PIDS = Path("/sys/fs/cgroup/pids")
can_limit_processes = pytest.mark.skipif(
    not os.access(PIDS, os.W_OK) or os.getuid() != 0, reason="needs its own pids cgroup"
)


@can_limit_processes
@pytest.mark.parametrize("most", [3, 9, 16])
def test_a_container_that_allows_few_processes_is_named(most):
    """Whether a fork or a native thread is refused, the error has the same sentence."""
    group = PIDS / f"mini_dist-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "pids.max").write_text(str(most))
        done = in_a_process(
            f"""
open("{group}/cgroup.procs", "w").write("0")
try:
    launch(lambda group: None, 8)
except RankError as error:
    print(error)
""",
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        assert "could not" in done.stdout or "was killed" in done.stdout, done.stderr
        assert f"This container may have {most} processes and threads" in done.stdout
    finally:
        leftovers.wait_until(lambda: (group / "pids.current").read_text() == "0\n", lambda: "busy")
        group.rmdir()


FULL = """
import os, subprocess
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=34m", "tmpfs", "/dev/shm"], check=True)
when = sys.argv[1]
def fill(group):
    with open("/dev/shm/too-much", "wb") as file:
        try:
            while True:
                file.write(bytes(1 << 20))
        except OSError:
            pass
    if group.rank() == 0 and when == "mapped":
        import mmap
        with open("/dev/shm/mapped", "wb+") as file:
            file.truncate(1 << 20)
            mmap.mmap(file.fileno(), 1 << 20)[:] = bytes(1 << 20)
launch(lambda group: None, 2)
try:
    launch(fill, 2)
    launch(lambda group: None, 8)
except RankError as error:
    print(error)
os.unlink("/dev/shm/too-much")
assert launch(lambda group: group.rank(), 2).results == [0, 1]
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")
@pytest.mark.parametrize("when", ["before", "mapped"])
def test_a_full_dev_shm_is_named_with_its_size_and_who_fills_it(when):
    command = ["unshare", "-m", sys.executable, "-c"]
    code = "import sys\nfrom mini_dist import RankError, launch\n" + FULL
    done = subprocess.run([*command, code, when], cwd=ROOT, capture_output=True, text=True)
    if "unshare" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "/dev/shm is full: 35.7 MB in all; the largest there: /dev/shm/too-much" in done.stdout
    assert "of root" in done.stdout
    assert ("was killed by SIGBUS" in done.stdout) == (when == "mapped")
    assert "No space left" in done.stdout or when == "mapped"


def test_a_working_directory_that_is_gone_is_named():
    done = in_a_process("""
import os, tempfile
gone = tempfile.mkdtemp()
os.chdir(gone)
def removes_it(group):
    os.rmdir(gone)
    raise ValueError("on purpose")
for number in range(2):
    try:
        launch(removes_it, 1)
    except RuntimeError as error:
        print(error)
os.chdir("/")
assert launch(lambda group: group.rank(), 2).results == [0, 1]
""")
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 1 raised ValueError: on purpose" in done.stdout
    assert "the working directory of this process has been removed" in done.stdout


# ---- impossible calls are refused before anything starts -----------------------------------------


@pytest.mark.parametrize(
    ("world_size", "error", "said"),
    [
        (0, ValueError, "world_size must be at least 1, not 0"),
        (-1, ValueError, "world_size must be at least 1, not -1"),
        (2.5, TypeError, "world_size=2.5 is not a whole number"),
        (True, TypeError, "world_size=True is not a whole number"),
        ("4", TypeError, "world_size='4' is not a whole number"),
        (None, TypeError, "world_size=None is not a whole number"),
        (10**400, ValueError, "world_size=a number of 1329 bits is too many for this machine"),
        (1000, ValueError, r"world_size=1000 is too many for this machine: .* Use \d+ or fewer"),
    ],
)
def test_an_impossible_world_size_is_refused(world_size, error, said):
    with pytest.raises(error, match=said):
        launch(lambda group: None, world_size)


def takes_nothing():
    pass


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (dict(fn=3), TypeError, "fn must be a function to call on each rank, not 3"),
        (dict(args=3), TypeError, r"args must be a tuple .* did you mean \(3,\)"),
        (dict(args="ab"), TypeError, r"args must be a tuple .* did you mean \('ab',\)"),
        (dict(kwargs=[1]), TypeError, r"kwargs must be a dict .* not \[1\]"),
        (dict(timeout=0), ValueError, "timeout must be a number of seconds above 0, not 0"),
        (dict(timeout=float("nan")), TypeError, "timeout=nan is not a finite number"),
        (dict(timeout="5"), TypeError, "timeout='5' is not a finite number"),
        (dict(seed="a"), TypeError, "seed='a' is not a whole number"),
        (
            dict(seed=2**64),
            ValueError,
            "seed must be from 0 to 2\\*\\*64 .* not 18446744073709551616",
        ),
        (dict(seed=-1), ValueError, "seed must be from 0 .* not -1"),
        (dict(seed=10**5000), ValueError, "seed must be from 0 .* not a number of 16610 bits"),
        (dict(start="thread"), ValueError, 'start must be "fork" or "spawn", not \'thread\''),
        (dict(fn=takes_nothing), TypeError, r"takes_nothing\(\) cannot take .*\(group\)"),
        (dict(args=(1,)), TypeError, r"\(args\[0\], group\): too many positional arguments"),
        (dict(kwargs={"lr": 1}), TypeError, "unexpected keyword argument 'lr'"),
    ],
)
def test_an_impossible_call_is_refused(arguments, error, said):
    with pytest.raises(error, match=said):
        launch(**{"fn": lambda group: None, **arguments})


def test_an_argument_that_cannot_travel_is_named_with_the_reason(notebook):
    said = "the function or an argument cannot be sent to another process: cannot pickle"
    with pytest.raises(TypeError, match=said + " '_thread.lock' object"):
        launch(lambda lock, group: None, 2, (threading.Lock(),))
    lock = threading.Lock()
    with pytest.raises(TypeError, match=said):
        launch(lambda group: lock, 2)
    cell = notebook.try_to_run(
        "lock = threading.Lock()\ndef work(group):\n    return lock\nlaunch(work, 2)"
    )
    assert said in cell.error
    assert "It is the variable 'lock', a _thread.lock. It belongs to one process" in cell.error
    for body in ("%time 1 + 1", "!ls", "get_ipython().user_ns"):
        cell = notebook.try_to_run(f"def work(group):\n    {body}\nlaunch(work, 2)")
        assert "the variable 'get_ipython'" in cell.error
        assert "%magic and !command lines" in cell.error and "subprocess.run" in cell.error
    cell = notebook.try_to_run(
        "import ipywidgets\nslider = ipywidgets.IntSlider()\n"
        "def helper(): return slider.value\nlaunch(lambda group: helper(), 2)"
    )
    assert "the variable 'slider' of the variable 'helper'" in cell.error
    assert "A widget lives in the notebook: pass its value." in cell.error
    notebook.run(f"{NEXT}\nassert_next_launch_is_warm_and_right()")


def test_a_result_that_cannot_be_rebuilt_here_is_named():
    def returns_an_exception_of_two_arguments(group):
        class Awkward(Exception):
            def __init__(self, a, b):
                super().__init__(a)

        return Awkward(1, 2)

    with pytest.raises(TypeError, match="the result of rank 0 cannot be rebuilt in this process"):
        launch(returns_an_exception_of_two_arguments, 2)
    assert_next_launch_is_warm_and_right()


def test_the_error_carries_rank_failures_and_outputs():
    def fails_on_2(group):
        print("hello from", group.rank())
        if group.rank() == 2:
            raise LookupError("on purpose")

    with pytest.raises(RankError) as caught:
        launch(fails_on_2, 3, quiet=True)
    error = caught.value
    assert error.rank == 2
    assert {rank: failure.type for rank, failure in error.failures.items()} == {2: "LookupError"}
    assert error.outputs == [f"hello from {rank}\n" for rank in range(3)]


def test_of_several_failures_the_cause_is_named_not_the_consequence():
    """The ranks that lose their neighbor raise too, some of them earlier."""

    def one_dies_others_notice(group):
        import torch.distributed as dist

        if group.rank() == 2:
            raise ArithmeticError("the cause")
        try:
            dist.all_reduce(torch.ones(2), group=group)
        finally:
            pass

    for _ in range(3):
        with pytest.raises(RankError, match="rank 2 of 4 raised ArithmeticError: the cause"):
            launch(one_dies_others_notice, 4, quiet=True)


def test_the_odd_one_out_is_marked():
    def differs(group):
        import torch.distributed as dist

        dist.all_reduce(torch.ones(3 if group.rank() == 1 else 2), group=group)

    with pytest.raises(RankError) as caught:
        launch(differs, 4, quiet=True)
    marked = [line for line in str(caught.value).splitlines() if "odd one out" in line]
    assert len(marked) == 1 and marked[0].strip().startswith("rank 1")


# ---- no false alarms --------------------------------------------------------------------------

FOUR_RANKS = {
    sound.a_server_that_is_asked_late_and_answers_late,
    sound.exchange_in_a_batch,
    sound.root_goes_on_before_all_have_received,
    sound.subgroups_with_work_of_their_own,
    sound.objects_of_other_sizes,
    sound.all_to_all_with_uneven_splits,
    sound.torch_ddp,
    sound.torch_fsdp2,
    sound.torch_dtensor,
    sound.torch_pipelining,
}
SOUND = [
    program
    for program in vars(sound).values()
    if inspect.isfunction(program) and "group" in inspect.signature(program).parameters
]


@pytest.mark.parametrize("program", SOUND, ids=lambda program: program.__name__)
def test_a_sound_program_raises_no_alarm(program):
    launch(program, 4 if program in FOUR_RANKS else 2, quiet=True, timeout=PATIENCE)


# ---- many faults in a row ----------------------------------------------------------------------


def test_faults_in_a_row_leave_nothing_behind(request):
    """Run ten faults, or a hundred with --long."""
    dice = random.Random(0)
    count = 100 if request.config.getoption("--long") else 10
    for _ in range(count):
        fault, size = dice.choice(list(SAID)), dice.choice([2, 2, 2, 3, 4])
        with pytest.raises(RankError):
            launch(only_two(fault), size, quiet=True, timeout=PATIENCE)
    handles = len(os.listdir("/proc/self/fd"))
    assert_next_launch_is_warm_and_right()
    with pytest.raises(RankError):
        launch(faults.raises, 2, quiet=True)
    launch(lambda group: None, 2)
    assert len(os.listdir("/proc/self/fd")) <= handles


def only_two(fault):
    """Run the fault on the two ranks it is written for; any other ranks idle until the end."""

    def work(group):
        import torch.distributed as dist

        pair = dist.new_group([0, 1])
        return fault(pair) if group.rank() < 2 else faults.hangs(group)

    return work


# ---- ranks that sabotage their launch --------------------------------------------------------


def writes_junk(junk, group):
    """Write junk into every Unix socket of rank 1, one of which leads to the parent."""
    import socket

    if group.rank() == 1:
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                with socket.socket(fileno=os.dup(fd)) as any_socket:
                    if any_socket.family == socket.AF_UNIX:
                        any_socket.sendall(junk)
            except OSError:
                pass
        time.sleep(1)
    return group.rank()


def number(count: int) -> bytes:
    return count.to_bytes(8, "little", signed=True)


@pytest.mark.parametrize(
    "junk",
    [
        pytest.param(number(-1) * 8, id="a negative count"),
        pytest.param(number(1) + number(10) + b"no pickle.", id="no pickle"),
        pytest.param(number(1) + number(2**60), id="more than memory holds"),
        pytest.param(number(1) + number(5) + b"\x80\x04K\x05.", id="something else"),
    ],
)
def test_junk_on_a_ranks_own_socket_is_that_ranks_failure_and_costs_no_zygote(junk):
    zygote = zygote_pid()
    with pytest.raises(RankError, match="something in this rank has written to its socket") as told:
        launch(writes_junk, 2, (junk,))
    assert told.value.rank == 1
    assert launch(rank_of, 2).results == [0, 1] and zygote_pid() == zygote


def rank_of(group):
    return group.rank()


def zygote_pid() -> int:
    from mini_dist.ranks.launch import ZYGOTES

    launch(rank_of, 2)
    return ZYGOTES["fork", False].process.pid


def removes_its_folder(levels, group):
    import shutil

    if group.rank() == 0:
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        paths = [os.readlink(link) for link in links if os.path.lexists(link)]
        (stack,) = [path for path in paths if path.endswith("/stack-0")]
        shutil.rmtree(Path(stack).parents[levels])


@pytest.mark.parametrize("levels", [0, 1], ids=["of its world", "of all worlds"])
def test_a_rank_that_removes_its_folder_does_not_fail_the_next_launch(levels):
    launch(removes_its_folder, 2, (levels,))
    assert launch(rank_of, 2).results == [0, 1]


def test_launch_in_a_signal_handler_during_a_launch_is_refused_at_once():
    """Otherwise it would wait forever for the launch that it interrupts."""
    told = []

    def handler(*_):
        try:
            launch(rank_of, 2)
        except RuntimeError as error:
            told.append(str(error))

    launch(rank_of, 2)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        launch(lambda group: time.sleep(1), 2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(told) == 1 and "this thread waits in another launch" in told[0]
    assert launch(rank_of, 2).results == [0, 1]


def test_a_limit_on_processor_time_is_named(monkeypatch):
    from mini_dist.ranks import diagnose, limits

    told = diagnose.describe_status(-signal.SIGXCPU)
    assert "SIGXCPU (it had used all the processor time that ulimit -t allows" in told
    assert "ulimit -t" not in diagnose.describe_status(-signal.SIGKILL)
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (60, 90))
    assert "allows, here 60 s for each process)" in diagnose.describe_status(-signal.SIGXCPU)
    assert "or by ulimit -t, here 60 s" in diagnose.describe_status(-signal.SIGKILL)


def returns_after_three(group):
    from mini_dist import all_reduce

    for _ in range(3 if group.rank() == 1 else 4):
        all_reduce(torch.ones(2), group)


def test_a_rank_that_has_returned_says_how_many_collectives_it_made_ours_included():
    with pytest.raises(RankError, match="rank 1 has returned, after 3 collectives"):
        launch(returns_after_three, 2)


def sleeps(communicates, group):
    if communicates:
        torch.distributed.all_reduce(torch.ones(1), group=group)
    time.sleep(60)


@pytest.mark.parametrize("communicates", [True, False])
def test_a_timeout_knows_for_how_long_no_rank_has_begun_an_operation(communicates):
    """If the ranks have begun no operation, it says 0, because they may be computing."""
    with pytest.raises(RankTimeout) as caught:
        launch(sleeps, 2, (communicates,), timeout=3)
    assert (caught.value.idle > 0) == communicates and caught.value.idle < 3.5
