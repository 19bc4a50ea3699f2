"""The TCP connections of this process, and which hosts behind them no longer answer.

A process does not notice that the cable at the other end is pulled: TCP retransmits for a quarter
of an hour, and a process that has nothing to send waits forever. `keep_asking` makes the kernel
probe an idle connection every other second; `silences` reads from the kernel's own records (tcp(7),
TCP_INFO) that the answers have stopped. A process that computes, sleeps or is stopped still
answers, because its kernel does: silence means a host, or the path to it.

The module also checks which user is at the other end, if that is on this host: gloo takes whichever
process connects first for the expected rank, and the kernel knows the user of each socket
(`refuse_strangers`).

We only check, because gloo in torch 2.13's wheels has no transport other than TCP. With
GLOO_DEVICE_TRANSPORT set to TCP_TLS (with key and certificate), UV or UNIX every rank raised
"makeDeviceForHostname(): unsupported gloo device" (tried in November 2026 on x86-64), so Unix
sockets would require our own transport for every collective. An HMAC with the run's secret would
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
# Fields of Linux's struct tcp_info (include/uapi/linux/tcp.h): retransmissions and probes since the
# last answer; milliseconds since the last data and the last acknowledgement arrived.
RETRANSMITS, PROBES, LAST_DATA, LAST_ACK = 2, 3, 52, 56


def connections() -> Iterator[tuple[str, socket.socket]]:
    """Yield each TCP connection of this process with its peer's address; none except on Linux."""
    for fd in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with suppress(OSError):  # not connected, or closed since
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(fd))) as tcp:
                if tcp.family in (socket.AF_INET, socket.AF_INET6):
                    yield plain(tcp.getpeername()), tcp


def plain(name: tuple) -> str:
    """Return the address in a socket's name, in IPv4 form if it is a mapped IPv6 address."""
    return name[0].removeprefix("::ffff:")


def shut_connections() -> None:
    """End every TCP connection of this process, so that nobody waits on one; a rank has no others
    than gloo's. (Listening sockets stay: gloo aborts if they are shut.)"""
    for _, tcp in connections():
        with suppress(OSError):  # the other side was faster
            tcp.shutdown(socket.SHUT_RDWR)


def own_addresses() -> list[str]:
    """Return the addresses by which other hosts know this process; none without connections."""
    pairs = [(plain(tcp.getsockname()), address) for address, tcp in connections()]
    return sorted({own for own, address in pairs if own != address})


def keep_asking(tcp: socket.socket) -> None:
    """Make the kernel probe an idle connection for the other host, without giving up."""
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        tcp.setsockopt(socket.IPPROTO_TCP, option, ASK_EVERY)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 127)


def silences(addresses) -> dict[str, float]:
    """Return the silent addresses, which owe two or more answers: seconds since the last answer.

    (One is no sign: a receiver without free memory is probed less and less often, and answers.)
    """
    found: dict[str, float] = {}
    for address, tcp in connections():
        if address not in addresses:
            continue
        with suppress(OSError):  # not TCP, or it has just broken
            keep_asking(tcp)
            info = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            last = min(struct.unpack_from("=I", info, at)[0] for at in (LAST_DATA, LAST_ACK))
            if max(info[RETRANSMITS], info[PROBES]) >= 2:
                found[address] = max(last / 1000, found.get(address, 0.0))
    return found


PATIENCE = 10.0  # seconds for the other side to accept a connection


def sockets_here() -> set[str]:
    """Return this process's sockets, by inode."""
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
    waiting = [tcp for tcp in connections_of(inodes) if owner(*tcp)]  # (others are unknown)
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
    """Return the TCP connections among these sockets of this process: their two ends."""
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
    """Return user and inode of the socket on this host with these ends; None if there is none."""
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
