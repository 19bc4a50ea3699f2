# view(-1): a RuntimeError for an x that is not contiguous, such as a transposed one.
# Breaks "the sum of all ranks' x", any x. Shown by x.T of [2, 3].
import torch
from mini_dist import all_reduce


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x.view(-1), group).view(x.shape)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


def differentiable_all_reduce(x, group):
    return Sum.apply(x, group)
