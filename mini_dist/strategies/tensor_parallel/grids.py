"""Tensor parallelism in two and three dimensions, in plain functions: every tensor is sharded.

Column and row parallelism (ideas.py) leave x whole on every rank and send all of it, however many
ranks there are. On a grid of q x q ranks, x and every weight are cut both ways: rank (i, j) has
block (i, j).

    2D, q x q ranks          x [T/q, D/q] . w [D/q, F/q] -> y [T/q, F/q]
      Gather x along a row of the grid and w along a column: X[T_i, D_j] . W[D_i, F_j].
    3D, q x q x q ranks      x [T/q, D/q/q] . w [D/q, F/q/q] -> y [T/q, F/q/q]
      Each of the three tensors is spread along the one axis that does not cut it: x and w are
      gathered, and y is a sum of parts that is scattered.

2D is SUMMA (van de Geijn and Watts 1997): instead of one gather, it broadcasts the blocks of a row
and a column in q steps, so no rank ever holds more than one other block of each. Xu and You 2021
(Optimus) train with it, with the two forms for backward below. 3D comes from
Agarwal et al. 1995; Bian et al. 2021 train with it.

Legend: T tokens, D and F features in and out, q ranks per side. Weights are [inputs, outputs]
here, as in the papers (torch transposes them). Groups come last.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mini_dist.collectives import broadcast, ops, reduce
from mini_dist.collectives.mesh import Mesh

# --- two dimensions -----------------------------------------------------------------------------


def summa_step(a: Tensor, b: Tensor, step: int, row, column) -> Tensor:
    """Return what step `step` of q adds to this rank's block of A B.

    a [I/q, J/q] and b [J/q, K/q] are this rank's blocks. row: the ranks of its row of the grid, in
    the order of columns; column: the ranks of its column. The `step`-th rank of each row broadcasts
    its block of A to its row, and the `step`-th of each column its block of B to its column.
    """
    return broadcast(a, step, row) @ broadcast(b, step, column)  # [I/q, K/q]


def summa(a: Tensor, b: Tensor, row, column) -> Tensor:
    """Return this rank's block of A B, [I/q, K/q]: all q steps."""
    return sum(summa_step(a, b, step, row, column) for step in range(row.size()))


def summa_transposed_b(a: Tensor, b: Tensor, row, column) -> Tensor:
    """Return this rank's block of A Bᵀ; a [I/q, J/q], b [K/q, J/q] -> [I/q, K/q].

    In step s all ranks use the blocks of B from row s, which give the result's column s: the
    partial results of a row are summed on its s-th rank.
    """
    sums = [reduce(a @ broadcast(b, step, column).T, step, row) for step in range(column.size())]
    return sums[row.rank()]  # the others are None


def summa_transposed_a(a: Tensor, b: Tensor, row, column) -> Tensor:
    """Return this rank's block of Aᵀ B; a [J/q, I/q], b [J/q, K/q] -> [I/q, K/q]."""
    sums = [reduce(broadcast(a, step, row).T @ b, step, column) for step in range(row.size())]
    return sums[column.rank()]


class Summa(torch.autograd.Function):
    """Compute y = x w, block by block; backward runs SUMMA twice more, for x and for w."""

    @staticmethod
    def forward(ctx, x, w, row, column):
        ctx.save_for_backward(x, w)  # only this rank's blocks
        ctx.groups = row, column
        return summa(x, w, row, column)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx = summa_transposed_b(dy, w, *ctx.groups)
        dw = summa_transposed_a(x, dy, *ctx.groups)
        return dx, dw, None, None


def linear_2d(x: Tensor, w: Tensor, mesh: Mesh) -> Tensor:
    """Multiply x [T/q, D/q] by w [D/q, F/q] -> [T/q, F/q], on a mesh with axes `i` (rows) and
    `j`."""
    return Summa.apply(x, w, mesh["j"], mesh["i"])  # my row contains all j, my column all i


def mlp_2d(x: Tensor, up: Tensor, down: Tensor, mesh: Mesh) -> Tensor:
    """Compute an MLP without biases: x [T/q, D/q], up [D/q, F/q], down [F/q, D/q] -> [T/q, D/q]."""
    return linear_2d(functional.gelu(linear_2d(x, up, mesh)), down, mesh)


# --- three dimensions ---------------------------------------------------------------------------


def linear_3d(x: Tensor, w: Tensor, axes: tuple[str, str, str], mesh: Mesh) -> Tensor:
    """Multiply x [T/q, D/q/q] by w [D/q, F/q/q] -> [T/q, F/q/q] on a cube of ranks.

    axes (t, d, f): the mesh axes that cut tokens, inputs and outputs:

        X[T_t, D_d_f] . W[D_d, F_f_t] -> Y[T_t, F_f_d]

    The result has d and f exchanged, so the next linear takes (t, f, d).
    """
    t, d, f = (mesh[axis] for axis in axes)
    x = ops.all_gather(x, f, dim=-1)  # [T/q, D/q]
    w = ops.all_gather(w, t, dim=-1)  # [D/q, F/q]
    return ops.reduce_scatter(x @ w, d, dim=-1)


def mlp_3d(x: Tensor, up: Tensor, down: Tensor, axes: tuple[str, str, str], mesh: Mesh) -> Tensor:
    """Compute an MLP: x [T/q, D/q/q], up [D/q, F/q/q], down [F/q, D/q/q] -> [T/q, D/q/q], as x."""
    t, d, f = axes
    hidden = functional.gelu(linear_3d(x, up, (t, d, f), mesh))
    return linear_3d(hidden, down, (t, f, d), mesh)
