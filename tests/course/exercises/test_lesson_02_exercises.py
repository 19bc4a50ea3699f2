"""Lesson 02: answers that average gradients wrongly get a hint that names the mistake."""

import sys
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from mini_dist import check
from mini_dist.collectives import (
    all_reduce,
    barrier,
    exchange,
    gather,
    recv,
    send,
    star_broadcast,
    star_reduce,
    start,
    tree_broadcast,
    wait,
)
from tests.course.exercises import solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest


def with_gradient(parameters):
    return [p for p in parameters if p.grad is not None]


def average(p, group, of=lambda everyones: everyones.mean(0)):
    """Average correctly, so that each wrong answer is wrong in one thing only."""
    everyones = gather(p.grad[None], 0, group)
    return star_broadcast(p.grad if everyones is None else of(everyones), 0, group)


wrong = Wrong()


@wrong("These are sums")
def sum_for_mean(parameters, group):
    for p in with_gradient(parameters):
        p.grad = average(p, group, of=lambda everyones: everyones.sum(0))


@wrong("These are sums")
def sums_by_reduce_and_broadcast(parameters, group):
    for p in with_gradient(parameters):
        everyones = gather(p.grad[None], 0, group)
        total = sum(everyones) if everyones is not None else p.grad
        p.grad = star_broadcast(total, 0, group)


@wrong("changed the weights")
def averages_the_weights(parameters, group):
    with torch.no_grad():
        for p in with_gradient(parameters):
            everyones = gather(p[None], 0, group)
            p.copy_(star_broadcast(p if everyones is None else everyones.mean(0), 0, group))


@wrong("changed the weights")
def averages_gradients_and_weights(parameters, group):
    averages_the_weights(parameters, group)
    for p in with_gradient(parameters):
        p.grad = average(p, group)


@wrong("wrong for number 4 of 5")
def skips_the_last_parameter(parameters, group):
    for p in with_gradient(parameters)[:-1]:
        p.grad = average(p, group)


@wrong("wrong for number 2 of 5")
def skips_scalars(parameters, group):
    for p in with_gradient(parameters):
        if p.dim() > 0:
            p.grad = average(p, group)


@wrong("wrong for number 2 of 5")
def only_the_first_parameter(parameters, group):
    p = parameters[0]
    p.grad = average(p, group)


@wrong("every rank makes the same calls in the same order")
def only_rank_0_broadcasts(parameters, group):
    for p in with_gradient(parameters):
        everyones = gather(p.grad[None], 0, group)
        if group.rank() == 0:
            p.grad = star_broadcast(everyones.mean(0), 0, group)


@wrong("backend's own all_reduce")
def the_backends_all_reduce(parameters, group):
    for p in with_gradient(parameters):
        dist.all_reduce(p.grad, group=group)
        p.grad /= group.size()


@wrong("library's all_reduce")
def the_librarys_all_reduce(parameters, group):
    for p in with_gradient(parameters):
        p.grad = all_reduce(p.grad, group, op="mean")


@wrong("library's star_reduce")
def reduces_instead_of_gathering(parameters, group):
    for p in with_gradient(parameters):
        total = star_reduce(p.grad, 0, group)
        p.grad = star_broadcast(p.grad if total is None else total / group.size(), 0, group)


@wrong("library's tree_broadcast")
def broadcasts_by_a_tree(parameters, group):
    for p in with_gradient(parameters):
        everyones = gather(p.grad[None], 0, group)
        p.grad = tree_broadcast(p.grad if everyones is None else everyones.mean(0), 0, group)


@wrong("Rank 0's own gradient is missing")
def forgets_rank_0(parameters, group):
    for p in with_gradient(parameters):
        p.grad = average(p, group, of=lambda everyones: everyones[1:].mean(0))


@wrong("Only rank 0 has the means")
def tells_nobody(parameters, group):
    for p in with_gradient(parameters):
        everyones = gather(p.grad[None], 0, group)
        if everyones is not None:
            p.grad = everyones.mean(0)


@wrong("Everyone has the means but rank 0")
def tells_everyone_but_itself(parameters, group):
    for p in with_gradient(parameters):
        mean = average(p, group)
        if group.rank() != 0:
            p.grad = mean


@wrong("broadcast, but never averaged")
def broadcasts_rank_0(parameters, group):
    for p in with_gradient(parameters):
        p.grad = star_broadcast(p.grad, 0, group)


@wrong("put the mean into parameter.grad")
def throws_the_mean_away(parameters, group):
    for p in with_gradient(parameters):
        grad = p.grad
        grad = average(p, group)  # noqa: F841 (the mistake: only the local name changes)


@wrong("something is None: the grad of a frozen parameter")
def trips_over_the_frozen_one(parameters, group):
    for p in parameters:
        p.grad = average(p, group)


@wrong("Frozen parameters are left alone")
def gives_the_frozen_one_a_gradient(parameters, group):
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad = average(p, group)


@wrong("bytes instead of")
def asks_rank_0_twice(parameters, group):
    for p in with_gradient(parameters):
        mean = average(p, group)
        p.grad = star_broadcast(mean, 0, group)


@wrong("bytes instead of")
def through_rank_1(parameters, group):
    hub = min(1, group.size() - 1)
    for p in with_gradient(parameters):
        everyones = gather(p.grad[None], hub, group)
        p.grad = star_broadcast(p.grad if everyones is None else everyones.mean(0), hub, group)


@wrong("Right with 4 ranks")
def only_for_4_ranks(parameters, group):
    for p in with_gradient(parameters):
        p.grad = average(p, group, of=lambda everyones: everyones.sum(0) / 4)


@wrong("Right with 4 ranks and 3 ranks and 2 ranks and 5 ranks. With one rank, 5 parameters")
def not_for_one_rank(parameters, group):
    peers = range(1, group.size())
    for p in with_gradient(parameters):
        everyones = gather(p.grad[None], 0, group)
        if group.rank() == 0:
            p.grad = everyones.mean(0)
            send(p.grad, peers[0], group)
            for peer in peers[1:]:
                send(p.grad, peer, group)
        else:
            p.grad = recv(p.grad, 0, group)


@wrong("everyone waits to receive")
def waits_for_each_other(parameters, group):
    for p in with_gradient(parameters):
        peer = group.size() - 1 if group.rank() == 0 else 0
        p.grad = (p.grad + recv(p.grad, peer, group)) / group.size()


def in_dtype(dtype, parameters, group):
    for p in with_gradient(parameters):
        everyones = gather(p.grad[None].to(dtype), 0, group)
        mean = p.grad.to(dtype) if everyones is None else everyones.mean(0)
        p.grad = star_broadcast(mean, 0, group).to(p.dtype)


@wrong("In 16 bits they lose digits")
def in_half_precision(parameters, group):
    in_dtype(torch.float16, parameters, group)


@wrong("bytes were sent where")
def in_bfloat16(parameters, group):
    in_dtype(torch.bfloat16, parameters, group)


@wrong("of float64, number 4 of them frozen: Only")
def always_in_float32(parameters, group):
    in_dtype(torch.float32, parameters, group)


@wrong("and travel as float64")
def always_in_float64(parameters, group):
    in_dtype(torch.float64, parameters, group)


@wrong("A barrier moves nothing")
def waits_at_a_barrier(parameters, group):
    for p in with_gradient(parameters):
        p.grad = average(p, group)
        dist.barrier(group)


@wrong("A barrier moves nothing")
def waits_at_the_librarys_barrier(parameters, group):
    for p in with_gradient(parameters):
        p.grad = average(p, group)
    barrier(group)


@wrong("bytes instead of")
def averages_twice(parameters, group):
    for p in with_gradient(parameters):
        p.grad = average(p, group)
        p.grad = average(p, group)


@wrong("divided by 4 twice")
def divides_twice(parameters, group):
    for p in with_gradient(parameters):
        p.grad = average(p, group) / group.size()


@wrong("gone through once")
def goes_through_the_parameters_twice(parameters, group):
    means = [average(p, group) for p in parameters if p.grad is not None]
    for p, mean in zip((p for p in parameters if p.grad is not None), means):
        p.grad = mean


@wrong("gone through once")
def asks_for_the_length(parameters, group):
    for i in range(len(parameters)):
        if parameters[i].grad is not None:
            parameters[i].grad = average(parameters[i], group)


@wrong("though it requires_grad: ask for .grad is None")
def asks_whether_it_requires_a_gradient(parameters, group):
    for p in parameters:
        if p.requires_grad:
            p.grad = average(p, group)


@wrong("gradients that are not contiguous")
def views_them_flat(parameters, group):
    for p in with_gradient(parameters):
        everyones = gather(p.grad.view(1, -1), 0, group)
        mean = p.grad.view(-1) if everyones is None else everyones.mean(0)
        p.grad = star_broadcast(mean, 0, group).view_as(p)


@wrong("had a gradient no longer has one")
def takes_them_away(parameters, group):
    for p in with_gradient(parameters):
        average(p, group)
        p.grad = None


@wrong("is still under way")
def drops_the_handles(parameters, group):
    for p in with_gradient(parameters):
        if group.rank() != 0:
            dist.isend(p.grad.contiguous(), group_dst=0, group=group)
            p.grad = recv(p.grad, 0, group)
        else:
            for peer in range(1, group.size()):
                p.grad = p.grad + recv(p.grad, peer, group)
            p.grad = p.grad / group.size()
            for peer in range(1, group.size()):
                send(p.grad, peer, group)


# ------------------------------------------------------------------------------------------------

right = Right("average_through_rank_0")


@right
def a_flat_bucket(parameters, group):
    kept = with_gradient(parameters)
    flat = torch.cat([p.grad.flatten() for p in kept])
    everyones = gather(flat[None], 0, group)
    flat = star_broadcast(flat if everyones is None else everyones.mean(0), 0, group)
    for p, part in zip(kept, flat.split([p.numel() for p in kept])):
        p.grad = part.view_as(p)


@right
def divides_first(parameters, group):
    for p in with_gradient(parameters):
        p.grad = p.grad / group.size()
        p.grad = average(p, group, of=lambda everyones: everyones.sum(0))


@right
def a_running_mean_of_what_comes_first(parameters, group):
    for p in with_gradient(parameters):
        came = torch.empty(p.shape, dtype=p.dtype)
        if group.rank() == 0:
            mean = p.grad.clone()
            for k in range(1, group.size()):
                dist.recv(came, group=group)
                mean += (came - mean) / (k + 1)
            for peer in range(1, group.size()):
                send(mean, peer, group)
            p.grad.copy_(mean)
        else:
            send(p.grad, 0, group)
            p.grad.copy_(recv(p.grad, 0, group))


@right
def sums_at_rank_0_and_sends_at_once(parameters, group):
    peers = range(1, group.size())
    for p in with_gradient(parameters):
        if group.rank() != 0:
            p.grad = exchange(p.grad, 0, 0, group)
            continue
        came = [torch.empty(p.shape, dtype=p.dtype) for _ in peers]
        wait(start(group, receives=list(zip(came, peers))))
        p.grad = (sum(came, p.grad) / group.size()).contiguous()
        wait(start(group, sends=[(p.grad, peer) for peer in peers]))


@right
def in_threads(parameters, group):
    kept = with_gradient(parameters)
    with ThreadPoolExecutor(1) as pool:
        for p, mean in [(p, pool.submit(average, p, group)) for p in kept]:
            p.grad = mean.result()


@right
def in_place_and_without_autograd(parameters, group):
    with torch.no_grad():
        for p in list(parameters)[::-1]:
            if p.grad is not None:
                p.grad.data[...] = average(p, group)


@pytest.mark.parametrize("fn", right.answers, ids=lambda fn: fn.__name__)
def test_another_good_way_is_right(fn):
    verdict = check.average_through_rank_0.judge(fn)
    assert verdict.state == "right", verdict


@pytest.mark.parametrize("fn, says", wrong.answers, ids=wrong.names())
def test_a_wrong_average_is_refused_with_the_hint_that_names_it(fn, says):
    verdict = check.average_through_rank_0.judge(fn)
    assert verdict.state == "wrong"
    assert says in verdict.hint


def test_the_solution_is_right():
    verdict = check.average_through_rank_0.judge(solutions.average_through_rank_0)
    assert verdict.state == "right", verdict
