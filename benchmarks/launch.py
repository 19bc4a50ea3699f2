"""Compare launch with torch's and accelerate's launchers, in the cells of a real notebook kernel.

    python benchmarks/launch.py [--json FILE] [--long]

Every launcher runs the same function, defined in the notebook: an all-reduce of one number. The
time is the time of the call in the cell. The first five rows compare with a stated number of
milliseconds. "By hand" leaves at least 0.3 s between cells, as a learner does. "at once" is Run
All, where a launch finds the next ranks still starting. A first call is in the cell right after the
import. The row "4 ranks on 2 hosts" compares launch with hosts (Linux; lesson 26) and launch
without, to show how much longer it takes to make the hosts. It has no bar. Only this file needs
accelerate: pip install -e '.[bench]'.
"""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from _form import Case, main
from jupyter_client.manager import start_new_kernel

ROOT = Path(__file__).resolve().parent.parent
FIRST, LATER_4, LATER_8 = 2500, 50, 120  # ms, as promised to learners
PAUSE = 0.3  # seconds
LIMIT = 40  # seconds

FUNCTION = """
def add_up(group=None):
    import torch, torch.distributed as dist
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()
"""

# Each way: the code before its first call, and the call for n ranks. Without a rendezvous over
# loopback and one process group each, the other launchers would not run the same function.
OURS = "from mini_dist import launch", "launch(add_up, n)"
ON_HOSTS = (
    """
    from mini_dist import Hosts, launch
    two = Hosts(2, uplink="200 Mbit/s")
    """,
    "launch(add_up, n, hosts=two)",
)
SPAWN = (
    """
    import cloudpickle, torch.multiprocessing
    from their_ranks import join_and_call
    """,
    "torch.multiprocessing.spawn(join_and_call, (cloudpickle.dumps(add_up), n, new_store()), n)",
)
TORCHRUN = (
    """
    import cloudpickle, subprocess, sys
    def torchrun(n):
        open("blob", "wb").write(cloudpickle.dumps(add_up))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, f"--nproc-per-node={n}", "their_ranks.py"]
        subprocess.run(command, check=True, capture_output=True)
    """,
    "torchrun(n)",
)
ACCELERATE = (
    """
    import socket
    from accelerate import notebook_launcher
    from their_ranks import join_by_environment
    def joined():
        join_by_environment()
        add_up()
    def accelerate(n):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])  # free, a moment ago
        notebook_launcher(joined, (), num_processes=n, use_port=port)
    """,
    "accelerate(n)",
)

THEIR_RANKS = """
import os, sys, cloudpickle
import torch.distributed as dist

def join_and_call(rank, blob, n, store):
    dist.init_process_group("gloo", store=dist.FileStore(store, n), rank=rank, world_size=n)
    cloudpickle.loads(blob)()

def join_by_environment():
    dist.init_process_group("gloo")

if __name__ == "__main__":
    join_by_environment()
    cloudpickle.loads(open("blob", "rb").read())()
    dist.destroy_process_group()  # Without this some runs abort at the end.
"""

TIMED = """
import time, uuid
def new_store(): return f"store-{uuid.uuid4()}"
def timed(call, n):
    began = time.perf_counter()
    exec(call, {**globals(), "n": n})
    print("\\n", (time.perf_counter() - began) * 1e3)
"""


class Notebook:
    """A notebook kernel that uses one way to launch."""

    def __init__(self, way):
        self.way = way
        self.start()

    def start(self) -> None:
        setup, self.call = self.way
        self.directory = tempfile.TemporaryDirectory(prefix="benchmark-")
        Path(self.directory.name, "their_ranks.py").write_text(THEIR_RANKS)
        path = os.pathsep.join([str(ROOT), self.directory.name])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self.manager, self.client = start_new_kernel(
            cwd=self.directory.name, env=environment, stderr=subprocess.DEVNULL
        )
        self.run(TIMED)
        self.run(FUNCTION)
        self.run(textwrap.dedent(setup))

    def run(self, source: str, limit: float = 120) -> str:
        printed = []

        def hear(message):
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])
            elif message["msg_type"] == "error":
                raise RuntimeError("\n".join(message["content"]["traceback"]))

        self.client.execute_interactive(source, output_hook=hear, timeout=limit)
        return "".join(printed)

    def launch(self, n: int) -> float:
        """Return the milliseconds of one launch. A launch that hangs, as a fork of a kernel may,
        counts LIMIT."""
        try:
            return float(self.run(f"timed({self.call!r}, {n})", LIMIT).split()[-1])
        except TimeoutError:
            print(f"hangs: {self.call} with n={n}; counted as {LIMIT} s", file=sys.stderr)
            self.close()
            self.start()
            return LIMIT * 1e3

    def close(self) -> None:
        self.client.stop_channels()
        with contextlib.suppress(ProcessLookupError):  # This also ends the ranks that hang.
            os.killpg(self.manager.provisioner.pgid, signal.SIGKILL)
        self.manager.shutdown_kernel(now=True)
        self.directory.cleanup()


def first_call(n):
    def run():
        notebook = Notebook(OURS)
        try:
            return notebook.launch(n)
        finally:
            notebook.close()

    return run


def cases(long):
    yield Case("4 ranks, first call", first_call(4), FIRST, 1, repeats=5 if long else 3, warmup=0)

    notebooks = []

    def way(which):
        notebooks.append(Notebook(which))
        return notebooks[-1].launch

    def after_a_pause(launch, n):
        def run():
            time.sleep(PAUSE)
            return launch(n)

        return run

    try:
        ours = way(OURS)
        often = 30 if long else 10
        for n, bar in (4, LATER_4), (8, LATER_8):
            by_hand = after_a_pause(ours, n)
            yield Case(f"{n} ranks, later, by hand", by_hand, bar, 1, repeats=often, warmup=3)
            at_once = lambda n=n: ours(n)  # noqa: E731
            yield Case(f"{n} ranks, later, at once", at_once, bar, 1, repeats=often, warmup=3)
        ours_by_hand = after_a_pause(ours, 4)
        on_hosts = after_a_pause(way(ON_HOSTS), 4)
        yield Case("4 ranks on 2 hosts", on_hosts, ours_by_hand, repeats=often, warmup=3)
        few = 3 if long else 1
        others = [("torch.multiprocessing.spawn", SPAWN, few, 0), ("torchrun", TORCHRUN, few, 0)]
        if importlib.util.find_spec("accelerate"):
            others.append(("accelerate.notebook_launcher", ACCELERATE, often // 2, 1))
        else:
            print("no row for accelerate, which is not installed: pip install -e '.[bench]'")
        for name, which, repeats, warmup in others:
            theirs = after_a_pause(way(which), 4)
            yield Case(
                f"4 ranks, against {name}", ours_by_hand, theirs, 1, repeats=repeats, warmup=warmup
            )
    finally:
        for notebook in notebooks:
            notebook.close()


if __name__ == "__main__":
    sys.exit(main(cases, __doc__))
