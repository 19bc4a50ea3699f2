# Adds up in place: dy may be the gradient of other tensors too (in (copy(x) + z), z gets the same dy).
# Breaks "add up the gradients" of x only; shown by z.grad, which becomes the sum of all ranks' dy.
import torch
from mini_dist import all_reduce


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return dy.copy_(all_reduce(dy, ctx.group)) if dy.is_contiguous() else all_reduce(dy, ctx.group), None


def copy(x, group):
    return Copy.apply(x, group)
