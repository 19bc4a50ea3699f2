"""Run the same rank functions as Ray actors, on a Ray cluster.

    python docs/cluster/on_ray.py            # 4 ranks on this machine: a ring, and ZeRO-3

A placement group reserves one bundle per rank before any rank starts. STRICT_SPREAD puts each
bundle on a different node; PACK puts as many as fit on one node. Rank 0's node keeps the
rendezvous.
"""

import os
import signal
import socket
import time

import ray
import torch
import torch.distributed as dist
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mini_dist.ranks.ledger import Ledger
from mini_dist.ranks.ledger.group import BACKEND, register
from mini_dist.ranks.ledger.recording import Recorder


@ray.remote(num_cpus=1, max_restarts=0)
class Rank:
    def address(self) -> tuple[str, int]:
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def run(self, fn, args, rank: int, size: int, address: tuple[str, int], nodes: list[str]):
        torch.set_num_threads(1)
        register(Recorder(), torch.device("cpu"))
        where = f"tcp://{address[0]}:{address[1]}"
        dist.init_process_group(BACKEND, init_method=where, rank=rank, world_size=size)
        hosts = [sorted({*nodes}).index(node) for node in nodes]
        recorder = dist.group.WORLD.recorder
        recorder.start(memory=False, hosts=hosts)
        result = fn(*args, dist.group.WORLD)
        recorder.stop()
        return result, recorder.export()


def launch_on_ray(fn, world_size: int, args=(), strategy: str = "PACK", timeout: float = 60.0):
    """Call fn(*args, group) on every rank; the results in rank order, and the ledger.

    Raises Ray's own error if a rank fails, or if its node dies: then the whole run is over, as with
    `launch`, and who wants to go on starts again from a checkpoint. TimeoutError, which names who
    is not done and where, when the ranks have worked for `timeout` seconds.
    """
    bundles = placement_group([{"CPU": 1}] * world_size, strategy=strategy)
    ray.get(bundles.ready(), timeout=60)
    ranks = [
        Rank.options(scheduling_strategy=PlacementGroupSchedulingStrategy(bundles, r)).remote()
        for r in range(world_size)
    ]
    try:
        addresses = ray.get([rank.address.remote() for rank in ranks])
        nodes = [node for node, _ in addresses]
        common = world_size, addresses[0], nodes
        futures = [rank.run.remote(fn, args, r, *common) for r, rank in enumerate(ranks)]
        left, deadline = futures, time.monotonic() + timeout
        while left:  # the first failure ends it: ray.get of all would wait for the others
            done, left = ray.wait(left, timeout=max(0.0, deadline - time.monotonic()))
            ray.get(done)
            if not done:
                late = [f"rank {r} on {nodes[r]}" for r in map(futures.index, left)]
                raise TimeoutError(f"not done after {timeout:g} s: {', '.join(late)}")
        results, exports = zip(*ray.get(futures))
        return list(results), Ledger.from_ranks(exports)
    finally:
        for rank in ranks:
            ray.kill(rank)
        remove_placement_group(bundles)


def ring(numel: int, group):
    from mini_dist.collectives import ring_all_reduce

    return ring_all_reduce(torch.full((numel,), group.rank() + 1.0), group)[0].item()


def zero_3(group):
    from mini_dist import GPT, Batches, ModelConfig, load_text, token_loss
    from mini_dist.strategies.zero import ZeRO3

    config = ModelConfig(d_model=32, num_layers=2, num_heads=4, seq_len=32)
    gpt = GPT(config, seed=0)
    model = ZeRO3(gpt, group, lambda p: torch.optim.AdamW(p, lr=3e-3), units=gpt.blocks)
    losses = []
    for step in range(3):
        inputs, targets = Batches(load_text(), 8, 32).batch(step)
        loss = token_loss(model(inputs), targets).mean()
        loss.backward()
        model.step()
        model.zero_grad()
        losses.append(round(loss.item(), 4))
    return losses


def dies(group):
    from mini_dist.collectives import ring_all_reduce

    for step in range(10):
        if step == 3 and group.rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        ring_all_reduce(torch.ones(1000), group)


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False, logging_level="error")
    for fn, args in ((ring, (1000,)), (zero_3, ())):
        results, ledger = launch_on_ray(fn, 4, args)
        print(fn.__name__, results[0], f"{ledger.total_bytes():,} bytes sent", flush=True)
    try:
        launch_on_ray(dies, 4)
    except ray.exceptions.RayError as error:
        print("a rank was killed:", type(error).__name__, flush=True)
