"""Lessons 09 and 10, solved as a learner would."""

import torch
from torch.nn import functional

from mini_dist import ops
from mini_dist.collectives import all_reduce
from mini_dist.model import IGNORE_INDEX, TokenLoss


def column_linear(x, weight, bias, group):
    return functional.linear(ops.copy(x, group), weight, bias)


def row_linear(x, weight, bias, group):
    y = ops.reduce(x @ weight.T, group)
    if bias is not None:
        y = y + bias
    return y


def copy(x, group):
    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return all_reduce(dy, group)

    return Copy.apply(x)


def reduce(x, group):
    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return all_reduce(x, group)

        @staticmethod
        def backward(ctx, dy):
            return dy

    return Reduce.apply(x)


def vocab_parallel_cross_entropy(logits, targets, group):
    width = logits.shape[-1]
    highest = all_reduce(logits.detach().amax(-1), group, op="max")
    logits = logits - highest[..., None]
    local = targets - group.rank() * width
    mine = (0 <= local) & (local < width)
    at_target = logits.gather(-1, local.clamp(0, width - 1)[..., None])[..., 0] * mine
    exp_sum, at_target = ops.reduce(torch.stack([logits.exp().sum(-1), at_target]), group)
    loss = exp_sum.log() - at_target
    counts = targets != IGNORE_INDEX
    return TokenLoss(loss[counts].sum(), counts.sum())


def sequence_parallel_mlp(x, norm, up, down, bias, group):
    x = ops.all_gather(norm(x), group, dim=1)
    x = functional.gelu(x @ up.T) @ down.T
    return ops.reduce_scatter(x, group, dim=1) + bias
