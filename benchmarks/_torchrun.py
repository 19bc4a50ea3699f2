"""Run their code as its users start it: under torchrun, in processes without mini_dist.

In our own processes their code also gets what `launch` gives to ranks: freed memory is kept, and a
recorder writes down every call. Here it gets neither. The processes wait for a signal from one of
our ranks, take one step, and report how long it took, so both sides still take turns in one run.
"""

import os
import pickle
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TIMES = struct.Struct("<dd")  # seconds, CPU seconds
STEP, END = b"step", b"end"


@contextmanager
def ranks(make: Callable, args: tuple, world_size: int) -> Iterator[str]:
    """Start ranks of torchrun that hold `step, _ = make(*args, group)`; pass their folder to
    `step`.

    make: a function of a benchmark's file, so that it can be imported by its name.
    """
    file = sys.modules[make.__module__].__file__
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job").write_bytes(pickle.dumps((Path(file).stem, make.__name__, args)))
        for rank in range(world_size):
            os.mkfifo(f"{folder}/go-{rank}")
            os.mkfifo(f"{folder}/done-{rank}")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        process = subprocess.Popen(
            [*torchrun, f"--nproc-per-node={world_size}", __file__, folder],
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # torchrun's own default
        )
        try:
            yield folder
        except BaseException:
            process.terminate()
            raise
        for rank in range(world_size):
            tell(folder, rank, END)
        process.wait()


def tell(folder: str, rank: int, what: bytes) -> None:
    with open(f"{folder}/go-{rank}", "wb") as go:  # opens when the rank reads
        go.write(what)


def step(folder: str, rank: int) -> tuple[float, float]:
    """Let that rank take a step when the other ranks do; return its seconds and CPU seconds."""
    tell(folder, rank, STEP)
    with open(f"{folder}/done-{rank}", "rb") as done:
        return TIMES.unpack(done.read())


def serve(folder: str) -> None:
    """Run in each process of torchrun: take a step on every request."""
    import torch.distributed as dist

    module, name, args = pickle.loads(Path(folder, "job").read_bytes())
    dist.init_process_group("gloo")
    take_a_step, _ = getattr(__import__(module), name)(*args, dist.group.WORLD)
    rank = dist.get_rank()
    while True:
        with open(f"{folder}/go-{rank}", "rb") as go:
            if go.read() == END:
                return dist.destroy_process_group()
        dist.barrier()
        start = time.perf_counter(), time.process_time()
        take_a_step()
        took = time.perf_counter() - start[0], time.process_time() - start[1]
        with open(f"{folder}/done-{rank}", "wb") as done:
            done.write(TIMES.pack(*took))


if __name__ == "__main__":
    serve(sys.argv[1])
