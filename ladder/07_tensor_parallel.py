"""Rung 7, from rung 1: each rank has a slice of each block matrix; the ranks sum activations."""

import os
import runpy
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

# Batch, sequence, width, heads, head dim, vocabulary, layers. b, s, h: this rank's B, S, N.
B, S, D, N, H, V, L = 16, 16, 32, 4, 8, 128, 8
TEXT = b"Every rank holds a part of the model, and together the ranks hold all of it. " * 3
ROWS = torch.tensor(list(TEXT)).unfold(0, S + 1, 1)  # [rows, S + 1]: one token per byte


def all_reduce(x, group):
    """Sum x over the group. In backward, each term gets the gradient of the sum, equal on all."""
    total = x.clone()
    dist.all_reduce(total.data, group=group)  # `.data` hides this from autograd.
    return total


def shard(block, group):
    """Keep 1/n of the weights [outputs, inputs]: qkv and up by outputs, out and down by inputs."""
    for linear, dim in (block.qkv, 0), (block.out, 1), (block.up, 0), (block.down, 1):
        linear.weight.data = linear.weight.data.chunk(group.size(), dim)[group.rank()].clone()
    block.group = group
    return block


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, x):  # [b, s, D] -> [b, s, D]
        y = self.norm1(x)
        y.register_hook(lambda dy: all_reduce(dy, self.group))  # Add the dy of all ranks' heads.
        qkv = self.qkv(y).unflatten(-1, (-1, 3, H))  # [B, S, h, 3, H]
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # [B, h, S, H] each
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).flatten(2))
        x = x + all_reduce(y, self.group)
        y = self.norm2(x)
        y.register_hook(lambda dy: all_reduce(dy, self.group))
        y = self.down(functional.gelu(self.up(y)))
        return x + all_reduce(y, self.group)


def train(device, group):
    """Return the loss of every step (0 except on rank 0), and what this rank sends and holds."""
    rank, size = group.rank(), group.size()
    assert N % size == 0, f"{size} ranks cannot share {N} heads equally"
    torch.manual_seed(0)  # All ranks draw the same parameters.
    blocks = [shard(Block(), group) for _ in range(L - 3)]
    model = nn.Sequential(nn.Embedding(V, D), *blocks, nn.RMSNorm(D), nn.Linear(D, V, bias=False))
    parameters = list(model.to(device).parameters())
    means, squares = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    losses = []
    for step in range(10):
        rows = ROWS[B * step : B * (step + 1)].to(device)
        tokens, targets = rows[:, :-1], rows[:, 1:]  # [B, S]
        model.zero_grad()
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        losses.append(loss.item() if rank == 0 else 0.0)  # All have it; run() adds them up.
        with torch.no_grad():  # Adam without bias correction.
            for p, mean, square in zip(parameters, means, squares):
                mean.lerp_(p.grad, 0.1)
                square.lerp_(p.grad**2, 0.1)
                p -= 0.01 * mean / (square.sqrt() + 1e-8)
    P = sum(p.numel() for p in parameters)
    return losses, {
        # float32; per block 4 all-reduces of [B, S, D], 2 in backward; a ring sends 2 (n-1)/n.
        "bytes sent per step": 4 * 2 * (size - 1) * (4 * len(blocks) * B * S * D) // size,
        "parameters": P,
        "gradients": sum(p.grad.numel() for p in parameters),
        "optimizer": sum(state.numel() for state in means + squares),
    }


def run(rank, size, url):
    """Join the other ranks at `url` and train. Rank 0 prints the losses next to rung 0's."""
    torch.set_num_threads(1)  # The ranks share this machine's cores.
    on_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", size))  # one each
    device = f"cuda:{rank % torch.cuda.device_count()}" if on_gpus else "cpu"
    dist.init_process_group("cpu:gloo" + ",cuda:nccl" * on_gpus, url, rank=rank, world_size=size)
    reports = [None] * size
    report = train(device, dist.group.WORLD)
    dist.all_gather_object(reports, report)
    dist.destroy_process_group()
    if rank == 0:
        rung_0 = os.path.join(os.path.dirname(__file__), "00_one_process.py")
        one_process, _ = runpy.run_path(rung_0)["train"](device)
        for step, expected in enumerate(one_process):
            loss = sum(losses[step] for losses, _ in reports)
            print(f"step {step}  loss {loss:.6f}  one process {expected:.6f}")
        for rank, (_, held) in enumerate(reports):
            print(f"rank {rank}  {held}")


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun has started this process as one of the ranks.
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
    else:
        size = int(sys.argv[1]) if sys.argv[1:] else 4
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(run, (size, f"file://{folder}/meet"), size)
