"""Run a function on n ranks: from a notebook cell, from a script, or under torchrun.

    def hello(group):
        return group.rank() * 10

    launch(hello, world_size=4).results  # [0, 10, 20, 30]

How it is done is in `ranks/`: `world.py` (the parent's side), `zygote.py` (who forks the ranks),
`rank.py` (a rank's life), `flight.py` and `diagnose.py` (how a failure is told).
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import signal
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
from .ranks.world import Zygote, ZygoteDied, rank_environment

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
    count: bool = False,
    start: str | None = None,
    quiet: bool = False,
) -> Run:
    """Call `fn(*args, group, **kwargs)` in `world_size` fresh processes and collect the results.

    `group` is the process group of all ranks. Rank r starts with all random generators seeded
    with `seed + r`. The ranks see the caller's working directory, sys.path and environment; each
    computes with one thread, and on one core if each core gets the same number of ranks, two or
    more. They use NCCL if there is a GPU for each, else gloo, over loopback.
    Under torchrun the call joins the world that torchrun made instead of making one.

    timeout: seconds until a run that is not done is ended. memory: record bytes held by kind.
    count: record every kernel, for mini_dist.replay (slower). start: "fork" (warm, the default
    on Linux) or "spawn". quiet: do not show the ranks' prints.

    Raises RankError if a rank fails, RankTimeout after `timeout`, ValueError or TypeError for
    arguments that cannot work.
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function to call on each rank, not {fn!r}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return join_torchrun(
            fn, world_size, args, kwargs or {}, seed=seed, memory=memory, count=count
        )
    if inside_a_rank():
        raise RuntimeError(
            "launch was called inside a rank: ranks cannot start ranks of their own. "
            "Call it from the notebook or the script, with as many ranks as all of it needs."
        )
    start = start or ("fork" if sys.platform == "linux" else "spawn")
    check_arguments(world_size, args, kwargs, timeout, seed, start)
    check_call(fn, args, kwargs or {})
    blob = to_bytes((fn, tuple(args), kwargs or {}), "the function or an argument")
    device = "cuda" if count_gpus() >= world_size else "cpu"
    job = Job(blob, seed, memory, count, os.getcwd(), sys.path, rank_environment())
    with LOCK:
        return run_job(job, world_size, device, timeout, start, quiet)


def run_job(job, world_size, device, timeout, start, quiet) -> Run:
    zygote = get_zygote(start)
    try:
        return run_on(zygote, job, world_size, device, timeout, quiet)
    except RankError:
        raise
    except (ZygoteDied, KeyboardInterrupt):  # (an interrupt before or after the run itself)
        zygote.close()
        raise


def run_on(zygote, job, world_size, device, timeout, quiet) -> Run:
    began = time.perf_counter()
    world = zygote.take(world_size, device, patient=any(word in job.blob for word in HEAVY))
    try:
        outcome = world.run(job, timeout)
    except KeyboardInterrupt:
        outcome = "interrupt"
    with uninterrupted():
        error = None if outcome == "done" else explain(outcome, world, timeout)
        # Ranks that are done need no waiting for, unless the next ones want the same GPU memory.
        world.end(wait=bool(error) or device == "cuda")
        zygote.prepare(world_size, device)
    outputs = [rank.text() for rank in world.ranks]
    if not quiet:
        print_outputs(outputs)
    if error:
        raise error
    seconds = time.perf_counter() - began
    reports = [rank.report for rank in world.ranks]
    results = [unpickle(report.result, rank) for rank, report in enumerate(reports)]
    ledger = Ledger.from_ranks([report.ledger for report in reports])
    return Run(results, outputs, ledger, seconds, device)


# A first job that speaks of these is better off waiting a second for the zygote to load torch's
# optimizers and wrappers than loading them in every rank.
HEAVY = (b"optim", b"mini_dist", b"parallel", b"fsdp")
LOCK = threading.Lock()  # one run at a time in a process: two would share its cores
ZYGOTES: dict[str, Zygote] = {}  # one a start method, as long as this process lives


def forget_zygotes() -> None:
    """A fork of this process lets go of its zygotes, which end when nobody holds them."""
    global LOCK
    LOCK = threading.Lock()
    for zygote in ZYGOTES.values():
        zygote.close()
    ZYGOTES.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_zygotes)


def get_zygote(start: str) -> Zygote:
    zygote = ZYGOTES.get(start)
    if zygote and not (zygote.alive() and zygote.current()):
        zygote.close()
        zygote = None
    if zygote is None:
        zygote = ZYGOTES[start] = Zygote(start)
    return zygote


@contextlib.contextmanager
def uninterrupted():
    """Whoever interrupts twice shall not interrupt the clearing up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def unpickle(result: bytes, rank: int):
    try:
        return pickle.loads(result)
    except Exception as error:
        raise TypeError(
            f"the result of rank {rank} cannot be rebuilt in this process: "
            f"{type(error).__name__}: {error}"
        ) from error


def inside_a_rank() -> bool:
    dist = sys.modules.get("torch.distributed")
    return bool(dist and dist.is_initialized() and hasattr(dist.group.WORLD, "recorder"))


def check_arguments(world_size, args, kwargs, timeout, seed, start) -> None:
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
        raise TypeError(
            f"args must be a tuple of arguments, not {args!r}; did you mean ({args!r},)?"
        )
    if kwargs is not None and not isinstance(kwargs, dict):
        raise TypeError(f"kwargs must be a dict of arguments by name, not {kwargs!r}")
    if not isinstance(seed, int):
        raise TypeError(f"seed must be a whole number, not {seed!r}")
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"timeout must be a number of seconds above 0, not {timeout!r}")
    if start not in ("fork", "spawn"):
        raise ValueError(f'start must be "fork" or "spawn", not {start!r}')


def check_call(fn, args, kwargs) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(*args, "the group", **kwargs)
    except TypeError as error:
        given = ", ".join([*(f"args[{i}]" for i in range(len(args))), "group"])
        name = getattr(fn, "__name__", "fn")
        raise TypeError(
            f"{name}{signature} cannot take what launch passes to it, {name}({given}): {error}. "
            "The process group is the last positional argument."
        ) from None


def count_gpus() -> int:
    if not any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg")):
        return 0  # without importing torch, which takes a second
    import torch

    return torch.cuda.device_count()


def warm_up() -> None:
    """Start loading torch into a zygote now, so that the first launch finds it ready."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" not in os.environ:
        get_zygote("fork").prepare(4, "cuda" if count_gpus() >= 4 else "cpu")


# In a notebook the first launch is seconds away: use them. (A script or test starts it on demand.)
if "ipykernel" in sys.modules and getattr(sys.modules.get("IPython"), "get_ipython", bool)():
    warm_up()
