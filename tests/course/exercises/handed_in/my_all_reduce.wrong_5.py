# Remembers the cut points of the first bucket; a longer bucket in a later call keeps its tail unsummed,
# a shorter one is cut wrongly. Breaks "buckets ... can have any length". Shown by two calls, 8 then 13 numbers.
import torch
from mini_dist import exchange

CUTS = {}


def my_all_reduce(x, group):
    n, r = group.size(), group.rank()
    if n not in CUTS:
        CUTS[n] = [len(x) * i // n for i in range(n + 1)]
    cuts = CUTS[n]
    out = x.clone()
    part = lambda i: out[cuts[i % n] : cuts[i % n + 1]]
    for s in range(n - 1):
        part(r - s - 1).add_(exchange(part(r - s).clone(), (r + 1) % n, (r - 1) % n, group, like=part(r - s - 1)))
    for s in range(n - 1):
        part(r - s).copy_(exchange(part(r - s + 1).clone(), (r + 1) % n, (r - 1) % n, group, like=part(r - s)))
    return out
