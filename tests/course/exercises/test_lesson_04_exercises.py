"""Lesson 04: answers that need more than log2 n rounds are told so, even if they are right."""

import sys
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from mini_dist import check
from mini_dist.collectives import exchange, halving_doubling_all_reduce, recv, send
from tests.course.exercises import right, solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)
cloudpickle.register_pickle_by_value(right)

doubling = Wrong()


def pair_by_pair(x, group, distances):
    rank = group.rank()
    total = x.clone()
    for distance in distances:
        total = total + exchange(total, rank ^ distance, rank ^ distance, group)
    return total


@doubling("A ring needs 7 rounds")
def whole_tensors_round_a_ring(x, group):
    rank, size = group.rank(), group.size()
    total = moving = x.clone()
    for _ in range(size - 1):
        moving = exchange(moving, (rank + 1) % size, (rank - 1) % size, group)
        total = total + moving
    return total


@doubling("A ring needs 14 rounds")
def ring_of_chunks(x, group):
    if len(x) % group.size():
        return whole_tensors_round_a_ring(x, group)
    return right.ring_all_reduce(x, group)


@doubling("Every message goes to or from rank 0")
def through_rank_0(x, group):
    if group.rank() != 0:
        return exchange(x, 0, 0, group)
    total = x.clone()
    for peer in range(1, group.size()):
        total += recv(x, peer, group)
    for peer in range(1, group.size()):
        send(total, peer, group)
    return total


@doubling("where 3 would do")
def everyone_tells_everyone(x, group):
    rank, size = group.rank(), group.size()
    total = x.clone()
    for k in range(1, size):
        total = total + exchange(x, rank ^ k, rank ^ k, group)
    return total


@doubling("You stopped after the first round")
def one_round(x, group):
    return pair_by_pair(x, group, [1] if group.size() > 1 else [])


@doubling("8 ranks need 3 rounds")
def one_round_too_few(x, group):
    return pair_by_pair(x, group, [d for d in (1, 2) if d < group.size()])


@doubling("in twice")
def always_the_same_partner(x, group):
    return pair_by_pair(x, group, [1] * (group.size().bit_length() - 1))


@doubling("before* this round")
def sends_x_instead_of_the_sum(x, group):
    rank, size, distance = group.rank(), group.size(), 1
    total = x.clone()
    while distance < size:
        total = total + exchange(x, rank ^ distance, rank ^ distance, group)
        distance *= 2
    return total


@doubling("random numbers of float64: Each rank adds in its own order, so the last bits differ")
def partners_go_round_a_ring(x, group):
    rank, size, distance = group.rank(), group.size(), 1
    total = x.clone()
    while distance < size:
        to, source = (rank + distance) % size, (rank - distance) % size
        total = total + exchange(total, to, source, group)
        distance *= 2
    return total


@doubling("shape [1, 1000]; [1000] is asked for")
def one_dimension_too_many(x, group):
    return solutions.doubling_all_reduce(x, group)[None]


@doubling("These are means")
def mean(x, group):
    total = solutions.doubling_all_reduce(x, group)
    return total / group.size() if x.is_floating_point() else total


@doubling("Right with 8 ranks")
def only_for_8_ranks(x, group):
    return pair_by_pair(x, group, [1, 2, 4] if group.size() == 8 else [])


@doubling("Your function changes its input")
def adds_in_place(x, group):
    rank, size, distance = group.rank(), group.size(), 1
    while distance < size:
        x += exchange(x.clone(), rank ^ distance, rank ^ distance, group)
        distance *= 2
    return x.clone()


@doubling("With one rank, 5 numbers of float64: You return x itself")
def one_rank_gets_x_itself(x, group):
    return x if group.size() == 1 else solutions.doubling_all_reduce(x, group)


@doubling("the backend's own all_reduce")
def backend(x, group):
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


@doubling("one number of float64, of no dimension")
def only_for_rows(x, group):
    total, distance = torch.zeros(len(x), *x.shape[1:], dtype=x.dtype) + x, 1
    while distance < group.size():
        total = total + exchange(total, group.rank() ^ distance, group.rank() ^ distance, group)
        distance *= 2
    return total


@doubling("You send the least bytes, in 6 rounds")
def halves_then_doubles(x, group):
    """Halving and doubling by hand: the least bytes, but twice the rounds."""
    rank, size, mine = group.rank(), group.size(), x.clone()
    distances = [1 << k for k in range(size.bit_length() - 1)]
    for distance in distances:
        halves, mine_is = mine.tensor_split(2), rank // distance % 2
        came = exchange(
            halves[1 - mine_is], rank ^ distance, rank ^ distance, group, like=halves[mine_is]
        )
        mine = halves[mine_is] + came
    for distance in reversed(distances):
        came = exchange(mine, rank ^ distance, rank ^ distance, group)
        mine = torch.cat([came, mine] if rank // distance % 2 else [mine, came])
    return mine


@doubling("The work is done by the library's halving_doubling_all_reduce")
def another_of_the_library(x, group):
    return halving_doubling_all_reduce(x, group)


@doubling("deadlock")
def everyone_sends_first(x, group):
    rank, size, distance = group.rank(), group.size(), 1
    total = x.clone()
    while distance < size:
        send(total, rank ^ distance, group)
        total = total + recv(total, rank ^ distance, group)
        distance *= 2
    return total


@pytest.mark.parametrize("fn, says", doubling.answers, ids=doubling.names())
def test_a_wrong_answer_is_refused_with_the_hint_that_names_it(fn, says):
    verdict = check.doubling_all_reduce.judge(fn)
    assert verdict.state == "wrong"
    assert says in verdict.hint


def test_the_solution_is_right():
    verdict = check.doubling_all_reduce.judge(solutions.doubling_all_reduce)
    assert verdict.state == "right", verdict


right_doubling = Right("doubling_all_reduce")


@right_doubling
def farthest_partner_first(x, group):
    halves = [1 << k for k in reversed(range(group.size().bit_length() - 1))]
    return pair_by_pair(x, group, halves)


@right_doubling
def recursively(x, group, distance=1):
    if distance == group.size():
        return x.clone()
    partner = group.rank() ^ distance
    return recursively(x + exchange(x, partner, partner, group), group, 2 * distance)


@right_doubling
def into_one_buffer(x, group):
    rank, total = group.rank(), x.clone(memory_format=torch.contiguous_format)
    came = torch.empty_like(total)
    for k in range(group.size().bit_length() - 1):
        partner = rank + (1 << k) * (-1 if rank >> k & 1 else 1)
        exchange(total, partner, partner, group, out=came)
        total.add_(came)
    return total


@right_doubling
def the_lower_rank_receives_in_a_thread(x, group):
    rank, distance, total = group.rank(), 1, x.clone()
    with ThreadPoolExecutor(1) as pool:
        while distance < group.size():
            partner = rank ^ distance
            coming = pool.submit(recv, total, partner, group)
            send(total, partner, group)
            total, distance = total + coming.result(), 2 * distance
    return total


@pytest.mark.parametrize("fn", right_doubling.answers, ids=lambda fn: fn.__name__)
def test_another_good_way_is_right(fn):
    verdict = check.doubling_all_reduce.judge(fn)
    assert verdict.state == "right", verdict
