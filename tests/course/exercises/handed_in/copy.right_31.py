# RIGHT: torch's own all-reduce, on a private contiguous copy of dy; other names of the arguments, group through *rest.
import torch
import torch.distributed as dist


class F(torch.autograd.Function):
    """Megatron's f."""

    @staticmethod
    def forward(ctx, activations, *rest):
        (ctx.group,) = rest
        return activations.view(activations.shape)

    @staticmethod
    def backward(ctx, upstream):
        mine = torch.clone(upstream, memory_format=torch.contiguous_format)
        dist.all_reduce(mine, op=dist.ReduceOp.SUM, group=ctx.group)
        return mine, None


def copy(activations, ranks):
    return F.apply(activations, ranks)
