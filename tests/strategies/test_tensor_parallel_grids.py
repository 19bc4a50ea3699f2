"""2D and 3D tensor parallelism equals one process and sends the formulas' bytes; a grid sends less
where the calculator says so."""

import itertools

import pytest
import torch
from torch.nn import functional

from mini_dist import Mesh, launch
from mini_dist.plan.calculators.grids import grid_sends_less_from, side_of, tensor_grid
from mini_dist.strategies.tensor_parallel import grids, ideas


def numbers(T, D, F):
    dice = torch.Generator().manual_seed(0)
    shapes = ((T, D), (D, F), (F, D), (T, D))
    return [torch.randn(shape, generator=dice, dtype=torch.float64) for shape in shapes]


def one_process(T, D, F):
    x, up, down, dy = numbers(T, D, F)
    leaves = [each.requires_grad_() for each in (x, up, down)]
    y = functional.gelu(x @ up) @ down
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def saved_by(function):
    """Return the result and the bytes that autograd saves, counting each storage once."""
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = function()
    return y, sum(kept.values())


def block(x, *cuts):
    """Take a block of x; cuts: (dim, number of pieces, index), applied in sequence."""
    for dim, pieces, place in cuts:
        x = x.chunk(pieces, dim)[place]
    return x.clone(memory_format=torch.contiguous_format)


def train(way, shape, axes, group):
    mesh, (x, up, down, dy) = Mesh(group, **axes), numbers(*shape)
    where = {axis: (size, mesh.index(axis)) for axis, size in axes.items()}
    if way == "1d":
        n, r = group.size(), group.rank()
        pieces = [x, block(up, (1, n, r)), block(down, (0, n, r)), dy]

        def mlp(x, up, down):
            return ideas.mlp(x, (up.T, None), (down.T, None), group)
    elif way == "2d":
        pieces = [block(each, (0, *where["i"]), (1, *where["j"])) for each in (x, up, down, dy)]

        def mlp(x, up, down):
            return grids.mlp_2d(x, up, down, mesh)
    else:
        t, d, f = (where[axis] for axis in "tdf")
        pieces = [
            block(x, (0, *t), (1, *d), (1, *f)),
            block(up, (0, *d), (1, *f), (1, *t)),
            block(down, (0, *f), (1, *d), (1, *t)),
            block(dy, (0, *t), (1, *d), (1, *f)),
        ]

        def mlp(x, up, down):
            return grids.mlp_3d(x, up, down, tuple("tdf"), mesh)

    leaves = [piece.requires_grad_() for piece in pieces[:3]]
    y, kept = saved_by(lambda: mlp(*leaves))
    y.backward(pieces[3])
    return [y.detach(), *(leaf.grad for leaf in leaves)], kept, [p.nbytes for p in pieces]


def assembled(way, results, axes):
    """Assemble y and the gradients of x, up and down from all ranks' pieces."""
    whole = [torch.full_like(each, torch.nan) for each in one_process(*SHAPE)]
    places = itertools.product(*(range(size) for size in axes.values()))
    for (pieces, *_), place in zip(results, places):
        at = dict(zip(axes, place))
        if way == "1d":
            (r,) = place
            cuts = [(), (), ((1, axes["tp"], r),), ((0, axes["tp"], r),)]
        elif way == "2d":
            cuts = [((0, axes["i"], at["i"]), (1, axes["j"], at["j"]))] * 4
        else:
            t, d, f = ((axes[axis], at[axis]) for axis in "tdf")
            like_x = ((0, *t), (1, *d), (1, *f))
            cuts = [like_x, like_x, ((0, *d), (1, *f), (1, *t)), ((0, *f), (1, *d), (1, *t))]
        for target, piece, each in zip(whole, pieces, cuts):
            for dim, number, index in each:
                target = target.chunk(number, dim)[index]
            target.copy_(piece)
    return whole


SHAPE = (16, 8, 32)
LAYOUTS = [
    ("1d", {"tp": 4}),
    ("1d", {"tp": 8}),
    ("2d", {"i": 1, "j": 1}),
    ("2d", {"i": 2, "j": 2}),
    ("3d", {"t": 1, "d": 1, "f": 1}),
    ("3d", {"t": 2, "d": 2, "f": 2}),
]


@pytest.mark.parametrize("way, axes", LAYOUTS, ids=str)
def test_a_grid_computes_what_one_process_does_for_the_bytes_of_its_formula(way, axes):
    size = 1
    for each in axes.values():
        size *= each
    run = launch(train, size, (way, SHAPE, axes))
    for found, wanted in zip(assembled(way, run.results, axes), one_process(*SHAPE)):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    said = tensor_grid(way, *SHAPE, size, itemsize=8)

    assert run.ledger.total_bytes() == round(said["sent"] * size)
    for _, kept, (_, up, down, _) in run.results:
        weights = 0 if way == "3d" else up + down  # 3d saves the gathered weights
        assert kept - weights == said["kept"]


def test_sixteen_ranks_send_less_on_a_square():
    """A run confirms the calculator's crossover for many tokens and a narrow model."""
    shape = (64, 4, 16)
    assert grid_sends_less_from("2d", *shape) == 16
    for size, axes in ((4, {"i": 2, "j": 2}), (16, {"i": 4, "j": 4})):
        sent = [
            launch(train, size, (way, shape, each)).ledger.total_bytes()
            for way, each in (("2d", axes), ("1d", {"tp": size}))
        ]
        assert (sent[0] < sent[1]) == (size >= 16), (size, sent)


def test_two_blocks_that_were_sent_are_all_that_a_step_holds():
    """SUMMA saves the blocks that it owns, not those that it received."""

    def kept(group):
        mesh = Mesh(group, i=2, j=2)
        x, w = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
        return saved_by(lambda: grids.linear_2d(x, w, mesh))[1], x.nbytes + w.nbytes

    assert all(found == own for found, own in launch(kept, 4).results)


@pytest.mark.parametrize(
    "way, tokens, d_model, says",
    [("2d", 8192, 8192, 81), ("2d", 10**9, 8192, 9), ("3d", 8192, 8192, 27), ("3d", 10**9, 64, 8)],
)
def test_from_how_many_devices_a_grid_sends_less(way, tokens, d_model, says):
    assert grid_sends_less_from(way, tokens, d_model, 4 * d_model) == says


def test_it_may_never_send_less():
    assert grid_sends_less_from("2d", 1, 8192, 4 * 8192, most=1000) is None


@pytest.mark.parametrize(
    "way, size, says",
    [("2d", 8, "4 or 9 do"), ("3d", 10, "8 or 27 do"), ("4d", 16, "none of '1d', '2d', '3d'")],
)
def test_a_number_that_makes_no_grid_is_told(way, size, says):
    with pytest.raises(ValueError, match=says):
        side_of(way, size)
