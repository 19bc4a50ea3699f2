# The group is kept on the class, not in ctx: with copies on two groups, both backwards use the last one.
# Breaks "saves the group (ctx.group = group)" / "of all ranks" of *this* group. Shown by two groups before backward.
import torch
from mini_dist import all_reduce


class Copy(torch.autograd.Function):
    group = None

    @staticmethod
    def forward(ctx, x, group):
        Copy.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return all_reduce(dy, Copy.group), None


def copy(x, group):
    return Copy.apply(x, group)
