"""Each differentiable collective does what it says, and its backward is its transpose."""

import pytest
import torch

from mini_dist import launch
from mini_dist.collectives import ops

N_ROWS = 12  # divisible by 1, 2, 3 and 4 ranks
CHUNK, ONE, EACH = "a chunk of one tensor", "one tensor, alike", "a tensor of each rank's own"

# name: (input, output, partner)
PAIRS = {
    "copy": (ONE, EACH, "all_reduce"),
    "all_reduce": (EACH, ONE, "copy"),
    "split": (ONE, CHUNK, "join"),
    "join": (CHUNK, ONE, "split"),
    "all_gather": (CHUNK, EACH, "reduce_scatter"),
    "reduce_scatter": (EACH, CHUNK, "all_gather"),
}


def make(kind, seed, group, dim):
    """Make a random float64 tensor of `kind`; ranks that share one tensor use the same seed."""
    own = 1000 + group.rank() if kind == EACH else 0
    generator = torch.Generator().manual_seed(seed + own)
    shape = [5, 3]
    shape.insert(dim, N_ROWS)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.chunk(group.size(), dim)[group.rank()] if kind == CHUNK else x


def product(kind, a, b, group):
    """Return <a, b> over all ranks, counting a replicated tensor only once."""
    from mini_dist.collectives import all_reduce

    mine = (a * b).sum()
    return mine if kind == ONE else all_reduce(mine, group)


def transposes(group):
    found = {}
    for name, (kind_in, kind_out, partner) in PAIRS.items():
        for dim in (
            (0, 1, 2)
            if "split" in name or "gather" in name or name == "join" or "scatter" in name
            else (0,)
        ):
            more = {} if name in ("copy", "all_reduce") else {"dim": dim}
            x = make(kind_in, 1, group, dim).requires_grad_()
            y = getattr(ops, name)(x, group, **more)
            dy = make(kind_out, 2, group, dim)
            before = x.detach().clone()
            (dx,) = torch.autograd.grad(y, x, dy)
            by_partner = getattr(ops, partner)(dy, group, **more)
            found[name, dim] = (
                product(kind_out, y.detach(), dy, group),
                product(kind_in, x.detach(), dx, group),
                torch.equal(dx, by_partner),
                torch.equal(x, before),
            )
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_backward_is_the_transpose_of_forward(size):
    """<f(x), dy> = <x, f^T(dy)> in float64, up to the order of summation."""
    for found in launch(transposes, size).results:
        for case, (forward, backward, is_partner, untouched) in found.items():
            torch.testing.assert_close(forward, backward, rtol=1e-12, atol=0, msg=f"{case}")
            assert is_partner, f"{case}: backward is not the partner's forward"
            assert untouched, f"{case}: the input was written into"


def all_to_alls(splits, group):
    """Send splits[r][d] rows from rank r to rank d, forward and backward."""
    rank, size = group.rank(), group.size()
    out, into = splits[rank], [row[rank] for row in splits]
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(sum(out), 3, generator=generator, dtype=torch.float64, requires_grad=True)
    y = ops.all_to_all(x, group, out, into)
    dy = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    (dx,) = torch.autograd.grad(y, x, dy)
    forward = product(EACH, y.detach(), dy, group)
    backward = product(EACH, x.detach(), dx, group)
    # Each row holds its source and target, so we can check its way there and back.
    labels = torch.tensor([[rank, d] for d in range(size) for _ in range(out[d])]).reshape(-1, 2)
    there = ops.all_to_all(labels, group, out, into)
    home = ops.all_to_all(there, group, into, out)
    return forward, backward, there, torch.equal(home, labels)


UNEVEN = {
    2: [[0, 3], [2, 1]],
    3: [[1, 0, 2], [4, 0, 0], [0, 1, 1]],
    4: [[2, 2, 2, 2]] * 4,
}


@pytest.mark.parametrize("size", UNEVEN)
def test_all_to_all_goes_back_by_the_splits_exchanged(size):
    results = launch(all_to_alls, size, (UNEVEN[size],)).results
    for rank, (forward, backward, there, came_home) in enumerate(results):
        torch.testing.assert_close(forward, backward, rtol=1e-12, atol=0)
        assert came_home
        expected = [[s, rank] for s in range(size) for _ in range(UNEVEN[size][s][rank])]
        assert there.tolist() == expected


def identities(group):
    one, own = make(ONE, 3, group, 1), make(EACH, 3, group, 1)
    whole = ops.all_gather(ops.split(one, group, dim=1), group, dim=1)
    total = ops.join(ops.reduce_scatter(own, group, dim=1), group, dim=1)
    torch.testing.assert_close(whole, ops.copy(one, group), rtol=0, atol=0)
    torch.testing.assert_close(total, ops.all_reduce(own, group))  # summed in another order


def test_copy_is_split_then_all_gather_and_all_reduce_is_reduce_scatter_then_join():
    launch(identities, 4)


def there_and_back(name, group):
    kind_in, kind_out, _ = PAIRS[name]
    x = make(kind_in, 1, group, 0).requires_grad_()
    more = {"algorithm": "ring"} if name in ("copy", "all_reduce") else {"dim": 0}
    y = getattr(ops, name)(x, group, **more)
    y.backward(make(kind_out, 2, group, 0))


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_sends_the_bytes_of_its_two_collectives(name):
    """Per rank, a scatter or a gather sends (n-1)/n of a tensor, and an all-reduce twice that."""
    cost = {
        "copy": 0,
        "split": 0,
        "all_reduce": 2,
        "join": 1,
        "all_gather": 1,
        "reduce_scatter": 1,
    }
    n, whole = 4, 8 * N_ROWS * 5 * 3
    run = launch(there_and_back, n, (name,))
    for rank in range(n):
        backward = run.ledger.total_bytes(rank=rank, phase="backward")
        forward = run.ledger.total_bytes(rank=rank) - backward
        assert forward == cost[name] * (n - 1) / n * whole
        assert backward == cost[PAIRS[name][2]] * (n - 1) / n * whole


def twice_differentiable(group):
    """Square reduce(x): the second backward goes through the partner, also differentiable."""
    x = torch.tensor([1.0 + group.rank()], requires_grad=True)
    y = ops.all_reduce(x, group).square().sum()  # replicated: (sum of x)^2
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    return dx.item(), dx.requires_grad


def test_backward_can_be_differentiated_again():
    assert launch(twice_differentiable, 2).results == [(6.0, True), (6.0, True)]


def refusals(group):
    x = torch.zeros(4, 7)
    for function in (ops.split, ops.reduce_scatter):
        with pytest.raises(
            ValueError, match=r"ranks, 2, must divide x.shape\[1\]=7: 6 or 8 would do"
        ):
            function(x, group, dim=1)
    with pytest.raises(ValueError, match=r"ranks, 2, must divide x.shape\[0\]=7"):
        ops.all_to_all(x.T, group)


def test_sizes_that_do_not_divide_are_refused_with_the_number_that_must():
    launch(refusals, 2)
