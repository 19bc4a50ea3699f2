"""Run a command on several hosts on this machine, each with an address and a slow link, no root.

    python docs/cluster/on_hosts.py --hosts 2 --uplink "200 Mbit/s" -- \\
        torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id my-run \\
        --rdzv-endpoint 10.77.0.1:29500 --rdzv-conf is_host={is_first} --local-addr {address} \\
        docs/cluster/train.py --ranks 2

In the command `{host}` becomes the number of the host and `{address}` its address, 10.77.0.1 for
host 0. `{is_first}` becomes 1 on host 0 and 0 on the others, because torchrun could not find this
out by name. The hosts are network namespaces (mini_dist/ranks/cables.py). They share files and
processors, and they have no connection to the outside. The first command that fails ends the
others.

`kill -USR1` on this program pulls the cable of the last host. From then on the program does not
wait for that host. TCP waits for a quarter of an hour.
"""

import argparse
import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from mini_dist import Hosts
from mini_dist.ranks.cables import Switch, move_to, pull_cable
from mini_dist.ranks.hosts import UPLINK
from mini_dist.ranks.network import give_rights_back, leave_the_hosts_network

LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1  # of linux/prctl.h
GRACE = 10  # seconds for the others to end by themselves when one has failed


def run(hosts: Hosts, command: list[str]) -> int:
    """The first status that is not 0, or 0; raises SystemExit where there are no namespaces."""
    if why := leave_the_hosts_network():
        sys.exit(f"no hosts on this machine: {why}")
    switch = Switch("hosts", hosts.number, hosts.bandwidth, hosts.latency)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": UPLINK}
    processes = []
    for host, home in enumerate(switch.homes):

        def enter(home=home):
            move_to(home)
            give_rights_back()
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # should this program be killed

        fill = {"{host}": str(host), "{address}": f"10.77.0.{host + 1}"}
        fill["{is_first}"] = str(int(host == 0))
        words = [
            functools.reduce(lambda w, key: w.replace(key, fill[key]), fill, w) for w in command
        ]
        processes.append(
            subprocess.Popen(words, env=environment, preexec_fn=enter, start_new_session=True)
        )
    cut_off = set()  # hosts

    def pull(*_):
        cut_off.add(hosts.number - 1)
        if not os.fork():  # a network is entered for good
            move_to(switch.homes[-1])
            pull_cable()
            os._exit(0)
        os.wait()

    signal.signal(signal.SIGUSR1, pull)
    try:
        return wait_for(processes, cut_off)
    finally:
        for process in processes:
            if process.poll() is None:  # torchrun ends its ranks on SIGTERM, and not on SIGKILL
                process.terminate()
        for process in processes:
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for home in switch.homes:
            kill_all_in(home)


def kill_all_in(home: int) -> None:
    """What is left on a host: the ranks of a torchrun that had to be killed."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is not ours
            if os.path.samestat(os.stat(folder / "ns/net"), os.fstat(home)):
                os.kill(int(folder.name), signal.SIGKILL)


def wait_for(processes: list[subprocess.Popen], cut_off: set[int]) -> int:
    deadline = None
    while True:
        codes = {h: process.poll() for h, process in enumerate(processes) if h not in cut_off}
        failed = [(host, code) for host, code in codes.items() if code]
        if failed and deadline is None:
            host, code = failed[0]
            print(f"host {host}: the command ended with status {code}", file=sys.stderr, flush=True)
            deadline = time.monotonic() + GRACE
        if None not in codes.values():
            return failed[0][1] if failed else 0
        if deadline and time.monotonic() > deadline:
            return failed[0][1]
        time.sleep(0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--uplink", default="200 Mbit/s")
    parser.add_argument("command", nargs="+", help="after --; {host} is the host's number")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of `finally`
    hosts = Hosts(options.hosts, options.uplink)
    sys.exit(run(hosts, options.command))
