"""The run in torchft (nightly): each rank a replica that may die and come back, DDP between them.

A lighthouse hears of all replicas and says who takes part in a step.  It is a thread of rank 0
here; in a cluster it is a program of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from mini_dist.collectives import broadcast
from mini_dist.model.data import Batches, load_text
from mini_dist.model.gpt import GPT
from mini_dist.model.loss import token_loss

from .kept import kept
from .run import BATCH, CONFIG, adamw, measure


@contextlib.contextmanager
def lighthouse(at_least: int, group):
    """The address of one that runs in rank 0, on all ranks; it makes quorums of `at_least`."""
    port, server = torch.zeros(1, dtype=torch.int64), None
    if group.rank() == 0:
        from torchft.coordination import LighthouseServer

        server = LighthouseServer(bind="127.0.0.1:0", min_replicas=at_least, join_timeout_ms=1000)
        port.fill_(int(server.address().rsplit(":", 1)[1]))
    yield f"http://127.0.0.1:{broadcast(port, 0, group).item()}"
    if server:
        server.shutdown()


def replicas(batches, group):
    logging.disable(logging.WARNING)
    with lighthouse(group.size(), group) as address:
        manager, model, optimizer = replica(GPT(CONFIG), address, group.size(), group.rank())
        losses = []
        for inputs, targets in batches(group.rank(), group.size()):
            optimizer.zero_grad()  # also asks for a quorum
            loss = token_loss(model(inputs), targets).mean()
            loss.backward()
            optimizer.step()  # only if all replicas that took part agree
            losses.append(loss.item())
        manager.shutdown(wait=False)
        group.barrier().wait()
        return losses


def replica(gpt, address, at_least, number):
    """A manager for this process alone, the model behind it, and an optimizer that asks it."""
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.ddp import DistributedDataParallel

    inner = adamw(gpt.parameters())

    def load(state):
        gpt.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=at_least,
        load_state_dict=load,
        state_dict=lambda: {"model": gpt.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica_{number}_",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=address,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=30),
        use_async_quorum=False,  # who heals takes part in that very step
    )
    return manager, DistributedDataParallel(manager, gpt), Optimizer(manager, inner)


@kept("torchft")
def runs() -> list[dict]:
    return measure({"torchft": (replicas,)})


def comes_or_goes(number: int, address: str, again: bool = False) -> None:
    """A replica in a process of its own: number 3 kills itself, and is started `again`.

    All leave after three steps with it. Prints how many took part in each step that counted; at
    last a sum over its weights, and its steps until one had counted.
    """
    gpt = GPT(CONFIG, seed=number)
    manager, model, optimizer = replica(gpt, address, 3, number)
    batches, seen, until_one_counted = Batches(load_text(), BATCH, CONFIG.seq_len), [], 0
    while seen[-3:] != [4, 4, 4] or not (again or (4, 3) in zip(seen, seen[1:])):
        optimizer.zero_grad()
        inputs, targets = batches.batch(manager.current_step())
        token_loss(model(inputs), targets).mean().backward()
        if number == 3 and not again and seen[-3:] == [4, 4, 4]:
            os.kill(os.getpid(), signal.SIGKILL)
        before, until_one_counted = manager.current_step(), until_one_counted + (not seen)
        optimizer.step()
        if manager.current_step() > before:  # all agreed that it counts
            seen.append(manager.num_participants())
            print(seen[-1], flush=True)
    weights = sum(p.detach().double().abs().sum().item() for p in gpt.parameters())
    print(weights, until_one_counted, flush=True)
    os._exit(0)  # its server's threads would go on


def serve_quorums() -> None:
    """A lighthouse in a process of its own; prints its address, ends with its input."""
    from torchft.coordination import LighthouseServer

    # Each step waits this long for all that live: on a busy machine another one is late each time.
    # A dead one is missed after 5 s.
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=3, join_timeout_ms=20_000)
    print(server.address(), flush=True)
    sys.stdin.read()
    os._exit(0)


def process(call: str) -> subprocess.Popen:
    """One that makes this call, of a function in here."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    code = f"from {__name__} import *; {call}"
    return subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)


@kept("torchft")
def one_comes_one_dies() -> dict:
    """Three replicas begin, a fourth comes with weights of its own, one is killed and comes back.

    took_part: in the steps of replica 0; repeated numbers are listed once. weights: the sum of each
    replica's weights at the end. healed_in: steps of the restarted replica until it took part in a
    step that counted. exits: of each replica's process, and of the killed one, -9 for a SIGKILL.
    """
    lighthouse = process("serve_quorums()")
    address = lighthouse.stdout.readline().strip()
    replicas = {n: process(f"comes_or_goes({n}, {address!r})") for n in (0, 1, 3)}
    killed = replicas[3]

    def stop() -> None:
        for each in (lighthouse, killed, *replicas.values()):
            each.kill()

    late = threading.Timer(600, stop)  # where the fourth is never heard of, nobody would end
    late.start()
    try:
        took_part = []
        for line in iter(replicas[0].stdout.readline, ""):
            if line.strip() in ("3", "4") and took_part[-1:] != [int(line)]:
                took_part.append(int(line))
            if 2 not in replicas:
                replicas[2] = process(f"comes_or_goes(2, {address!r})")
            if took_part == [3, 4, 3] and replicas[3] is killed:
                replicas[3] = process(f"comes_or_goes(3, {address!r}, again=True)")
            last = line
        ends = [last.split()]
        ends += [replicas[number].communicate()[0].split()[-2:] for number in (1, 2, 3)]
        exits = [each.wait() for each in (*(replicas[n] for n in range(4)), killed)]
        lighthouse.communicate()
    finally:
        late.cancel()
        stop()
    return {
        "took_part": took_part,
        "weights": [float(weights) for weights, _ in ends],
        "healed_in": int(ends[3][1]),
        "exits": exits,
    }
