"""Lesson 11, solved as a learner would."""

import torch

from mini_dist.collectives import start, wait
from mini_dist.context_parallel import Partial
from mini_dist.context_parallel.ring import add_block


def merge(a, b):
    lse = torch.logaddexp(a.lse, b.lse)
    share_a = (a.lse - lse).exp()[..., None]
    share_b = (b.lse - lse).exp()[..., None]
    return Partial(share_a * a.out + share_b * b.out, lse)


def ring_step(total, q, kv, block, kernel, group):
    rank, size = group.rank(), group.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    arriving = torch.empty_like(kv)
    handles = start(group, receives=[(arriving, before)], sends=[(kv, after)])
    total = add_block(total, q, kv, block, kernel)
    wait(handles)
    return total, arriving


def zigzag(seq_len, size):
    chunks = torch.arange(seq_len).view(2 * size, -1)
    return torch.stack([torch.cat([chunks[r], chunks[2 * size - 1 - r]]) for r in range(size)])
