"""The TCP connections of this process, and which hosts behind them answer no more.

A pulled cable is not an event for who waits at its other end: TCP sends again for a quarter of an
hour, and who has nothing to send waits for ever. Asked to (`keep_asking`), the kernel asks an idle
connection every other second whether somebody is there; that the answers stop coming, `silences`
reads from the kernel's own notes (tcp(7), TCP_INFO). A process that computes, sleeps or is stopped
still answers, because its kernel does: silence is a host, or the way to it.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
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
