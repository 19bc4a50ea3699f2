# WRONG: start() with a clone that keeps x's strides: a transposed x is not contiguous and gloo refuses it.
# Breaks "x may have any shape".
import torch
from mini_dist.collectives import start, wait

def doubling_all_reduce(x, group):
    total, d = x.clone(), 1
    while d < group.size():
        peer, came = group.rank() ^ d, torch.empty_like(total)
        wait(start(group, [(came, peer)], [(total, peer)]))
        total = total + came
        d *= 2
    return total
