"""What the kernel counted on this process's sockets: a check that is independent of the ledger."""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys

# Offsets in Linux's struct tcp_info (include/uapi/linux/tcp.h): u64 each.
BYTES_RECEIVED, BYTES_SENT, BYTES_RETRANSMITTED = 128, 200, 208


def wire_bytes() -> tuple[int, int] | None:
    """Bytes this process has sent and received over TCP so far; None where nobody counts them."""
    if sys.platform != "linux":
        return None
    sent = received = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{fd}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(fd))) as copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue  # not TCP, or closed since (as the listing of the directory itself)
        if len(info) < BYTES_RETRANSMITTED + 8:
            return None  # a kernel before 4.19
        sent += u64(info, BYTES_SENT) - u64(info, BYTES_RETRANSMITTED)
        received += u64(info, BYTES_RECEIVED)
    return sent, received


def u64(data: bytes, offset: int) -> int:
    return struct.unpack_from("<Q", data, offset)[0]
