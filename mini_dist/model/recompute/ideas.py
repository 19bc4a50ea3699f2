"""Activation recomputation in one function; blocks.py does it for the blocks of a model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def forget_and_repeat(block: Callable, x: Tensor) -> Tensor:
    """block(x), of which only x is kept; backward computes the rest once more.

    It must come out the same, dropout included: so the random numbers are drawn from the state that
    the generator had the first time (Chen et al. 2016, section 3). Here that is the generator for
    the CPU; blocks.py also handles the one of a GPU.
    """

    class Careful(torch.autograd.Function):
        @staticmethod
        def forward(ctx, block, x, anchor):
            ctx.block, ctx.random_state = block, torch.get_rng_state()
            ctx.save_for_backward(x)
            return block(x)

        @staticmethod
        def backward(ctx, grad):
            x = ctx.saved_tensors[0].detach().requires_grad_(ctx.needs_input_grad[1])
            with torch.enable_grad(), torch.random.fork_rng():
                torch.set_rng_state(ctx.random_state)
                out = ctx.block(x)
            if out.requires_grad:
                out.backward(grad)
            return None, x.grad, None

    # Autograd skips a function none of whose inputs needs a gradient, but the block's parameters
    # may need one where x needs none, so one more input needs a gradient.
    anchor = torch.zeros((), device=x.device, requires_grad=True)
    return Careful.apply(block, x, anchor)
