"""Lesson 06, solved as a learner would."""

import torch


def forget_and_repeat(block, x):
    class Careful(torch.autograd.Function):
        @staticmethod
        def forward(ctx, block, x):
            ctx.block, ctx.dice = block, torch.get_rng_state()
            ctx.save_for_backward(x)
            return block(x)

        @staticmethod
        def backward(ctx, grad):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad(), torch.random.fork_rng():
                torch.set_rng_state(ctx.dice)
                out = ctx.block(x)
            out.backward(grad)
            return None, x.grad

    return Careful.apply(block, x)
