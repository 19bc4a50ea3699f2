"""What the kernel counted on this process's sockets: a check that is independent of the ledger."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import sys
import termios
import time

# Offsets in Linux's struct tcp_info (include/uapi/linux/tcp.h): u64 each.
BYTES_RECEIVED, BYTES_SENT, BYTES_RETRANSMITTED = 128, 200, 208
PATIENCE = 0.5  # seconds


def wire_bytes() -> tuple[int, int] | None:
    """Bytes this process has sent and received over TCP so far; None where nobody counts them.

    A send is over for its sender when the kernel has taken the bytes, and they may still lie there
    when the receiver is busy. So it is waited for them, but not longer than PATIENCE.
    """
    if sys.platform != "linux":
        return None
    deadline = time.monotonic() + PATIENCE
    sent = received = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{fd}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(fd))) as copy:
                tcp_info(copy)  # (raises if it is not TCP, whose queue is none of ours)
                while on_their_way(copy) and time.monotonic() < deadline:
                    time.sleep(0.001)
                info = tcp_info(copy)
        except OSError:
            continue  # not TCP, or closed since (as the listing of the directory itself)
        if len(info) < BYTES_RETRANSMITTED + 8:
            return None  # a kernel before 4.19
        sent += u64(info, BYTES_SENT) - u64(info, BYTES_RETRANSMITTED)
        received += u64(info, BYTES_RECEIVED)
    return sent, received


def tcp_info(tcp: socket.socket) -> bytes:
    return tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)


def on_their_way(tcp: socket.socket) -> int:
    """Bytes that the kernel was given and whose arrival it does not know of."""
    return int.from_bytes(fcntl.ioctl(tcp, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def u64(data: bytes, offset: int) -> int:
    return struct.unpack_from("<Q", data, offset)[0]
