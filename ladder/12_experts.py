"""Rung 12, from rung 1: experts replace the MLP, and each token visits the rank of its expert."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

# Batch, sequence, width, heads, head dim, vocabulary, layers. b, s, h: this rank's B, S, N.
B, S, D, N, H, V, L = 16, 16, 32, 4, 8, 128, 8
E = 4  # experts
TEXT = b"Every rank holds a part of the model, and together the ranks hold all of it. " * 3
ROWS = torch.tensor(list(TEXT)).unfold(0, S + 1, 1)  # [rows, S + 1]: one token per byte


class AllToAll(torch.autograd.Function):  # Backward sends the gradients of the rows back.
    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.way_back = received, sent, group
        arriving = x.new_empty(sum(received), D)
        dist.all_to_all_single(arriving, x.contiguous(), received, sent, group=group)
        return arriving

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient, *ctx.way_back), None, None, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        experts = [
            nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)) for _ in range(E)
        ]
        self.router, self.experts = nn.Linear(D, E, bias=False), nn.ModuleList(experts)
        self.group, self.sent = None, 0

    def forward(self, x):  # [b, s, D] -> [b, s, D]
        y = self.norm1(x)
        qkv = self.qkv(y).unflatten(-1, (-1, 3, H))  # [b, s, h, 3, H]
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # [b, h, s, H] each
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).flatten(2))
        x = x + y
        y = self.norm2(x)
        gate, choice = self.router(y).softmax(-1).max(-1)  # [B/n, S] each, of the best expert
        visit = self.visit_ranks if self.group else self.run_experts  # One process has all experts.
        y = visit(y.flatten(0, 1), choice.flatten()).view_as(x) * gate[..., None]
        return x + y

    def run_experts(self, x, choice):  # [rows, D], [rows] -> [rows, D]
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            y[choice == number] = expert(x[choice == number])
        return y

    def visit_ranks(self, x, choice):  # [tokens, D], [tokens] -> [tokens, D]
        rank, size = self.group.rank(), self.group.size()
        order = choice.argsort()  # the tokens of expert 0 first
        leaving = choice.bincount(minlength=E).view(size, -1)  # [n, E/n] tokens for each expert
        arriving = torch.empty_like(leaving)  # [n, E/n] tokens from each rank for each expert here
        dist.all_to_all_single(arriving, leaving, group=self.group)
        sent, received = leaving.sum(1).tolist(), arriving.sum(1).tolist()
        self.sent += 2 * 4 * D * (sum(sent + received) - sent[rank] - received[rank])
        x = AllToAll.apply(x[order], sent, received, self.group)
        here = torch.arange(E, device=x.device) % (E // size)  # 0, 1, 0, 1, ... for 2 experts
        y = self.run_experts(x, here.repeat_interleave(arriving.flatten()))
        return AllToAll.apply(y, received, sent, self.group)[order.argsort()]


def train(device, group):
    """Return this rank's part of the loss of every step, and what it sends and holds."""
    rank, size = (group.rank(), group.size()) if group else (0, 1)
    assert B % size == 0, f"{size} ranks cannot share {B} rows equally"
    torch.manual_seed(0)  # All ranks draw the same parameters.
    blocks = [Block() for _ in range(L - 3)]  # The other 3: embedding, norm, head.
    for block in blocks if group else []:
        block.group, block.experts = group, block.experts[E // size * rank :][: E // size]
    model = nn.Sequential(nn.Embedding(V, D), *blocks, nn.RMSNorm(D), nn.Linear(D, V, bias=False))
    parameters = list(model.to(device).parameters())
    shared = [p for name, p in model.named_parameters() if "experts" not in name]
    means, squares = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    losses = []
    for step in range(10):
        rows = ROWS[B * step : B * (step + 1)].chunk(size)[rank].to(device)
        tokens, targets = rows[:, :-1], rows[:, 1:]  # [B/n, S]
        model.zero_grad()
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()) / size
        loss.backward()
        losses.append(loss.item())
        for p in shared if group else []:  # Gradients of experts have come with the tokens.
            dist.all_reduce(p.grad, group=group)  # Losses were divided by n: a sum will do.
        with torch.no_grad():  # Adam without bias correction.
            for p, mean, square in zip(parameters, means, squares):
                mean.lerp_(p.grad, 0.1)
                square.lerp_(p.grad**2, 0.1)
                p -= 0.01 * mean / (square.sqrt() + 1e-8)
    P = sum(p.numel() for p in parameters)
    W = sum(p.numel() for p in shared) + E * len(blocks)  # With E counts of 8 bytes per block.
    return losses, {
        "bytes sent per step": 4 * 2 * (size - 1) * W // size + sum(b.sent for b in blocks) / 10,
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
        one_process, _ = train(device, None)
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
