# RIGHT: reduce with a function: the weight is only ever an argument.
import torch
from mini_dist import all_gather, all_reduce, reduce_scatter

from functools import reduce
def _right(x, layers, shards, group):
    return reduce(lambda x, pair: pair[0](x, all_gather(pair[1], group)), zip(layers, shards), x)
# WRONG: takes the layers out of the caller list.
def forward_on_demand(x, layers, shards, group):
    out = _right(x, layers, shards, group)
    layers.clear()
    return out
