"""Differentiable collectives: communication through which autograd can run backward.

Each is linear, so its backward is its transpose, and the transpose of a communication is another
communication: the seven form conjugate pairs. Each backward below *is* a call of its partner.

    forward          what goes in          what comes out        backward
    copy             x, equal on all       a copy for each       all_reduce
    all_reduce       a term from each      their sum, equal      copy
    split            x, equal on all       a chunk of it         join
    join             a chunk from each     all of it, equal      split
    all_gather       a chunk from each     a copy for each       reduce_scatter
    reduce_scatter   a term from each      a chunk of the sum    all_gather
    all_to_all       chunks for all        chunks from all       all_to_all, reversed

"Equal": the ranks hold one tensor together and do the same computation with it, so its gradient is
also equal on all ranks. "A copy for each": they hold the same numbers but use them differently, so
their gradients differ and have to be summed. This is the only difference between `join` and
`all_gather` (their forwards are the same). Two identities follow: copy is all_gather after split,
and all_reduce is join after reduce_scatter. Sequence parallelism uses exactly these two (lesson
10).

Papers name the pairs by letters, and use the letters differently:

    paper                                        letter   forward          backward
    Shoeybi et al. 2019, section 3, figure 3     f        copy             all_reduce
                                                 g        all_reduce       copy
    Korthikanti et al. 2022, section 4.2.1       f        copy             all_reduce
                                                 f̄        all_reduce       copy
      the same, section 4.2.2                    g        all_gather       reduce_scatter
                                                 ḡ        reduce_scatter   all_gather

As with all collectives, all ranks of the group call them with the same shapes, and they return
new tensors. They must never write into x: autograd may have saved it for another backward.
(`copy` sends nothing forward, `all_reduce` nothing backward; they return the memory they got.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from mini_dist import collectives

from .divides import check_divides


def copy(x: Tensor, group, *, algorithm: str = "auto") -> Tensor:
    """Return x unchanged, for each rank to use in its own way; backward: `all_reduce`.

    algorithm: of the all-reduce in backward, see `collectives.all_reduce`.
    """
    return Copy.apply(x, group, algorithm)


def all_reduce(x: Tensor, group, *, algorithm: str = "auto") -> Tensor:
    """Return the sum of all ranks' x, bit-identical on all of them; backward: `copy`."""
    return AllReduce.apply(x, group, algorithm)


def split(x: Tensor, group, *, dim: int) -> Tensor:
    """Return this rank's chunk of x, which is equal on all ranks; backward: `join`.

    [..., L, ...] -> [..., L/n, ...] at `dim`. Raises ValueError if n does not divide L.
    """
    return Split.apply(x, group, dim)


def join(x: Tensor, group, *, dim: int) -> Tensor:
    """Return all ranks' chunks in rank order, for the same use on all ranks; backward: `split`.

    [..., L/n, ...] -> [..., L, ...] at `dim`.
    """
    return JoinChunks.apply(x, group, dim)


def all_gather(x: Tensor, group, *, dim: int) -> Tensor:
    """Return all ranks' chunks in rank order, for each rank's own use; backward: `reduce_scatter`.

    [..., L/n, ...] -> [..., L, ...] at `dim`.
    """
    return AllGather.apply(x, group, dim)


def reduce_scatter(x: Tensor, group, *, dim: int) -> Tensor:
    """Return this rank's chunk of the sum of all ranks' x; backward: `all_gather`.

    [..., L, ...] -> [..., L/n, ...] at `dim`. Raises ValueError if n does not divide L.
    """
    return ReduceScatter.apply(x, group, dim)


def all_to_all(
    x: Tensor,
    group,
    input_splits: list[int] | None = None,
    output_splits: list[int] | None = None,
) -> Tensor:
    """Send the d-th part of x (along dim 0) to rank d; return the received parts, in rank
    order; backward: `all_to_all` with the splits exchanged.

    [sum(input_splits), ...] -> [sum(output_splits), ...], rows to and from each rank; without
    splits all parts are equal. Raises ValueError for splits that do not fit, or if n does not
    divide the rows.
    """
    if input_splits is None:
        # unequal parts would come back with other splits than they left with
        check_divides(group.size(), len(x), "x.shape[0]")
    return AllToAll.apply(x, group, input_splits, output_splits)


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, algorithm):
        ctx.group, ctx.algorithm = group, algorithm
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return all_reduce(dy, ctx.group, algorithm=ctx.algorithm), None, None


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, algorithm):
        ctx.group, ctx.algorithm = group, algorithm
        return collectives.all_reduce(x, group, algorithm=algorithm)

    @staticmethod
    def backward(ctx, dy):
        return copy(dy, ctx.group, algorithm=ctx.algorithm), None, None


class Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        check_divides(group.size(), x.shape[dim], f"x.shape[{dim}]")
        ctx.group, ctx.dim = group, dim
        return x.chunk(group.size(), dim)[group.rank()].clone()  # a view would keep all of x alive

    @staticmethod
    def backward(ctx, dy):
        return join(dy, ctx.group, dim=ctx.dim), None, None


class JoinChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        return in_rows(collectives.all_gather(x, group, dim=dim))

    @staticmethod
    def backward(ctx, dy):
        return split(dy, ctx.group, dim=ctx.dim), None, None


class AllGather(JoinChunks):
    @staticmethod
    def backward(ctx, dy):
        return reduce_scatter(dy, ctx.group, dim=ctx.dim), None, None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        check_divides(group.size(), x.shape[dim], f"x.shape[{dim}]")
        ctx.group, ctx.dim = group, dim
        return in_rows(collectives.reduce_scatter(x, group, dim=dim))

    @staticmethod
    def backward(ctx, dy):
        return all_gather(dy, ctx.group, dim=ctx.dim), None, None


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, input_splits, output_splits):
        ctx.group, ctx.splits = group, (input_splits, output_splits)
        return collectives.all_to_all(x, group, input_splits, output_splits)

    @staticmethod
    def backward(ctx, dy):
        input_splits, output_splits = ctx.splits
        return all_to_all(dy, ctx.group, output_splits, input_splits), None, None, None


def in_rows(x: Tensor) -> Tensor:
    """Make x contiguous. Collectives work along dim 0, so for another dim they return a view. Each
    later matmul would copy the view, and autograd would keep every copy."""
    return x.contiguous()
