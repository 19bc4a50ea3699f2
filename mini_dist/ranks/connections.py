"""The TCP connections of this process, and which hosts behind them answer no more.

A pulled cable is not an event for who waits at its other end: TCP sends again for a quarter of an
hour, and who has nothing to send waits for ever. Asked to (`keep_asking`), the kernel asks an idle
connection every other second whether somebody is there; that the answers stop coming, `silences`
reads from the kernel's own notes (tcp(7), TCP_INFO). A process that computes, sleeps or is stopped
still answers, because its kernel does: silence is a host, or the way to it.

And who is at the other end, where that is on this host: gloo takes whoever connects first for the
rank that it waits for, and the kernel knows the user of each socket (`refuse_strangers`).

Why the check and nothing else: gloo in torch 2.13's wheels has no transport but TCP. With
GLOO_DEVICE_TRANSPORT set to TCP_TLS (with key and certificate), UV or UNIX every rank raised
"makeDeviceForHostname(): unsupported gloo device" (tried in November 2026 on x86-64), so Unix
sockets would mean a transport of our own for every collective. An HMAC with the run's secret would
protect what is unpickled, but not the numbers in tensors, and torch unpickles objects itself. The
check protects both, before anything is exchanged.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

ASK_EVERY = 2  # seconds
# In Linux's struct tcp_info (include/uapi/linux/tcp.h): bytes that count what was sent again, and
# asked, since the last answer; milliseconds since anything came, data and acknowledgements.
RETRANSMITS, PROBES, LAST_DATA, LAST_ACK = 2, 3, 52, 56


def connections() -> Iterator[tuple[str, socket.socket]]:
    """Each TCP connection of this process, with the address of its other side; none off Linux."""
    for fd in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with suppress(OSError):  # not connected, or closed since
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(fd))) as tcp:
                if tcp.family in (socket.AF_INET, socket.AF_INET6):
                    yield plain(tcp.getpeername()), tcp


def plain(name: tuple) -> str:
    """The address in the name of a socket; IPv4's, where it is told as one of IPv6."""
    return name[0].removeprefix("::ffff:")


def shut_connections() -> None:
    """End every TCP connection of this process, so that nobody waits on one: gloo's are all that
    a rank has. (Not what only listens: gloo aborts if that is shut.)"""
    for _, tcp in connections():
        with suppress(OSError):  # the other side was faster
            tcp.shutdown(socket.SHUT_RDWR)


def own_addresses() -> list[str]:
    """Those by which other hosts know this process; none if it is connected with no other."""
    pairs = [(plain(tcp.getsockname()), address) for address, tcp in connections()]
    return sorted({own for own, address in pairs if own != address})


def keep_asking(tcp: socket.socket) -> None:
    """Let the kernel ask an idle connection whether the other host is there, and not give up."""
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        tcp.setsockopt(socket.IPPROTO_TCP, option, ASK_EVERY)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 127)


def silences(addresses) -> dict[str, float]:
    """Of these addresses, those that owe an answer twice or more: seconds since the last one.

    (Once is no sign: a receiver that has no room left is asked less and less often, and answers.)
    """
    found: dict[str, float] = {}
    for address, tcp in connections():
        if address not in addresses:
            continue
        with suppress(OSError):  # it is no TCP, or has just broken
            keep_asking(tcp)
            info = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            last = min(struct.unpack_from("=I", info, at)[0] for at in (LAST_DATA, LAST_ACK))
            if max(info[RETRANSMITS], info[PROBES]) >= 2:
                found[address] = max(last / 1000, found.get(address, 0.0))
    return found


PATIENCE = 10.0  # seconds for the other side to accept a connection


def sockets_here() -> set[str]:
    """The sockets of this process, by their inode."""
    found = set()
    for fd in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with suppress(OSError):  # closed since
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {link[8:-1] for link in found if link.startswith("socket:[")}


def refuse_strangers(inodes: set[str]) -> None:
    """Raise ConnectionError if another user's process is at the other end of one of these sockets.

    Both ends of a connection on one host are sockets that the kernel knows, each with its user.
    A socket without another end here is connected to another host, about which nothing is known.
    One without an inode has not been accepted yet, or its side has closed it.
    """
    deadline = time.monotonic() + PATIENCE
    waiting = [tcp for tcp in connections_of(inodes) if owner(*tcp)]  # (else nobody can say)
    while waiting:
        unknown = []
        for local, far in waiting:
            user, inode = owner(far, local) or (None, 0)
            if inode and user != os.getuid():
                raise ConnectionError(
                    f"a process of another user of this machine, {user}, has connected to this "
                    "rank as if it were another rank. Nothing was exchanged with it"
                )
            if not inode and (user is not None or is_loopback(far)):
                unknown.append((local, far))
        waiting = unknown
        if waiting and time.monotonic() > deadline:
            raise ConnectionError("a connection to another rank has broken before it was used")
        if waiting:
            time.sleep(0.002)


def connections_of(inodes: set[str]) -> list[tuple[tuple, tuple]]:
    """Of the sockets of this process the TCP connections among these: their two ends."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}")[8:-1] in inodes:
                with socket.socket(fileno=os.dup(int(fd))) as tcp:
                    if tcp.family in (socket.AF_INET, socket.AF_INET6):
                        found.append((tcp.getsockname()[:2], tcp.getpeername()[:2]))
    return found


# Of linux/netlink.h, sock_diag.h and inet_diag.h; a table of all sockets, /proc/net/tcp, is slow.
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, NLMSG_ERROR = 4, 20, 1, 2
REQUEST, USER_AT, STATE_AT = struct.Struct("=IHHIIBBBxI2s2s16s16sI8s"), 80, 17
ESTABLISHED = 1


def owner(local: tuple, far: tuple) -> tuple[int, int] | None:
    """User and inode of the socket on this host that has these ends; None if there is none."""
    family = socket.AF_INET6 if ":" in local[0] else socket.AF_INET
    ends = [socket.inet_pton(family, end[0]).ljust(16, b"\0") for end in (local, far)]
    ports = [struct.pack("!H", end[1]) for end in (local, far)]
    head = REQUEST.size, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0
    about = family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF
    request = REQUEST.pack(*head, *about, *ports, *ends, 0, b"\xff" * 8)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
            kernel.send(request)
            answer = kernel.recv(4096)
    except OSError:
        return None
    if struct.unpack_from("=H", answer, 4)[0] == NLMSG_ERROR or answer[STATE_AT] != ESTABLISHED:
        return None
    return struct.unpack_from("=II", answer, USER_AT)


def is_loopback(end: tuple) -> bool:
    return plain(end).startswith("127.") or plain(end) == "::1"
