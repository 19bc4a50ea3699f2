"""Rung 6, from rung 5: each layer's parameters exist only while it computes (ZeRO-3)."""

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
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).flatten(2))
        x = x + y
        y = self.norm2(x)
        y = self.down(functional.gelu(self.up(y)))
        return x + y


class Unit:
    """One layer: its U parameters. This rank stores and updates U/n of them."""

    def __init__(self, layer, group):
        self.group, self.parameters = group, list(layer.parameters())
        sizes = [p.numel() for p in self.parameters]
        self.flat = torch.cat([p.data.flatten() for p in self.parameters])  # [U]
        for p, data in zip(self.parameters, self.flat.split(sizes)):
            p.data = data.view_as(p)  # The layer's weights are now parts of `flat`.
        self.hooks = [p.register_post_accumulate_grad_hook(self.ready) for p in self.parameters]
        self.missing = len(self.parameters)
        self.shard = self.flat.chunk(group.size())[group.rank()].clone()  # [U/n]
        self.shard.grad = torch.empty_like(self.shard)  # [U/n], summed over the ranks
        self.free()
        self.hooks.append(layer.register_forward_pre_hook(self.gather))
        self.hooks.append(layer.register_forward_hook(self.leave))

    def ready(self, _):
        """Sum and free the layer's gradients when they are complete."""
        self.missing -= 1
        if self.missing == 0:
            whole = torch.cat([p.grad.flatten() for p in self.parameters])  # [U]
            for p in self.parameters:
                p.grad = None
            # No overlap here: backward waits, so that only one layer's gradients exist at a time.
            parts = list(whole.chunk(self.group.size()))  # Rank r gets the sum of part r.
            dist.reduce_scatter(self.shard.grad, parts, group=self.group)
            self.missing = len(self.parameters)
            self.free()

    def gather(self, *_):
        """Give `flat` memory again, and fill it with the shards of all ranks."""
        self.flat.untyped_storage().resize_(4 * self.flat.numel())
        dist.all_gather(list(self.flat.chunk(self.group.size())), self.shard, group=self.group)

    def leave(self, _, inputs, output):
        """Free the parameters after forward; gather them again when backward reaches the layer."""
        self.free()
        output.register_hook(self.gather)

    def free(self):
        """Give back the memory of `flat`, which every parameter of the layer is a view of."""
        self.flat.untyped_storage().resize_(0)


def train(device, group):
    """Return this rank's part of the loss of every step, and what it sends and holds."""
    rank, size = group.rank(), group.size()
    assert B % size == 0, f"{size} ranks cannot share {B} rows equally"
    torch.manual_seed(0)  # All ranks draw the same parameters.
    blocks = [Block() for _ in range(L - 3)]  # The other 3: embedding, norm, head.
    model = nn.Sequential(nn.Embedding(V, D), *blocks, nn.RMSNorm(D), nn.Linear(D, V, bias=False))
    parameters = list(model.to(device).parameters())
    units = [Unit(layer, group) for layer in model]
    shards = [unit.shard for unit in units]
    means, squares = ([torch.zeros_like(shard) for shard in shards] for _ in range(2))
    losses = []
    for step in range(10):
        rows = ROWS[B * step : B * (step + 1)].chunk(size)[rank].to(device)
        tokens, targets = rows[:, :-1], rows[:, 1:]  # [B/n, S]
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()) / size
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():  # Adam without bias correction; p is this rank's shard of a layer.
            for p, mean, square in zip(shards, means, squares):
                mean.lerp_(p.grad, 0.1)
                square.lerp_(p.grad**2, 0.1)
                p -= 0.01 * mean / (square.sqrt() + 1e-8)
    storages = [t.untyped_storage() for t in shards + [unit.flat for unit in units]]
    for unit in units:
        for hook in unit.hooks:
            hook.remove()  # Else they keep the group alive, and its threads can crash at exit.
    P = sum(p.numel() for p in parameters)
    return losses, {
        "bytes sent per step": 4 * 3 * (size - 1) * P // size,  # gather twice, reduce once
        "parameters": sum(storage.nbytes() for storage in storages) // 4,
        "gradients": sum(p.grad.numel() for p in parameters + shards if p.grad is not None),
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
