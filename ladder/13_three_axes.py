"""Rung 13, from rung 11: data, tensor and pipeline parallelism, each in groups of its own."""

import os
import runpy
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

# Batch, sequence, width, heads, head dim, vocabulary, layers. b, s, h: this rank's B, S, N.
B, S, D, N, H, V, L, M = 16, 16, 32, 4, 8, 128, 8, 8  # M micro-batches
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
        qkv = self.qkv(y).unflatten(-1, (-1, 3, H))  # [b, s, h, 3, H]
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # [b, h, s, H] each
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + all_reduce(self.out(y.transpose(1, 2).flatten(2)), self.group)
        y = self.norm2(x)
        y.register_hook(lambda dy: all_reduce(dy, self.group))
        y = self.down(functional.gelu(self.up(y)))
        return x + all_reduce(y, self.group)


def train(device, group):
    """Return this rank's part of the loss of every step, and what it sends and holds."""
    cuts = (2, 2) if group.size() >= 4 else (1, 1)
    mesh = torch.arange(group.size()).view(-1, *cuts)  # the ranks as [dp, pp, tp]
    axes = [mesh.movedim(axis, -1).flatten(0, 1).tolist() for axis in (0, 1, 1, 2)]
    replicas, down, up, slices = (dist.new_subgroups_by_enumeration(axis)[0] for axis in axes)
    (dp, stages, tp), stage = mesh.shape, down.rank()
    first, last = stage == 0, stage == stages - 1
    torch.manual_seed(0)  # All ranks draw the same parameters.
    blocks = [shard(Block(), slices) for _ in range(L - 3)]
    model = nn.Sequential(nn.Embedding(V, D), *blocks, nn.RMSNorm(D), nn.Linear(D, V, bias=False))
    model = model[L // stages * stage : L // stages * (stage + 1)]  # Only this rank's layers.
    blocks = [layer for layer in model if layer in blocks]  # The others are freed.
    parameters = list(model.to(device).parameters())
    means, squares = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    losses, saved, counts, sends = [], [], [], []

    def receive(source, way):
        x = torch.empty(B // dp // M, S, D, device=device)
        dist.recv(x, group=way, group_src=source)
        return x

    def forward(micro):
        x = tokens[micro] if first else receive(stage - 1, down).requires_grad_()
        y = model(x)  # [B/dp/M, S, D], on the last stage [B/dp/M, S, V]
        if last:
            y = functional.cross_entropy(y.flatten(0, 1), targets[micro].flatten()) / M / dp
            losses[-1] += y.item() if slices.rank() == 0 else 0.0
        else:
            sends.append(dist.isend(y.detach(), group=down, group_dst=stage + 1))
        saved.append((x, y))
        counts.append(len(saved))

    def backward():
        x, y = saved.pop(0)  # The oldest first: messages arrive in order.
        y.backward(None if last else receive(stage + 1, up))  # gradient of y; a loss needs none
        if not first:
            sends.append(dist.isend(x.grad, group=up, group_dst=stage - 1))

    for step in range(10):
        rows = ROWS[B * step : B * (step + 1)].chunk(dp)[replicas.rank()].to(device)
        tokens, targets = rows[:, :-1].chunk(M), rows[:, 1:].chunk(M)  # [B/dp/M, S] each
        model.zero_grad()
        losses.append(0.0)
        warmup = stages - 1 - stage  # forwards until its first gradient can be back
        for turn in range(M + warmup):
            if turn < M:
                forward(turn)
            if turn >= warmup:
                backward()
        while sends:
            sends.pop().wait()
        for p in parameters:
            dist.all_reduce(p.grad, group=replicas)
        with torch.no_grad():  # Adam without bias correction.
            for p, mean, square in zip(parameters, means, squares):
                mean.lerp_(p.grad, 0.1)
                square.lerp_(p.grad**2, 0.1)
                p -= 0.01 * mean / (square.sqrt() + 1e-8)
    P, X = sum(p.numel() for p in parameters), B // dp * S * D  # X passes from layer to layer
    sent = (2 - first - last) * X + 8 * (tp - 1) * len(blocks) * X // tp + 2 * (dp - 1) * P // dp
    return losses, {
        "bytes sent per step": 4 * sent,
        "micro-batches saved": max(counts),
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
        size = int(sys.argv[1]) if sys.argv[1:] else 8
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(run, (size, f"file://{folder}/meet"), size)
