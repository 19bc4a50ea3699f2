# WRONG: gathers the new MINUS the old shard and adds it to flat: (flat + (new - flat)) rounds, so the result is not what
# update returned. Breaks "returns the new shard" / "return all parameters". Shown by random floats, or by a weight that
# update sets to a much smaller number (1e8 -> 1e-3 gives 0).
import torch
from mini_dist import all_gather, all_reduce, reduce_scatter

def sharded_step(flat, gradient, update, group):
    shard = flat.chunk(group.size())[group.rank()]
    change = update(shard, reduce_scatter(gradient, group, op="mean")) - shard
    return flat + all_gather(change, group)
