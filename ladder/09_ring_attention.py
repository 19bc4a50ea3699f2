"""Rung 9, from rung 1: each rank takes a part of the sequence, and keys and values go round."""

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


def shift(x, group, by):
    """Send x to the rank `by` places on, and return what the rank `by` places back has sent."""
    rank, size = group.rank(), group.size()
    arriving = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=(rank + by) % size)
    receive = dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - by) % size)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return arriving


class Shift(torch.autograd.Function):
    """Pass x on to the next rank in forward, and its gradient back in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return shift(x, group, 1)

    @staticmethod
    def backward(ctx, gradient):
        return shift(gradient, ctx.group, -1), None


def ring_attention(q, k, v, group):
    """Attend to the keys of one rank after the other: [B, N, S/n, H] each, and so is the result."""
    rank, size = group.rank(), group.size()
    index = torch.arange(S // size, device=q.device)
    top, total, out = torch.full_like(q[..., :1], -torch.inf), 0.0, 0.0
    for step in range(size):
        source = (rank - step) % size  # the rank whose keys and values are here
        is_later = source * len(index) + index > (rank * len(index) + index)[:, None]
        scores = (q @ k.mT / H**0.5).masked_fill(is_later, -1e9)  # [B, N, S/n, S/n]
        new_top = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
        shrink = (top - new_top).exp()  # Earlier terms were divided by exp(top).
        weights = (scores - new_top).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + weights @ v
        top = new_top
        if step < size - 1:
            k, v = Shift.apply(torch.stack([k, v]), group)
    return out / total


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, x):  # [b, s, D] -> [b, s, D]
        y = self.norm1(x)
        qkv = self.qkv(y).unflatten(-1, (-1, 3, H))  # [b, s, h, 3, H]
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # [b, h, s, H] each
        y = ring_attention(q, k, v, self.group)
        y = self.out(y.transpose(1, 2).flatten(2))
        x = x + y
        y = self.norm2(x)
        y = self.down(functional.gelu(self.up(y)))
        return x + y


def train(device, group):
    """Return this rank's part of the loss of every step, and what it sends and holds."""
    rank, size = group.rank(), group.size()
    assert S % size == 0, f"{size} ranks cannot share {S} tokens equally"
    torch.manual_seed(0)  # All ranks draw the same parameters.
    blocks = [Block() for _ in range(L - 3)]  # The other 3: embedding, norm, head.
    for block in blocks:
        block.group = group
    model = nn.Sequential(nn.Embedding(V, D), *blocks, nn.RMSNorm(D), nn.Linear(D, V, bias=False))
    parameters = list(model.to(device).parameters())
    means, squares = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    losses = []
    for step in range(10):
        here = slice(S // size * rank, S // size * (rank + 1) + 1)
        rows = ROWS[B * step : B * (step + 1), here].to(device)
        tokens, targets = rows[:, :-1], rows[:, 1:]  # [B, S/n]
        model.zero_grad()
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()) / size
        loss.backward()
        losses.append(loss.item())
        for p in parameters:
            dist.all_reduce(p.grad, group=group)  # Losses were divided by n: a sum will do.
        with torch.no_grad():  # Adam without bias correction.
            for p, mean, square in zip(parameters, means, squares):
                mean.lerp_(p.grad, 0.1)
                square.lerp_(p.grad**2, 0.1)
                p -= 0.01 * mean / (square.sqrt() + 1e-8)
    P = sum(p.numel() for p in parameters)
    return losses, {
        "bytes sent per step": 4 * 2 * (size - 1) * (P + 2 * len(blocks) * B * S * D) // size,
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
