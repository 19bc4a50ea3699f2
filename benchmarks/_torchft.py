"""Run torchft for comparison with our elastic runs: of three replicas one is killed, two continue.

    pip install -e .[torchft]
    python benchmarks/_torchft.py

A lighthouse hears the replicas' heartbeats. Each replica is a separate process with a copy of a
small model. Before each step the replicas agree on who takes part, and after it on whether the step
counts. At the end the two survivors have equal weights.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch

STEPS, KILLED, REPLICAS = 30, 10, 3


def replica(number: int, lighthouse: str) -> None:
    os.environ.update(TORCHFT_LIGHTHOUSE=lighthouse, GLOO_SOCKET_IFNAME="lo")
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.ddp import DistributedDataParallel

    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(number)
    module = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def load(state: dict) -> None:
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=2,
        load_state_dict=load,
        state_dict=lambda: {"module": module.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica_{number}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=10),
        use_async_quorum=False,
    )
    model, steps = DistributedDataParallel(manager, module), Optimizer(manager, optimizer)
    began = time.monotonic()
    while manager.current_step() < STEPS:
        if number == REPLICAS - 1 and manager.current_step() == KILLED:
            print(f"replica {number} kills itself", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        steps.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        steps.step()
        time.sleep(0.1)  # The last replica to start then finds the others running.
        weight = module.weight.sum().item()
        print(
            f"replica {number}: {manager.current_step()} steps, {manager.num_participants()} take "
            f"part, weights add up to {weight:.6f}, {time.monotonic() - began:.1f} s",
            flush=True,
        )
    os._exit(0)


def main() -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=5000)
    command = [sys.executable, __file__]
    replicas = [
        subprocess.Popen([*command, str(n), lighthouse.address()], stderr=subprocess.DEVNULL)
        for n in range(REPLICAS)
    ]
    for process in replicas:
        process.wait(timeout=120)
    lighthouse.shutdown()


if __name__ == "__main__":
    replica(int(sys.argv[1]), sys.argv[2]) if len(sys.argv) > 1 else main()
