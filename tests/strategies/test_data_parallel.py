"""Every way of averaging gradients equals one process and sends the expected bytes."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from mini_dist import GPT, ModelConfig, RankError, launch
from mini_dist.collectives.emulate import Clock, EmulatedAllReduce, EmulatedDevice, EmulatedModel
from mini_dist.model.data import Batches
from mini_dist.model.loss import token_loss
from mini_dist.plan.calculators.links import Link
from mini_dist.strategies.data_parallel import (
    Bucketed,
    Naive,
    Overlapped,
    average_in_buckets,
    average_through_rank_0,
    backend_mean_,
    make_buckets,
    mean,
    mean_,
    overlapped_backward,
    ring_mean,
)

CONFIG = ModelConfig(
    vocab_size=256, d_model=16, num_layers=2, num_heads=2, seq_len=8, tied_embedding=True
)
TEXT = torch.randint(0, 256, (4000,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
STEPS, BATCH = 5, 12
KINDS = {"naive": Naive, "bucketed": Bucketed, "overlapped": Overlapped}


def sizes(kind):
    return {} if kind == "naive" else {"bucket_bytes": 20_000}


def train(kind, accumulation, group):
    """Return parameters after 5 steps. Ranks start with different weights; wrapping must fix it."""
    rank, size = group.rank(), group.size()
    model = KINDS[kind](GPT(CONFIG, seed=rank, dtype=torch.float64), group, **sizes(kind))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = Batches(TEXT, BATCH, CONFIG.seq_len, rank=rank, size=size)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batches.batch(step)
        micro = list(zip(inputs.tensor_split(accumulation), targets.tensor_split(accumulation)))
        for number, (x, y) in enumerate(micro):
            share = len(x) / len(inputs)  # micro-batches may differ in size
            loss = share * token_loss(model(x), y).mean()
            if number < len(micro) - 1:
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
        model.finish()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def alone():
    """Train in one process without a wrapper, as the oracle."""
    model = GPT(CONFIG, seed=0, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = Batches(TEXT, BATCH, CONFIG.seq_len)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batches.batch(step)
        token_loss(model(inputs), targets).mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.fixture(scope="module")
def oracle():
    return alone()


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_one_process(kind, size, accumulation, oracle):
    run = launch(train, size, (kind, accumulation))
    for rank in range(size):
        for ours, theirs in zip(run.results[rank], oracle):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)  # float64: only rounding
        assert all(map(torch.equal, run.results[rank], run.results[0])), "ranks agree bitwise"


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_sends_two_models_less_two_parts_however_many_micro_batches(kind):
    size = 4
    gradients = 8 * GPT(CONFIG).num_parameters()  # float64; the tied embedding once
    for accumulation in (1, 3):
        run = launch(train, size, (kind, accumulation))
        in_all = sum(
            run.ledger.total_bytes(op="all_reduce", phase=phase) for phase in ("backward", "step")
        )
        assert in_all == STEPS * 2 * (size - 1) * gradients


def test_buckets_follow_backward_and_hold_what_fits():
    parameters = [nn.Parameter(torch.zeros(n)) for n in (10, 10, 100, 10)]
    order = [[p.numel() for p in bucket] for bucket in make_buckets(parameters, 80)]
    assert order == [[10], [100], [10, 10]]
    assert len(make_buckets(parameters, 1)) == 4
    assert len(make_buckets(parameters, 1 << 20)) == 1
    mixed = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4, dtype=torch.float64))]
    assert len(make_buckets(mixed, 1 << 20)) == 2, "a bucket has one dtype"
    with pytest.raises(ValueError, match="bucket_bytes=0 holds nothing"):
        make_buckets(parameters, 0)


class Wide(nn.Module):
    """Layers whose backward takes a while and starts with the last layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def overlap(kind, group):
    model = KINDS[kind](Wide(), group, bucket_bytes=4 * (64 * 64 + 64))
    model(torch.ones(8, 64)).sum().backward()
    model.finish()


def test_overlapped_buckets_leave_before_backward_ends_and_others_do_not():
    starts = {}
    for kind in ("bucketed", "overlapped"):
        ledger = launch(overlap, 2, (kind,)).ledger
        (backward_end,) = [t for t, phase in ledger.phases[0] if phase == "step"]
        calls = ledger.calls(op="all_reduce", rank=0)
        assert len(calls) == 6
        starts[kind] = [call.start < backward_end for call in calls]
    assert starts["bucketed"] == [False] * 6
    assert starts["overlapped"][0]


def reduced(reduce, group):
    model = Overlapped(GPT(CONFIG, dtype=torch.float64), group, reduce)
    inputs, targets = Batches(TEXT, BATCH, 8, rank=group.rank(), size=group.size()).batch(0)
    token_loss(model(inputs), targets).mean().backward()
    model.finish()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("size", [1, 3, 4])
def test_our_ring_and_the_backends_all_reduce_give_the_same_means_for_the_same_bytes(size):
    runs = {reduce: launch(reduced, size, (reduce,)) for reduce in (mean, ring_mean, backend_mean_)}
    expected = runs[mean].results[0]
    gradients = 8 * GPT(CONFIG).num_parameters()
    for reduce, run in runs.items():
        assert all(map(torch.equal, run.results[0], run.results[-1]))
        torch.testing.assert_close(run.results[0], expected, rtol=0, atol=1e-15)
        op = "ring_all_reduce" if reduce is ring_mean else "all_reduce"
        calls = run.ledger.calls(op=op)
        assert sum(call.sent for call in calls) == 2 * (size - 1) * gradients
        assert [call.is_leaf for call in calls] == [reduce is backend_mean_] * size, (
            "native or ours"
        )


# ---- the page and the engine --------------------------------------------------------------------


def by_page_and_engine(dtype, bucket_bytes, group):
    """Return one step's gradients and messages, by functions of ideas.py and by their wrappers."""
    inputs, targets = Batches(TEXT, 6, 8, rank=group.rank(), size=group.size()).batch(0)

    def gradients(average):
        gpt = GPT(CONFIG, seed=0).to(dtype)
        before = average(gpt, lambda model: token_loss(model(inputs), targets).mean())
        sent = [
            (row[0], row[3], row[4]) for row in group.recorder.comms[before:] if row[0] == "send"
        ]
        return [parameter.grad for parameter in gpt.parameters()], sent

    def buckets_page(gpt, loss):
        before = len(group.recorder.comms)
        loss(gpt).backward()
        average_in_buckets(gpt.parameters(), bucket_bytes, group)
        return before

    def overlapped_page(gpt, loss):
        before = len(group.recorder.comms)
        buckets = make_buckets(list(gpt.parameters()), bucket_bytes)
        with ThreadPoolExecutor(max_workers=1) as sender:
            overlapped_backward(loss(gpt), buckets, sender, group)
        return before

    def engine(kind):
        def average(gpt, loss):
            model = kind(gpt, group, bucket_bytes=bucket_bytes)
            before = len(group.recorder.comms)  # skips the broadcast of initial weights
            loss(model).backward()
            model.finish()
            return before

        return average

    pages = gradients(buckets_page), gradients(overlapped_page)
    return pages, (gradients(engine(Bucketed)), gradients(engine(Overlapped)))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 3000, 1 << 20])
def test_page_and_engine_send_the_same_in_the_same_order_and_find_the_same_bits(size, bucket_bytes):
    for pages, engines in launch(by_page_and_engine, size, (torch.float32, bucket_bytes)).results:
        for (page, page_sent), (engine, engine_sent) in zip(pages, engines):
            assert all(map(torch.equal, page, engine)) and page_sent == engine_sent
            assert bool(page_sent) == (size > 1)


def mean_in_place(elements, group):
    x = torch.full((elements,), float(group.rank()))
    found = mean_(x, group)
    return found.unique().tolist(), found.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_large_bucket_is_averaged_in_its_own_memory(size):
    expected = [(size - 1) / 2]
    run = launch(mean_in_place, size, (1_500_001,))
    assert run.results == [(expected, True)] * size
    sent = run.ledger.total_bytes(op="pipelined_ring_all_reduce")
    assert sent == 2 * (size - 1) * 4 * 1_500_001
    assert [found for found, _ in launch(mean_in_place, size, (1001,)).results] == [expected] * size


def alive_after_finish(group):
    """Return the buckets that are alive after finish(), and the number of other threads."""
    buckets = []

    def reduce(flat, group):
        buckets.append(weakref.ref(flat))
        return flat.clone()

    model = Overlapped(nn.Linear(2, 2), group, reduce)
    model(torch.ones(2)).sum().backward()
    model.finish()
    return [flat() is not None for flat in buckets], threading.active_count() - 1


def test_after_finish_neither_a_bucket_nor_the_thread_is_left():
    """Otherwise a late thread would raise the step's peak by a bucket, and a deadlock in the
    optimizer's step would be reported only after the timeout."""
    assert launch(alive_after_finish, 2).results == [([False], 0)] * 2


def backward_twice(group):
    model = Overlapped(nn.Linear(2, 2), group)
    model(torch.ones(2)).sum().backward()
    model(torch.ones(2)).sum().backward()


def test_a_second_backward_that_would_be_lost_is_refused():
    with pytest.raises(RankError, match=r"put all backwards of a step but the last inside no_sync"):
        launch(backward_twice, 2, quiet=True)


# ---- overlap on emulated devices ----------------------------------------------------------------

SIZES, BACKWARD = [1000, 1000, 3000, 1000], 0.004
SPEED = Link(latency=1e-4, bandwidth=4e6)


def emulated(kind, slow, group):
    """Return the emulated times when backward ended and the last gradients arrived, and now."""
    clock = Clock()
    factor = 3 if group.rank() == slow else 1
    device = EmulatedDevice(clock)
    model = EmulatedModel(SIZES, BACKWARD / 2, factor * BACKWARD, device)
    reduce = EmulatedAllReduce(device, SPEED)
    wrapped = KINDS[kind](model, group, reduce, **({} if kind == "naive" else {"bucket_bytes": 1}))
    clock.start(group)
    wrapped().backward()
    backward_end = device.free
    wrapped.finish()
    arrived = max(p.grad.max().item() for p in model.parameters())
    return backward_end, arrived, clock.now()


@pytest.mark.parametrize("slow", [None, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_hidden_time_is_the_predicted_one(size, kind, slow):
    """A bucket is sent when the slowest rank has it and the previous bucket has arrived. Naive and
    Bucketed hide nothing; Overlapped hides all but what remains when backward ends."""
    forward_end = len(SIZES) * BACKWARD / 2
    each = 3 * BACKWARD if slow is not None and slow < size else BACKWARD
    backward_end = forward_end + len(SIZES) * each
    sent = [2 * (size - 1) * (1e-4 + 8 * n / size / 4e6) for n in SIZES]  # by hand, per layer
    free = 0.0
    for number, seconds in enumerate(reversed(sent)):
        ready = forward_end + (number + 1) * each if kind == "overlapped" else backward_end
        free = max(free, ready) + seconds
    for rank, (end, arrived, woke) in enumerate(launch(emulated, size, (kind, slow)).results):
        if rank == slow or slow is None:
            assert end == pytest.approx(backward_end)
        assert arrived == pytest.approx(free)
        assert woke >= arrived, "somebody did not wait"
    if kind != "overlapped" or size == 1:
        assert free == pytest.approx(backward_end + sum(sent)), "nothing is hidden"
    else:
        assert free < backward_end + sum(sent), "something is"


class Uneven(nn.Module):
    """A frozen, an unused and a rank-dependent parameter, and a buffer."""

    def __init__(self):
        super().__init__()
        self.used = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x, use_it):
        x = x * self.used * self.frozen * self.scale
        return x + self.sometimes if use_it else x


def uneven(kind, group):
    torch.manual_seed(group.rank())
    module = Uneven()
    module.scale.mul_(group.rank() + 2)
    model = KINDS[kind](module, group, **sizes(kind))
    model(torch.ones(3), use_it=group.rank() == 1).sum().backward()
    model.finish()
    return module.scale, module.frozen.grad, module.unused.grad, module.sometimes.grad


@pytest.mark.parametrize("kind", KINDS)
def test_unused_frozen_and_sometimes_used_parameters(kind):
    for scale, frozen, unused, sometimes in launch(uneven, 4, (kind,)).results:
        assert torch.equal(scale, torch.full((3,), 2.0)), "rank 0's buffers"
        assert frozen is None
        assert torch.equal(unused, torch.zeros(3))
        assert torch.equal(sometimes, torch.full((3,), 0.25)), "one rank of four used it"


def backward_by_function(group):
    """Ranks get their gradients in opposite orders, and only rank 0 uses the third parameter."""
    first, second, third = (nn.Parameter(torch.full((3,), value)) for value in (0.5, 0.9, 0.7))
    inner, outer = (first, second) if group.rank() == 0 else (second, first)
    loss = ((1.5 + group.rank()) * inner).tanh().mul(outer).sum()
    loss = loss + third.sum() if group.rank() == 0 else loss
    parameters = [first, second, third]
    grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    local = [torch.zeros(3) if grad is None else grad for grad in grads]
    with ThreadPoolExecutor(max_workers=1) as sender:
        overlapped_backward(loss, [[third], [second], [first]], sender, group)
    return local, [parameter.grad for parameter in parameters]


def test_buckets_leave_in_their_order_whatever_order_gradients_get_ready_in():
    locals_, averaged = zip(*launch(backward_by_function, 2).results)
    means = [sum(grads) / 2 for grads in zip(*locals_)]
    for grads in averaged:
        torch.testing.assert_close(grads, means)


def test_a_model_without_parameters_is_refused():
    def wrap(group):
        with pytest.raises(ValueError, match="no parameter requires a gradient"):
            Naive(nn.ReLU(), group)

    launch(wrap, 1)


def through_rank_0(group):
    parameter = nn.Parameter(torch.zeros(5))
    parameter.grad = torch.full((5,), float(group.rank()))
    average_through_rank_0([parameter, nn.Parameter(torch.zeros(2))], group)
    return parameter.grad


def test_rank_0_carries_everyones_bytes():
    run = launch(through_rank_0, 4)
    assert all(torch.equal(grad, torch.full((5,), 1.5)) for grad in run.results)
    assert [run.ledger.total_bytes(rank=rank) for rank in range(4)] == [60, 20, 20, 20]
