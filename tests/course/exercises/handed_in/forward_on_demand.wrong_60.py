# WRONG: "Send x through all layers; every rank has only a shard of each weight" (an all-gather puts the parts in rank order; here the part that started k ranks back is put k places ahead). Shown by: 3 ranks. With 1 or 2 ranks it is right.
import torch

from mini_dist import exchange


@torch.no_grad()
def gather_by_ring(shard, group):
    rank, size = group.rank(), group.size()
    whole = shard.new_empty(size * len(shard))
    places = whole.chunk(size)
    places[rank].copy_(shard)
    part = shard
    for k in range(1, size):
        part = exchange(part, (rank + 1) % size, (rank - 1) % size, group)
        places[(rank + k) % size].copy_(part)
    return whole


def forward_on_demand(x, layers, shards, group):
    for layer, shard in zip(layers, shards):
        x = layer(x, gather_by_ring(shard, group))
    return x
