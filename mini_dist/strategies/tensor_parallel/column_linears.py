"""The engine that enters a region: one x times several matrices that are cut by outputs.

On the page (ideas.py) x enters, and each linear is a separate call. Autograd then computes one dx
per matrix before it sums them, and holds x until all are done. Here backward computes the
gradients of the weights first, frees x, and accumulates all products into one dx.

The saving, measured for q, k and v on 2 ranks in units of the whole x [B, S, D] (weights and
results are small there; tests/strategies/test_tensor_parallel.py checks the peaks):

                                    page, SEQUENCE    here, SEQUENCE    here, SEQUENCE_AGAIN
    peak                            4.1               2.1               2.1
    saved for backward              1.1               1.1               0.6
    all-gathers of x                1                 1                 2
    CPU time, x [8, 128, 256]       7 ms              6 ms              10 ms

(CPU time on a busy machine: the first two are equal within the noise.) With several matrices dx
differs in its last bits, because the products are rounded in a different order; all else is
bitwise equal (tests/strategies/test_tensor_parallel_ideas.py).
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mini_dist.ranks.older_torch import gradients_of

from .ideas import SEQUENCE, TENSOR, Pair

# As SEQUENCE, but a rank saves only its part of x, and gathers all of it once more when
# backward needs it (Korthikanti et al. 2022, section 4.2.2).
SEQUENCE_AGAIN = SEQUENCE._replace(gathers_again=True)


def column_linears(
    x: Tensor, linears: list[tuple[Tensor, Tensor | None]], group, pair: Pair = TENSOR
) -> tuple[Tensor, ...]:
    """Compute x [B, S, D] (SEQUENCE: [B, S/t, D]) -> this rank's outputs [B, S, F/t] of each
    linear.

    linears: weight [F/t, D] and bias [F/t] or None of each. x enters once for all of them.
    """
    if not pair.gathers_again:
        x = pair.enter(x, group)
    return ColumnLinears.apply(x, group, pair, *chain(*linears))


class ColumnLinears(torch.autograd.Function):
    """Multiply x by each weight; with `gathers_again` x is this rank's part and is gathered here.

    x [..., D], or its part; then the group, the pair, and weight [F/t, D], bias [F/t] of each
    linear -> [..., F/t] for each.
    """

    clear_saved_tensors_on_access = True  # with these two lines backward can free x and each dy
    boxed_grads_call = True  # right after use; the dys come as a list that it may empty

    @staticmethod
    def forward(ctx, x, group, pair, *parameters):  # weight, bias, weight, bias...
        weights, biases = parameters[::2], parameters[1::2]
        entered = pair.enter(x, group) if pair.gathers_again else x
        ys = tuple(functional.linear(entered, *each) for each in zip(weights, biases))
        dtype = ys[0].dtype  # under autocast it is narrower than x and the weights
        ctx.save_for_backward(x.to(dtype), *weights)
        ctx.group, ctx.pair = group, pair
        return ys

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        dys = gradients_of(dys)
        x, *weights = ctx.saved_tensors
        needs_dx, _, _, *needed = ctx.needs_input_grad
        if ctx.pair.gathers_again:
            x = ctx.pair.enter(x, ctx.group)
        shape, dtype, x = x.shape, x.dtype, x.reshape(-1, x.shape[-1])  # [T, D]
        dys[:] = [dy.reshape(-1, dy.shape[-1]) for dy in dys]  # [T, F/t]
        gradients = []
        for dy, weight_needs, bias_needs in zip(dys, needed[::2], needed[1::2]):
            gradients.append(dy.T @ x if weight_needs else None)  # [F/t, D]
            gradients.append(dy.sum(0) if bias_needs else None)
        if not needs_dx:
            return None, None, None, *gradients
        del x, dy  # x and dx are never both in memory
        dx = dys.pop() @ weights.pop().to(dtype)
        while dys:
            torch.addmm(dx, dys.pop(), weights.pop().to(dtype), out=dx)
        dx = dx.view(shape)
        if ctx.pair.gathers_again:
            dx = ctx.pair.leave(dx, ctx.group)  # enter's backward
        return dx, None, None, *gradients
