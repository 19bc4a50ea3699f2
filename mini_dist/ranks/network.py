"""A private network for ranks: a loopback that nobody else on the host can reach.

gloo's connections are neither encrypted nor authenticated. On the host's loopback any user of the
host could connect to a rank before its peer does and send it bytes, which `all_gather_object` even
unpickles. Linux gives every process that asks a network namespace: an empty network with its own
loopback, visible to this process and its forks. No privilege is needed if the system lets users
make namespaces (namespaces(7), user_namespaces(7)); some systems forbid it, and macOS has
none.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import pwd
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # of linux/sched.h
SIOCSIFFLAGS, IFF_UP = 0x8914, 1  # of linux/sockios.h and linux/if.h
CAPABILITY_VERSION = 0x20080522  # of linux/capability.h, the third
FIRST_PERSON = 500 if sys.platform == "darwin" else 1000  # accounts below belong to the system
NOBODY = 65534
ROOT = 0  # which needs no open door


def leave_the_hosts_network() -> str | None:
    """Move this process into its own network; return None, or why that is impossible.

    Call it while the process has one thread. It tries in a fork first: if a namespace
    can be made but not used, there is no way back out of it.
    """
    if sys.platform != "linux":
        return f"{sys.platform} has no network namespaces"
    trial = os.fork()
    if trial == 0:
        number = errno.EIO
        try:
            enter_an_empty_network()
            number = 0
        except OSError as error:
            number = error.errno or number
        finally:
            os._exit(number)
    number = os.waitstatus_to_exitcode(os.waitpid(trial, 0)[1])
    if number == 0:
        enter_an_empty_network()
        return None
    return f"this system refuses a network namespace: {os.strerror(abs(number))}"


def enter_an_empty_network() -> None:
    """Enter an empty network. Raises OSError if the system refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        refusal = ctypes.get_errno()
        # A user may not make a network in the host's user namespace, but may in its own, where it
        # has all capabilities. They do not count outside: a process that already has some (root in
        # a container, for example, working in another user's folder) would lose them there.
        user, group, before = os.getuid(), os.getgid(), capabilities(libc)
        if any(struct.unpack("6I", before[1].raw)[1::3]):  # those permitted
            raise OSError(refusal, os.strerror(refusal))
        check(libc.unshare(CLONE_NEWUSER | CLONE_NEWNET))
        with suppress(FileNotFoundError):  # (old kernels do not require it)
            Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        bring_loopback_up()
        BEFORE.append(before)
    else:
        bring_loopback_up()


BEFORE: list[tuple] = []  # the capabilities before the process got its own user namespace


def give_rights_back() -> None:
    """Drop all capabilities that its own user namespace gave this process."""
    if BEFORE:
        check(ctypes.CDLL(None, use_errno=True).capset(*BEFORE[0]))


def bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def capabilities(libc) -> tuple:
    """Return what this process may do beyond its user's rights, as capget and capset use it."""
    header, data = struct.pack("Ii", CAPABILITY_VERSION, 0), ctypes.create_string_buffer(24)
    check(libc.capget(header, data))
    return header, data


def check(status: int) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def other_people() -> set[str]:
    """Return which other users run anything on this machine, including services, or could log in.

    (A service that faces the network is the most likely to be under a stranger's control.)
    """
    with_a_shell = {
        user.pw_uid for user in pwd.getpwall() if not user.pw_shell.endswith(("nologin", "false"))
    }
    running = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            running.add(process.stat().st_uid)
    people = {uid for uid in with_a_shell if FIRST_PERSON <= uid != NOBODY} | running
    return {name_of(uid) for uid in people - {os.getuid(), ROOT}}


def name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
