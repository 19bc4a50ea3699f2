"""Rung 12, from rung 1: the MLP becomes experts, and tokens travel to the expert's rank.

B batch, S sequence, D model, N heads, H head dim, V vocabulary, L layers, E experts, T tokens.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

B, S, D, N, H, V, L, E = 16, 16, 32, 4, 8, 128, 8, 4
TEXT = b"Every rank holds a part of the work, and together the ranks hold all of it. The loss of "
TEXT += b"every step is the loss of one process: what changes is who holds what, and who sends it."
ROWS = torch.tensor(list(TEXT)).unfold(0, S + 1, 1)  # [rows, S + 1]: one token per byte


class AllToAll(torch.autograd.Function):
    """Send rows of x to every rank, `sent[r]` of them to rank r; gradients take the way back."""

    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.way_back = received, sent, group
        arriving = x.new_empty(sum(received), D)
        dist.all_to_all_single(arriving, x.contiguous(), received, sent, group=group)
        return arriving

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient, *ctx.way_back), None, None, None


def run_experts(x, choice, experts):  # [T, D], [T] -> [T, D]
    y = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        y[choice == number] = expert(x[choice == number])
    return y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.out = nn.Linear(D, D, bias=False)
        self.router = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)) for _ in range(E)
        )
        self.group, self.bytes_sent = None, 0

    def forward(self, x):  # [B, S, D] -> [B, S, D]
        y = self.norm1(x)
        qkv = self.qkv(y).unflatten(-1, (-1, 3, H))  # [B, S, N, 3, H]
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # [B, N, S, H] each
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).flatten(2))
        x = x + y
        y = self.norm2(x)
        gate, choice = self.router(y).softmax(-1).flatten(0, 1).max(-1)  # [T]: the best expert
        y = self.visit(y.flatten(0, 1), choice) * gate[:, None]
        return x + y.view_as(x)

    def visit(self, y, choice):
        """Return for each token of y [T, D] what its expert makes of it."""
        if self.group is None:  # One process has all experts.
            return run_experts(y, choice, self.experts)
        rank, size = self.group.rank(), self.group.size()
        counts = choice.bincount(minlength=E)  # [E]: how many tokens go to each expert
        arriving = torch.empty_like(
            counts
        )  # [E]: from rank 0 for each expert here, from rank 1, ...
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = (c.view(size, -1).sum(1).tolist() for c in (counts, arriving))
        order = choice.argsort(stable=True)
        here = AllToAll.apply(y[order], sent, received, self.group)  # [sum(received), D]
        of_here = torch.arange(E, device=y.device) % len(self.experts)
        here = run_experts(here, of_here.repeat_interleave(arriving), self.experts)
        back = AllToAll.apply(here, received, sent, self.group)  # [T, D]
        self.bytes_sent += 8 * (E - len(self.experts)) + 2 * 4 * D * (
            sum(sent + received) - sent[rank] - received[rank]
        )
        return torch.empty_like(back).index_copy(0, order, back)


def train(group, device):
    """Return this rank's share of the loss of every step, and what the rank sent and holds."""
    rank, size = (group.rank(), group.size()) if group else (0, 1)
    torch.manual_seed(0)  # All ranks begin with the same parameters.
    blocks = [Block() for _ in range(L - 3)]
    for block in blocks if group else []:
        block.group = group
        block.experts = block.experts[E // size * rank : E // size * (rank + 1)]
    head = nn.Linear(D, V, bias=False)
    model = nn.Sequential(nn.Embedding(V, D), *blocks, nn.RMSNorm(D), head).to(device)
    parameters = list(model.parameters())
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
        for p in shared if group else []:  # An expert has got its tokens from all ranks.
            dist.all_reduce(p.grad, group=group)
        with torch.no_grad():  # Adam, without its correction of the first steps.
            for p, mean, square in zip(parameters, means, squares):
                mean.lerp_(p.grad, 0.1)
                square.lerp_(p.grad**2, 0.1)
                p -= 0.01 * mean / (square.sqrt() + 1e-8)
    P = sum(p.numel() for p in shared)
    routed = sum(block.bytes_sent for block in blocks)  # in all steps
    held = {
        "bytes sent per step": 4 * 2 * (size - 1) * P // size + routed / 10,
        "parameters": sum(p.numel() for p in parameters),
        "gradients": sum(p.grad.numel() for p in parameters),
        "optimizer": sum(state.numel() for state in means + squares),
    }
    return losses, held


def run(rank, size, meet):
    """Join the other ranks, train, and print the losses beside those of one process."""
    torch.set_num_threads(1)  # The ranks share this machine's cores.
    gpus = torch.cuda.device_count()
    on_gpus = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", size))  # One GPU per rank, or none.
    device = torch.device("cuda", rank % gpus) if on_gpus else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpus else "gloo", meet, rank=rank, world_size=size)
    reports = [None] * size
    dist.all_gather_object(reports, train(dist.group.WORLD, device))
    dist.destroy_process_group()
    if rank == 0:
        for step, expected in enumerate(train(None, device)[0]):
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
