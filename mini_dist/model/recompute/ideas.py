"""Activation recomputation in one function; blocks.py does it for the blocks of a model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def forget_and_repeat(block: Callable, x: Tensor) -> Tensor:
    """Compute block(x) and save only x; backward computes the block again.

    The second run must give the same result, dropout included, so it draws its random numbers from
    the generator state of the first run (Chen et al. 2016, section 3). This function handles the
    CPU's generator; blocks.py handles a GPU's as well.
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

    # Autograd skips a function if none of its inputs requires a gradient. The block's parameters
    # may require one even where x does not, so an extra input does.
    anchor = torch.zeros((), device=x.device, requires_grad=True)
    return Careful.apply(block, x, anchor)
