# WRONG: hosts are assumed to be named 0..h-1 (max + 1, and index into a list). Breaks "hosts[r] is the host of rank r". Shown by [3,3,9,9].
from mini_dist.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter, split_sizes
from mini_dist.collectives.messages import Members
import torch
def all_reduce_on_hosts(x, hosts, group):
    by = [[] for _ in range(len(set(hosts)))]
    for r, h in enumerate(hosts):
        by[h].append(r)
    inside = Members(group, by[hosts[group.rank()]])
    across = Members(group, [ranks[inside.rank()] for ranks in by])
    flat = x.flatten()
    chunk = ring_all_reduce(ring_reduce_scatter(flat, inside), across)
    return ring_all_gather(chunk, inside, split_sizes(len(flat), inside.size())).view(x.shape)
