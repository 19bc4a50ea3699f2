"""The life of one rank: join the world, wait for a job, run it, report, leave.

A rank is used once. It joins while it is still on standby, so that a launch only has to send it
a function. It reports to the parent over a socket; what it prints goes into a pipe.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import random
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta

from .flight import FlightRecorder
from .transport import receive, send, to_bytes

LONGER_THAN_ANY_RUN = timedelta(days=30)  # the parent's deadline has to be the one that strikes


@dataclass
class Job:
    """What the parent sends to every rank."""

    blob: bytes  # (fn, args, kwargs), pickled
    seed: int
    memory: bool
    count: bool
    directory: str  # the parent's working directory, sys.path and environment
    path: list[str]
    environment: dict[str, str]


@dataclass
class Report:
    """What a rank sends back."""

    outcome: str  # returned or raised
    result: bytes | None = None
    error: Failure | None = None
    ledger: dict | None = None


@dataclass
class Failure:
    """An exception that has travelled: the parent, who has the cell's source, adds the lines."""

    type: str
    message: str
    frames: list[tuple[str, int, str]]  # file name, line number, function; outermost first
    because: Failure | None  # its __cause__ or __context__
    is_connection: bool  # a consequence of another rank's end, not a cause


def main(rank: int, size: int, device: str, directory: str, control: int, output: int) -> None:
    pid = os.getpid()
    redirect_output(output)
    # A rank that waits in C++ runs no Python; on this signal, and when native code aborts, its
    # stack is written all the same.
    stack = open(f"{directory}/stack-{rank}", "w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    faulthandler.enable(file=stack)
    keep_freed_memory()
    parent = socket.socket(fileno=control)
    try:
        group = join(rank, size, device, directory)
        job = pickle.loads(receive(parent))
        stay_on_a_core(rank, size)
        report = run(job, group)
    except EOFError:  # the parent has no job for this rank, or is gone
        os._exit(0)
    except BaseException as error:
        report = Report("raised", error=describe(error))
    if os.getpid() != pid:  # a fork that the job made and that came back from it
        os._exit(0)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the job may have closed it
            stream.flush()
    with contextlib.suppress(OSError):
        send(parent, pickle.dumps(report))
        parent.recv(1)  # stay until dismissed: leaving would break the others' connections
    os._exit(0)  # the interpreter's own exit costs 50 ms and sometimes aborts after success


M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1  # of glibc's malloc.h


def keep_freed_memory() -> None:
    """Let malloc reuse the memory of large tensors, as torch's own allocator does on a GPU.

    Else it goes back to the kernel, and to get it again costs 5 to 10 times a copy of its bytes.
    """
    mallopt = sys.platform == "linux" and getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:  # (musl has none)
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def stay_on_a_core(rank: int, size: int) -> None:
    """Deal the cores out to the ranks, where each core gets the same number of them, two or more.

    Left to itself, the kernel moves a rank to whichever core is idle for a moment. There its data
    is in no cache, and soon two ranks wait for one core while the other idles. (Not before there is
    a job: until then a rank only starts, and it does so faster where there is room.)

    Dealt there and back again, 0 1 1 0 on two cores: of a rank's two neighbours in a ring one is
    on its own core, whose cache has what comes from there, and one on another, so that stages of a
    pipeline that compute one after the other do not both wait for one core. (A ring of 64 MB on
    four ranks takes 87 ms so, with 0 1 0 1 148; GPipe's step 165 ms, with 0 0 1 1 183.)
    """
    if sys.platform != "linux":  # macOS lets nobody choose
        return
    cores = sorted(os.sched_getaffinity(0))
    if size > len(cores) and size % len(cores) == 0:
        lap, place = divmod(rank, len(cores))
        core = cores[place if lap % 2 == 0 else -1 - place]
        for thread in os.listdir("/proc/self/task"):  # gloo's, too; later ones will inherit it
            with contextlib.suppress(OSError):  # a sandbox may refuse it, or the thread has ended
                os.sched_setaffinity(int(thread), {core})


def redirect_output(pipe: int) -> None:
    """Let Python and native code write into the pipe, a line at a time."""
    os.dup2(pipe, 1)
    os.dup2(pipe, 2)
    os.close(pipe)
    sys.stdin = open(os.devnull)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)


def join(rank: int, size: int, device: str, directory: str):
    """Initialise torch.distributed through a file, over loopback, with the ledger in front."""
    import torch
    import torch.distributed as dist

    from ..ledger import recording

    torch.set_num_threads(1)
    recorder = recording.Recorder(FlightRecorder(f"{directory}/flight-{rank}"))
    index = torch.device(device, rank) if device == "cuda" else torch.device(device)
    recording.register(recorder, index)
    dist.init_process_group(
        recording.BACKEND,
        store=dist.FileStore(f"{directory}/store", size),
        rank=rank,
        world_size=size,
        timeout=LONGER_THAN_ANY_RUN,
    )
    return dist.group.WORLD


def run(job: Job, group) -> Report:
    recorder = group.recorder
    try:
        for name in set(os.environ) - set(job.environment):
            del os.environ[name]
        os.environ.update(job.environment, RANK=str(group.rank()), WORLD_SIZE=str(group.size()))
        os.chdir(job.directory)
        sys.path[:] = job.path
        if group.device.type == "cuda":  # not on standby: it would hold memory of the GPU
            import torch

            torch.cuda.set_device(group.device)
        seed_everything(job.seed + group.rank())
        function, args, kwargs = pickle.loads(job.blob)
        recorder.start(job.memory, job.count)
        result = function(*args, group, **kwargs)
        recorder.stop()
        blob = to_bytes(result, f"the result of rank {group.rank()}")
        return Report("returned", result=blob, ledger=recorder.export())
    except BaseException as error:
        return Report("raised", error=describe(error))


def seed_everything(seed: int) -> None:
    """Forked ranks share one parent's generators: unseeded, they would draw the same numbers."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would look for other devices
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def describe(error: BaseException, seen: tuple = ()) -> Failure:
    frames = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    because = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if because in seen:  # a circle
        because = None
    try:
        text = str(error)
    except Exception as another:
        text = f"(its __str__ raised {type(another).__name__})"
    return Failure(
        type=type(error).__name__,
        message=text,
        frames=frames,
        because=describe(because, (*seen, error)) if because is not None else None,
        is_connection=isinstance(error, (ConnectionError, RuntimeError)) and "gloo" in text,
    )
