"""Inject random faults of many kinds: each must end in one clear error, in time, without leftovers.

    python benchmarks/faults.py [--json FILE] [--long] [--seed N] [--cases N] [--only NAME]

A case draws a kind of fault, a number of ranks, the faulty rank, the number of collectives before
the fault, and the activity of the other ranks. Its error has to match the patterns of its kind, in
few lines, without internals of the launcher, before its deadline. Then the next launch must give
the right result, and this process must own what it owned before: one zygote, its ranks on standby,
their folder, and as many open files. A kind without patterns is not a fault, and its results must
be right.
"""

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import cloudpickle
import psutil
import torch
import torch.distributed as dist
from _form import machine as about_this_machine

from mini_dist import launch
from mini_dist.ranks.folder import LOG, MARKER
from mini_dist.ranks.launch import ZYGOTES

FOUND = 3.0  # seconds in which a detectable fault has to be detected
AFTER = 2.0  # seconds after the timeout in which an undetectable fault has to end
GONE = 10.0  # seconds that processes may take to disappear on a busy machine
TIMEOUT = 0.6
INSIDES = re.compile(
    r"mini_dist/(ranks|launch|ledger)|'World' object|Errno 9\b|unpack|EOFError(?!: EOF when)"
)
TAG = f"98765{os.getpid()}"  # a sleep time in seconds that identifies our sleeping children


@dataclass
class Kind:
    """A kind of fault, and what one rank does.

    said: patterns that its error must contain, with {r} the rank and {n} the number of ranks.
    waited: nothing can detect the fault, so the timeout ends the run.
    """

    act: Callable
    said: list[str]
    everybody: bool = False
    waited: bool = False
    sizes: tuple = (1, 2, 2, 3, 4)
    error: str = "RankError"
    alone: bool = False  # Other ranks' actions or earlier steps would change its error.
    options: dict = field(default_factory=dict)
    around: Callable | None = None  # a context in the parent; gets the dice
    outside: Callable | None = None  # called with the dice instead of a plain launch


KINDS: dict[str, Kind] = {}


def kind(*said, **about):
    def add(act):
        KINDS[act.__name__] = Kind(act, list(said), **about)
        return act

    return add


RAISED = r"rank {r} of {n} raised "
KILLED = r"rank {r} of {n} was killed by "
ENDED = r"rank {r} of {n} ended its process with exit code "
LATE = r"not done after 0\.6 s, the timeout of this launch"
STUCK = r"deadlock: rank"
UNLIKE = r"the ranks do not agree on an operation that they enter together:"

# ---- it raises ----------------------------------------------------------------------------------


@kind(RAISED + "ValueError: on purpose", r"line \d+, in raises_a_value_error")
def raises_a_value_error(group):
    raise ValueError("on purpose")


@kind(RAISED + "KeyError: 'absent'", "in innermost")
def raises_deep_inside(group):
    def innermost():
        return {}["absent"]

    def middle():
        return innermost()

    middle()


@kind(RAISED + "ValueError: second", "while handling ZeroDivisionError: first")
def raises_while_handling(group):
    try:
        raise ZeroDivisionError("first")
    except ZeroDivisionError:
        raise ValueError("second")  # noqa: B904


@kind(RAISED + "ValueError: second", "while handling OSError: first")
def raises_from_a_cause(group):
    raise ValueError("second") from OSError("first")


@kind(RAISED + r"Unprintable: \(its __str__ raised RuntimeError\)")
def raises_what_cannot_be_printed(group):
    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError

    raise Unprintable


@kind(RAISED + r"Leaves: \(its __str__ raised SystemExit\)")
def raises_what_exits_when_printed(group):
    class Leaves(Exception):
        def __str__(self):
            sys.exit(3)

    raise Leaves


@kind(RAISED + r"Interrupts: \(its __str__ raised KeyboardInterrupt\)")
def raises_what_interrupts_when_printed(group):
    class Interrupts(Exception):
        def __str__(self):
            raise KeyboardInterrupt

    raise Interrupts


@kind(RAISED + "ValueError: number 0", r"\[\d+ more\]", "while handling ValueError: number 14")
def raises_the_last_of_a_long_chain(group):
    error = None
    for number in range(1500, -1, -1):
        before, error = error, ValueError(f"number {number}")
        error.__cause__ = before
    raise error


@kind(RAISED + "ValueError: one", "while handling ValueError: other")
def raises_in_a_circle(group):
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    raise one


if sys.version_info >= (3, 11):

    @kind(RAISED + "ExceptionGroup: several", "member 1: KeyError: 'a'", "member 2: OSError: b")
    def raises_a_group(group):
        raise ExceptionGroup("several", [KeyError("a"), OSError("b")])  # noqa: F821

    @kind(RAISED + "ValueError: on purpose", "a note of the learner")
    def raises_with_a_note(group):
        error = ValueError("on purpose")
        error.add_note("a note of the learner")
        raise error


@kind(RAISED + r"ValueError: .*\\ud800")
def raises_half_a_surrogate_pair(group):
    raise ValueError("half \ud800 a pair")


@kind(RAISED + r"ValueError: x+ \[\.\.\. 9,990,000 more\]")
def raises_a_message_of_megabytes(group):
    raise ValueError("x" * 10_000_000)


@kind(RAISED + "RecursionError", r"times in a row\]")
def never_returns_from_itself(group):
    never_returns_from_itself(group)


@kind(RAISED + "SystemExit: 3", r"sys\.exit\(3\)")
def exits_by_an_exception(group):
    sys.exit(3)


@kind(RAISED + "SystemExit")
def exits_as_if_all_were_well(group):
    sys.exit()


@kind(RAISED + "KeyboardInterrupt")
def raises_an_interrupt(group):
    raise KeyboardInterrupt


@kind(RAISED + "GeneratorExit")
def raises_a_generators_exit(group):
    raise GeneratorExit


@kind(RAISED + "StopIteration")
def asks_an_empty_iterator(group):
    next(iter(()))


@kind(RAISED + "Own: mine")
def raises_a_class_of_its_own(group):
    class Own(Exception):
        pass

    raise Own("mine")


@kind(RAISED + "ValueError: on purpose")
def raises_what_holds_a_lock(group):
    error = ValueError("on purpose")
    error.lock, error.group = threading.Lock(), group
    raise error


@kind(RAISED + r"(RuntimeError|MemoryError|OutOfMemoryError): .*(memory|allocate)")
def asks_for_too_much_memory(group):
    torch.empty(10**15)


@kind(RAISED + "EOF.*", "A rank has no keyboard")
def asks_for_input(group):
    input("how many? ")


@kind(RAISED + "BdbQuit", "A rank has no keyboard", "in opens_the_debugger")
def opens_the_debugger(group):
    breakpoint()
    return group.size()


@kind(RAISED + "AssertionError")
def asserts_what_is_not(group):
    assert group.size() == -1


@kind(RAISED + "ArithmeticError: in backward")
def raises_in_a_hook_of_backward(group):
    def hook(gradient):
        raise ArithmeticError("in backward")

    x = torch.ones(2, requires_grad=True)
    x.register_hook(hook)
    (x * 2).sum().backward()


@kind(RAISED + "ModuleNotFoundError: No module named 'not_installed'")
def imports_what_is_not_there(group):
    import not_installed  # noqa: F401


@kind(RAISED + "SyntaxError")
def compiles_nonsense(group):
    exec("a b c")


@kind(RAISED + "UnicodeDecodeError")
def decodes_what_is_no_text(group):
    b"\xff".decode("utf-8")


@kind(RAISED + "OSError: .*No space left on device")
def writes_to_a_full_disk(group):
    with open("/dev/full", "w") as full:
        full.write("x")


@kind(RAISED + "ConnectionRefusedError", r"network of their own.*network=True")
def asks_the_hosts_network(group):
    socket.create_connection(("127.0.0.1", 9))


@kind(RAISED + "OSError: .*Too many open files", r"ulimit -n")
def opens_too_many_files(group):
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    files = [open("/dev/null") for _ in range(100)]
    return len(files)


@kind(
    r"rank 0 of {n} raised ValueError: on purpose",
    "raised the same",
    everybody=True,
    sizes=(2, 3, 4),
)
def raises_everywhere(group):
    raise ValueError("on purpose")


@kind(r"rank 0 of {n} raised ValueError: of rank 0", everybody=True)
def raises_something_else_on_each_rank(group):
    raise ValueError(f"of rank {group.rank()}")


@kind(RAISED + "ValueError: on purpose", sizes=(2, 3, 4))
def raises_with_work_in_flight(group):
    work = group.send([torch.ones(4)], (group.rank() + 1) % group.size(), 7)
    raise ValueError(f"on purpose{'' if work else ''}")


@kind(RAISED + "ValueError: send with rank 99: this group has ranks 0 to", sizes=(2, 3))
def sends_to_nobody(group):
    dist.send(torch.ones(2), 99, group=group)


@kind(RAISED + "RuntimeError: launch was called inside a rank")
def launches_again(group):
    launch(dist.get_rank, world_size=2)


@kind(RAISED + "ValueError: on purpose")
def raises_with_stdout_gone(group):
    sys.stdout = None
    raise ValueError("on purpose")


@kind(RAISED + "ValueError: on purpose")
def removes_its_directory_and_raises(group):
    gone = tempfile.mkdtemp()
    os.chdir(gone)
    os.rmdir(gone)
    raise ValueError("on purpose")


# ---- its process ends ---------------------------------------------------------------------------


def dies_of(number: signal.Signals):
    def act(group):
        signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
        os.kill(os.getpid(), number)
        signal.pause()

    act.__name__ = f"dies_of_{number.name}"
    kind(KILLED + number.name)(act)


for name in ("KILL", "TERM", "ABRT", "BUS", "FPE", "ILL", "XCPU", "HUP", "QUIT", "SYS", "PIPE"):
    dies_of(signal.Signals[f"SIG{name}"])


@kind(KILLED + r"signal 40 \(Real-time signal")
def dies_of_a_real_time_signal(group):
    os.kill(os.getpid(), 40)
    signal.pause()


@kind(KILLED + "SIGSEGV")
def reads_at_address_0(group):
    ctypes.string_at(0)


@kind(KILLED + "SIGBUS", "memory of a file")
def reads_behind_the_end_of_a_file(group):
    with tempfile.TemporaryFile() as file:
        file.truncate(8192)
        memory = mmap.mmap(file.fileno(), 8192)
        file.truncate(0)
        memory[5000] = 1


@kind(KILLED + "SIGALRM")
def is_ended_by_its_own_timer(group):
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    while True:
        time.sleep(1)


@kind(KILLED + "SIGABRT")
def gives_up_in_native_code(group):
    os.abort()


def ends_with(status: int):
    def act(group):
        os._exit(status)

    act.__name__ = f"ends_with_status_{status}"
    kind(ENDED + f"{status} instead of returning")(act)


for status in (0, 1, 7, 70, 255):
    ends_with(status)


@kind(ENDED + "3")
def exits_by_c(group):
    ctypes.CDLL(None).exit(3)


@kind(ENDED + "0")
def becomes_another_program(group):
    os.execv("/bin/true", ["true"])


@kind(r"rank \d of {n} was killed by SIGKILL", sizes=(2, 3, 4))
def kills_another(group):
    other = (group.rank() + 1) % group.size()
    pids = [None] * group.size()
    Path(f"{PLACE.value}-{group.rank()}").write_text(str(os.getpid()))
    while not pids[other]:
        with contextlib.suppress(FileNotFoundError, ValueError):
            pids[other] = int(Path(f"{PLACE.value}-{other}").read_text())
    os.kill(pids[other], signal.SIGKILL)
    signal.pause()


KINDS["kills_another"].everybody = False


@kind(ENDED + "5")
def leaves_a_child(group):
    subprocess.Popen(["sleep", TAG])
    os._exit(5)


@kind(ENDED + "5")
def leaves_a_child_in_a_session_of_its_own(group):
    subprocess.Popen(["sleep", TAG], start_new_session=True)
    os._exit(5)


@kind(KILLED + "SIGKILL")
def leaves_a_daemon(group):
    subprocess.run(["sh", "-c", f"setsid sh -c 'sleep {TAG} & sleep {TAG}' & sleep 0.05"])
    os.kill(os.getpid(), signal.SIGKILL)


@kind(r"rank {r} of {n} ended its process")
def closes_all_its_files(group):
    os.closerange(0, 1000)
    return 1


# ---- it waits forever ---------------------------------------------------------------------------


@kind(LATE, "rank {r} is running", r"time\.sleep\(1000\)", waited=True)
def sleeps(group):
    time.sleep(1000)


@kind(LATE, "rank {r} is running", waited=True)
def computes_for_ever(group):
    while True:
        pass


@kind(LATE, "rank {r} is running", waited=True)
def computes_natively_for_ever(group):
    x = torch.ones(64, 64)
    while True:
        x = x @ x * 0


@kind(LATE, "rank {r} is running", waited=True)
def stops_itself(group):
    os.kill(os.getpid(), signal.SIGSTOP)


@kind(LATE, "rank {r} is running", r"lock\.acquire\(\)", waited=True)
def waits_for_its_own_lock(group):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@kind(LATE, "rank {r} is running", waited=True)
def reads_from_its_own_pipe(group):
    end, _ = os.pipe()
    os.read(end, 1)


@kind(LATE, waited=True)
def prints_without_end(group):
    while True:
        print("x" * 100)


@kind(LATE, waited=True)
def hears_no_signal(group):
    for number in range(1, 32):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1)


@kind(LATE, waited=True)
def becomes_a_program_that_sleeps(group):
    os.execv("/bin/sleep", ["sleep", TAG])


@kind(STUCK, r"rank {r} has returned, after \d collective", sizes=(2, 3, 4))
def returns_early(group):
    return "early"


@kind(UNLIKE, "rank {r} calls broadcast", sizes=(2, 3, 4))
def calls_another_collective(group):
    dist.broadcast(torch.ones(2), 0, group=group)


@kind(UNLIKE, r"rank {r} calls all_reduce\(float32\[3\]\)", sizes=(2, 3, 4))
def has_another_shape(group):
    dist.all_reduce(torch.ones(3), group=group)


@kind(UNLIKE, r"rank {r} calls all_reduce\(float64\[2\]\)", sizes=(2, 3, 4))
def has_another_dtype(group):
    dist.all_reduce(torch.ones(2, dtype=torch.float64), group=group)


@kind(UNLIKE, r"rank {r} calls all_reduce\(float32\[2\], MAX\)", sizes=(2, 3, 4))
def has_another_reduction(group):
    dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX, group=group)


@kind(UNLIKE, r"rank {r} calls barrier\(\)", sizes=(2, 3, 4))
def waits_at_a_barrier(group):
    dist.barrier(group=group)


@kind(UNLIKE, r"root 0", r"root 1", everybody=True, sizes=(2, 3, 4), alone=True)
def disagree_on_the_root(group):
    dist.reduce(torch.ones(2), min(group.rank(), 1), group=group)


@kind(STUCK, r"in send\(float32\[2\], to rank", everybody=True, sizes=(2, 3, 4), alone=True)
def everyone_sends_first(group):
    rank, size = group.rank(), group.size()
    dist.send(torch.ones(2), (rank + 1) % size, group=group)
    dist.recv(torch.ones(2), (rank - 1) % size, group=group)


@kind(STUCK, r"in recv\(float32\[2\], from rank", everybody=True, sizes=(2, 3, 4), alone=True)
def everyone_receives_first(group):
    rank, size = group.rank(), group.size()
    dist.recv(torch.ones(2), (rank - 1) % size, group=group)
    dist.send(torch.ones(2), (rank + 1) % size, group=group)


@kind(STUCK, r"in recv\(", sizes=(2, 3, 4), alone=True, options={"others": "return"})
def receives_what_nobody_sends(group):
    dist.recv(torch.ones(2), (group.rank() + 1) % group.size(), group=group)


@kind(UNLIKE, r"calls send\(float32\[4\]", everybody=True, sizes=(2,), alone=True)
def receives_less_than_is_sent(group):
    if group.rank() == 0:
        dist.send(torch.ones(4), 1, group=group)
    else:
        dist.recv(torch.ones(2), 0, group=group)


@kind(STUCK, everybody=True, sizes=(3, 4), alone=True)
def leaves_one_out_of_a_barrier(group):
    if group.rank() != 1:
        dist.barrier(group=group)


@kind(STUCK, everybody=True, sizes=(2, 3, 4), alone=True)
def one_more_collective_on_rank_0(group):
    for _ in range(3 + (group.rank() == 0)):
        dist.all_reduce(torch.ones(2), group=group)


# ---- what it returns ----------------------------------------------------------------------------


@kind(RAISED + "PicklingError: the result of rank {r} cannot be sent", "generator")
def returns_a_generator(group):
    return (i for i in range(3))


@kind(RAISED + "PicklingError: .*lock", "inside the function, on each rank")
def returns_a_lock(group):
    return {"a": [threading.Lock()]}


@kind(RAISED + "PicklingError", "Open files and sockets belong to one process")
def returns_a_socket(group):
    return [socket.socket()]


@kind(RAISED + "PicklingError")
def returns_its_group(group):
    return group


@kind(RAISED + "(PicklingError|SystemExit)")
def returns_what_exits_when_pickled(group):
    class Leaves:
        def __reduce__(self):
            sys.exit(3)

    return Leaves()


@kind(RAISED + "PicklingError: .*coroutine", r"asyncio\.run")
def returns_a_coroutine(group):
    async def later():
        pass

    return later()


@kind(
    r"the result of rank \d cannot be rebuilt in this process",
    error="TypeError",
    options={"others": "return"},
)
def returns_what_cannot_be_rebuilt(group):
    class Awkward(Exception):
        def __init__(self, a, b):
            super().__init__(a)

    return Awkward(1, 2)


@kind(
    r"the result of rank \d cannot be rebuilt in this process",
    error="TypeError",
    options={"others": "return"},
)
def returns_what_exits_when_rebuilt(group):
    class Leaves:
        def __reduce__(self):
            return sys.exit, (3,)

    return Leaves()


# ---- sound, and hard on the launcher ------------------------------------------------------------


@kind()
def loses_its_stdout(group):
    sys.stdout = None


@kind()
def has_a_stdout_without_flush(group):
    class Silent:
        def write(self, text):
            pass

    sys.stdout = sys.stderr = Silent()


@kind()
def closes_its_stdout(group):
    sys.stdout.close()
    sys.stderr.close()


@kind()
def closes_its_output(group):
    os.close(1)
    os.close(2)


@kind()
def prints_half_a_surrogate_pair(group):
    print("half \ud800 a pair", b"\xff")


@kind()
def forgets_its_environment(group):
    os.environ.clear()
    sys.path.clear()


@kind()
def removes_its_directory(group):
    gone = tempfile.mkdtemp()
    os.chdir(gone)
    os.rmdir(gone)


@kind()
def forks_and_both_return(group):
    os.fork()


@kind()
def forks_and_the_child_raises(group):
    if os.fork() == 0:
        raise ValueError("in the child")


@kind()
def leaves_a_child_behind(group):
    subprocess.Popen(["sleep", TAG], start_new_session=bool(group.rank() % 2))


@kind()
def leaves_a_thread(group):
    threading.Thread(target=time.sleep, args=(1000,)).start()


@kind()
def reaps_its_children_itself(group):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    subprocess.Popen(["true"])


@kind(RAISED + "OSError: .*Too many open files")
def may_open_no_more_files(group):
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))


@kind()
def displays(group):
    display(torch.ones(2))  # noqa: F821


@kind()
def leaves_messages_unreceived(group):
    if group.size() > 1:
        PENDING.append(group.send([torch.ones(4)], (group.rank() + 1) % group.size(), 7))


PENDING: list = []


@kind()
def stops_the_zygote(group):
    os.kill(os.getppid(), signal.SIGSTOP)


@kind()
def returns_megabytes(group):
    torch.save(torch.ones(3), tempfile.TemporaryFile())
    print("y" * 3_000_000)


# ---- something happens to the launcher ----------------------------------------------------------


@kind(LATE, waited=True)
def stops_the_zygote_and_sleeps(group):
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(1000)


@kind("the process that starts ranks ended with status -9", error="ZygoteDied")
def kills_the_zygote(group):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def keeper():
    return ZYGOTES.get(("fork", False))


@contextlib.contextmanager
def zygote_killed(dice):
    keeper().process.kill()
    keeper().process.wait()
    yield


@contextlib.contextmanager
def zygote_stopped(dice):
    os.kill(keeper().process.pid, signal.SIGSTOP)
    yield


def standby() -> list[int]:
    return [child.pid for child in psutil.Process(keeper().process.pid).children()]


@contextlib.contextmanager
def standby_killed(dice):
    for pid in dice.sample(standby(), k=min(1, len(standby()))):
        os.kill(pid, signal.SIGKILL)
        while psutil.pid_exists(pid):  # A zombie may still have threads that are being killed.
            time.sleep(0.001)
    yield


@contextlib.contextmanager
def directory_removed(dice):
    before, gone = os.getcwd(), tempfile.mkdtemp()
    os.chdir(gone)
    os.rmdir(gone)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def few_files_allowed(dice):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (now + dice.randrange(2, 14), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def interrupted(dice):
    """Interrupt one to three times, as the kernel's interrupt button does."""
    times = dice.choice([1, 1, 2, 3])

    def interrupt():
        time.sleep(dice.uniform(0.1, 0.4))
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # A later interrupt is not meant for launch.
        thread.join()
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def signals_blocked(dice):
    """Block signals as in a thread of a server, and start the zygote there."""
    keeper().close()
    before = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def nothing(group):
    pass


def others_meanwhile(name: str, said: list[str], around, **about):
    KINDS[name] = Kind(about.pop("act", nothing), said, around=around, **about)


others_meanwhile("zygote_killed_before", [], zygote_killed)
others_meanwhile("zygote_stopped_before", [], zygote_stopped)
others_meanwhile("standby_killed_before", [], standby_killed)
others_meanwhile(
    "directory_removed_before",
    ["working directory of this process has been removed"],
    directory_removed,
    error="RuntimeError",
)
others_meanwhile(
    "few_files_allowed",
    [r"could not run {n} ranks: .*Too many open files", "ulimit -n"],
    few_files_allowed,
    sizes=(6, 8, 12),
)
others_meanwhile(
    "interrupted",
    [r"^interrupted\.", r"time\.sleep\(1000\)"],
    interrupted,
    act=sleeps,
    error="RankInterrupt",
    options={"timeout": 20},
)

others_meanwhile(
    "zygote_with_signals_blocked",
    [ENDED + "3 instead"],
    signals_blocked,
    act=KINDS["exits_by_c"].act,
)

# ---- what cannot be ------------------------------------------------------------------------------


def refused(name: str, said: str, error: str, **arguments):
    def call(dice):
        launch(**{"fn": nothing, "world_size": 2, "quiet": True, **arguments})

    KINDS[name] = Kind(nothing, [said], error=error, outside=call)


refused("world_size_0", "at least 1, not 0", "ValueError", world_size=0)
refused("world_size_negative", "not a number of 67 bits", "ValueError", world_size=-(10**20))
refused("world_size_huge", "a number of 1329 bits is too many", "ValueError", world_size=10**400)
refused("world_size_text", "world_size='4' is not a whole number", "TypeError", world_size="4")
refused("seed_too_large", "seed must be from 0 to", "ValueError", seed=2**64)
refused("seed_huge", "not a number of 16610 bits", "ValueError", seed=10**5000)
refused("seed_negative", "seed must be from 0 to", "ValueError", seed=-1)
refused("timeout_zero", "timeout must be a number of seconds above 0", "ValueError", timeout=0)
refused("timeout_nan", "timeout=nan is not a finite number", "TypeError", timeout=float("nan"))
refused("no_function", "fn must be a function", "TypeError", fn=3)
refused("wrong_arguments", "too many positional arguments", "TypeError", args=(1, 2))
refused("args_no_tuple", "args must be a tuple", "TypeError", args=3)
refused("unknown_start", 'start must be "fork" or "spawn"', "ValueError", start="thread")
refused(
    "lock_as_argument",
    "cannot be sent to another process: cannot pickle '_thread.lock'",
    "PicklingError",
    fn=lambda lock, group: None,
    args=(threading.Lock(),),
)
SHARED = threading.Lock()
refused(
    "lock_in_a_closure",
    "It is the variable 'SHARED', a _thread.lock",
    "PicklingError",
    fn=lambda group: SHARED,
)

# ---- one case -----------------------------------------------------------------------------------


@dataclass
class Place:
    """A path that the ranks of one case share."""

    value: str = ""


PLACE = Place()


def job(act, culprit, before, others, everybody, place, group):
    PLACE.value = place
    for _ in range(before):
        dist.all_reduce(torch.ones(2), group=group)
    result = None
    if everybody or group.rank() == culprit:
        result = act(group)
    elif others == "meet":
        dist.all_reduce(torch.ones(2), group=group)
    elif others == "sleep":
        time.sleep(0.02)
        dist.all_reduce(torch.ones(2), group=group)
    return group.rank() if result is None else result


def run_case(name: str, dice: random.Random) -> list[str]:
    """Run one case; return what was wrong with its end, or nothing."""
    about = KINDS[name]
    size = dice.choice(about.sizes)
    culprit, before = dice.randrange(size), 0 if about.alone else dice.choice([0, 0, 1, 3])
    sound = not about.said
    others = about.options.get("others") or ("return" if sound else dice.choice(["meet", "sleep"]))
    timeout = about.options.get("timeout") or (TIMEOUT if about.waited else 30)
    memory, wrong = dice.random() < 0.2, []
    with tempfile.TemporaryDirectory() as folder:
        place = f"{folder}/pid"
        if name == "kills_another":
            others, about = "meet", Kind(about.act, about.said, everybody=True, sizes=about.sizes)
        arguments = (about.act, culprit, before, others, about.everybody, place)
        context = about.around(dice) if about.around else contextlib.nullcontext()
        began = time.monotonic()
        try:
            with context:
                began = time.monotonic()
                if about.outside:
                    about.outside(dice)
                else:
                    run = launch(job, size, arguments, timeout=timeout, quiet=True, memory=memory)
        except BaseException as error:
            wrong += judge(error, about, culprit, size)
        else:
            if not sound:
                wrong.append("no error at all")
            elif run.results != list(range(size)):
                wrong.append(f"results {run.results}")
        took = time.monotonic() - began
    limit = timeout + AFTER if about.waited else FOUND
    limit += 3 if "zygote" in name else 0  # A new zygote has to load torch first.
    if took > limit:
        wrong.append(f"took {took:.1f} s, more than {limit:g}")
    return wrong


def judge(error: BaseException, about: Kind, culprit: int, size: int) -> list[str]:
    message, wrong = str(error), []
    kinds = [each.__name__ for each in type(error).__mro__]
    if not about.said:
        return [f"is sound, but {kinds[0]}: {message[:2000]}"]
    if about.error not in kinds:
        trace = "".join(traceback.format_exception(error))[-1500:]
        wrong.append(f"{kinds[0]} and not {about.error}: {trace}")
    for pattern in about.said:
        pattern = pattern.replace("{r}", str(culprit)).replace("{n}", str(size))
        if not re.search(pattern, message, flags=re.MULTILINE | re.DOTALL):
            wrong.append(f"{pattern!r} is not in: {message[:2000]}")
    if len(message.splitlines()) > 40 or len(message) > 20_000:
        wrong.append(f"{len(message.splitlines())} lines, {len(message)} characters")
    if inside := INSIDES.search(message):
        wrong.append(f"speaks of the launcher's insides ({inside[0]}): {message[:2000]}")
    return wrong


def left_behind(files: int) -> list[str]:
    """Return what this process has beyond a zygote, its standby ranks and their folder."""
    size, wrong = random.choice([2, 3]), []
    results = launch(add_up, size, quiet=True).results
    if results != [sum(range(size))] * size:
        wrong.append(f"the next launch returned {results}")
    zygote = keeper()
    found = []
    deadline = time.monotonic() + GONE
    while time.monotonic() < deadline:
        family = psutil.Process(zygote.process.pid).children(recursive=True)
        found = []
        if len(family) != zygote.standby.size:
            found.append(f"{len(family)} processes for {zygote.standby.size} ranks on standby")
        if sleeping := [p.pid for p in psutil.process_iter(["cmdline"]) if is_ours(p)]:
            found.append(f"children of ranks: {sleeping}")
        names = set(os.listdir(zygote.directory))
        if names != {MARKER, LOG, str(zygote.standby.number)}:
            found.append(f"files: {names}")
        now = len(os.listdir("/proc/self/fd")) - 2 * zygote.standby.size
        if now > files:
            found.append(f"{now} open files, {files} before")
        if not found:
            return wrong
        time.sleep(0.02)
    return wrong + found


def is_ours(process: psutil.Process) -> bool:
    return TAG in (process.info["cmdline"] or [])


def add_up(group):
    total = torch.tensor(float(group.rank()))
    dist.all_reduce(total, group=group)
    return total.item()


def run_cases(cases: int, seed: int, only: str | None = None, show=print) -> dict:
    """Run this many cases; return the results of each kind, and the mistakes case by case."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    dice = random.Random(seed)
    names = [name for name in KINDS if only is None or only in name]
    launch(add_up, 2, quiet=True)
    left_behind(1 << 30)
    files = len(os.listdir("/proc/self/fd")) - 2 * keeper().standby.size
    deck: list[str] = []
    ran, problems, seconds = Counter(), [], []
    for number in range(cases):
        if not deck:  # Run every kind once before any kind runs again.
            deck = dice.sample(names, k=len(names))
        name = deck.pop()
        case_seed = dice.randrange(2**32)
        before = keeper().directory
        began = time.monotonic()
        wrong = run_case(name, random.Random(case_seed))
        seconds.append(time.monotonic() - began)
        wrong += left_behind(files)
        if keeper().directory != before and os.path.exists(before):
            time.sleep(1)
            wrong += [f"{before} is left"] if os.path.exists(before) else []
        ran[name] += 1
        for each in wrong:
            problems.append({"case": number, "kind": name, "seed": case_seed, "wrong": each})
            show(f"case {number}, {name} (seed {case_seed}): {each}")
    return {"cases": sum(ran.values()), "kinds": len(ran), "problems": problems, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and rows here")
    parser.add_argument("--long", action="store_true", help="ten times as many cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--only", metavar="NAME", help="kinds whose name has this in it")
    options = parser.parse_args()
    about = about_this_machine()
    done = run_cases(options.cases * (10 if options.long else 1), options.seed, options.only)
    median = sorted(done["seconds"])[len(done["seconds"]) // 2]
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(
        f"seed {options.seed}: {done['cases']} cases of {done['kinds']} kinds, {median:.2f} s each"
    )
    print(f"{len(done['problems'])} problems")
    if options.json:
        options.json.write_text(json.dumps({"machine": about, **done}, indent=1) + "\n")
    return 1 if done["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
