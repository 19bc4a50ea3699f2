"""Run two ranks, each on its own host, in torchrun's environment but without the slow torchrun.

    python -m tests.ranks.as_torchrun FAULT TIMEOUT

Prints each rank's output, its exit status and how many seconds it ran.
"""

import os
import sys
import time

import torch

from mini_dist import Hosts, launch
from mini_dist.collectives import recv, ring_all_reduce, send
from mini_dist.ranks.cables import Switch, move_to, pull_cable
from mini_dist.ranks.network import leave_the_hosts_network


def steps(fault, group):
    """Run rings forever; at step 3, rank 1 pulls its cable or, for "goes on", sleeps instead."""
    for step in range(1_000_000):
        if step == 3 and group.rank() == 1:
            if fault == "goes on":
                time.sleep(600)
            pull_cable()
        ring_all_reduce(torch.ones(1000), group)


def idle(_, group):
    """Pull rank 1's cable while rank 0 waits for it and no data is in flight to be sent again."""
    if group.rank() == 0:
        recv(torch.ones(1000), 1, group)
    time.sleep(1)
    pull_cable()
    time.sleep(600)


def large(_, group):
    """Pull the cable 1 s into a message that takes 4 s on the uplink.

    (gloo does not wake the sender, even when the connection has broken.)
    """
    numbers = torch.ones(25_000_000)
    if group.rank() == 0:
        send(numbers, 1, group)
    request = torch.distributed.irecv(numbers, 0, group=group)
    time.sleep(1)
    pull_cable()
    request.wait()


def late(_, group):
    """Lose no rank: rank 1 just computes for longer than the limit for a silent host."""
    if group.rank() == 1:
        time.sleep(20)
    ring_all_reduce(torch.ones(1000), group)


def be_a_rank(rank: int, fault: str, timeout: float) -> None:
    os.environ |= {"RANK": str(rank), "GROUP_RANK": str(rank), "LOCAL_RANK": "0"}
    os.environ |= {"WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "GLOO_SOCKET_IFNAME": "eth0"}
    if fault == "wrong interface":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    job = {"idle": idle, "large": large, "late": late}.get(fault, steps)
    launch(job, 2, (fault,), timeout=timeout)


if __name__ == "__main__":
    fault, timeout = sys.argv[1], float(sys.argv[2])
    if why := leave_the_hosts_network():
        sys.exit(f"no hosts on this machine: {why}")
    switch = Switch("w1", 2, Hosts(2, "200 Mbit/s").bandwidth, 0.0)
    began, ranks = time.monotonic(), {}
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            move_to(switch.homes[rank])
            be_a_rank(rank, fault, timeout)
            os._exit(0)
        ranks[pid] = rank
    while ranks:
        pid, status = os.wait()
        code, seconds = os.waitstatus_to_exitcode(status), time.monotonic() - began
        print(f"rank {ranks.pop(pid)} ended with {code} after {seconds:.1f} s", flush=True)
