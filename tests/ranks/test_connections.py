"""Only an unreachable host counts as silent, not a late host or one with full buffers."""

import os
import signal
import socket
import time

import pytest

from mini_dist.ranks import network
from mini_dist.ranks.cables import Switch, move_to, pull_cable
from mini_dist.ranks.connections import connections, own_addresses, silences

from .test_network import in_a_fork

WAIT = 7  # seconds: three probes of an idle connection, and more if data is in flight


def listen_on_host_1(switch) -> int:
    """Start a process on host 1 that accepts two connections and never reads."""
    ready, said = os.pipe()
    listener = os.fork()
    if listener == 0:
        signal.alarm(60)  # in case the parent ends first
        signal.signal(signal.SIGUSR1, lambda *_: pull_cable())
        move_to(switch.homes[1])
        server = socket.create_server(("10.77.0.2", 5000))
        os.write(said, b"1")
        kept = [server.accept() for _ in range(2)]  # noqa: F841
        while True:
            signal.pause()
    os.read(ready, 1)
    return listener


def watch(seconds: float) -> list[dict]:
    """Return the silent hosts at each of several looks; no look may leave a file open."""
    found, end, files = [], time.monotonic() + seconds, os.listdir("/proc/self/fd")
    while time.monotonic() < end:
        found.append(silences({"10.77.0.2"}))
        time.sleep(0.2)
    assert os.listdir("/proc/self/fd") == files
    return found


def two_connections_and_a_cable():
    assert network.leave_the_hosts_network() is None
    switch = Switch("w1", 2, 25e6, 0.0)
    listener = listen_on_host_1(switch)
    kept = os.open("/proc/self/ns/net", os.O_RDONLY)  # else the switch ends with its last process
    move_to(switch.homes[0])
    idle, full = (socket.create_connection(("10.77.0.2", 5000)) for _ in range(2))
    full.setblocking(False)
    end = time.monotonic() + 1
    while time.monotonic() < end:  # until the kernel's buffers on both sides are full
        try:
            full.send(bytes(1 << 16))
        except BlockingIOError:
            time.sleep(0.01)
    assert sorted(address for address, _ in connections()) == ["10.77.0.2"] * 2
    assert own_addresses() == ["10.77.0.1"] and silences({"10.77.0.3"}) == {}
    os.kill(listener, signal.SIGSTOP)  # as a debugger does; its kernel still answers
    answered = watch(WAIT)
    os.kill(listener, signal.SIGCONT)
    full.close()  # (else this connection might reveal the silence)
    os.kill(listener, signal.SIGUSR1)
    pulled = time.monotonic()
    last = {}  # On a busy machine, the listener may pull the cable seconds late.
    while not last.get("10.77.0.2", 0) > 4 and time.monotonic() < pulled + 40:
        last = watch(0.2)[-1]
    passed = time.monotonic() - pulled
    os.kill(listener, signal.SIGKILL)
    os.waitpid(listener, 0)
    os.close(kept)
    return answered == [{}] * len(answered), 4 < last["10.77.0.2"] < passed + 3


def test_silent_is_a_host_without_its_cable_and_not_one_that_is_stopped_or_has_no_room():
    if (why := in_a_fork(network.leave_the_hosts_network)) != "None":
        pytest.skip(f"no network namespaces: {why}")
    assert in_a_fork(two_connections_and_a_cable) == "(True, True)"
