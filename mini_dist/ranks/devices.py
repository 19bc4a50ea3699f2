"""Where a rank's tensors belong, and what carries its messages from there.

    launch(fn, 4)                     a GPU for each rank if there are four, else the CPU
    launch(fn, 4, device="cpu")       gloo
    launch(fn, 4, device="cuda")      rank r on GPU r: NCCL
    launch(fn, 4, device="cuda:0")    all ranks share GPU 0: gloo, by way of the host's memory

A rank reads its device from `group.device`. If the caller asked for a GPU, it is also torch's
default device while the function runs, and tensors that come with the function (arguments, and the
variables of a cell) arrive there. So a cell that was written on a laptop runs on a GPU as it
stands. With device=None nothing of this happens: a lesson prints the same on every machine, and a
GPU adds numbers in another order. (Under torchrun nothing comes with the function: it was there.)

The library relies on no default device. It makes its tensors on the device of those it gets, and
the tables that the host reads on HOST. It could not rely on one: torch's default device is one of
a thread, and autograd calls the hooks of CUDA tensors in threads of its own.
"""

from __future__ import annotations

import os
import re

HOST = "cpu"  # for tables that the host reads, and for what waits there


def count_gpus() -> int:
    """Count the GPUs that torch can use."""
    if not any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg")):
        return 0  # without importing torch, which takes a second
    import torch

    return torch.cuda.device_count()


def choose_device(device: str | None, num_ranks: int, num_gpus: int) -> str:
    """Decide where the tensors of `num_ranks` ranks of one machine belong.

    device: what the caller asked for. Returns "cpu", "cuda" (each rank has a GPU of its own), or
    "cuda:K" (all ranks share GPU K). Raises ValueError if the machine has no such GPUs.
    """
    if device is None:
        return "cuda" if num_gpus >= num_ranks else "cpu"
    shared = re.fullmatch(r"cuda:(\d+)", device)
    if not shared and device not in ("cpu", "cuda"):
        raise ValueError(
            f'device={device!r}: give "cpu", "cuda" (a GPU for each rank), "cuda:0" (all ranks '
            "share this GPU), or None"
        )
    if device == "cpu":
        return device
    if num_gpus == 0:
        raise ValueError(
            f'device={device!r}: torch finds no GPU on this machine; give "cpu", or leave device '
            "out"
        )
    if shared and int(shared[1]) >= num_gpus:
        raise ValueError(
            f"device={device!r}: this machine has {gpus(num_gpus)}, counted from 0; "
            f'"cuda:{num_gpus - 1}" is the last one'
        )
    if not shared and num_ranks > num_gpus:
        raise ValueError(
            f'device="cuda" for {num_ranks} ranks: this machine has {gpus(num_gpus)}, and NCCL '
            'refuses two ranks on one GPU ("Duplicate GPU detected"); give '
            f'world_size={num_gpus}, or device="cuda:0", where all ranks share one GPU and gloo '
            "carries their messages"
        )
    return device


def gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def is_shared(device: str) -> bool:
    """Whether all ranks use one GPU. NCCL refuses that, so gloo carries their messages."""
    return ":" in device


def default_device(device, is_asked: bool):
    """Return this torch.device if it is a GPU that the caller asked for, else None: torch's own."""
    return device if is_asked and device.type == "cuda" else None


def device_of_rank(device: str, index: int):
    """Return the torch.device of the rank with this index among the ranks of its machine."""
    import torch

    return torch.device("cuda", index) if device == "cuda" else torch.device(device)
