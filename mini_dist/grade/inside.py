"""The first process in a sandbox: make it, start the worker in it, and end with it.

    unshare --user ... python -m mini_dist.grade.inside '{"worker": ..., ...}' < job

It sees a file system in memory of a stated size, in which the system's programs, this Python and
mini_dist are there to be read; processes of its own; a loopback that leads nowhere; no rights
beyond a user's. Without "apart", on a system that has no namespaces, the worker runs as the user
who grades, under the limits of `set_limits`; off Linux none of them is of memory or processes.

The job is JSON on stdin, its length in front; when stdin ends, because the grader has, all ends.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import stat
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from ..ranks.network import bring_loopback_up

LENGTH = struct.Struct("<q")
# of linux/mount.h, linux/prctl.h and the tables of system calls
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC = 2, 4, 8, 4096, 16384
MNT_DETACH, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 2, -100, 0x8000, 1, 2
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
# Who is root outside may write to these by being root, without any right.
OF_PROC = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "driver", "mtrr")
MOST_FILES = 100_000
MOST_OPEN = 4096  # files of one process
THREADS = 5  # times as many as processes
# Memory that nobody's size shows (memfd_create, shmget, msgget), the keys of the session that
# started the grader, other processes' memory, and calls for which the kernel has much code.
FORBIDDEN = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
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
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # which number; linux/audit.h
LOOK = 0.05  # seconds between two looks at the number of processes
TOO_MANY = 77  # a status


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
    package = str(Path(__file__).resolve().parents[1])
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
    for kind in ("pid", "mnt"):  # who would hide processes from the grader cannot
        with suppress(OSError):
            Path(f"/proc/sys/user/max_{kind}_namespaces").write_text("0")
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
    """Have the kernel refuse FORBIDDEN, and all calls in another machine's numbers, with EPERM."""
    which, machine = MACHINES[platform.machine()]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    refuse, allow = 0x00050000 | errno.EPERM, 0x7FFF0000
    numbers = sorted(both[which] for both in FORBIDDEN.values())
    tests = [(equal, number) for number in numbers] + [(at_least, 0x40000000)]  # (x32)
    steps = [(load, 0, 0, 4), (equal, 0, len(tests) + 2, machine), (load, 0, 0, 0)]
    steps += [(test, len(tests) - i, 0, number) for i, (test, number) in enumerate(tests)]
    steps += [(give, 0, 0, allow), (give, 0, 0, refuse)]
    program = Filter(len(steps), b"".join(struct.pack("HBBI", *step) for step in steps))
    call = (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)
    checked(LIBC.prctl(*call), "seccomp")


def set_limits(limits: dict) -> None:
    def at_most(kind: int, value: int) -> None:
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))

    at_most(resource.RLIMIT_CORE, 0)
    at_most(resource.RLIMIT_FSIZE, limits["disk"])
    at_most(resource.RLIMIT_NOFILE, MOST_OPEN)
    if sys.platform == "linux":
        at_most(resource.RLIMIT_DATA, limits["memory"])
        if limits["apart"]:  # else it would count all that this user runs
            at_most(resource.RLIMIT_NPROC, THREADS * limits["processes"])  # it counts threads
        if limits["cores"]:
            os.sched_setaffinity(0, limits["cores"])


def read_exactly(number: int) -> bytes:
    data = b""
    while len(data) < number and (more := os.read(0, number - len(data))):
        data += more
    return data


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


def end_if_there_are_too_many(processes: int) -> None:
    """Root's processes have no limit of the system's, and a fork bomb is fast: look often. (In here
    /proc shows nobody else's.)"""
    while True:
        pids = [name for name in os.listdir("/proc") if name.isdigit()]
        if len(pids) > processes:
            why = f"it started more than {processes} processes"
            break
        if sum(map(threads_of, pids)) > THREADS * processes:
            why = f"it started more than {THREADS * processes} threads"
            break
        time.sleep(LOOK)
    os.write(2, f"{why}\n".encode())
    os._exit(TOO_MANY)


def threads_of(pid: str) -> int:
    try:
        return os.stat(f"/proc/{pid}/task").st_nlink - 2
    except OSError:
        return 0


def main() -> None:
    limits = json.loads(sys.argv[1])
    (length,) = LENGTH.unpack(read_exactly(LENGTH.size))
    job = read_exactly(length)
    if limits["apart"]:
        seclude(limits["disk"])
    elif sys.platform == "linux":
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.environ["HOME"] = os.environ["IPYTHONDIR"] = os.environ["MPLCONFIGDIR"] = os.getcwd()
    worker = os.fork()
    if worker == 0:
        set_limits(limits)
        if limits["apart"]:
            give_up_rights()
        Path("job").write_bytes(job)
        os.dup2(os.open("job", os.O_RDONLY), 0)
        os.unlink("job")
        os.execv(sys.executable, [sys.executable, "-m", f"mini_dist.grade.{limits['worker']}"])
    if sys.platform == "linux":  # nobody in here looks into this process, or has it do things
        LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    threading.Thread(target=end_with_the_grader, daemon=True).start()
    if limits["apart"]:
        most = (limits["processes"],)
        threading.Thread(target=end_if_there_are_too_many, args=most, daemon=True).start()
    while True:
        pid, status = os.wait()  # orphans come to this process
        if pid == worker:
            end_descendants()
            os._exit(min(255, abs(os.waitstatus_to_exitcode(status))))


if __name__ == "__main__":
    main()
