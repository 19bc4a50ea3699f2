"""Lesson 07, solved as a learner would."""

import torch

from mini_dist.collectives import all_gather, reduce_scatter


def sharded_step(flat, gradient, update, group):
    rank, size = group.rank(), group.size()
    per_rank = len(flat) // size
    mean = reduce_scatter(gradient, group) / size
    new = update(flat[rank * per_rank : (rank + 1) * per_rank], mean)
    return all_gather(new, group)


def backward_in_units(loss, units, group):
    parts, hooks, missing = {}, [], [len(unit) for unit in units]

    for number, unit in enumerate(units):

        def ready(p, number=number, unit=unit):
            missing[number] -= 1
            if missing[number] == 0:
                flat = torch.cat([q.grad.reshape(-1) for q in unit])
                parts[number] = reduce_scatter(flat, group, op="mean")
                for q in unit:
                    q.grad = None

        hooks += [p.register_post_accumulate_grad_hook(ready) for p in unit]
    loss.backward()
    for hook in hooks:
        hook.remove()
    return [parts[number] for number in range(len(units))]


def forward_on_demand(x, layers, shards, group):
    for number in range(len(layers)):
        x = layers[number](x, all_gather(shards[number], group))
    return x
