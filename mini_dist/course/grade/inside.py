"""The first process in a sandbox: make it, start the worker in it, watch it, and end with it.

    unshare --user ... python -m mini_dist.course.grade.inside '{"worker": ..., ...}' < job

It sees a file system in memory of a stated size, in which the system's programs, this Python and
mini_dist are there to be read; processes of its own; a loopback that leads nowhere; no rights
beyond a user's. Without "apart", on a system that has no namespaces, the worker runs as the user
who grades, under the limits of `set_limits`; off Linux none of them is of memory or processes.

The job is JSON on stdin, its length in front; when stdin ends, because the grader has, all ends. It
may come long after the start: until then the worker loads what it needs, and the limits are watched
from the job on. This process reads nothing that the worker says, so no output can keep it from
enforcing them.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import os
import platform
import resource
import signal
import socket
import stat
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from mini_dist.ranks.network import bring_loopback_up

from . import usage

LENGTH = struct.Struct("<q")
# of linux/mount.h, linux/prctl.h and the tables of system calls
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC = 2, 4, 8, 4096, 16384
MNT_DETACH, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 2, -100, 0x8000, 1, 2
AF_NETLINK = 16
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_MOUNT_SETATTR = 442
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 4, 24, 38, 36
CAPABILITY_VERSION, LAST_CAPABILITY = 0x20080522, 63
LIBC = ctypes.CDLL(None, use_errno=True)

HOME = "/home/learner"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
OF_ETC = ("passwd", "group", "hosts", "nsswitch.conf", "localtime", "alternatives", "fonts")
OF_ETC += ("ld.so.cache", "ld.so.conf", "ld.so.conf.d")
DEVICES = ("null", "zero", "full", "random", "urandom")
# A user who is root outside can write to these as root, without any capability.
OF_PROC = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "driver", "mtrr")
MOST_FILES = 100_000
MOST_OPEN = 4096  # files of one process
THREADS = 5  # times as many as processes
# Memory that nobody's size shows (memfd_create, shmget, msgget, semget, mq_open), the keys of the
# session that started the grader, other processes' memory, and calls for which the kernel has much
# code.
FORBIDDEN = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
}
SOCKET, SETSOCKOPT = (41, 198), (54, 208)
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, AF_NETLINK)
# A program that sets the size of its sockets' buffers is told that it has, and nothing changes:
# `usage.OF_A_SOCKET` is what a socket holds by default.
SOL_SOCKET, BUFFERS = 1, (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, and both with FORCE
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # which number; linux/audit.h
LOOK = 0.05  # seconds between two looks at the number of processes: a fork bomb is fast
LOOK_CLOSELY = 0.25  # seconds between two looks at memory, and at the processes of the whole host
BEYOND = 77  # the status of a sandbox that was ended because it went beyond a limit


def checked(status: int, what: str) -> None:
    if status < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    texts = (source.encode(), target.encode(), kind.encode() or None)
    checked(LIBC.mount(*texts, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def show(path: str, what: int, root: str) -> None:
    """Let `what` (opened by O_PATH) be read at `path` in the new file system."""
    place, kind = Path(root + path), os.fstat(what).st_mode
    place.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISLNK(kind):
        place.symlink_to(os.readlink("", dir_fd=what))
        return
    place.mkdir(exist_ok=True) if stat.S_ISDIR(kind) else place.touch()
    mount(f"/proc/self/fd/{what}", str(place), flags=MS_BIND | MS_REC)
    read_only(str(place))


def read_only(path: str) -> None:
    attributes = struct.pack("4Q", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    call = (SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), AT_RECURSIVE, attributes, 32)
    checked(LIBC.syscall(*call), f"read-only {path}")


def to_be_read() -> list[str]:
    """The system's programs, this Python with what is installed, and mini_dist: no folder of a
    user's."""
    package = str(Path(__file__).resolve().parents[2])
    python = [sys.prefix, sys.base_prefix, package]
    python += [each for each in sys.path if each.endswith("-packages")]
    python += map(os.path.realpath, [*python])
    paths = [*SYSTEM, *(f"/etc/{name}" for name in OF_ETC), *sorted(python, key=len)]
    found = []
    for path in filter(os.path.lexists, paths):
        if not any(path == other or path.startswith(f"{other}/") for other in found):
            found.append(path)
    return found


def seclude(disk: int) -> None:
    """Exchange the file system for one in memory of `disk` bytes, with little in it. OSError where
    the system refuses."""
    root = "/tmp"  # any folder: the new file system hides what is in it, here and nowhere else
    visible = {path: os.open(path, os.O_PATH | os.O_NOFOLLOW) for path in to_be_read()}
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk},nr_inodes={MOST_FILES}")
    for path, what in visible.items():
        show(path, what, root)
        os.close(what)
    for name in ("tmp", "var/tmp", "dev/shm", "proc", HOME[1:]):
        Path(root, name).mkdir(parents=True, exist_ok=True)
    os.chmod(f"{root}/tmp", 0o1777)
    for name in DEVICES:
        Path(root, "dev", name).touch()
        mount(f"/dev/{name}", f"{root}/dev/{name}", flags=MS_BIND)
        read_only(f"{root}/dev/{name}")  # its owner and mode; what is written to it arrives
    mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    with suppress(OSError):  # only what runs a shell in a terminal needs it
        Path(root, "dev/pts").mkdir()
        mount("devpts", f"{root}/dev/pts", "devpts", 0, "newinstance,ptmxmode=0666,mode=620")
        Path(root, "dev/ptmx").symlink_to("pts/ptmx")
    os.chdir(root)
    pivot = SYS_PIVOT_ROOT[platform.machine()]
    checked(LIBC.syscall(pivot, b".", b"."), "pivot_root")
    checked(LIBC.umount2(b".", MNT_DETACH), "umount")  # the old one, which lies on top
    os.chdir(HOME)
    # No processes that /proc does not show here, and no memory of the kernel's that nothing counts.
    for kind in ("pid_namespaces", "mnt_namespaces", "inotify_watches", "fanotify_marks"):
        with suppress(OSError):
            Path(f"/proc/sys/user/max_{kind}").write_text("0")
    for path in filter(os.path.exists, (f"/proc/{name}" for name in OF_PROC)):
        mount(path, path, flags=MS_BIND | MS_REC)
        read_only(path)
    bring_loopback_up()


def give_up_rights() -> None:
    for capability in range(LAST_CAPABILITY):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    none = struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24)
    checked(LIBC.capset(*none), "capset")
    forbid_calls()


class Filter(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))


def forbid_calls() -> None:
    """Install a filter of system calls; `rules` says what it refuses."""
    steps = assembled(rules(platform.machine()))
    program = Filter(len(steps), b"".join(struct.pack("HBBI", *step) for step in steps))
    call = (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)
    checked(LIBC.prctl(*call), "seccomp")


def rules(machine: str) -> list[tuple]:
    """Return the filter as steps, where None as a label means the next step.

    A step is (label,), ("load", offset in struct seccomp_data), ("give", what) or (test, number,
    label if it is so, label if not).

    It refuses FORBIDDEN, calls in another machine's numbers and sockets of other FAMILIES, and lets
    no program set the size of BUFFERS.
    """
    which, audited = MACHINES[machine]
    numbers = sorted(both[which] for both in FORBIDDEN.values())
    return [
        ("load", 4),
        ("equal", audited, None, "refuse"),
        ("load", 0),
        *(("equal", number, "refuse", None) for number in numbers),
        ("at least", 0x40000000, "refuse", None),  # (x32)
        ("equal", SOCKET[which], "family", None),
        ("equal", SETSOCKOPT[which], "option", None),
        ("give", 0x7FFF0000),
        ("family",),
        ("load", 16),
        *(("equal", family, "allow", None) for family in FAMILIES),
        ("refuse",),
        ("give", 0x00050000 | errno.EPERM),
        ("option",),
        ("load", 24),
        ("equal", SOL_SOCKET, None, "allow"),
        ("load", 32),
        *(("equal", option, "pretend", None) for option in BUFFERS),
        ("allow",),
        ("give", 0x7FFF0000),
        ("pretend",),
        ("give", 0x00050000),  # an error of number 0: the call returns 0
    ]


def assembled(rules: list[tuple]) -> list[tuple[int, int, int, int]]:
    """Return the filter as the kernel takes it: code, two distances to jump, number."""
    codes = {"load": 0x20, "equal": 0x15, "at least": 0x35, "give": 0x06}
    places, steps = {}, []
    for rule in rules:
        if len(rule) == 1:
            places[rule[0]] = len(steps)
        else:
            steps.append(rule)

    def distance(label: str | None, here: int) -> int:
        return 0 if label is None else places[label] - here - 1

    return [
        (codes[kind], *(distance(label, here) for label in labels or (None, None)), number)
        for here, (kind, number, *labels) in enumerate(steps)
    ]


def set_limits(limits: dict) -> None:
    def at_most(kind: int, value: int) -> None:
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))

    at_most(resource.RLIMIT_CORE, 0)
    at_most(resource.RLIMIT_FSIZE, limits["disk"])
    at_most(resource.RLIMIT_NOFILE, MOST_OPEN)
    if sys.platform == "linux":
        at_most(resource.RLIMIT_MSGQUEUE, 0)
        at_most(resource.RLIMIT_DATA, limits["memory"])
        if limits["apart"]:  # else it would count all that this user runs
            at_most(resource.RLIMIT_NPROC, THREADS * limits["processes"])  # it counts threads
        if limits["cores"]:
            os.sched_setaffinity(0, limits["cores"])


def read_exactly(number: int) -> bytes:
    data = bytearray()
    while len(data) < number and (more := os.read(0, min(1 << 20, number - len(data)))):
        data += more
    return bytes(data)


def end_with_the_grader() -> None:
    while os.read(0, 1):
        pass
    end_descendants()
    if sys.platform != "linux":
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def end_descendants() -> None:
    """In a sandbox the system does it; else, on Linux, whoever loses its parent becomes a child of
    this process, so in the end all of them are."""
    children = f"/proc/self/task/{os.getpid()}/children"
    while os.path.exists(children) and (pids := Path(children).read_text().split()):
        for pid in map(int, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.wait()


def end_beyond_limits(limits: dict) -> None:
    """Look often, and end everything once it goes beyond a limit."""
    deadline = time.monotonic() + limits["seconds"]
    looks = round(LOOK_CLOSELY / LOOK)
    for look in itertools.count():
        if why := beyond(limits, deadline, closely=look % looks == 0):
            leave(BEYOND, why)
        time.sleep(LOOK)


def beyond(limits: dict, deadline: float, closely: bool) -> str:
    """Return which limit is exceeded, as a sentence, or "". closely: also measure memory."""
    if time.monotonic() > deadline:
        return f"it took longer than {limits['seconds']:g} s"
    if not (limits["apart"] or closely):  # (all processes of the host are listed)
        return ""
    pids = usage.everybody() if limits["apart"] else usage.family(os.getpid())
    most = limits["processes"]
    if len(pids) > most:
        return f"it started more than {most} processes"
    if limits["apart"] and usage.threads(pids) > THREADS * most:
        return f"it started more than {THREADS * most} threads"
    held = usage.memory(pids, limits["memory"]) if closely else None
    if held is None or held.total <= limits["memory"]:
        return ""
    kernel = f", up to {held.kernel / 2**30:.1f} GB of it in the kernel (sockets, page tables)"
    mostly = 4 * held.kernel > held.total
    return f"it took more than {limits['memory'] / 2**30:g} GB of memory{kernel * mostly}"


LEAVING = threading.Lock()  # never released: who leaves first says why


def leave(status: int, why: str = "") -> None:
    LEAVING.acquire()
    if why:
        os.write(2, f"\n{why}\n".encode())
    end_descendants()
    os._exit(status)


def main() -> None:
    limits = json.loads(sys.argv[1])
    if limits["apart"]:
        seclude(limits["disk"])
    elif sys.platform == "linux":
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.environ["HOME"] = os.environ["IPYTHONDIR"] = os.environ["MPLCONFIGDIR"] = os.getcwd()
    reads, writes = os.pipe()
    worker = os.fork()
    if worker == 0:
        set_limits(limits)
        if limits["apart"]:
            give_up_rights()
        os.dup2(reads, 0)
        os.close(writes)
        os.execv(
            sys.executable, [sys.executable, "-m", f"mini_dist.course.grade.{limits['worker']}"]
        )
    os.close(reads)
    if sys.platform == "linux":  # nobody in here looks into this process, or has it do things
        LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    length = read_exactly(LENGTH.size)  # until it comes, nothing of a learner's is in here
    if len(length) < LENGTH.size:
        leave(1)
    job = read_exactly(*LENGTH.unpack(length))
    threading.Thread(target=end_with_the_grader, daemon=True).start()
    threading.Thread(target=end_beyond_limits, args=(limits,), daemon=True).start()
    with suppress(BrokenPipeError), os.fdopen(writes, "wb") as pipe:  # (its status tells)
        pipe.write(job)
    with suppress(ChildProcessError):  # (none is left where the other thread ends them)
        while (ended := os.wait())[0] != worker:  # orphans come to this process
            pass
        leave(min(255, abs(os.waitstatus_to_exitcode(ended[1]))))
    LEAVING.acquire()


if __name__ == "__main__":
    main()
