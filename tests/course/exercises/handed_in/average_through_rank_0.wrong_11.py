# WRONG: a receive buffer per shape, used again: two parameters of one shape end up with the SAME tensor as .grad (the last
# one's mean). Breaks "replaces each parameter.grad by its mean". Shown by two layers of one size.
import torch
from mini_dist import gather
from mini_dist.collectives import star_broadcast

def average_through_rank_0(parameters, group):
    room = {}
    for p in parameters:
        if p.grad is None:
            continue
        everyones = gather(p.grad[None], 0, group)
        new = star_broadcast(p.grad if everyones is None else everyones.mean(0), 0, group)
        p.grad = room.setdefault((p.shape, p.dtype), torch.empty_like(p)).copy_(new)
