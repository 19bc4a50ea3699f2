# only the tokens that count are worked on and sent
import torch
from mini_dist import all_reduce
from mini_dist.collectives import ops
from mini_dist.model.loss import IGNORE_INDEX, TokenLoss


def vocab_parallel_cross_entropy(logits, targets, group):
    keep = (targets != IGNORE_INDEX).reshape(-1)
    z = logits.reshape(-1, width := logits.shape[-1])[keep]  # [T, V/t]
    local = targets.reshape(-1)[keep] - width * group.rank()
    (rows,) = torch.nonzero((0 <= local) & (local < width), as_tuple=True)
    picked = z.new_zeros(len(z)).index_put((rows,), z[rows, local[rows]])
    m = all_reduce(z.detach().max(-1).values, group, op="max")
    denominator = ops.all_reduce(torch.exp(z - m[:, None]).sum(1), group)
    return TokenLoss((denominator.log() + m - ops.all_reduce(picked, group)).sum(), keep.sum())
