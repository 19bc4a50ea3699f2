"""Run a function on n ranks: from a notebook cell, from a script, or under torchrun.

    def hello(group):
        return group.rank() * 10

    launch(hello, world_size=4).results  # [0, 10, 20, 30]

How it is done: `zygote.py` (who forks the ranks), `rank.py` (a rank's life); the parent's side of
them, `zygote_handle.py`, `rank_handle.py`, `world.py` (ranks and one job) and `standby.py` (started
before they are wanted); `flight.py` and `diagnose.py` (how a failure is told); `hosts.py` and
`cables.py` (ranks on several hosts); `torchrun.py` and `connections.py` (the same launch in a world
that torchrun made, and who of it is silent); `elastic.py` and `membership.py` (a run that lives on
when a rank dies: the parent's side and the rank's).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections import ChainMap
from collections.abc import Callable

from mini_dist.plan.fields import checks_kinds

from .arguments import check_arguments, check_call, check_hosts, check_world, only_gloo
from .devices import choose_device, count_gpus
from .diagnose import RankError, RankInterrupt, RankTimeout, brief, cannot_run, explain
from .elastic import Elastic, ElasticRun, as_elastic
from .hosts import UPLINK, Hosts
from .ledger import Ledger, nothing
from .network import other_people
from .rank import Job
from .report import Run, print_outputs
from .standby import prepare, take
from .torchrun import join_torchrun
from .transport import Frames, from_frames, to_frames
from .world import World
from .zygote_handle import ZygoteDied, ZygoteHandle, rank_environment

__all__ = ["RankError", "RankInterrupt", "RankTimeout", "Run", "launch"]

FOR_EVER = 1e9  # seconds; an int may be too large for a float


@checks_kinds(error=TypeError, infinite=("timeout",))
def launch(
    fn: Callable,
    world_size: int = 4,
    args: tuple = (),
    kwargs: dict | None = None,
    *,
    device: str | None = None,
    timeout: float = 60.0,
    seed: int = 0,
    memory: bool = False,
    count: bool = False,
    start: str | None = None,
    quiet: bool = False,
    network: bool = False,
    hosts: Hosts | None = None,
    elastic: bool | Elastic = False,
    simulate: str | object | None = None,
    ranks: str | None = None,
    pretend: dict | None = None,
    host_us: float = 0.0,
    stragglers: dict | None = None,
    slow_links: dict | None = None,
) -> Run:
    """Call `fn(*args, group, **kwargs)` in `world_size` fresh processes and collect the results.

    `group` is the process group of all ranks. Rank r starts with all random generators seeded
    with `seed + r`. The ranks see the caller's working directory, sys.path and environment; each
    computes with one thread, and on one core if each core gets the same number of ranks, two or
    more. NCCL carries the messages of tensors on a rank's own GPU, and gloo carries all others,
    over loopback: on Linux one of their own, which no one else on the host can reach and which
    leads nowhere else (`network.py`). `run.title()` and `run.ledger` say what carried them.
    Under torchrun the call joins the world that torchrun made instead of making one.

    device: where the ranks' tensors belong; a rank reads it from `group.device`. "cpu"; "cuda", a
    GPU for each rank; "cuda:0", one GPU that all ranks share, with gloo instead of NCCL; None,
    "cuda" if there is a GPU for each rank, else "cpu". A GPU that is given here is also torch's
    default device in `fn`, and tensors among `args` arrive there (`devices.py`).
    timeout: seconds until a run that is not done is ended; under torchrun each rank says then where
    it waits, and ends its process, as it does for a host that answers no more (torchrun.py).
    memory: record bytes held by kind. count: record every kernel, for mini_dist.course.replay
    (slower). start: "fork" (warm, the default on Linux) or "spawn". quiet: do not show the ranks'
    prints. network: leave the ranks in the host's network, where they can reach the internet, and
    other users of the host can reach them.
    hosts: deal the ranks out to several hosts with slow links between them (`hosts.py`); where the
    system allows none, they run on this one, `run.no_hosts` says why, and `seconds_on` what it
    would have taken.
    elastic: a rank that dies does not end the others, which get RanksChanged and may `regroup`
    (membership.py); its result is None, and Run.lost tells of it. Not under torchrun.
    simulate: a machine of the planner, such as "h100", or a Hardware of your own. The ranks run
    without storage, in a few processes of this machine, and the run's times, bytes and memory are
    those of the machine that was named (simulation/simulate.py).
    ranks: of a simulated world: "all", or "kinds", one rank of each kind; None: all of up to 8.
    pretend: in a simulated run no value exists. Where the function asks for one, on a line with one
    of these names, it gets that value: {"loss": 5.0}.
    host_us: in a simulated run, the microseconds that the host takes to launch a kernel.
    stragglers, slow_links: in a simulated run, ranks whose kernels take longer, or whose nodes'
    messages to other nodes do, and how many times as long: {5: 1.5}.

    Raises RankError if a rank fails, RankTimeout after `timeout`, ValueError or TypeError for
    arguments that cannot work.
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function to call on each rank, not {fn!r}")
    if not timeout > 0:
        raise ValueError(f"timeout must be a number of seconds above 0, not {brief(timeout)}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if elastic:
            raise ValueError(
                "elastic=True under torchrun: it ends all ranks when one dies, and starts them "
                "anew. Leave elastic out, and resume from a checkpoint (--max-restarts, --nnodes)"
            )
        how = dict(device=device, timeout=timeout, seed=seed, memory=memory, count=count)
        return join_torchrun(fn, world_size, args, kwargs or {}, **how)
    if inside_a_rank():
        raise RuntimeError(
            "launch was called inside a rank: ranks cannot start ranks of their own. "
            "Call it from the notebook or the script, with as many ranks as all of it needs."
        )
    if simulate is not None:
        from .simulation.simulate import simulate as on

        if hosts or elastic or device:
            raise ValueError(
                "simulate cannot be combined with hosts, elastic or device: the simulated machine "
                "has its own devices and links"
            )
        check_world(world_size, args, kwargs, seed)
        check_call(fn, args, kwargs or {})
        how = dict(ranks=ranks, pretend=pretend, host_us=host_us)
        how |= dict(stragglers=stragglers, slow_links=slow_links)
        how |= dict(timeout=timeout, seed=seed, start=start, quiet=quiet)
        return on(launch, fn, world_size, args, kwargs or {}, simulate, **how)
    if ranks is not None or pretend is not None or host_us or stragglers or slow_links:
        raise ValueError(
            "ranks, pretend, host_us, stragglers and slow_links are of simulated runs: give "
            'simulate="h100" as well'
        )
    start = start or ("fork" if sys.platform == "linux" else "spawn")
    check_arguments(world_size, args, kwargs, seed, start)
    check_hosts(hosts, world_size, start, network)
    check_call(fn, args, kwargs or {})
    call = to_frames((fn, tuple(args), kwargs or {}), "the function or an argument")
    timeout = float("inf") if timeout > FOR_EVER else float(timeout)
    chosen = choose_device(device, world_size, count_gpus())
    elastic = as_elastic(elastic)
    if elastic and hosts:
        raise ValueError(
            "hosts and elastic do not go together: a rank that joins would have no host. "
            "Leave one of them out."
        )
    job = Job(
        seed,
        memory,
        count,
        working_directory(),
        sys.path,
        rank_environment(),
        device is not None,
        elastic=elastic is not None,
        beat=elastic.beat if elastic and elastic.silence else None,
    )
    if hosts:
        job.hosts = hosts.places(world_size)
    if hosts or elastic:
        chosen = only_gloo(device, chosen, "hosts" if hosts else "elastic")
    how = hosts, timeout, (start, network), quiet, elastic
    if LOCK.holder == threading.get_ident():
        raise RuntimeError(
            "launch was called while this thread waits in another launch, by a signal handler or a "
            "watch function: let that note what is to be done, and launch when the first is over."
        )
    with LOCK:
        return run_job(job, call, world_size, chosen, *how)


def run_job(
    job: Job,
    call: Frames,
    world_size: int,
    device: str,
    hosts: Hosts | None,
    timeout: float,
    kind: tuple,
    quiet: bool,
    elastic: Elastic | None,
) -> Run:
    """Take a world, run the job on it, put the next one on standby, and collect what came of it.

    What ranks do wrong, and an interrupt, is an `outcome`: it becomes a RankError at the end, when
    their prints have been shown. That the zygote has died since the last launch `take_world` mends.
    Anything else is a mishap of this process or of the system: then the zygote goes, and with it
    every rank.
    """
    began = time.perf_counter()
    try:
        world = take_world(kind, world_size, device, hosts, timeout)
        if world.has_hosts:
            job.environment["GLOO_SOCKET_IFNAME"] = UPLINK
        warn_if_open(world.keeper, time.monotonic() + timeout)
        runner = ElasticRun(world, elastic) if elastic else world
        try:
            outcome = runner.run(job, call, timeout)
        except KeyboardInterrupt:
            outcome = "interrupt"
        with uninterrupted():
            error = None if outcome == "done" else explain(outcome, world, timeout)
            # Ranks that are done need no waiting for, unless the next want the same GPU memory.
            world.end(wait=bool(error) or device != "cpu")
            reports = [rank.report for rank in world.ranks if rank.report]
            imported = dict(ChainMap(*(report.imported for report in reports)))
            prepare(world.keeper, world_size, device, hosts, imported)
    except BaseException as unexpected:  # whatever it is, no rank outlives it
        with uninterrupted():
            if kind in ZYGOTES:
                ZYGOTES.pop(kind).close()
        if isinstance(unexpected, OSError):
            raise cannot_run(unexpected, world_size) from unexpected
        if isinstance(unexpected, KeyboardInterrupt):
            raise RankInterrupt("interrupted.") from None
        raise
    outputs = [rank.text() for rank in world.ranks]
    if not quiet:
        print_outputs(outputs)
    if error:
        raise error
    seconds = time.perf_counter() - began
    results = [
        unpickle(rank.result, rank.number) if rank.returned else None for rank in world.ranks
    ]
    ledger = Ledger.from_ranks(
        [rank.report.ledger if rank.returned else nothing(time.time()) for rank in world.ranks]
    )
    lost = runner.lost if elastic else []
    return Run(results, outputs, ledger, seconds, device, hosts, world.no_hosts, lost)


def take_world(kind: tuple, size: int, device: str, hosts: Hosts | None, timeout: float) -> World:
    deadline = time.monotonic() + timeout
    try:
        return take(get_zygote(*kind), size, device, hosts, deadline)
    except ZygoteDied:  # somebody has ended or stopped it since the last launch
        return take(get_zygote(*kind), size, device, hosts, deadline)


class OneAtATime:
    """Allow one run at a time in a process: two would share its cores."""

    def __init__(self):
        self.lock, self.holder = threading.Lock(), None

    def __enter__(self) -> None:
        self.lock.acquire()
        self.holder = threading.get_ident()

    def __exit__(self, *_) -> None:
        self.holder = None
        self.lock.release()


LOCK = OneAtATime()
# One a start method and network, as long as this process lives.
ZYGOTES: dict[tuple[str, bool], ZygoteHandle] = {}


def forget_zygotes() -> None:
    """Let a fork of this process release its zygotes, which end when no process holds them."""
    global LOCK
    LOCK = OneAtATime()
    for zygote in ZYGOTES.values():
        zygote.close()
    ZYGOTES.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_zygotes)


def get_zygote(start: str, network: bool) -> ZygoteHandle:
    zygote = ZYGOTES.get((start, network))
    if zygote and not (zygote.alive() and zygote.current()):
        zygote.close()
        zygote = None
    if zygote is None:
        zygote = ZYGOTES[start, network] = ZygoteHandle(start, network)
    return zygote


@contextlib.contextmanager
def uninterrupted():
    """Ignore further interrupts while a run is cleared up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def unpickle(result: Frames, rank: int):
    try:
        return from_frames(result)
    except (Exception, SystemExit) as error:
        raise TypeError(
            f"the result of rank {rank} cannot be rebuilt in this process: "
            f"{type(error).__name__}: {error}"
        ) from error


def working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise RuntimeError(
            "the working directory of this process has been removed, and ranks are to start in it: "
            "os.chdir(...) to one that exists"
        ) from None


def warn_if_open(zygote: ZygoteHandle, deadline: float) -> None:
    """Warn once, before the first job, if other people on the host could reach the ranks."""
    while not zygote.has_told and time.monotonic() < deadline:  # (it tells before it loads torch)
        zygote.read_answers()
    why, zygote.open = zygote.open, None
    people = other_people() if why else ()
    if people:
        some = ", ".join(sorted(people)[:3])
        warnings.warn(
            f"other users of this machine ({some}) can connect to your ranks: {why}. Ranks refuse "
            "them, but a run may fail by it. You can ignore this if nobody else uses this machine.",
            stacklevel=5,
        )


def inside_a_rank() -> bool:
    dist = sys.modules.get("torch.distributed")
    return bool(dist and dist.is_initialized() and hasattr(dist.group.WORLD, "recorder"))


def warm_up() -> None:
    """Start loading torch into a zygote now, so that the first launch finds it ready."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" not in os.environ:
        prepare(get_zygote("fork", False), 4, choose_device(None, 4, count_gpus()))


# In a notebook the first launch is seconds away: use them. (A script or test starts it on demand.)
if "ipykernel" in sys.modules and getattr(sys.modules.get("IPython"), "get_ipython", bool)():
    warm_up()
