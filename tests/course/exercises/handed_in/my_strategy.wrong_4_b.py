# WRONG: the number of micro-batches of the first call is kept: a second call with another number divides wrongly.
import torch
from mini_dist.collectives import begin_all_gather_, begin_reduce_scatter
BUCKET = 100e6
class Unit:
    def __init__(self, params, group):
        self.params, self.group, n = params, group, group.size()
        self.length = sum(p.numel() for p in params)
        self.padded = -(-self.length // n) * n
        p = params[0]
        self.whole = p.new_zeros(self.padded, requires_grad=False).detach()
        at = 0
        for p in params:
            place = self.whole[at:at + p.numel()].view(p.shape)
            place.copy_(p.detach())
            p.data = place
            at += p.numel()
        self.shard = torch.nn.Parameter(self.whole.chunk(n)[group.rank()])
        self.missing, self.flying = len(params), None
    def ready(self):
        self.missing -= 1
        if self.missing == 0:
            flat = torch.cat([*(p.grad.flatten() for p in self.params), self.whole.new_zeros(self.padded - self.length)])
            for p in self.params:
                p.grad = None
            self.flying = begin_reduce_scatter(flat, self.group)
    def finish(self, scale):
        self.shard.grad = self.flying.wait().mul_(scale)
        self.flying, self.missing = None, len(self.params)
def my_strategy(model, make_optimizer, loss_of, group):
    units, bucket, nbytes = [], [], 0
    for p in reversed(list(model.parameters())):
        if bucket and (nbytes >= BUCKET or p.dtype != bucket[0].dtype):
            units.append(Unit(bucket, group))
            bucket, nbytes = [], 0
        bucket.append(p)
        nbytes += p.numel() * p.element_size()
    units.append(Unit(bucket, group))
    unit_of = {p: unit for unit in units for p in unit.params}
    optimizer = make_optimizer([unit.shard for unit in units])
    def hook(p):
        unit_of[p].ready()
    def step(batches):
        for batch in batches[:-1]:
            loss_of(model, batch).backward()
        hooks = [p.register_post_accumulate_grad_hook(hook) for p in unit_of]
        loss_of(model, batches[-1]).backward()
        for each in hooks:
            each.remove()
        step.count = getattr(step, 'count', len(batches))
        for unit in units:
            unit.finish(1 / (group.size() * step.count))
        optimizer.step()
        optimizer.zero_grad()
        for arriving in [begin_all_gather_(unit.whole, group) for unit in reversed(units)]:
            arriving.wait()
    return step
