"""Test launch: a learner's function on real ranks, from a script and from notebook cells."""

import contextlib
import functools
import importlib
import multiprocessing
import os
import py_compile
import random
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import mini_dist
from mini_dist import RankError, launch
from mini_dist.ranks.launch import ZYGOTES
from tests.ranks import leftovers
from tests.ranks.notebook import Notebook

ROOT = Path(__file__).resolve().parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has forked ranks and /proc")


def in_a_script(function):
    """Pickle a function of this file by value, so that its ranks need not import this file."""
    function.__module__ = "__main__"
    return function


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    with Notebook(tmp_path_factory.mktemp("notebook")) as notebook:
        notebook.run("import torch, torch.distributed as dist\nfrom mini_dist import launch")
        yield notebook


# ---- results ---------------------------------------------------------------------------------


def test_results_are_in_rank_order_whoever_is_done_first():
    @in_a_script
    def last_rank_first(group):
        import torch.distributed as dist

        rank, size = group.rank(), group.size()
        token = torch.zeros(1)
        if rank < size - 1:
            dist.recv(token, rank + 1, group=group)
        if rank > 0:
            dist.send(token, rank - 1, group=group)
        return rank * 10

    assert launch(last_rank_first, world_size=4).results == [0, 10, 20, 30]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_any_number_of_ranks_meets_in_the_group(size):
    @in_a_script
    def meet(group):
        import torch.distributed as dist

        total = torch.tensor(float(group.rank()))
        dist.all_reduce(total, group=group)
        return group.rank(), group.size(), total.item()

    expected = [(rank, size, size * (size - 1) / 2) for rank in range(size)]
    assert launch(meet, world_size=size).results == expected


def test_the_group_is_the_last_positional_argument():
    run = launch(lambda a, b, group, *, c: (a, b, c, group.rank()), 2, (1, 2), {"c": 3})
    assert run.results == [(1, 2, 3, 0), (1, 2, 3, 1)]


def test_a_decorator_may_add_an_argument():
    def with_a_diary(fn):
        return functools.wraps(fn)(lambda group: fn(group, []))

    run = launch(with_a_diary(lambda group, diary: diary), 2)
    assert run.results == [[], []]


def test_tensors_and_modules_travel_as_arguments_and_results():
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    module[0].bias = module[1].bias  # one parameter under two names, as in a tied embedding
    x = torch.randn(4, 3)

    def use(module, x, group):
        assert module[0].bias is module[1].bias
        module.eval()
        return module, module(x) + group.rank()

    run = launch(use, 2, (module, x))
    module.eval()
    for rank, (returned, y) in enumerate(run.results):
        torch.testing.assert_close(y, module(x) + rank)  # the rank uses one thread, we use more
        assert returned[0].bias is returned[1].bias
        assert all(map(torch.equal, returned.state_dict().values(), module.state_dict().values()))
    assert run.outputs == ["", ""]  # no warning about the ledger's hooks on the outputs


def test_dtypes_and_views_survive_the_way():
    tensors = [
        *(torch.arange(6).reshape(2, 3).t(), torch.ones(2, dtype=torch.bfloat16)),
        *(torch.tensor(1 + 2j), torch.ones(0, 3), torch.tensor(True), numpy.float32(2)),
    ]
    (back,) = launch(lambda tensors, group: tensors, 1, (tensors,)).results
    for one, other in zip(tensors, back):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
        assert one.dtype == other.dtype and one.shape == other.shape


def test_a_result_of_200_megabytes_arrives_whole():
    (big,) = launch(lambda group: torch.arange(25_000_000), 1).results
    assert torch.equal(big, torch.arange(25_000_000))


def test_an_argument_larger_than_any_pipe_arrives_whole():
    x = torch.arange(5_000_000)
    assert launch(lambda x, group: int(x.sum()), 2, (x,)).results == [int(x.sum())] * 2


def test_torch_ops_may_be_mentioned():
    add, packet, namespace = torch.ops.aten.add.Tensor, torch.ops.aten.mul, torch.ops.aten

    def use(group):
        x = torch.ones(2)
        return torch.ops.aten.neg(namespace.relu(packet(add(x, x), x))).tolist()

    assert launch(use, 1).results == [[-2.0, -2.0]]


def test_closures_lambdas_partials_and_callable_objects():
    import functools

    class Scale:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, group):
            return self.factor * group.rank()

    Scale.__module__ = "__main__"
    factor = 3
    ways = [
        lambda group: factor * group.rank(),
        functools.partial(lambda factor, group: factor * group.rank(), 3),
        Scale(3),
        Scale(3).__call__,
    ]
    for way in ways:
        assert launch(way, 2).results == [0, 3]


def test_a_function_of_a_cell_that_caches_travels_also_where_it_calls_itself():
    cell = {"__name__": "__main__"}
    exec(
        """
from functools import cache, lru_cache

@lru_cache(maxsize=7)
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

@cache
def use(group):
    return fibonacci(group.rank() + 10), fibonacci.cache_parameters()["maxsize"]
""",
        cell,
    )
    assert launch(cell["use"], 2).results == [(55, 7), (89, 7)]


# ---- printing and display -----------------------------------------------------------------------


@in_a_script
def print_in_every_way(group):
    """Print parts of lines from Python, native code and a child process, on all ranks at once."""
    import ctypes
    import subprocess

    import torch.distributed as dist

    letter = "abcd"[group.rank()]
    libc = ctypes.CDLL(None)
    for _ in range(20):
        dist.barrier(group=group)
        for _ in range(10):
            print(letter, end="")
        print()
        os.write(1, f"{letter * 10}\n".encode())
        libc.printf(f"{letter * 10}\n".encode())
        libc.fflush(None)
        print(letter * 10, file=sys.stderr)
    subprocess.run(["sh", "-c", f"echo {letter * 10}; echo {letter * 10} >&2"])


def test_prints_are_captured_per_rank_and_shown_grouped(capfd):
    run = launch(print_in_every_way, 4)
    for letter, output in zip("abcd", run.outputs):
        assert output == (letter * 10 + "\n") * (20 * 4 + 2)
    shown = capfd.readouterr().out
    expected = [f"[rank {r}] {'abcd'[r] * 10}" for r in range(4) for _ in range(82)]
    assert shown.splitlines() == expected


def test_quiet_keeps_the_prints_and_shows_nothing(capfd):
    assert launch(lambda group: print("hello"), 2, quiet=True).outputs == ["hello\n", "hello\n"]
    assert capfd.readouterr().out == ""


def test_a_rank_that_prints_megabytes_is_cut_with_a_word_and_stalls_nobody():
    run = launch(lambda group: print("x" * 3_000_000), 2, quiet=True)
    for output in run.outputs:
        body, _, note = output.partition("\n")
        assert set(body) == {"x"} and 500_000 < len(body) < 3_000_000
        (dropped,) = re.findall(r"\[\.\.\. (\d+) more bytes\]", note)
        assert len(body) + int(dropped) == 3_000_001  # the newline too


def test_output_that_is_no_text_is_shown_all_the_same():
    (output,) = launch(lambda group: os.write(1, b"\xff ok \xe2\x98\x83\n"), 1, quiet=True).outputs
    assert output == "\ufffd ok \u2603\n"


def test_a_terminal_of_few_characters_costs_no_result():
    code = """
from mini_dist import launch
print(launch(lambda group: print("\\u2603 \\ud800"), 2).outputs == ["\\u2603 \\\\ud800\\n"] * 2)
"""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment["PYTHONIOENCODING"] = "ascii"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        r"[rank 0] \u2603 \ud800",
        r"[rank 1] \u2603 \ud800",
        "True",
    ]


def test_what_a_rank_displays_is_shown_as_text_and_said_to_be(notebook):
    cell = notebook.run("""
class Rich:
    def _repr_html_(self): return "<b>rich</b>"
    def __repr__(self): return "in words"
launch(lambda group: display(Rich(), 3) if group.rank() else display("hello"), 2)
""")
    assert cell.printed.splitlines() == [
        "[rank 0] hello",
        "[rank 1] in words",
        "[rank 1] 3",
        "[rank 1] (as text: a rank has no page to draw on. Return it, and display it in the cell.)",
    ]


def test_a_run_reads_as_a_line_a_rank():
    run = launch(lambda group: [torch.ones(2), torch.ones(100, 3)][group.rank()], 2)
    title, *lines = repr(run).splitlines()
    assert title == "2 ranks on cpu, nothing sent" or torch.cuda.device_count() > 1
    assert [line.split()[:2] for line in lines] == [["rank", "0"], ["rank", "1"]]
    assert "tensor([1., 1.])" in lines[0]
    assert "[100, 3]" in lines[1] and len(lines[1]) < 80  # its shape, not its 300 numbers


def test_the_html_is_a_row_a_rank_and_escapes_what_ranks_return():
    html = launch(lambda group: f"<script>{group.rank()}</script>", 2)._repr_html_()
    assert html.count("<tr>") == 3
    assert "<script>" not in html and "&lt;script&gt;1" in html


def test_a_result_with_a_broken_repr_can_still_be_looked_at():
    class Broken:
        def __repr__(self):
            raise ValueError

    Broken.__module__ = "__main__"
    run = launch(lambda group: Broken(), 1)
    assert "rank 0" in repr(run) and "Broken" in run._repr_html_()


# ---- what ranks see of their parent ------------------------------------------------------------


def test_numbers_of_numpy_are_numbers():
    options = dict(world_size=numpy.int64(2), seed=numpy.int32(7), timeout=numpy.float32(60))
    assert launch(lambda group: torch.initial_seed(), **options).results == [7, 8]


def test_rank_r_starts_from_seed_plus_r_in_every_generator():
    def draw(group):
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    def expected(seed):
        random.seed(seed), numpy.random.seed(seed)
        generator = torch.Generator().manual_seed(seed)
        return random.random(), numpy.random.rand(), torch.rand(1, generator=generator).item()

    for seed in (0, 7):
        assert launch(draw, 3, seed=seed).results == [expected(seed + rank) for rank in range(3)]


def test_ranks_are_fresh_at_every_call():
    def count(group):
        torch.seen = getattr(torch, "seen", 0) + 1
        return torch.seen, os.getpid()

    first, second = launch(count, 2).results, launch(count, 2).results
    assert [seen for seen, _ in first + second] == [1] * 4
    assert len({pid for _, pid in first + second}) == 4


def test_ranks_see_directory_path_and_environment_as_they_are_now(tmp_path, monkeypatch):
    launch(lambda group: None, 2)  # now a standby world predates the changes below
    (tmp_path / "notes.txt").write_text("relative")
    (tmp_path / "learners_module.py").write_text("def answer(): return 42")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LEARNERS_VARIABLE", "set")
    monkeypatch.delenv("HOME", raising=False)

    @in_a_script
    def look(group):
        import learners_module

        variable = os.environ["LEARNERS_VARIABLE"]
        return open("notes.txt").read(), learners_module.answer(), variable, "HOME" in os.environ

    assert launch(look, 2).results == [("relative", 42, "set", False)] * 2


def test_each_rank_computes_with_one_thread():
    def threads(group):
        before = len(os.listdir("/proc/self/task"))
        torch.randn(500, 500) @ torch.randn(500, 500)
        torch.randn(1_000_000).sum()
        return torch.get_num_threads(), len(os.listdir("/proc/self/task")) - before

    assert launch(threads, 2).results == [(1, 0)] * 2


def test_edits_are_seen_at_the_next_call(tmp_path):
    """Edit a learner's module, one that the zygote loaded after a rank, and one from its start.

    A rank finds the modules already loaded that the rank before it imported.
    """
    copy = tmp_path / "mini_dist"
    shutil.copytree(ROOT / "mini_dist", copy, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "theirs.py").write_text("value = 'old'\n")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        from pathlib import Path
        import mini_dist
        from mini_dist import launch
        from mini_dist.ranks.launch import ZYGOTES

        assert Path(mini_dist.__file__).parent.parent == Path(sys.path[0])
        def look(group):
            import theirs
            was_there = "mini_dist.model.loss" in sys.modules
            import mini_dist.model.loss, mini_dist.ranks.report
            edited = lambda module: hasattr(module, "EDITED_BY_THE_TEST")
            both = edited(mini_dist.model.loss), edited(mini_dist.ranks.report)
            return theirs.value, was_there, *both

        def edit(module):
            with open(sys.modules[module].__file__, "a") as file:
                file.write("\\nEDITED_BY_THE_TEST = 1\\n")

        print(launch(look, 1, quiet=True).results)
        first = ZYGOTES["fork", False].process.pid
        print(launch(look, 1, quiet=True).results)  # a rank that had begun before the other's end
        Path(sys.path[0], "theirs.py").write_text("value = 'newer'\\n")
        print(launch(look, 1, quiet=True).results)
        assert ZYGOTES["fork", False].process.pid == first  # no reason to start another
        edit("mini_dist.model.loss")
        print(launch(look, 1, quiet=True).results)
        assert ZYGOTES["fork", False].process.pid != first
        edit("mini_dist.ranks.report")
        print(launch(look, 1, quiet=True).results)
        """).replace("import mini_dist\n", "import mini_dist, mini_dist.model.loss\n", 1)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "[('old', False, False, False)]",
        "[('old', True, False, False)]",
        "[('newer', True, False, False)]",
        "[('newer', False, True, False)]",
        "[('newer', False, True, True)]",
    ], done.stderr


@linux
def test_ranks_that_share_cores_evenly_stay_where_they_are_put():
    """All threads of a rank stay on its core, gloo's too.

    3 ranks on 2 cores are not pinned, because 2 of them would get half a core each. Nor are 2 ranks
    on 2 cores, because the rest of the machine needs room.
    """
    code = """
import os
two = set(sorted(os.sched_getaffinity(0))[:2])
os.sched_setaffinity(0, two)
from mini_dist import launch
def cores(group):
    group.barrier().wait()
    return [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
for size in (2, 3, 4):
    where = [set(map(frozenset, threads)) for threads in launch(cores, size).results]
    if len(two) == 1 or size != 4:
        assert where == [{frozenset(two)}] * size, where
    else:
        first, second = ({frozenset({core})} for core in sorted(two))
        assert where == [first, second, second, first], where
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_edit_within_the_second_and_of_the_same_length_is_seen(tmp_path, monkeypatch):
    """It is seen even if this process has cached the bytecode of the previous version."""
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "edited_often.py"

    @in_a_script
    def look(group):
        import edited_often

        return edited_often.value

    second = 1_700_000_000
    for value in range(10):
        module.write_text(f"value = {value}\n")
        os.utime(module, ns=(second * 10**9 + value * 10**7,) * 2)  # Python sees no difference
        if value == 0:
            cached = py_compile.compile(str(module))
            os.utime(cached, ns=(second * 10**9 + 1,) * 2)
        assert launch(look, 1).results == [value]


def test_modules_of_a_class_of_their_own_come_along():
    """Pickling a function that names `torch.distributed` and `config` pickles config modules."""
    namespace = {"__name__": "__main__", "torch": torch, "config": {"lr": 1}}
    exec(
        "def work(group):\n"
        "    x = torch.ones(1) * config['lr']\n"
        "    torch.distributed.all_reduce(x, group=group)\n"
        "    torch._dynamo.config, torch._inductor\n"
        "    return x.item()\n",
        namespace,
    )
    importlib.import_module("torch._dynamo.config")
    importlib.import_module("torch._inductor.config")
    assert launch(namespace["work"], 2).results == [2.0, 2.0]


# ---- where launch can be called from ------------------------------------------------------------


def test_launch_from_threads_runs_one_after_the_other():
    results = {}

    def work(name):
        results[name] = launch(lambda group: (name, group.rank()), 2).results

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {name: [(name, 0), (name, 1)] for name in "ab"}


@linux
def test_a_fork_launches_with_a_zygote_of_its_own_and_leaves_its_parents_alone():
    def in_the_fork(queue):
        results = launch(lambda group: group.rank(), 2).results
        keeper = leftovers.zygote()
        queue.put((results, keeper.process.pid, keeper.directory))

    launch(lambda group: None, 2)
    ours = leftovers.zygote().process
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    fork = context.Process(target=in_the_fork, args=(queue,))
    fork.start()
    results, theirs, directory = queue.get()
    fork.join()
    assert results == [0, 1] and theirs != ours.pid
    leftovers.assert_all_gone(theirs, directory)
    assert ours.poll() is None  # although a fork of its parent has come and gone
    assert launch(lambda group: group.rank(), 2).results == [0, 1]
    leftovers.assert_only_standby()


def test_spawn_is_the_same_with_processes_that_start_from_nothing():
    def look(group):
        import torch.distributed as dist

        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        print("hello")
        return group.rank(), total.item(), torch.get_num_threads()

    def fails(group):
        raise ValueError("on purpose")

    try:
        run = launch(look, 2, start="spawn", quiet=True)
        assert run.results == [(0, 2.0, 1), (1, 2.0, 1)]
        assert run.outputs == ["hello\n", "hello\n"]
        if sys.platform == "linux":
            leftovers.assert_only_standby("spawn")
        with pytest.raises(RankError, match="rank 0 of 2 raised ValueError: on purpose"):
            launch(fails, 2, start="spawn")
    finally:
        keeper = ZYGOTES.pop(("spawn", False))
        session, directory = keeper.process.pid, keeper.directory
        keeper.close()
    if sys.platform == "linux":
        leftovers.assert_all_gone(session, directory)


def test_under_torchrun_the_same_script_joins_the_world_that_is_there(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys
        import torch, torch.distributed as dist
        from mini_dist import launch

        def work(x, group):
            total = torch.tensor(float(group.rank() + x))
            dist.all_reduce(total, group=group)
            return group.rank(), total.item(), torch.initial_seed(), os.getpid()

        run = launch(work, world_size=2, args=(10,), seed=5)
        again = launch(work, world_size=2, args=(20,))
        assert [result[:3] for result in run.results] == [(0, 21.0, 5), (1, 21.0, 6)], run.results
        assert again.results[0][1] == 41.0
        rank = dist.get_rank()
        assert run.results[rank][3] == os.getpid()  # this process is the rank
        assert not launch.__wrapped__.__globals__["ZYGOTES"]
        try:
            launch(work, world_size=3, args=(10,))
        except ValueError as error:
            told = str(error)
        sys.stdout.write(f"rank {rank}: {told}\\n")
        sys.stdout.flush()
        dist.destroy_process_group()
        """)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank}: launch(world_size=3) under a torchrun of 2 ranks" in done.stdout


# ---- processes, sockets and GPUs -------------------------------------------------------------


@linux
def test_no_socket_but_on_the_loopback_interface():
    @in_a_script
    def addresses(group):
        """Return the local addresses of this rank's internet sockets while they are in use."""
        import ipaddress
        import socket

        import torch.distributed as dist

        dist.all_reduce(torch.ones(1), group=group)
        dist.barrier(group=dist.new_group(list(range(group.size()))))
        mine = set()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                mine.add(os.readlink(f"/proc/self/fd/{fd}"))
        found = set()
        for table in ("tcp", "tcp6", "udp", "udp6"):
            for line in open(f"/proc/self/net/{table}").read().splitlines()[1:]:
                fields = line.split()
                if f"socket:[{fields[9]}]" in mine:
                    words = bytes.fromhex(fields[1].split(":")[0])
                    packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                    address = ipaddress.ip_address(packed)
                    found.add(str(getattr(address, "ipv4_mapped", None) or address))
        dist.barrier(group=group)
        assert socket.AF_INET  # (the tables above are for AF_INET and AF_INET6)
        return found

    for found in launch(addresses, 3).results:
        assert found and found <= {"127.0.0.1", "::1"}


@linux
def test_the_zygote_has_run_no_operation_and_holds_no_gpu():
    """An operation would start a thread pool; CUDA would start a thread and open devices."""
    launch(lambda group: torch.randn(300, 300).sum().item(), 2)
    zygote = leftovers.zygote().process.pid
    assert len(os.listdir(f"/proc/{zygote}/task")) == 1
    open_files = [os.readlink(fd) for fd in Path(f"/proc/{zygote}/fd").iterdir()]
    assert not [file for file in open_files if "nvidia" in file]


def test_importing_mini_dist_starts_nothing_and_loads_no_torch():
    code = """
import sys, mini_dist.ranks.launch
assert not mini_dist.ranks.launch.ZYGOTES and "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@linux
def test_the_zygote_goes_when_its_process_does(tmp_path):
    code = """
import sys
from mini_dist import launch
from mini_dist.ranks.launch import ZYGOTES
launch(lambda group: None, 2)
keeper = ZYGOTES["fork", False]
print(keeper.process.pid, keeper.directory)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    session, directory = done.stdout.split()
    leftovers.assert_all_gone(int(session), directory)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: this machine has none")
def test_a_gpu_a_rank_means_nccl_and_cuda():
    @in_a_script
    def look(group):
        import torch.distributed as dist

        x = torch.ones(3, device="cuda")
        dist.all_reduce(x, group=group)
        return x, x.device.index, torch.cuda.current_device()

    size = torch.cuda.device_count()
    run = launch(look, size)
    assert repr(run).startswith(f"{size} rank") and "NCCL" in repr(run)
    for rank, (x, index, current) in enumerate(run.results):
        assert x.tolist() == [size] * 3 and index == current == rank
        assert x.device.type == "cpu"  # a result does not start CUDA in the parent


# ---- in the cells of a notebook -----------------------------------------------------------------


def test_everything_a_cell_defines_works_on_ranks(notebook):
    notebook.run("""
class Point:
    def __init__(self, x): self.x = x
class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0))
    def forward(self, x): return torch.ops.aten.mul(self.weight, x)
SCALE = 3
def scaled(x): return SCALE * x
""")
    notebook.run("""
import contextlib, dataclasses, enum
class Colour(enum.Enum):
    RED = 1
@dataclasses.dataclass
class Pair:
    a: Point
    b: Colour
def closure(k):
    return lambda group: Pair(Point(scaled(k) + group.rank()), Colour.RED)
run = launch(closure(2), world_size=2)
""")
    notebook.run("""
assert [r.a.x for r in run.results] == [6, 7]
# they are the notebook's own classes, not copies of the same name
assert all(type(r) is Pair and type(r.a) is Point and r.b is Colour.RED for r in run.results)
module = Twice()
results = launch(lambda m, group: (m, m(torch.tensor(5.0)).item()), 2, (module,)).results
assert [y for _, y in results] == [10.0, 10.0]
assert all(type(m) is Twice and m is not module for m, _ in results)
""")


def test_a_cell_run_again_with_other_definitions_gives_other_results(notebook):
    for value in (1, 2):
        notebook.run(f"def helper(): return {value}")
        notebook.run(f"assert launch(lambda group: helper(), 2).results == [{value}] * 2")


def test_a_notebook_shows_prints_per_rank_and_a_table_of_results(notebook):
    cell = notebook.run("""
def speak(group):
    for i in range(3):
        dist.barrier()
        print("line", i)
    return group.rank()
launch(speak, world_size=2)
""")
    assert cell.printed.splitlines() == [f"[rank {r}] line {i}" for r in (0, 1) for i in range(3)]
    assert cell.result["text/plain"].splitlines()[0] == "2 ranks on cpu, nothing sent"
    assert cell.result["text/html"].count("<tr>") == 3


def test_ranks_see_what_the_notebook_changed_since(notebook):
    notebook.run("""
import os, pathlib, sys
launch(lambda group: None, 2)
os.makedirs("elsewhere", exist_ok=True); os.chdir("elsewhere")
pathlib.Path("note.txt").write_text("here"); pathlib.Path("mine.py").write_text("x = 5")
os.environ["MINE"] = "set"
def look(group):
    import mine
    return open("note.txt").read(), mine.x, os.environ["MINE"]
assert launch(look, 2).results == [("here", 5, "set")] * 2
os.chdir("..")
""")


def test_training_on_ranks_from_a_cell_equals_training_on_one(notebook):
    """The whole course rests on this cell: ranks that average gradients train like one."""
    notebook.run("""
def train(world_size_to_average, group):
    torch.manual_seed(0)
    model, data = torch.nn.Linear(4, 1), torch.randn(8, 4)
    shard = data.chunk(group.size())[group.rank()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(shard).square().mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= group.size()
        optimizer.step()
    return model.weight.detach()
alone = launch(train, 1, (1,)).results[0]
for weight in launch(train, 4, (4,)).results:
    torch.testing.assert_close(weight, alone)
""")


def test_mini_dist_is_on_the_path_of_these_tests():
    assert Path(mini_dist.__file__).parent == ROOT / "mini_dist"
