# WRONG: x.view(-1): a transposed x raises. Breaks "the sum of all x" for an x that is not contiguous.
from mini_dist.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter, split_sizes
from mini_dist.collectives.messages import Members
import torch
def all_reduce_on_hosts(x, hosts, group):
    by = {}
    for r, h in enumerate(hosts):
        by.setdefault(h, []).append(r)
    inside = Members(group, by[hosts[group.rank()]])
    across = Members(group, [ranks[inside.rank()] for ranks in by.values()])
    flat = x.view(-1)
    chunk = ring_all_reduce(ring_reduce_scatter(flat, inside), across)
    return ring_all_gather(chunk, inside, split_sizes(len(flat), inside.size())).view(x.shape)
