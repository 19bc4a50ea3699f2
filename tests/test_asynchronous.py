"""A server that waits for no one, for some or for all; and many steps between two averages."""

import time

import pytest
import torch
from torch import nn

from mini_dist import RankError, launch
from mini_dist.asynchronous import DiLoCo, leave, outer_step, pull, push, serve
from mini_dist.data_parallel import Naive
from mini_dist.mesh import Mesh
from mini_dist.trainable import Trainable
from mini_dist.zero import ZeRO3

STEPS, LR = 6, 0.1


def vector(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# -- the server -----------------------------------------------------------------------------------


def gradient(x, worker):
    """Of a loss of this worker's own: not linear, so it matters where it is taken."""
    return (x - vector(worker, *x.shape)).tanh()


def by_server(bound, slow, group):
    """Rank 0 serves; every worker takes STEPS steps, one of them 5 ms later than it could."""
    x = torch.zeros(4, 3, dtype=torch.float64)
    num_workers = group.size() - 1
    if group.rank() == 0:
        applied = serve(x, lambda rows, g: rows - LR / num_workers * g, num_workers, bound, group)
        return x, applied
    for _ in range(STEPS):
        here = pull(x, None, 0, group)
        time.sleep(0.005 * (group.rank() == slow))
        push(gradient(here, group.rank()), None, 0, group)
    leave(0, group)


@pytest.mark.parametrize("workers", [1, 3])
def test_without_a_lead_it_is_synchronous_training(workers):
    x, applied = launch(by_server, 1 + workers, (0, 2)).results[0]
    expected = torch.zeros(4, 3, dtype=torch.float64)
    for _ in range(STEPS):
        expected -= LR / workers * sum(gradient(expected, 1 + w) for w in range(workers))
    torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-12)
    for first in range(0, len(applied), workers):  # each round has everyone once
        of_a_round = applied[first : first + workers]
        assert {update.worker for update in of_a_round} == set(range(1, 1 + workers))
        assert [update.staleness for update in of_a_round] == list(range(workers))


@pytest.mark.parametrize("bound", [1, 2])
def test_nobody_is_further_ahead_of_the_slowest_than_the_bound(bound):
    _, applied = launch(by_server, 4, (bound, 3)).results[0]
    made = dict.fromkeys((1, 2, 3), 0)
    for update in applied:
        made[update.worker] += 1
        assert max(made.values()) - min(made.values()) <= bound + 1  # the step that is under way
        assert update.staleness <= 2 * (2 * bound + 1)
    assert set(made.values()) == {STEPS}


def one_is_late(group):
    """Worker 2 takes all its steps between the pull and the push of worker 1's second step."""
    x = torch.zeros(2)
    if group.rank() == 0:
        return serve(x, lambda rows, g: rows - g, 2, None, group)
    if group.rank() == 2:
        group.recv([x], 1, 7).wait()
    for step in range(STEPS):
        pull(x, None, 0, group)
        if group.rank() == 1 and step == 1:
            group.send([x], 2, 7).wait()
            group.recv([x], 2, 7).wait()
        push(torch.ones(2), None, 0, group)
    leave(0, group)
    if group.rank() == 2:
        group.send([x], 1, 7).wait()


def test_without_a_bound_nobody_waits():
    applied = launch(one_is_late, 3, timeout=20).results[0]
    assert [update.worker for update in applied] == [1] + [2] * STEPS + [1] * (STEPS - 1)
    assert [update.staleness for update in applied] == [0] * (STEPS + 1) + [STEPS] + [0] * 4


def touched_rows(group):
    """Two workers, of which each needs two rows of a hundred."""
    table = torch.zeros(100, 8)
    if group.rank() == 0:
        serve(table, lambda rows, g: rows - g, 2, None, group)
        return table
    rows = torch.tensor([group.rank(), 50 + group.rank()])
    for _ in range(3):
        push(torch.ones_like(pull(torch.empty(2, 8), rows, 0, group)), rows, 0, group)
    leave(0, group)


def test_only_the_rows_that_a_batch_touches_travel_and_change():
    run = launch(touched_rows, 3)
    changed = run.results[0].any(dim=1).nonzero().flatten().tolist()
    assert changed == [1, 2, 51, 52]
    assert (run.results[0][changed] == -3).all()
    pulls, pushes = (run.ledger.total_bytes(op=op) for op in ("pull", "push"))
    request, rows, values = 16, 2 * 8, 2 * 8 * 4
    assert pulls == 2 * 3 * (request + rows)
    assert pushes == 2 * 3 * (request + rows + values)
    assert run.ledger.total_bytes() == pulls + pushes + 2 * 3 * values + 2 * request


def test_bad_input_gets_one_sentence():
    with pytest.raises(RankError, match="bound=-1: the slowest worker"):
        launch(by_server, 2, (-1, 0))
    model = Trainable(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="every=0"):
        DiLoCo(model, None, every=0)
    with pytest.raises(ValueError, match="lr=-1"):
        DiLoCo(model, None, every=1, lr=-1)
    with pytest.raises(ValueError, match="beta=1"):
        DiLoCo(model, None, every=1, beta=1)


# -- many steps between two averages --------------------------------------------------------------


def outer_steps(lr, beta, group):
    before, momentum = vector(0, 5), torch.zeros(5, dtype=torch.float64)
    for step in range(3):
        now = before + vector(10 * step + group.rank(), 5)
        before, momentum = outer_step(before, now, momentum, lr, beta, group)
    return before


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("lr, beta", [(1.0, 0.0), (0.7, 0.9)])
def test_the_outer_step_is_torchs_nesterov_on_the_mean_change(lr, beta, size):
    expected = nn.Parameter(vector(0, 5))
    optimizer = torch.optim.SGD([expected], lr=lr, momentum=beta, nesterov=beta > 0)
    for step in range(3):
        expected.grad = -sum(vector(10 * step + rank, 5) for rank in range(size)) / size
        optimizer.step()
    run = launch(outer_steps, size, (lr, beta))
    for found in run.results:
        assert torch.equal(found, run.results[0])
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)


def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(cluster, step, rank=None):
    """A cluster's batch of 8 rows, or the half of it that one of its two ranks has."""
    inputs, targets = vector(100 + cluster, 8, 6), vector(200 + 10 * cluster + step, 8, 3)
    rows = slice(None) if rank is None else slice(4 * rank, 4 * rank + 4)
    return inputs[rows], targets[rows]


def adam(tensors):
    return torch.optim.Adam(tensors, lr=0.01)


def clusters(kind, every, group):
    """Two clusters of two ranks: gradients are averaged inside, changes across."""
    mesh = Mesh(group, across=2, inside=2)
    inside, across = mesh["inside"], mesh["across"]
    inner = module()
    if kind is ZeRO3:
        model = ZeRO3(inner, inside, adam, units=[inner[0], inner[2]])
    else:
        model = Naive(inner, inside)
        optimizer = adam(model.tensors_to_step())
    diloco = DiLoCo(model, across, every)
    for step in range(5):
        inputs, targets = batch(mesh.index("across"), step, mesh.index("inside"))
        model.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        if kind is ZeRO3:
            model.step()
        else:
            model.finish()
            optimizer.step()
        diloco.step()
    with torch.no_grad():
        return model(vector(300, 2, 6))


@pytest.mark.parametrize("kind", [Naive, ZeRO3])
@pytest.mark.parametrize("every", [1, 2])
def test_clusters_that_average_now_and_then_are_two_processes_that_do(kind, every):
    models = [module() for _ in range(2)]
    optimizers = [adam(model.parameters()) for model in models]
    outer = [nn.Parameter(p.detach().clone()) for p in models[0].parameters()]
    outer_optimizer = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    for step in range(5):
        for cluster, (model, optimizer) in enumerate(zip(models, optimizers)):
            inputs, targets = batch(cluster, step)
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
        if (step + 1) % every == 0:
            for x, *nows in zip(outer, *(model.parameters() for model in models)):
                x.grad = x.detach() - sum(now.detach() for now in nows) / 2
            outer_optimizer.step()
            with torch.no_grad():
                for x, *nows in zip(outer, *(model.parameters() for model in models)):
                    for now in nows:
                        now.copy_(x)
    with torch.no_grad():
        expected = [model(vector(300, 2, 6)) for model in models]
    for rank, found in enumerate(launch(clusters, 4, (kind, every)).results):
        torch.testing.assert_close(found, expected[rank // 2], rtol=1e-9, atol=1e-9)
