# a class with __call__; one optimizer per bucket, stepped as soon as its gradients are there (each element is treated separately)
import torch
from mini_dist.collectives import begin_all_gather_, begin_reduce_scatter
class Sharded:
    def __init__(self, model, make_optimizer, loss_of, group, size=60_000_000):
        self.model, self.loss_of, self.group = model, loss_of, group
        self.buckets, self.queue, self.last = [], [], False
        run, room = [], 0
        for p in [*model.parameters()][::-1]:
            if run and (room <= 0 or run[0].dtype != p.dtype):
                self.buckets.append(run)
                run = []
            if not run:
                room = size
            run.append(p)
            room -= p.numel()
        self.buckets.append(run)
        self.flats, self.shards, self.optimizers, self.index = [], [], [], {}
        for b, params in enumerate(self.buckets):
            flat = torch.cat([p.detach().reshape(-1) for p in params])
            flat = torch.nn.functional.pad(flat, (0, -len(flat) % group.size()))
            for p, piece in zip(params, flat.split([p.numel() for p in params] + ([left] if (left := len(flat) - sum(p.numel() for p in params)) else []))):
                p.data = piece.view(p.shape)
                self.index[id(p)] = b
                p.register_post_accumulate_grad_hook(self.leave)
            part = flat.chunk(group.size())[group.rank()].requires_grad_()
            self.flats.append(flat); self.shards.append(part)
            self.optimizers.append(make_optimizer([part]))
        self.open = [len(b) for b in self.buckets]
    def leave(self, p):
        if not self.last:
            return
        b = self.index[id(p)]
        self.open[b] -= 1
        if self.open[b] == 0:
            g = torch.cat([p.grad.reshape(-1) for p in self.buckets[b]])
            g = torch.nn.functional.pad(g, (0, len(self.flats[b]) - len(g)))
            for p in self.buckets[b]:
                p.grad = None
            self.queue.append((b, begin_reduce_scatter(g, self.group)))
    def __call__(self, batches):
        self.last = False
        for batch in batches[:-1]:
            self.loss_of(self.model, batch).backward()
        self.last = True
        self.loss_of(self.model, batches[-1]).backward()
        gathers = []
        for b, handle in self.queue:
            self.shards[b].grad = handle.wait() / (self.group.size() * len(batches))
            self.optimizers[b].step()
            self.optimizers[b].zero_grad(set_to_none=True)
            gathers.append(begin_all_gather_(self.flats[b].detach(), self.group))
        for handle in gathers:
            handle.wait()
        self.queue.clear()
        self.open = [len(b) for b in self.buckets]
def my_strategy(model, make_optimizer, loss_of, group):
    return Sharded(model, make_optimizer, loss_of, group)
