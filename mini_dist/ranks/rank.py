"""The life of one rank: join the world, wait for a job, run it, report, leave.

A rank is used once. It joins while it is still on standby, so that a launch only has to send it
a function. It reports to the parent over a socket; what it prints goes into a pipe.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import faulthandler
import itertools
import os
import pickle
import random
import signal
import socket
import sys
import traceback
from dataclasses import dataclass, field

from .devices import default_device
from .flight import FlightRecorder
from .membership import LONGER_THAN_ANY_RUN, Membership
from .threads import stay_on_a_core
from .transport import Frames, from_frames, receive, send, to_frames


@dataclass
class Job:
    """What the parent sends to every rank in addition to (fn, args, kwargs)."""

    seed: int
    memory: bool
    count: bool
    directory: str  # the parent's working directory, sys.path and environment
    path: list[str]
    environment: dict[str, str]
    is_asked: bool = False  # the device: the caller gave it (devices.py)
    hosts: list[int] | None = None  # of each rank, with launch(hosts=...)
    elastic: bool = False  # a rank's death is not the end of the others
    beat: float | None = None  # seconds between two signs of life


@dataclass
class Report:
    """What a rank sends back in addition to its result."""

    outcome: str  # returned, raised, or absent: it could not even join the others
    error: Failure | None = None
    ledger: dict | None = None
    imported: dict[str, str] = field(default_factory=dict)  # name -> file of new modules of KEPT


@dataclass
class Failure:
    """An exception of a rank. The parent, which has the cell's source, adds the lines."""

    type: str
    message: str
    frames: list[tuple[str, int, str]]  # file name, line number, function; outermost first
    is_connection: bool  # a consequence of another rank's end, not a cause
    errno: int | None
    notes: list[str]
    members: list[Failure]  # of an ExceptionGroup
    because: list[Failure] = field(default_factory=list)  # its causes or contexts, nearest first
    more: int = 0  # causes in the middle of a long chain, left out


# Packages whose modules later ranks find loaded, once a rank has imported them. Importing them
# starts no thread and runs no kernel, so a process that has them can be forked. (Each rank of each
# test would take 0.1 s to load pytest.)
KEPT = {"mini_dist", "pytest"}


def main(rank: int, size: int, device: str, directory: str, control: int, output: int) -> None:
    pid = os.getpid()
    parent = socket.socket(fileno=control)
    streams, result, members, num_loaded = [], [], None, len(sys.modules)
    try:
        streams = redirect_output(output)
        # A rank that waits in C++ runs no Python; on this signal, and when native code aborts, its
        # stack is written all the same.
        stack = open(f"{directory}/stack-{rank}", "w")
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        faulthandler.enable(file=stack)
        keep_freed_memory()
        recorder = get_ready(rank, device, directory)
        group = join(rank, size, directory) if rank < size else None
    except BaseException as error:
        report = Report("absent", error=describe(error))
    else:
        try:
            about, *call = receive(parent)
        except (EOFError, OSError):  # the parent has no job for this rank, or is gone
            os._exit(0)
        stay_on_a_core(rank, size)
        job, members = pickle.loads(about), None
        if job.elastic:
            members = recorder.membership = Membership(parent, recorder, directory, rank)
            members.start(tuple(range(size)), job.beat)
        try:
            group = group or members.regroup()  # who comes later joins those who are there
            report, result = run(job, call, group)
        except BaseException as error:
            report, result = Report("absent", error=describe(error)), []
    if os.getpid() != pid:  # a fork that the job made and that came back from it
        os._exit(0)
    for stream in (*streams, sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):  # the job may have put anything in its place
            stream.flush()
    # The new modules are the last ones. Looking at those that the zygote loaded would copy their
    # pages. (Python code between two names would let a thread of the job change the dict.)
    num_new = max(0, len(sys.modules) - num_loaded)
    names = [*itertools.islice(reversed(sys.modules), num_new)]
    report.imported = {
        name: sys.modules[name].__file__
        for name in names
        if name.partition(".")[0] in KEPT and name in sys.modules
    }
    with contextlib.suppress(OSError):
        with members.speaking if members else contextlib.nullcontext():
            send(parent, [pickle.dumps(report), *result])
        if members:
            members.dismissed.acquire()
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


def redirect_output(pipe: int) -> list:
    """Let Python and native code write into the pipe, a line at a time; Python's two streams."""
    os.dup2(pipe, 1)
    os.dup2(pipe, 2)
    os.close(pipe)
    sys.stdin = open(os.devnull)
    options = dict(buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stdout, sys.stderr = (open(number, "w", **options) for number in (1, 2))
    return [sys.stdout, sys.stderr]


def get_ready(rank: int, device: str, directory: str):
    """Register groups that keep a ledger with torch.distributed; return this rank's recorder."""
    import torch

    from .devices import device_of_rank, is_shared
    from .ledger.group import register
    from .ledger.recording import Recorder

    torch.set_num_threads(1)
    recorder = Recorder(FlightRecorder(f"{directory}/flight-{rank}"))
    register(recorder, device_of_rank(device, rank), is_shared(device))
    return recorder


def join(rank: int, size: int, directory: str):
    """Initialise torch.distributed through a file, over loopback."""
    import torch.distributed as dist

    from .ledger.group import BACKEND

    dist.init_process_group(
        BACKEND,
        store=dist.FileStore(f"{directory}/store", size),
        rank=rank,
        world_size=size,
        timeout=LONGER_THAN_ANY_RUN,
    )
    return dist.group.WORLD


def run(job: Job, call: Frames, group) -> tuple[Report, Frames]:
    recorder = group.recorder
    try:
        for name in set(os.environ) - set(job.environment):
            del os.environ[name]
        os.environ.update(job.environment, RANK=str(group.rank()), WORLD_SIZE=str(group.size()))
        try:
            os.chdir(job.directory)
        except PermissionError:  # (one may already be where one could not go)
            if os.getcwd() != job.directory:
                raise
        sys.path[:] = job.path
        builtins.display = display
        if group.device.type == "cuda":  # not on standby: it would hold memory of the GPU
            import torch

            torch.cuda.set_device(group.device)
        seed_everything(job.seed + group.rank())
        there = default_device(group.device, job.is_asked)
        function, args, kwargs = from_frames(call, there)
        recorder.start(job.memory, job.count, job.hosts)
        with there or contextlib.nullcontext():
            result = function(*args, group, **kwargs)
        recorder.stop()
        frames = to_frames(result, f"the result of rank {group.rank()}")
        return Report("returned", ledger=recorder.export()), frames
    except BaseException as error:
        return Report("raised", error=describe(error)), []


def display(*objects, **_) -> None:
    """A notebook's display, in a process that has no page to draw on: the text of each object."""
    for each in objects:
        print(each if isinstance(each, str) else repr(each))
    rich = ("_repr_html_", "_repr_png_", "_repr_svg_", "_ipython_display_", "savefig")
    if any(hasattr(each, way) for each in objects for way in rich):
        print("(as text: a rank has no page to draw on. Return it, and display it in the cell.)")


def seed_everything(seed: int) -> None:
    """Seed all generators. Forked ranks inherit one state and would draw the same numbers."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would look for other devices
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


CHAIN = 8  # causes of an exception, and members of a group of them, that are told
LONG = 10_000  # characters of a message


def describe(error: BaseException) -> Failure:
    """Return a Failure that can be sent, whatever the exception and its chain of causes are."""
    chain, seen = [error], {id(error)}
    while (because := cause_of(chain[-1])) is not None and id(because) not in seen:  # (a circle)
        chain.append(because)
        seen.add(id(because))
    told = chain if len(chain) <= CHAIN else chain[: CHAIN // 2] + chain[-CHAIN // 2 :]
    first, *others = [failure(each) for each in told]
    first.because, first.more = others, len(chain) - len(told)
    return first


def cause_of(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def failure(error: BaseException, depth: int = 3) -> Failure:
    frames = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    try:
        text = str(error)
    except BaseException as another:  # also one that ends the process, as sys.exit
        text = f"(its __str__ raised {type(another).__name__})"
    members, notes = getattr(error, "exceptions", ()), getattr(error, "__notes__", ())
    members = members if depth and isinstance(members, (tuple, list)) else ()
    members = [each for each in members if isinstance(each, BaseException)]
    notes = [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []
    number = getattr(error, "errno", None)
    return Failure(
        type=type(error).__name__,
        message=sendable(text),
        frames=frames,
        is_connection=isinstance(error, (ConnectionError, RuntimeError)) and "gloo" in text,
        errno=number if isinstance(error, OSError) and isinstance(number, int) else None,
        notes=[sendable(note) for note in notes[:CHAIN]],
        members=[failure(each, depth - 1) for each in members[:CHAIN]],
    )


def sendable(text: str) -> str:
    """Return text that any terminal can show: half of a surrogate pair is no character."""
    text = text if len(text) <= LONG else f"{text[:LONG]} [... {len(text) - LONG:,} more]"
    return text.encode("utf-8", "backslashreplace").decode()
