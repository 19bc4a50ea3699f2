"""Train a small GPT with ZeRO-3 and checkpoints: in a cell, as a script, under torchrun, by Slurm.

    python docs/cluster/train.py --ranks 2 --directory runs/demo
    torchrun --standalone --nproc-per-node 2 docs/cluster/train.py --ranks 2 --directory runs/demo

If each rank of a machine has a GPU, the script trains on GPUs over NCCL, otherwise on the CPU over
gloo.

If you start it again with the same directory, it continues from its last checkpoint, on any number
of ranks that divides the batch. With `--kill 7` the last rank kills itself the first time that it
reaches step 7.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

from mini_dist import GPT, ModelConfig, launch
from mini_dist.model.data import Batches, load_text
from mini_dist.strategies.train import train_step
from mini_dist.strategies.zero import ZeRO3
from mini_dist.training.checkpoint import Training

CONFIG = ModelConfig(d_model=64, num_layers=2, num_heads=4, seq_len=32)


def train(directory, steps, every, kill, batch_size, group):
    gpt = GPT(CONFIG, seed=0, device=group.device)
    model = ZeRO3(gpt, group, lambda p: torch.optim.AdamW(p, lr=3e-3), units=gpt.blocks)
    training = Training(model, (), group, background=True)
    share = dict(rank=group.rank(), size=group.size(), device=group.device)
    batches = Batches(load_text(), batch_size, CONFIG.seq_len, **share)
    saved = training.resume(directory)
    first = saved.step if saved else 0
    if group.rank() == 0:
        print(f"{group.size()} ranks, from step {first}", flush=True)
    for step in range(first, steps):
        if step == kill and first == 0:
            # Before the kill every rank has printed its last step and completed its checkpoint.
            training.wait()
            dist.barrier(group)
            if group.rank() == group.size() - 1:
                print(f"rank {group.rank()} kills itself at step {step}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        done = train_step(model, model.optimizer, [batches.batch(step)], max_norm=1.0)
        if group.rank() == 0:
            print(f"step {step}: loss {done.loss:.4f}", flush=True)
        if (step + 1) % every == 0 or step + 1 == steps:
            training.save(directory, step + 1)
    training.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=int(os.environ.get("WORLD_SIZE", 2)))
    parser.add_argument("--directory", type=Path, default=Path("runs/cluster"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=2, help="steps between checkpoints")
    parser.add_argument("--kill", type=int, help="the last rank kills itself at this step, once")
    parser.add_argument("--batch", type=int, default=12, help="sequences of a step, on all ranks")
    parser.add_argument("--device", help='"cpu", "cuda", or "cuda:0" for all ranks of a machine')
    options = parser.parse_args()
    job = (str(options.directory), options.steps, options.every, options.kill, options.batch)
    run = launch(train, options.ranks, job, device=options.device, timeout=3600)
    if os.environ.get("RANK", "0") == "0":
        print(run.title(), flush=True)  # where the tensors were, and what carried the messages
    if dist.is_initialized():  # under torchrun this process is a rank
        dist.destroy_process_group()
