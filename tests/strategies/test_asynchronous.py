"""Test servers that wait for no worker, some or all, and averaging only every few steps."""

import os
import signal
import sys
import time
from collections import Counter
from random import Random

import pytest
import torch
from torch import nn

from mini_dist import RankError, launch
from mini_dist.collectives import barrier
from mini_dist.collectives.mesh import Mesh
from mini_dist.strategies.asynchronous import (
    Arrivals,
    DiLoCo,
    Worker,
    add_rows_,
    dealt,
    interleave,
    leave,
    outer_step,
    pull,
    pull_dealt,
    push,
    push_dealt,
    push_touched,
    serve,
    serve_model,
    shared,
    updates,
)
from mini_dist.strategies.compression import Compressed, half, top_k
from mini_dist.strategies.data_parallel import Naive
from mini_dist.strategies.trainable import Trainable
from mini_dist.strategies.zero import ZeRO3

STEPS, LR = 6, 0.1


def vector(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# -- the server -----------------------------------------------------------------------------------


def gradient(x, worker):
    """Return the gradient of this worker's own loss; it is nonlinear, so it depends on x."""
    return (x - vector(worker, *x.shape)).tanh()


def by_server(bound, slow, group):
    """Rank 0 serves; every worker takes STEPS steps, and worker `slow` delays each by 5 ms."""
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
    for first in range(0, len(applied), workers):  # every worker appears once per round
        of_a_round = applied[first : first + workers]
        assert {update.worker for update in of_a_round} == set(range(1, 1 + workers))
        assert [update.staleness for update in of_a_round] == list(range(workers))


@pytest.mark.parametrize("bound", [1, 2])
def test_nobody_is_further_ahead_of_the_slowest_than_the_bound(bound):
    _, applied = launch(by_server, 4, (bound, 3)).results[0]
    made = dict.fromkeys((1, 2, 3), 0)
    for update in applied:
        made[update.worker] += 1
        assert max(made.values()) - min(made.values()) <= bound + 1  # plus the step in progress
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
    """Each of two workers needs two rows of a hundred."""
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


def two_servers(group):
    """Make every request that a worker can make for rows that are dealt to two servers."""
    table = vector(0, 7, 2)
    if group.rank() < 2:
        part = dealt(table, group.rank(), 2).clone()
        serve(part, torch.sub, 1, 0, group)
        return part
    rows, tokens = torch.tensor([6, 1, 4]), torch.tensor([[2, 5], [5, 2]])
    whole = pull_dealt(table, None, 2, group)
    some = pull_dealt(table[:3], rows, 2, group)
    push_dealt(torch.ones_like(table), 2, group)
    push_touched(torch.full_like(table, 10.0), tokens, 2, group)
    for server in (0, 1):
        leave(server, group)
    return whole, some


def test_rows_are_dealt_to_servers_and_come_back_in_their_order():
    first, second, (whole, some) = launch(two_servers, 3).results
    table = vector(0, 7, 2)
    assert torch.equal(whole, table) and torch.equal(some, table[[6, 1, 4]])
    table -= 1
    table[[2, 5]] -= 10
    assert torch.equal(first, table[0::2]) and torch.equal(second, table[1::2])


def gives_up(bound, group):
    """Worker 3 raises an error before its third push, and catches it."""
    if group.rank() == 0:
        return serve(torch.zeros(2), torch.sub, 3, bound, group)
    try:
        for step in range(STEPS):
            gradient = pull(torch.zeros(2), None, 0, group)
            if group.rank() == 3 and step == 2:
                gradient /= 0
            push(gradient + 0, None, 0, group)
    except FloatingPointError as error:
        return str(error)
    finally:
        leave(0, group)


@pytest.mark.parametrize("bound", [0, 1, None])
def test_a_worker_that_fails_and_leaves_stops_nobody_and_pushes_no_nan(bound):
    applied, *_, said = launch(gives_up, 4, (bound,), timeout=20).results
    made = [sum(update.worker == worker for update in applied) for worker in (1, 2, 3)]
    assert made == [STEPS, STEPS, 2]
    assert said.startswith("a gradient is inf or nan") and "not pushed" in said


def server_dies(group):
    def update(rows, gradients):
        raise MemoryError("no room for the table")

    if group.rank() == 0:
        return serve(torch.zeros(2), update, 2, None, group)
    push(torch.ones(2), None, 0, group)
    return pull(torch.zeros(2), None, 0, group)


def test_the_death_of_a_server_is_one_error_that_names_it():
    with pytest.raises(RankError, match="^rank 0 of 3 raised MemoryError: no room for the table"):
        launch(server_dies, 3, timeout=20)


def killed(rank, group):
    if group.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank() == 0:
        return serve(torch.zeros(2), torch.sub, 2, 1, group)
    for _ in range(STEPS):
        push(pull(torch.zeros(2), None, 0, group), None, 0, group)
    leave(0, group)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_process_that_dies_ends_the_run_with_one_error_that_names_it(rank):
    with pytest.raises(RankError, match=f"^rank {rank} of 3 was killed"):
        launch(killed, 3, (rank,), timeout=20)


# -- virtual time ---------------------------------------------------------------------------------


def in_virtual_time(bound, slow, group):
    """Worker 2 takes `slow` virtual seconds per step, the others 1; real delays don't count."""
    workers, x = range(1, group.size()), torch.zeros(2)
    if group.rank() == 0:
        arrivals = Arrivals(group, workers, lambda worker: slow if worker == 2 else 1.0)
        return serve(x, torch.sub, len(workers), bound, arrivals), arrivals.pushed
    for _ in range(4):
        pull(x, None, 0, group)
        time.sleep(0.003 * (3 - group.rank()))
        push(torch.ones(2), None, 0, group)
    leave(0, group)


@pytest.mark.parametrize(
    "bound, order, moments",
    [
        (None, [1, 1, 2, 1, 1, 2, 2, 2], [1, 2, 2.5, 3, 4, 5, 7.5, 10]),
        (0, [1, 2, 1, 2, 1, 2, 1, 2], [1, 2.5, 3.5, 5, 6, 7.5, 8.5, 10]),
        (1, [1, 1, 2, 1, 2, 1, 2, 2], [1, 2, 2.5, 3.5, 5, 6, 7.5, 10]),
    ],
)
def test_in_virtual_time_the_order_is_that_of_the_stated_seconds(bound, order, moments):
    run = launch(in_virtual_time, 3, (bound, 2.5))
    applied, pushed = run.results[0]
    assert [update.worker for update in applied] == order
    assert pushed == moments
    assert updates(run.ledger) == applied  # the ledger's messages give equal updates


def test_of_two_workers_at_one_moment_the_lower_rank_is_heard():
    applied, pushed = launch(in_virtual_time, 3, (None, 1.0)).results[0]
    assert [update.worker for update in applied] == [1, 2] * 4
    assert [update.staleness for update in applied] == [0] + [1] * 7


# -- a model on servers ---------------------------------------------------------------------------


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def on_servers(num_servers, group):
    """Train synchronously for three rounds; a worker returns what it pulls at the end."""
    model = module()
    model[0].bias.requires_grad_(False)
    if group.rank() < num_servers:
        return serve_model(model, sgd, num_servers, 0, group)
    number = group.rank() - num_servers
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.zero_()  # only the servers' values are used
    with Worker(model, num_servers, group) as worker:
        for step in range(3):
            worker.pull()
            inputs, targets = batch(number, step)
            (worker(inputs) - targets).square().mean().backward()
            worker.push()
        worker.pull()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("num_servers, workers", [(1, 1), (3, 1), (1, 2), (2, 3)])
def test_a_model_on_servers_trains_as_one_process_with_all_pushes(num_servers, workers):
    alone = module()
    alone[0].bias.requires_grad_(False)
    optimizer = sgd([p for p in alone.parameters() if p.requires_grad])
    for step in range(3):
        gradients = []
        for number in range(workers):
            inputs, targets = batch(number, step)
            alone.zero_grad()
            (alone(inputs) - targets).square().mean().backward()
            gradients.append([p.grad for p in alone.parameters()])
        if workers == 1:  # with more, the order of pushes varies, and momentum depends on it
            for parameter, grad in zip(alone.parameters(), gradients[0]):
                parameter.grad = grad
            optimizer.step()
    run = launch(on_servers, num_servers + workers, (num_servers,))
    for applied in run.results[:num_servers]:
        assert len(applied) == 3 * workers
    pulled = run.results[num_servers:]
    if workers == 1:
        for found, expected in zip(pulled[0], alone.parameters()):
            torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
    n = sum(p.numel() for p in alone.parameters() if p.requires_grad)
    requests = num_servers * workers * (4 + 3 + 1)
    assert run.ledger.total_bytes() == workers * (4 + 3) * 8 * n + 16 * requests


def test_somebody_has_to_work():
    with pytest.raises(RankError, match="num_servers=2 of 2 ranks: give 1 or more"):
        launch(on_servers, 2, (2,))


# -- shared memory --------------------------------------------------------------------------------


def wild(rows, group):
    rank, size = group.rank(), group.size()
    table = shared(torch.full((rows * size, 3), float(rank)), group)
    first = table.clone()
    barrier(group)
    mine = torch.arange(rank, rows * size, size)
    for _ in range(50):
        add_rows_(table, mine, torch.ones(rows, 3))
    barrier(group)
    return first, table.clone()


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_share_one_table_and_rows_of_their_own_lose_nothing(size):
    for first, last in launch(wild, size, (4,)).results:
        assert (first == 0).all()  # rank 0's values
        assert (last == 50).all()


def collide(group):
    table = shared(torch.zeros(1), group)
    read = table.clone()
    barrier(group)
    for turn in range(group.size()):
        if turn == group.rank():
            table.copy_(read + 1)
        barrier(group)
    return table.item()


def test_updates_that_have_read_the_same_number_are_lost_but_for_one():
    assert launch(collide, 3).results == [1.0] * 3


def steps_of(worker, number, said):
    for step in range(number):
        said.append((worker, step))
        yield


def raced(numbers, seed):
    said = []
    interleave([steps_of(w, number, said) for w, number in enumerate(numbers)], Random(seed))
    return said


def test_who_goes_on_is_drawn_by_lot_and_everyone_comes_to_the_end_of_its_steps():
    numbers = [60, 60, 20]
    said = raced(numbers, 0)
    assert said == raced(numbers, 0) != raced(numbers, 1)
    for worker, number in enumerate(numbers):
        assert [step for who, step in said if who == worker] == list(range(number))
    turns = Counter(a != b for (a, _), (b, _) in zip(said, said[1:]))
    assert turns[True] > turns[False]  # with three workers, two of three draws switch
    assert raced([5], 0) == [(0, step) for step in range(5)]


FEATURES, EXAMPLES = 200, 800


def examples(touched):
    """Return rows, values and labels of a logistic regression with this many values per example."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(FEATURES, generator=generator, dtype=torch.float64)
    rows = [torch.randperm(FEATURES, generator=generator)[:touched] for _ in range(EXAMPLES)]
    rows = torch.stack(rows)
    values = torch.randn(EXAMPLES, touched, generator=generator, dtype=torch.float64)
    return rows, values / touched**0.5, (values * truth[rows]).sum(1).sign()


def slope(w, rows, values, label):
    return -label * torch.sigmoid(-label * (values @ w[rows])) * values


def loss_of(w, rows, values, labels):
    margins = labels * (values * w[rows]).sum(1)
    return nn.functional.softplus(-margins).mean().item()


def hogwild(w, data, mine, is_whole):
    """is_whole: no other worker runs between the read and the write of an update."""
    for rows, values, label in zip(*(each[mine] for each in data)):
        read, step = w[rows], slope(w, rows, values, label)
        yield
        w[rows] = (w[rows] if is_whole else read) - step


def loss_after(touched, workers, is_whole, share=1.0):
    data, w = examples(touched), torch.zeros(FEATURES, dtype=torch.float64)
    last = round(share * EXAMPLES)
    parts = [slice(number, last, workers) for number in range(workers)]
    interleave([hogwild(w, data, mine, is_whole) for mine in parts], Random(0))
    return loss_of(w, *data)


def test_races_cost_next_to_nothing_on_sparse_gradients_and_nearly_all_on_dense_ones():
    """Races cost a share of what four workers gain over one. Sparse: another worker uses a row in
    3 of 100 cases. Dense: it always does, and the other three might as well not have worked."""
    for touched, least, most in ((2, 0.0, 0.05), (FEATURES, 0.85, 1.05)):
        alone, of_four, racing = (
            loss_after(touched, *how) for how in ((1, True, 0.25), (4, True), (4, False))
        )
        assert alone - of_four > 0.1
        assert least <= (racing - of_four) / (alone - of_four) <= most
    assert loss_after(4, 1, True) == loss_after(4, 1, False)


def on_shared_memory(group):
    data, w = examples(2), shared(torch.zeros(FEATURES, dtype=torch.float64), group)
    barrier(group)
    for rows, values, label in zip(*(each[group.rank() :: group.size()] for each in data)):
        add_rows_(w, rows, -slope(w, rows, values, label))
    barrier(group)
    return loss_of(w, *data)


def test_real_ranks_that_race_on_sparse_gradients_get_as_far_as_one_process():
    alone, quarter = loss_after(2, 1, True), loss_after(2, 1, True, 0.25)
    for found in launch(on_shared_memory, 4).results:
        assert found - alone < 0.1 * (quarter - alone)


def test_only_the_cpus_memory_can_be_shared():
    with pytest.raises(ValueError, match="on meta: ranks can share the CPU's memory only"):
        shared(torch.empty(1, device="meta"), None)


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
    with pytest.raises(ValueError, match="fragments=3: 2 tensors and 5 steps .* make 1 to 2"):
        DiLoCo(model, None, every=5, fragments=3)
    with pytest.raises(ValueError, match="delay=5: an average is there before the next, 0 to 4"):
        DiLoCo(model, None, every=5, delay=5)
    with pytest.raises(ValueError, match="start=-1"):
        DiLoCo(model, None, every=5, start=-1)


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
    """Return a cluster's batch of 8 rows, or the half that one of its two ranks has."""
    inputs, targets = vector(100 + cluster, 8, 6), vector(200 + 10 * cluster + step, 8, 3)
    rows = slice(None) if rank is None else slice(4 * rank, 4 * rank + 4)
    return inputs[rows], targets[rows]


def adam(tensors):
    return torch.optim.Adam(tensors, lr=0.01)


def clusters(kind, every, group):
    """Train two clusters of two ranks: average gradients inside, changes across clusters."""
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


class Moved(Trainable):
    """A model with prescribed steps: in step t every rank adds its own vector."""

    def __init__(self, rank):
        super().__init__(nn.Linear(3, 2).double())
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()
        self.rank, self.t = rank, 0

    @torch.no_grad()
    def move(self):
        for number, parameter in enumerate(self.parameters()):
            parameter += vector(1000 * self.rank + 10 * self.t + number, *parameter.shape)
        self.t += 1


def move(steps, options, group):
    model = Moved(group.rank())
    diloco = DiLoCo(model, group, **options)
    places = []
    for _ in range(steps):
        model.move()
        diloco.step()
        places.append([parameter.detach().clone() for parameter in model.parameters()])
    diloco.finish()
    return places


def moved(steps, size, every, lr, beta, start=0, fragments=1, delay=0, keep=None):
    """Compute `move` for all ranks in one process, parameter by parameter."""
    models = [Moved(rank) for rank in range(size)]
    names = range(2)
    before = [parameter.detach().clone() for parameter in models[0].parameters()]
    momentum, change = [torch.zeros_like(x) for x in before], [None, None]
    keep = (0.5 if delay else 0) if keep is None else keep
    places = [[] for _ in models]
    for step in range(1, steps + 1):
        for model in models:
            model.move()
        nows = [[p.data for p in model.parameters()] for model in models]
        for i in names:
            turn = (i % fragments) * every // fragments
            average = sum(now[i] for now in nows) / size
            if step <= start:
                before[i] = average
                for now in nows:
                    now[i].copy_(average)
            elif (step - start - turn) % every == 0:
                change[i] = before[i] - average
            if step > start and change[i] is not None and (step - start - turn) % every == delay:
                momentum[i] = beta * momentum[i] + change[i]
                before[i] = before[i] - lr * (change[i] + beta * momentum[i])
                for now in nows:
                    now[i].copy_(before[i] + keep * (now[i] - before[i]))
                change[i] = None
        for place, now in zip(places, nows):
            place.append([x.clone() for x in now])
    return places


@pytest.mark.parametrize(
    "options",
    [
        dict(every=3, lr=1.0, beta=0.0, start=2),
        dict(every=4, lr=0.7, beta=0.9, fragments=2),
        dict(every=3, lr=0.7, beta=0.9, delay=1),
        dict(every=3, lr=0.7, beta=0.9, delay=1, keep=0.0),
        dict(every=4, lr=0.7, beta=0.9, fragments=2, keep=0.5),
        dict(every=4, lr=0.5, beta=0.5, start=1, fragments=2, delay=2, keep=0.25),
    ],
    ids=str,
)
def test_a_dense_start_fragments_and_a_delay_do_what_they_say(options):
    run = launch(move, 3, (11, options))
    for found, expected in zip(run.results, moved(11, 3, **options)):
        for a, b in zip(found, expected):
            for x, y in zip(a, b):
                torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


def two_a_step(keep, group):
    """Start at 1, subtract 2 in each of 3 steps, then take one outer step with lr=2."""
    model = Trainable(nn.Linear(1, 1, bias=False))
    weight = model.module.weight.data.fill_(1.0)
    diloco = DiLoCo(model, group, every=3, lr=2.0, beta=0.0, keep=keep)
    for _ in range(3):
        weight -= 2
        diloco.step()
    return weight.item()


@pytest.mark.parametrize("keep, expected", [(None, -11), (0.0, -11), (0.5, -8), (1.0, -5)])
def test_without_a_delay_keep_counts_too(keep, expected):
    """The outer step gives 1 - 2 * 6 = -11; this rank's own value is 1 - 6 = -5."""
    assert launch(two_a_step, 1, (keep,)).results == [expected]


def by_the_page(steps, every, group):
    """Do what DiLoCo does with outer_step alone, on all parameters as one vector."""
    model = Moved(group.rank())
    before = torch.zeros(8, dtype=torch.float64)
    momentum, places = torch.zeros_like(before), []
    for step in range(1, steps + 1):
        model.move()
        parameters = list(model.parameters())
        if step % every == 0:
            now = torch.cat([parameter.detach().flatten() for parameter in parameters])
            before, momentum = outer_step(before, now, momentum, 0.7, 0.9, group)
            for parameter, part in zip(parameters, before.split([6, 2])):
                parameter.data.copy_(part.view_as(parameter))
        places.append([parameter.detach().clone() for parameter in parameters])
    return places


def test_page_and_engine_are_equal_in_values_and_bytes():
    page, engine = launch(by_the_page, 3, (7, 2)), launch(move, 3, (7, dict(every=2)))
    for a, b in zip(page.results, engine.results):
        for one, other in zip(a, b):
            torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)
    assert page.ledger.traffic() == engine.ledger.traffic()


@pytest.mark.parametrize(
    "reduce", [Compressed(top_k(1.0)), half(torch.float64)], ids=["top", "half"]
)
def test_an_average_may_travel_compressed(reduce):
    """If nothing is left out, the result is the dense one; each fragment has its own state."""
    options = dict(every=2, fragments=2)
    dense, found = (launch(move, 2, (7, o)) for o in (options, options | dict(reduce=reduce)))
    for a, b in zip(dense.results, found.results):
        for x, y in zip(a[-1], b[-1]):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


def bytes_of(options, steps):
    run = launch(move, 2, (steps, options))
    return run.ledger.total_bytes(op="all_reduce", rank=1)


def test_a_rank_sends_the_parameters_once_in_every_steps():
    n = 8 * (2 * 3 + 2)
    assert bytes_of(dict(every=1), 20) == 20 * n
    assert bytes_of(dict(every=5), 20) == 4 * n
    assert bytes_of(dict(every=20), 20) == n
    weight, bias = 8 * 2 * 3, 8 * 2  # sent after steps 5, 10, 15, 20, and 2, 7, 12, 17, 22
    assert bytes_of(dict(every=5, fragments=2, delay=2), 22) == 4 * weight + 5 * bias


def overflows(group):
    model = Moved(group.rank())
    diloco = DiLoCo(model, group, every=1)
    if group.rank() == 1:
        next(model.parameters()).data[0, 0] = float("nan")
    try:
        diloco.step()
    except FloatingPointError as error:
        return str(error), [bool(p.isfinite().all()) for p in diloco.fragments[0].tensors]


def test_a_nan_of_one_rank_is_an_error_on_all_of_them_before_anything_is_changed():
    for rank, (said, finite) in enumerate(launch(overflows, 2).results):
        assert said.startswith("the mean change of the ranks is inf or nan")
        assert finite == [rank == 0, True]


def torchs_post_local_sgd(start, every, group):
    """Train with PostLocalSGDOptimizer and DistributedDataParallel's hook, without subgroups."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = nn.parallel.DistributedDataParallel(module(), process_group=group)
    state = PostLocalSGDState(group, None, start, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_localSGD_hook)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = PeriodicModelAverager(every, start + every - 1, group)
    optimizer = PostLocalSGDOptimizer(plain, averager)
    for step in range(9):
        inputs, targets = batch(group.rank(), step)
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def our_post_local_sgd(start, every, group):
    model = Trainable(module())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = DiLoCo(model, group, every, lr=1.0, beta=0.0, start=start)
    for step in range(9):
        inputs, targets = batch(group.rank(), step)
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
        local.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("start, every", [(0, 3), (3, 2), (2, 5)])
def test_post_local_sgd_is_torchs(start, every):
    ours, theirs = (
        launch(f, 2, (start, every)) for f in (our_post_local_sgd, torchs_post_local_sgd)
    )
    for a, b in zip(ours.results, theirs.results):
        for x, y in zip(a, b):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


# -- deaths ---------------------------------------------------------------------------------------

IN_PROC = pytest.mark.skipif(
    sys.platform != "linux", reason="looks for connections in Linux's /proc"
)


class Killed(torch.optim.SGD):
    """An optimizer that kills its server at the first update."""

    def step(self):
        os.kill(os.getpid(), signal.SIGKILL)


def with_a_death(victim, num_servers, bound, group):
    """Workers take eight steps. Rank `victim` is killed after three, or at a push if it serves."""
    model, me = nn.Linear(3, 1), group.rank()
    if me < num_servers:
        kind = Killed if me == victim else torch.optim.SGD
        return serve_model(model, lambda x: kind(x, lr=0.1), num_servers, bound, group)
    with Worker(model, num_servers, group) as worker:
        for step in range(8):
            worker.pull()
            if me == victim and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            worker(torch.ones(2, 3)).sum().backward()
            worker.push()
    return step


@IN_PROC
@pytest.mark.parametrize("num_servers, bound", [(1, 0), (1, 2), (1, None), (2, 1)])
def test_when_a_workers_process_dies_the_servers_go_on_with_the_others(num_servers, bound):
    victim, *others = range(num_servers, num_servers + 3)
    run = launch(with_a_death, num_servers + 3, (victim, num_servers, bound), elastic=True)
    for applied in run.results[:num_servers]:
        made = Counter(update.worker for update in applied)
        assert made[victim] == 3
        assert {made[worker] for worker in others} <= {7, 8}  # one push may be lost, none repeats
    assert run.results[num_servers:] == [None, 7, 7]
    assert [lost.rank for lost in run.lost] == [victim]


@IN_PROC
@pytest.mark.parametrize("victim, num_servers", [(0, 1), (0, 2), (1, 2)])
def test_when_a_server_dies_that_is_one_clear_error_on_everyone(victim, num_servers):
    size = num_servers + 2
    with pytest.raises(RankError, match=f"rank {victim} of {size} was killed by SIGKILL") as raised:
        launch(with_a_death, size, (victim, num_servers, None), elastic=True)
    said = [raised.value.failures[rank] for rank in range(size) if rank != victim]
    assert {failure.type for failure in said} == {"ServerLost"}
    assert all("a server is gone" in failure.message for failure in said)
