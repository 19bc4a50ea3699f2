"""Lesson 19: answers that are biased, send zeros or forget what was left out are told so."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from mini_dist import check
from mini_dist.collectives import (
    all_gather,
    all_reduce,
    exchange,
    gather,
    star_broadcast,
)
from mini_dist.strategies.compression import ideas
from tests.course.exercises import solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

wrong_lot, wrong_top, wrong_power = Wrong(), Wrong(), Wrong()
right_lot, right_top, right_power = (
    Right("round_by_lot"),
    Right("top_k_with_feedback"),
    Right("power_mean"),
)


# ---- rounding by lot ----------------------------------------------------------------------------


@wrong_lot("This is round")
def rounds_to_the_nearest(x, lots):
    return x.round()


@wrong_lot("This is floor")
def always_down(x, lots):
    return x.floor()


@wrong_lot("This is int")
def cuts_off(x, lots):
    return x.int().to(x.dtype)


@wrong_lot("Each element needs its own random number")
def one_lot(x, lots):
    return (x + torch.rand(1, generator=lots, dtype=x.dtype)).floor()


@wrong_lot("Elements share random numbers")
def a_lot_a_row(x, lots):
    return (x + torch.rand(len(x), 1, generator=lots, dtype=x.dtype)).floor()


@wrong_lot("Elements share random numbers")
def a_lot_for_two_columns(x, lots):
    lot = torch.rand(x.shape, generator=lots, dtype=x.dtype)
    lot[:, 3] = lot[:, 2]
    return (x + lot).floor()


@wrong_lot("Elements share random numbers")
def a_lot_and_what_it_lacks_to_one(x, lots):
    lot = torch.rand(x.shape, generator=lots, dtype=x.dtype)
    lot[:, 5] = 1 - lot[:, 4]
    return (x + lot).floor()


@wrong_lot("The average of this is not x")
def a_coin(x, lots):
    up = torch.rand(x.shape, generator=lots) < 0.5
    return torch.where(up, x.ceil(), x.floor())


@wrong_lot("The average of this is not x")
def the_other_way_round(x, lots):
    up = torch.rand(x.shape, generator=lots, dtype=x.dtype) > x - x.floor()
    return torch.where(up, x.ceil(), x.floor())


@wrong_lot("Right above 0 and wrong below it")
def truncates_the_sum(x, lots):
    return (x + torch.rand(x.shape, generator=lots, dtype=x.dtype)).trunc()


@wrong_lot("one or more away")
def rounds_the_sum_with_the_lot(x, lots):
    return (x + 2 * torch.rand(x.shape, generator=lots, dtype=x.dtype) - 1).round()


@wrong_lot("These are not integers")
def forgets_the_floor(x, lots):
    return x + torch.rand(x.shape, generator=lots, dtype=x.dtype)


@wrong_lot("These numbers come from elsewhere")
def draws_from_the_common_generator(x, lots):
    return (x + torch.rand(x.shape, dtype=x.dtype)).floor()


@wrong_lot("These numbers come from elsewhere")
def seeds_its_own(x, lots):
    mine = torch.Generator().manual_seed(3)
    return (x + torch.rand(x.shape, generator=mine, dtype=x.dtype)).floor()


@wrong_lot("with x's shape and dtype")
def returns_integers(x, lots):
    return (x + torch.rand(x.shape, generator=lots, dtype=x.dtype)).floor().int()


@right_lot
def by_its_part_behind_the_point(x, lots):
    down = x.floor()
    return down + (torch.rand(x.shape, generator=lots, dtype=x.dtype) < x - down).to(x.dtype)


@right_lot
def by_bernoulli(x, lots):
    return x.floor() + torch.bernoulli(x - x.floor(), generator=lots)


@right_lot
def down_from_above(x, lots):
    return (x - torch.rand(x.shape, generator=lots, dtype=x.dtype)).ceil()


@right_lot
def nearest_of_a_shifted_one(x, lots):
    shift = torch.empty_like(x).uniform_(-0.5, 0.5, generator=lots)
    return (x + shift).round()


@right_lot
def by_lots_of_float32(x, lots):
    return (x + torch.rand(x.shape, generator=lots)).floor()


@right_lot
def in_double_precision(x, lots):
    lot = torch.rand(x.shape, generator=lots, dtype=torch.float64)
    return (x.double() + lot).floor().to(x.dtype)


# ---- top-k with feedback ------------------------------------------------------------------------


def chosen(x, error, k):
    whole = x + error
    return whole, whole.abs().topk(k).indices


def spread(x, places, values, group):
    return torch.zeros_like(x).index_add(0, places, values) / group.size()


def gathered(x, whole, places, group):
    return spread(x, all_gather(places.int(), group), all_gather(whole[places], group), group)


@wrong_top("a zero is as long as any other number")
def sends_a_mask(x, error, k, group):
    whole, places = chosen(x, error, k)
    mine = torch.zeros_like(x).index_copy(0, places, whole[places])
    return all_reduce(mine, group, op="mean"), whole - mine


@wrong_top("indices of topk are int64")
def sends_long_places(x, error, k, group):
    whole, places = chosen(x, error, k)
    everyones, values = all_gather(places, group), all_gather(whole[places], group)
    return spread(x, everyones, values, group), whole.index_fill(0, places, 0.0)


@wrong_top("What was left out is never sent")
def forgets(x, error, k, group):
    whole, places = chosen(x, 0.0, k)
    return gathered(x, whole, places, group), whole.index_fill(0, places, 0.0)


@wrong_top("These are sums")
def returns_sums(x, error, k, group):
    whole, places = chosen(x, error, k)
    mean = gathered(x, whole, places, group) * group.size()
    return mean, whole.index_fill(0, places, 0.0)


@wrong_top("the number of all ranks")
def divides_by_those_who_sent(x, error, k, group):
    whole, places = chosen(x, error, k)
    everyones = all_gather(places.int(), group)
    total = spread(x, everyones, all_gather(whole[places], group), group) * group.size()
    counts = torch.zeros_like(x).index_add(0, everyones, x.new_ones(len(everyones)))
    return total / counts.clamp(min=1), whole.index_fill(0, places, 0.0)


@wrong_top("keep x + error, not x")
def keeps_what_is_left_of_x(x, error, k, group):
    whole, places = chosen(x, error, k)
    return gathered(x, whole, places, group), x.index_fill(0, places, 0.0)


@wrong_top("keep x + error, not x")
def subtracts_what_was_sent_from_x(x, error, k, group):
    whole, places = chosen(x, error, k)
    sent = torch.zeros_like(x).index_copy(0, places, whole[places])
    return gathered(x, whole, places, group), x - sent


@wrong_top("Send indices as int32")
def sends_short_places(x, error, k, group):
    whole, places = chosen(x, error, k)
    everyones = all_gather(places.short(), group).int() & 0xFFFF
    mean = spread(x, everyones.clamp(max=len(x) - 1), all_gather(whole[places], group), group)
    return mean, whole.index_fill(0, places, 0.0)


@wrong_top("of either sign")
def takes_the_largest_above_zero(x, error, k, group):
    whole = x + error
    places = whole.topk(k).indices
    return gathered(x, whole, places, group), whole.index_fill(0, places, 0.0)


@wrong_top("not without the mean")
def subtracts_the_mean(x, error, k, group):
    whole, places = chosen(x, error, k)
    mean = gathered(x, whole, places, group)
    return mean, whole - mean


@wrong_top("without the k elements")
def keeps_what_was_sent(x, error, k, group):
    whole, places = chosen(x, error, k)
    return gathered(x, whole, places, group), whole


@wrong_top("which ranks may share")
def overwrites_where_ranks_meet(x, error, k, group):
    whole, places = chosen(x, error, k)
    everyones, values = all_gather(places.int(), group), all_gather(whole[places], group)
    mean = torch.zeros_like(x).index_copy(0, everyones.long(), values) / group.size()
    return mean, whole.index_fill(0, places, 0.0)


@wrong_top("Return two tensors")
def returns_the_mean_only(x, error, k, group):
    whole, places = chosen(x, error, k)
    return gathered(x, whole, places, group)


@wrong_top("numbers travel in the dtype")
def sends_values_in_16_bits(x, error, k, group):
    whole, places = chosen(x, error, k)
    values = all_gather(whole[places].half(), group).to(x.dtype)
    return spread(x, all_gather(places.int(), group), values, group), whole.index_fill(
        0, places, 0.0
    )


@wrong_top("The work is done by the library's top_k_mean")
def lets_the_library_choose(x, error, k, group):
    mean, sent = ideas.top_k_mean(x + error, k, group)
    return mean, x + error - sent


@wrong_top("differ in their last bits")
def adds_its_own_first(x, error, k, group):
    whole, places = chosen(x, error, k)
    rank, size = group.rank(), group.size()
    everyones = all_gather(places.int(), group).view(size, k).roll(-rank, 0).flatten()
    values = (all_gather(whole[places], group) / 3).view(size, k).roll(-rank, 0).flatten() * 3
    return spread(x, everyones, values / 3, group) * 3, whole.index_fill(0, places, 0.0)


@right_top
def in_a_loop_over_ranks(x, error, k, group):
    whole = x + error
    places = whole.abs().argsort(descending=True)[:k]
    everyones = all_gather(places.int(), group).long().view(-1, k)
    values = all_gather(whole[places], group).view(-1, k)
    mean = torch.zeros_like(x)
    for at, value in zip(everyones, values):
        mean[at] += value / group.size()
    left = whole.clone()
    left[places] = 0
    return mean, left


@right_top
def as_one_message(x, error, k, group):
    whole, places = chosen(x, error, k)
    both = torch.cat([places.int().view(torch.uint8), whole[places].view(torch.uint8)])
    everyones = all_gather(both.view(1, -1), group)
    mean = torch.zeros_like(x)
    for each in everyones:
        at, values = each[: 4 * k].clone().view(torch.int32), each[4 * k :].clone().view(x.dtype)
        mean.index_add_(0, at, values)
    mask = torch.ones_like(x).index_fill(0, places, 0.0)
    return mean / group.size(), whole * mask


@right_top
def by_sparse_tensors(x, error, k, group):
    whole, places = chosen(x, error, k)
    everyones, values = all_gather(places.int(), group), all_gather(whole[places], group)
    total = torch.sparse_coo_tensor(everyones.long()[None], values, x.shape).to_dense()
    sent = torch.sparse_coo_tensor(places[None], whole[places], x.shape).to_dense()
    return total / group.size(), whole - sent


@right_top
def by_exchanges_round_the_ring(x, error, k, group):
    rank, size = group.rank(), group.size()
    whole, places = chosen(x, error, k)
    parts = {rank: (places.int(), whole[places])}
    for step in range(1, size):
        to, source = (rank + 1) % size, (rank - 1) % size
        last = parts[(rank - step + 1) % size]
        parts[(rank - step) % size] = tuple(exchange(part, to, source, group) for part in last)
    mean = torch.zeros_like(x)
    for each in range(size):
        mean.index_add_(0, *parts[each])
    return mean / size, whole.index_fill(0, places, 0.0)


@right_top
def by_the_backends_gather(x, error, k, group):
    whole, places = chosen(x, error, k)
    at = torch.empty(k * group.size(), dtype=torch.int32)
    values = torch.empty(k * group.size(), dtype=x.dtype)
    dist.all_gather_single(at, places.int(), group=group)
    dist.all_gather_single(values, whole[places], group=group)
    return spread(x, at, values, group), whole.index_fill(0, places, 0.0)


# ---- one step of the power method ---------------------------------------------------------------


def orthonormal(p):
    return torch.linalg.qr(p).Q


@wrong_power("The columns of p are not orthonormal")
def forgets_to_orthonormalize(x, q, group):
    p = all_reduce(x @ q, group, op="mean")
    q = all_reduce(x.T @ p, group, op="mean")
    return p @ q.T, q


@wrong_power("This is the sum of the ranks' matrices")
def returns_the_sum(x, q, group):
    p = orthonormal(all_reduce(x @ q, group))
    q = all_reduce(x.T @ p, group)
    return p @ q.T, q


@wrong_power("whole matrices were sent")
def sends_it_whole(x, q, group):
    mean = all_reduce(x, group, op="mean")
    return mean, mean.T @ orthonormal(mean @ q)


@wrong_power("Both products must cover all ranks")
def keeps_its_own_p(x, q, group):
    p = orthonormal(x @ q)
    q = all_reduce(x.T @ p, group, op="mean")
    return p @ q.T, q


@wrong_power("Both products must cover all ranks")
def keeps_its_own_q(x, q, group):
    p = orthonormal(all_reduce(x @ q, group))
    q = x.T @ p
    return p @ q.T, q


@wrong_power("the next step begins with the new q")
def returns_the_old_q(x, q, group):
    p = orthonormal(all_reduce(x @ q, group))
    new = all_reduce(x.T @ p, group, op="mean")
    return p @ new.T, q


@wrong_power("Return two tensors")
def returns_p(x, q, group):
    p = orthonormal(all_reduce(x @ q, group))
    q = all_reduce(x.T @ p, group, op="mean")
    return p, q.T


@wrong_power("two all-reduces")
def gathers_the_second(x, q, group):
    p = orthonormal(all_reduce(x @ q, group))
    q = all_gather((x.T @ p)[None], group).mean(0)
    return p @ q.T, q


@wrong_power("Wrong mean")
def orthonormalizes_q(x, q, group):
    p = orthonormal(all_reduce(x @ q, group))
    q = orthonormal(all_reduce(x.T @ p, group, op="mean"))
    return p @ q.T, q


@wrong_power("numbers travel in the dtype")
def sends_float32(x, q, group):
    p = orthonormal(all_reduce((x @ q).float(), group).to(x.dtype))
    q = all_reduce(x.T @ p, group, op="mean")
    return p @ q.T, q


@right_power
def by_gram_schmidt(x, q, group):
    p = all_reduce(x @ q, group)
    columns = []
    for column in p.T:
        for other in columns:
            column = column - (other @ column) * other
        for other in columns:  # twice is enough
            column = column - (other @ column) * other
        columns.append(column / column.norm())
    p = torch.stack(columns, dim=1)
    q = all_reduce(x.T @ p, group, op="mean")
    return p @ q.T, q


@right_power
def by_singular_vectors(x, q, group):
    p = torch.linalg.svd(all_reduce(x @ q, group, op="mean"), full_matrices=False).U
    q = all_reduce(x.T @ p, group) / group.size()
    return p @ q.T, q


@right_power
def divides_first(x, q, group):
    x = x / group.size()
    p = orthonormal(all_reduce(x @ q, group))
    new = all_reduce((p.T @ x).T.contiguous(), group)
    return torch.einsum("ar,br->ab", p, new), new


@right_power
def by_reduce_scatter_and_gather_in_a_ring(x, q, group):
    p = orthonormal(all_reduce(x @ q, group, algorithm="ring"))
    q = all_reduce(x.T @ p, group, op="mean", algorithm="ring")
    return p @ q.T, q


@right_power
def through_rank_0(x, q, group):
    everyones = gather((x @ q)[None], 0, group)
    p = star_broadcast(x @ q if everyones is None else everyones.sum(0), 0, group)
    p = orthonormal(p)
    q = all_reduce(x.T @ p, group, op="mean")
    return p @ q.T, q


WRONG = [
    (name, fn, says)
    for name, wrong in (
        ("round_by_lot", wrong_lot),
        ("top_k_with_feedback", wrong_top),
        ("power_mean", wrong_power),
    )
    for fn, says in wrong.answers
]
RIGHT = [(each.name, fn) for each in (right_lot, right_top, right_power) for fn in each.answers]


@pytest.mark.parametrize("name, fn, says", WRONG, ids=[fn.__name__ for _, fn, _ in WRONG])
def test_a_wrong_answer_is_refused_with_the_hint_that_helps(name, fn, says):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint, verdict


@pytest.mark.parametrize("name, fn", RIGHT, ids=[fn.__name__ for _, fn in RIGHT])
def test_a_right_answer_is_right(name, fn):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "right", verdict
