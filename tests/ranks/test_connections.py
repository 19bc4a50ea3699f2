"""Only an unreachable host counts as silent, not a host that is late or has no room."""

import os
import signal
import socket
import time

import pytest

from mini_dist.ranks import network
from mini_dist.ranks.cables import Switch, move_to, pull_cable
from mini_dist.ranks.connections import connections, own_addresses, silences

from .test_network import in_a_fork

WAIT = 7  # seconds: three questions of an idle connection, and more of one with data under way


def listen_on_host_1(switch) -> int:
    """A process there that takes two connections and never reads."""
    ready, said = os.pipe()
    listener = os.fork()
    if listener == 0:
        signal.alarm(60)  # should whoever made it end first
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
    """What is silent, at each of several looks, which leave nothing open."""
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
    kept = os.open("/proc/self/ns/net", os.O_RDONLY)  # or the switch goes with its last process
    move_to(switch.homes[0])
    idle, full = (socket.create_connection(("10.77.0.2", 5000)) for _ in range(2))
    full.setblocking(False)
    end = time.monotonic() + 1
    while time.monotonic() < end:  # the kernel's room on both sides, then none
        try:
            full.send(bytes(1 << 16))
        except BlockingIOError:
            time.sleep(0.01)
    assert sorted(address for address, _ in connections()) == ["10.77.0.2"] * 2
    assert own_addresses() == ["10.77.0.1"] and silences({"10.77.0.3"}) == {}
    os.kill(listener, signal.SIGSTOP)  # a debugger, say: its kernel answers for it
    answered = watch(WAIT)
    os.kill(listener, signal.SIGCONT)
    full.close()  # (else it might be the one that tells)
    os.kill(listener, signal.SIGUSR1)
    pulled = time.monotonic()
    last = {}  # On a busy machine the listener may be seconds late to pull it.
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
