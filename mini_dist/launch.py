"""Run a function on n ranks: from a notebook cell, from a script, or under torchrun.

    def hello(group):
        return group.rank() * 10

    launch(hello, world_size=4).results  # [0, 10, 20, 30]

How it is done is in `ranks/`: `world.py` (the parent's side), `zygote.py` (who forks the ranks),
`rank.py` (a rank's life), `flight.py` and `diagnose.py` (how a failure is told).
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable

from .ledger import Ledger
from .ranks.diagnose import RankError, RankInterrupt, RankTimeout, explain
from .ranks.rank import Job
from .ranks.report import Run, print_outputs
from .ranks.torchrun import join_torchrun
from .ranks.transport import to_bytes
from .ranks.world import World, Zygote, ZygoteDied, rank_environment

__all__ = ["RankError", "RankInterrupt", "RankTimeout", "Run", "launch"]

RANKS_PER_CORE = 16


def launch(
    fn: Callable,
    world_size: int = 4,
    args: tuple = (),
    kwargs: dict | None = None,
    *,
    timeout: float = 60.0,
    seed: int = 0,
    memory: bool = False,
    start: str | None = None,
    quiet: bool = False,
) -> Run:
    """Call `fn(*args, group, **kwargs)` in `world_size` fresh processes and collect the results.

    `group` is the process group of all ranks. Rank r starts with all random generators seeded
    with `seed + r`. The ranks see the caller's working directory, sys.path and environment; each
    computes with one thread. They use NCCL if there is a GPU for each, else gloo, over loopback.
    Under torchrun the call joins the world that torchrun made instead of making one.

    timeout: seconds until a run that is not done is ended. memory: record bytes held by kind.
    start: "fork" (warm, the default on Linux) or "spawn". quiet: do not show the ranks' prints.

    Raises RankError if a rank fails, RankTimeout after `timeout`, ValueError or TypeError for
    arguments that cannot work.
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function to call on each rank, not {fn!r}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return join_torchrun(fn, world_size, args, kwargs or {}, seed=seed, memory=memory)
    start = start or ("fork" if sys.platform == "linux" else "spawn")
    check_arguments(world_size, args, timeout, start)
    blob = to_bytes((fn, tuple(args), kwargs or {}), "the function or an argument")
    device = "cuda" if count_gpus() >= world_size else "cpu"
    job = Job(blob, seed, memory, os.getcwd(), sys.path, rank_environment())
    with LOCK:
        return run_job(job, world_size, device, timeout, start, quiet)


def run_job(job, world_size, device, timeout, start, quiet) -> Run:
    began = time.perf_counter()
    zygote = get_zygote(start)
    world = zygote.take(world_size, device, patient=any(word in job.blob for word in HEAVY))
    error = None
    try:
        outcome = world.run(job, timeout)
        if outcome != "done":
            error = explain(outcome, world, timeout)
    except KeyboardInterrupt:
        error = explain("interrupt", world, timeout)
    # Ranks that are done need no waiting for, unless the next ones want the same GPU memory.
    world.end(wait=bool(error) or device == "cuda")
    outputs = [rank.text() for rank in world.ranks]
    if not quiet:
        print_outputs(outputs)
    zygote.prepare(world_size, device)
    if error:
        raise error
    seconds = time.perf_counter() - began
    reports = [rank.report for rank in world.ranks]
    results = [pickle.loads(report.result) for report in reports]
    ledger = Ledger.from_ranks([report.ledger for report in reports])
    return Run(results, outputs, ledger, seconds, device)


# A first job that speaks of these is better off waiting a second for the zygote to load torch's
# optimizers and wrappers than loading them in every rank.
HEAVY = (b"optim", b"mini_dist", b"parallel", b"fsdp")
LOCK = threading.Lock()  # one run at a time in a process: two would share its cores
ZYGOTES: dict[str, Zygote] = {}  # one a start method, as long as this process lives


def get_zygote(start: str) -> Zygote:
    zygote = ZYGOTES.get(start)
    if zygote and zygote.alive() and not zygote.current():
        zygote.close()
        zygote = None
    if zygote is None or not zygote.alive():
        zygote = ZYGOTES[start] = Zygote(start)
    return zygote


def check_arguments(world_size, args, timeout, start) -> None:
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"world_size must be a whole number of ranks, not {world_size!r}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    most = max(RANKS_PER_CORE * (os.cpu_count() or 1), count_gpus())
    if world_size > most:
        raise ValueError(
            f"world_size={world_size} is too many for this machine: its {os.cpu_count()} cores "
            f"can share at most {most} ranks ({RANKS_PER_CORE} a core). Use {most} or fewer."
        )
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple of arguments, not {args!r}; did you mean ({args!r},)?")
    if not timeout > 0:
        raise ValueError(f"timeout must be a number of seconds above 0, not {timeout!r}")
    if start not in ("fork", "spawn"):
        raise ValueError(f'start must be "fork" or "spawn", not {start!r}')


def count_gpus() -> int:
    if not any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg")):
        return 0  # without importing torch, which takes a second
    import torch

    return torch.cuda.device_count()


def warm_up() -> None:
    """Start loading torch into a zygote now, so that the first launch finds it ready."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" not in os.environ:
        get_zygote("fork").prepare(4, "cuda" if count_gpus() >= 4 else "cpu")


# In a notebook the first launch is seconds away: use them. (A script or a test starts it on demand.)
if "ipykernel" in sys.modules and getattr(sys.modules.get("IPython"), "get_ipython", bool)():
    warm_up()
