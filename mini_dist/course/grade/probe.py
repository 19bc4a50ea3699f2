"""A worker that tries out what can be done in a sandbox, and says it.

The job may hold {"read": paths, "write": paths, "chmod": paths, "connect": port, "fill": bytes,
"memfd": true, "queues": true, "families": numbers, "buffer": bytes} and one of {"sockets": pairs,
"in_flight": pairs, "pipes": number, "tables": bytes}, which it then holds until it is ended.
"""

import ctypes
import json
import mmap
import os
import socket
import stat
import sys
import time
from contextlib import suppress

ON_ONE_WAY = 100  # messages that a socket's buffer takes, whatever its size


def works(action, *args) -> bool:
    try:
        action(*args)
    except OSError:
        return False
    return True


def touch(path: str) -> None:
    with open(path, "a"):
        pass


def change_mode(path: str) -> None:
    """To what it is: so it harms nothing, even where it works."""
    os.chmod(path, stat.S_IMODE(os.stat(path).st_mode))


def write_zeros(number: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink("zeros")
    with open("zeros", "wb") as file:
        for _ in range(0, number, 1 << 20):
            file.write(bytes(1 << 20))


def queues() -> list[str]:
    """Which of the kernel's own queues and semaphores can be made, by the names of their calls."""
    libc = ctypes.CDLL(None)
    calls = {
        "semget": (libc.semget, 0, 1000, 0o600),
        "msgget": (libc.msgget, 0, 0o600),
        "shmget": (libc.shmget, 0, 4096, 0o600),
        "mq_open": (libc.mq_open, b"/x", os.O_CREAT | os.O_RDWR, 0o600, None),
    }
    return [name for name, (call, *args) in calls.items() if call(*args) >= 0]


def buffer(wanted: int) -> int:
    """The size of a socket's buffer after one has asked for this many bytes."""
    with socket.socket(socket.AF_UNIX) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wanted)
        return one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def fill_sockets(pairs: int) -> list:
    """Queue what one end of each pair takes, and read nothing."""
    held = []
    for _ in range(pairs):
        one, other = socket.socketpair()
        one.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                one.send(bytes(1 << 16))
        held.append((one, other))
    return held


def fill_pipes(number: int) -> list:
    """Write 64 KB into each pipe, which is what it takes unless its user has too many."""
    held = [os.pipe() for _ in range(number)]
    for _, end in held:
        os.set_blocking(end, False)
        with suppress(BlockingIOError):
            os.write(end, bytes(1 << 16))
    return held


def send_sockets(pairs: int) -> list:
    """Queue as much, pair by pair, and send both ends of each to nobody and close them, so that
    /proc shows one pair at any moment, and a few sockets on which they are sent."""
    held = []
    for number in range(pairs):
        ((one, other),) = fill_sockets(1)
        if number % ON_ONE_WAY == 0:
            held.append(socket.socketpair())
        socket.send_fds(held[-1][0], [b"x"], [one.fileno(), other.fileno()])
        one.close()
        other.close()
    return held


def touch_pages(size: int) -> mmap.mmap:
    """Read one byte of every 2 MB: each needs a page table, none a page of its own."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    held = mmap.mmap(-1, size, flags=flags, prot=mmap.PROT_READ)
    for place in range(0, size, 2 << 20):
        held[place]
    return held


if __name__ == "__main__":
    job = json.load(sys.stdin)
    seen = [name for name in os.listdir("/proc") if name.isdigit()]
    said = {"apart": os.getppid() == 1 and len(seen) == 2}
    for kind, action in (("read", os.stat), ("write", touch), ("chmod", change_mode)):
        if kind in job:
            said[kind] = [path for path in job[kind] if works(action, path)]
    if "connect" in job:
        said["connect"] = works(socket.create_connection, ("127.0.0.1", job["connect"]), 5)
    if "memfd" in job:
        said["memfd"] = works(os.memfd_create, "x")
    if "fill" in job:
        said["fill"] = works(write_zeros, job["fill"])
    if "queues" in job:
        said["queues"] = queues()
    if "families" in job:
        said["families"] = [each for each in job["families"] if works(socket.socket, each)]
    if "buffer" in job:
        said["buffer"] = buffer(job["buffer"])
    print(json.dumps(said), flush=True)
    holds = {"sockets": fill_sockets, "in_flight": send_sockets}
    holds |= {"pipes": lambda n: [os.pipe() for _ in range(n)], "tables": touch_pages}
    for kind, hold in holds.items():
        if kind in job:
            held = hold(job[kind])
            time.sleep(20)
