# WRONG: "`parameters` may be a generator (`model.parameters()` returns one), so you can iterate over it only once." Shown by: 2 ranks and model.parameters(): the first parameter is used up by `next` and keeps this rank's own gradient; right with a list
import torch

from mini_dist import gather
from mini_dist.collectives import star_broadcast


def average_through_rank_0(parameters, group):
    device = next(iter(parameters)).device
    ranks = torch.tensor(group.size(), device=device)
    for p in parameters:
        if p.grad is None:
            continue
        everyones = gather(p.grad[None], 0, group)
        mean = p.grad if everyones is None else everyones.sum(0) / ranks
        p.grad = star_broadcast(mean, 0, group)
