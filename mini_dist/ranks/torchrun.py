"""The same launch under torchrun: join the world that is there instead of making one."""

from __future__ import annotations

import atexit
import os
import time


def join_torchrun(fn, world_size: int, args, kwargs, *, seed: int, memory: bool, count: bool):
    """Call `fn` in this process as one of torchrun's ranks; every rank gets the whole Run."""
    import torch
    import torch.distributed as dist

    from ..ledger import Ledger
    from ..ledger.group import BACKEND, register
    from ..ledger.recording import Recorder
    from .rank import seed_everything
    from .report import Run

    actual = int(os.environ["WORLD_SIZE"])
    if world_size != actual:
        raise ValueError(
            f"launch(world_size={world_size}) under a torchrun of {actual} ranks: use "
            f"world_size={actual}, or start torchrun with --nproc-per-node {world_size}"
        )
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if not dist.is_initialized():
        if on_gpu:
            torch.cuda.set_device(device)
        register(Recorder(), device)
        dist.init_process_group(BACKEND)
        atexit.register(leave)
    group = dist.group.WORLD
    began = time.perf_counter()
    seed_everything(seed + group.rank())
    on_a_host = int(os.environ["LOCAL_WORLD_SIZE"])
    hosts = [rank // on_a_host for rank in range(actual)] if on_a_host < actual else None
    group.recorder.start(memory, count, hosts)
    result = fn(*args, group, **kwargs)
    group.recorder.stop()
    both = [None] * actual
    dist.all_gather_object(both, (result, group.recorder.export()), group=group)
    results, ledgers = zip(*both)
    seconds = time.perf_counter() - began
    return Run(list(results), [""] * actual, Ledger.from_ranks(ledgers), seconds, device.type)


def leave() -> None:
    """End the world while Python still runs: gloo's threads may hold tensors, and a tensor that
    one of them lets go of when Python has ended aborts the process (2 of 400 did)."""
    import torch.distributed as dist

    if dist.is_initialized():  # the script may have done it
        dist.destroy_process_group()
