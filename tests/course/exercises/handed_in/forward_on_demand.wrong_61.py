# WRONG: "The gathers are collectives, so all ranks must run the same blocks in the same order. If a rank skips a block, the others wait forever." Shown by: 2 ranks, x [0, D] on rank 1 (no rows left for it) and [1, D] on rank 0: rank 0 waits forever. With rows on every rank it is right.
from mini_dist import all_gather


def forward_on_demand(x, layers, shards, group):
    if x.numel() == 0:  # nothing to compute here
        return x
    for number, layer in enumerate(layers):
        weight = all_gather(shards[number], group)
        x = layer(x, weight)
        weight = None
    return x
