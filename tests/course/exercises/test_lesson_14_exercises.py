"""Lesson 14: answers that send tokens astray or balance each rank alone are told so."""

import sys

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist

from mini_dist import check
from mini_dist.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    exchange,
    ops,
    reduce,
)
from mini_dist.strategies.expert_parallel import Dispatched
from tests.course.exercises import solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

# --- dispatch ------------------------------------------------------------------------------------

there = Wrong()


def splits(counts, group):
    """Return counts [n, E/n] from every rank, and the rows to and from each rank."""
    theirs = all_to_all(counts, group).view(group.size(), -1)
    return theirs, counts.view(group.size(), -1).sum(1).tolist(), theirs.sum(1).tolist()


def sorting(theirs):
    expert = torch.arange(theirs.shape[1]).repeat(len(theirs))
    return expert.repeat_interleave(theirs.flatten()).argsort(stable=True)


@there("in the order in which they came: by rank")
def leaves_the_rows_as_they_came(x, counts, group):
    theirs, sent, received = splits(counts, group)
    arrived = ops.all_to_all(x, group, sent, received)
    return arrived, Dispatched(sent, received, torch.arange(len(arrived)), theirs.sum(0).tolist())


@there("Sort by expert, and leave the rows of one expert")
def sorts_backwards(x, counts, group):
    theirs, sent, received = splits(counts, group)
    order = sorting(theirs).flip(0)
    arrived = ops.all_to_all(x, group, sent, received)[order]
    return arrived, Dispatched(sent, received, order, theirs.sum(0).tolist())


@there("Every rank has the rows of all ranks")
def everything_to_everyone(x, counts, group):
    n = group.size()
    lengths = all_to_all(torch.full((n,), len(x)), group).tolist()
    rows = ops.all_to_all(x.repeat(n, 1), group, [len(x)] * n, lengths)
    order = torch.arange(len(rows))
    return rows[order], Dispatched([len(x)] * n, lengths, order, counts.tolist())


@there("an all-to-all with splits, not an all-gather")
def gathers_the_rows(x, counts, group):
    lengths = all_to_all(torch.full((group.size(),), len(x)), group).tolist()
    rows = all_gather(x, group, sizes=lengths)
    return rows, Dispatched(lengths, lengths, torch.arange(len(rows)), counts.tolist())


@there("which is on rank")
def deals_the_experts_out_like_cards(x, counts, group):
    """Put expert e on rank e % n."""
    n = group.size()
    dealt = torch.arange(len(counts)).view(-1, n).T.flatten()  # 0 2 1 3 for two ranks
    starts = counts.cumsum(0) - counts
    rows = torch.cat([x[starts[e] : starts[e] + counts[e]] for e in dealt])
    theirs, sent, received = splits(counts[dealt], group)
    order = sorting(theirs)
    arrived = ops.all_to_all(rows, group, sent, received)[order]
    return arrived, Dispatched(sent, received, order, theirs.sum(0).tolist())


@there("no gradient comes back")
def sends_rows_by_a_plain_collective(x, counts, group):
    theirs, sent, received = splits(counts, group)
    order = sorting(theirs)
    arrived = all_to_all(x, group, sent, received)[order]
    return arrived, Dispatched(sent, received, order, theirs.sum(0).tolist())


@there("Dispatched.received of rank")
def mixes_up_to_and_from(x, counts, group):
    theirs, sent, received = splits(counts, group)
    order = sorting(theirs)
    arrived = ops.all_to_all(x, group, sent, received)[order]
    return arrived, Dispatched(sent, sent, order, theirs.sum(0).tolist())


@there("Dispatched.rows_per_expert of rank")
def counts_its_own_rows_as_visitors(x, counts, group):
    theirs, sent, received = splits(counts, group)
    order = sorting(theirs)
    arrived = ops.all_to_all(x, group, sent, received)[order]
    return arrived, Dispatched(sent, received, order, counts[: theirs.shape[1]].tolist())


@there("bytes in forward instead of")
def tells_all_counts_to_everyone(x, counts, group):
    n, rank = group.size(), group.rank()
    everyones = [all_to_all(counts.repeat(n), group).view(n, -1)][0]
    per_rank = len(counts) // n
    theirs = everyones[:, rank * per_rank : (rank + 1) * per_rank]
    sent, received = counts.view(n, -1).sum(1).tolist(), theirs.sum(1).tolist()
    order = sorting(theirs)
    arrived = ops.all_to_all(x, group, sent, received)[order]
    return arrived, Dispatched(sent, received, order, theirs.sum(0).tolist())


@there("its counts for this rank's experts")
def believes_that_all_ranks_send_as_many(x, counts, group):
    sent = counts.view(group.size(), -1).sum(1).tolist()
    arrived = ops.all_to_all(x, group, sent, [sent[group.rank()]] * group.size())
    return arrived, Dispatched(sent, sent, torch.arange(len(arrived)), counts.tolist())


@there("only those for its own experts: all_to_all, not all_gather")
def gathers_the_counts(x, counts, group):
    n, per_rank = group.size(), len(counts) // group.size()
    first = group.rank() * per_rank
    theirs = all_gather(counts[None], group).view(n, -1)[:, first : first + per_rank]
    sent, received = counts.view(n, -1).sum(1).tolist(), theirs.sum(1).tolist()
    order = sorting(theirs)
    arrived = ops.all_to_all(x, group, sent, received)[order]
    return arrived, Dispatched(sent, received, order, theirs.sum(0).tolist())


@there("no Dispatched came back")
def returns_only_the_rows(x, counts, group):
    return solutions.dispatch(x, counts, group)[0]


@there("no Dispatched came back")
def returns_the_fields_of_a_trip_alone(x, counts, group):
    arrived, dispatched = solutions.dispatch(x, counts, group)
    return arrived, tuple(dispatched)


@there("Return two things")
def returns_only_a_trip(x, counts, group):
    theirs, sent, received = splits(counts, group)
    return Dispatched(sent, received, sorting(theirs), theirs.sum(0).tolist())


def sends(x, theirs, sent, received, group):
    order = sorting(theirs)
    arrived = ops.all_to_all(x, group, sent, received)[order]
    return arrived, Dispatched(sent, received, order, theirs.sum(0).tolist())


@there("another order")
def sorts_by_what_is_in_the_rows(x, counts, group):
    arrived, dispatched = solutions.dispatch(x, counts, group)
    return arrived[arrived[:, 0].argsort(stable=True)], dispatched


@there("A sum over the ranks does not say it")
def adds_the_counts(x, counts, group):
    n = group.size()
    theirs = all_reduce(counts, group).view(n, -1)[group.rank()].expand(n, -1)
    return sends(x, theirs, counts.view(n, -1).sum(1).tolist(), theirs.sum(1).tolist(), group)


@there("Pad nothing")
def pads_to_the_longest(x, counts, group):
    n = group.size()
    sent = counts.view(n, -1).sum(1).tolist()
    most = int(all_reduce(counts.view(n, -1).sum(1).max()[None], group, op="max"))
    padded = [torch.nn.functional.pad(part, (0, 0, 0, most - len(part))) for part in x.split(sent)]
    arrived = ops.all_to_all(torch.cat(padded), group)
    received = [most] * n
    return arrived, Dispatched(received, received, torch.arange(len(arrived)), counts.tolist())


@there("none is padded")
def pads_and_cuts_again(x, counts, group):
    theirs, sent, received = splits(counts, group)
    most = int(all_reduce(torch.tensor([max(sent)]), group, op="max"))
    padded = [torch.nn.functional.pad(part, (0, 0, 0, most - len(part))) for part in x.split(sent)]
    parts = ops.all_to_all(torch.cat(padded), group).split(most)
    arrived, order = torch.cat([p[:n] for p, n in zip(parts, received)]), sorting(theirs)
    return arrived[order], Dispatched(sent, received, order, theirs.sum(0).tolist())


@there("numbers travel in the dtype that they were given in")
def sends_rows_in_16_bits(x, counts, group):
    arrived, dispatched = solutions.dispatch(x.bfloat16(), counts, group)
    return arrived.to(x.dtype), dispatched


@there("numbers travel in the dtype that they were given in")
def counts_in_32_bits(x, counts, group):
    theirs = all_to_all(counts.int(), group).view(group.size(), -1).long()
    sent, received = counts.view(group.size(), -1).sum(1).tolist(), theirs.sum(1).tolist()
    return sends(x, theirs, sent, received, group)


@there("rows keep their dtype")
def returns_rows_in_double_always(x, counts, group):
    arrived, dispatched = solutions.dispatch(x, counts, group)
    return arrived.double(), dispatched


@there("Return two things")
def returns_them_swapped(x, counts, group):
    return solutions.dispatch(x, counts, group)[::-1]


@there("Return two things")
def returns_nothing(x, counts, group):
    solutions.dispatch(x, counts, group)


@there("Dispatched.by_expert of rank")
def returns_the_way_back_as_order(x, counts, group):
    theirs, sent, received = splits(counts, group)
    order = sorting(theirs)
    arrived = ops.all_to_all(x, group, sent, received)[order]
    return arrived, Dispatched(sent, received, order.argsort(), theirs.sum(0).tolist())


@there("A barrier moves nothing")
def waits_for_everyone(x, counts, group):
    barrier(group)
    return solutions.dispatch(x, counts, group)


@there(".view does not")
def wants_contiguous_rows(x, counts, group):
    theirs, sent, received = splits(counts, group)
    return sends(x.view(-1).view(-1, x.shape[1]), theirs, sent, received, group)


right_dispatch = Right("dispatch")


@right_dispatch
def by_the_backend(x, counts, group):
    counts = counts.contiguous()
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    theirs = theirs.view(group.size(), -1)
    sent, received = counts.view(group.size(), -1).sum(1).tolist(), theirs.sum(1).tolist()
    order = sorting(theirs)
    arrived = ops.all_to_all(x, group, sent, received)[order]
    return arrived, Dispatched(sent, received, order, theirs.sum(0).tolist())


@right_dispatch
def expert_by_expert(x, counts, group):
    """Cut the received rows into blocks, one per rank and expert, and reorder the blocks."""
    n = group.size()
    theirs = all_to_all(counts, group).view(n, -1)
    sent, received = counts.view(n, -1).sum(1), theirs.sum(1)
    arrived = ops.all_to_all(x, group, sent.tolist(), received.tolist())
    lengths = theirs.flatten().tolist()
    blocks, places = arrived.split(lengths), torch.arange(len(arrived)).split(lengths)
    per_rank = theirs.shape[1]
    turn = [r * per_rank + e for e in range(per_rank) for r in range(n)]
    return torch.cat([blocks[i] for i in turn]), Dispatched(
        tuple(sent.tolist()), received, torch.cat([places[i] for i in turn]), theirs.sum(0).numpy()
    )


@right_dispatch
def counts_by_hand(x, counts, group):
    """Send the counts by messages, one rank after another."""
    rank, n = group.rank(), group.size()
    mine, theirs = counts.view(n, -1), torch.empty_like(counts).view(n, -1)
    theirs[rank] = mine[rank]
    for k in range(1, n):
        to, source = (rank + k) % n, (rank - k) % n
        theirs[source] = exchange(mine[to], to, source, group)
    return sends(x, theirs, mine.sum(1).tolist(), theirs.sum(1).tolist(), group)


class Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, sent, received):
        ctx.how = group, received, sent
        return all_to_all(x, group, sent, received)

    @staticmethod
    def backward(ctx, gradient):
        return all_to_all(gradient, *ctx.how), None, None, None


@right_dispatch
def with_a_gradient_of_its_own(x, counts, group):
    theirs, sent, received = splits(counts, group)
    order = sorting(theirs)
    return Rows.apply(x, group, sent, received).index_select(0, order), Dispatched(
        [np.int64(n) for n in sent], received, order, theirs.sum(0).tolist()
    )


@right_dispatch
def one_journey_for_each_local_expert(x, counts, group):
    n, per_rank = group.size(), len(counts) // group.size()
    theirs = all_to_all(counts, group).view(n, -1)
    mine, blocks = counts.view(n, -1), x.split(counts.tolist())
    came = [
        ops.all_to_all(
            torch.cat([blocks[to * per_rank + e] for to in range(n)]),
            group,
            mine[:, e].tolist(),
            theirs[:, e].tolist(),
        )
        for e in range(per_rank)
    ]
    return torch.cat(came), Dispatched(
        mine.sum(1).tolist(), theirs.sum(1).tolist(), sorting(theirs), [len(rows) for rows in came]
    )


# --- combine -------------------------------------------------------------------------------------

back = Wrong()


@back("has answers to rows of other ranks")
def sends_them_in_the_experts_order(answers, dispatched, group):
    return ops.all_to_all(answers, group, dispatched.received, dispatched.sent)


@back("has answers to rows of other ranks")
def sorts_once_more(answers, dispatched, group):
    return ops.all_to_all(
        answers[dispatched.by_expert], group, dispatched.received, dispatched.sent
    )


@back("not at the index of its row")
def turns_each_ranks_answers_round(answers, dispatched, group):
    parts = solutions.combine(answers, dispatched, group).split(dispatched.sent)
    return torch.cat([part.flip(0) for part in parts])


@back("does not cut")
def forgets_to_exchange_the_splits(answers, dispatched, group):
    as_they_came = answers[dispatched.by_expert.argsort()]
    return ops.all_to_all(as_they_came, group, dispatched.sent, dispatched.received)


@back("no gradient reaches the experts")
def sends_answers_by_a_plain_collective(answers, dispatched, group):
    return all_to_all(
        answers[dispatched.by_expert.argsort()], group, dispatched.received, dispatched.sent
    )


@back("no gradient reaches the experts")
def detaches_them(answers, dispatched, group):
    return solutions.combine(answers.detach(), dispatched, group)


@back("each row goes back once")
def sends_them_twice(answers, dispatched, group):
    solutions.combine(answers.detach(), dispatched, group)
    return solutions.combine(answers, dispatched, group)


@back("numbers travel in the dtype that they were given in")
def answers_in_16_bits(answers, dispatched, group):
    return solutions.combine(answers.bfloat16(), dispatched, group).to(answers.dtype)


@back("rows keep their dtype")
def answers_in_double_always(answers, dispatched, group):
    return solutions.combine(answers, dispatched, group).double()


@back("has answers to rows of other ranks")
def sorts_by_what_is_in_the_answers(answers, dispatched, group):
    as_they_came = answers[answers[:, 0].argsort()]
    return ops.all_to_all(as_they_came, group, dispatched.received, dispatched.sent)


@back("Return the answers, a tensor")
def returns_no_answers(answers, dispatched, group):
    solutions.combine(answers, dispatched, group)


@back("Return the answers, a tensor")
def returns_what_it_was_given_too(answers, dispatched, group):
    return solutions.combine(answers, dispatched, group), dispatched


@back("returned 0 rows")
def returns_no_rows(answers, dispatched, group):
    return solutions.combine(answers, dispatched, group)[:0]


@back("rows go whole")
def flattens_them(answers, dispatched, group):
    return solutions.combine(answers, dispatched, group).flatten()


@back("A barrier moves nothing")
def meets_everyone_first(answers, dispatched, group):
    dist.barrier(group=group)
    return solutions.combine(answers, dispatched, group)


@back("Right as long as the group is the whole")
def for_the_world(answers, dispatched, group):
    return solutions.combine(answers, dispatched, dist.group.WORLD)


right_combine = Right("combine")


@right_combine
def puts_them_where_they_were(answers, dispatched, group):
    as_they_came = torch.zeros_like(answers).index_copy(0, dispatched.by_expert, answers)
    return ops.all_to_all(as_they_came, group, tuple(dispatched.received), dispatched.sent)


@right_combine
def scatters_them(answers, dispatched, group):
    where = dispatched.by_expert[:, None].expand_as(answers)
    as_they_came = answers.new_zeros(answers.shape).scatter(0, where, answers)
    return ops.all_to_all(as_they_came, group, dispatched.received, dispatched.sent)


@right_combine
def row_by_row(answers, dispatched, group):
    places = dispatched.by_expert.tolist()
    rows = [answers[places.index(i)] for i in range(len(places))]
    as_they_came = torch.stack(rows) if rows else answers
    return ops.all_to_all(as_they_came, group, dispatched.received, dispatched.sent)


@right_combine
def messages_of_its_own(answers, dispatched, group):
    as_they_came = answers[dispatched.by_expert.argsort()]
    return Rows.apply(as_they_came, group, dispatched.received, dispatched.sent)


# --- the balance loss ----------------------------------------------------------------------------

balance = Wrong()


def counted(decision):
    return decision.experts.flatten().bincount(minlength=decision.probabilities.shape[1])


@balance("the loss of each rank's own tokens")
def alone(decision, group):
    visits = counted(decision)
    share = visits / visits.sum()
    return len(visits) * (share * decision.probabilities.mean(0)).sum(), all_reduce(visits, group)


@balance("mean of the ranks' own losses")
def mean_of_the_losses(decision, group):
    loss, visits = alone(decision, group)
    return all_reduce(loss, group, op="mean"), visits


@balance("the probabilities can stay at home")
def sends_the_probabilities(decision, group):
    visits = all_reduce(counted(decision), group)
    mean = decision.probabilities.mean(0)
    everyones = mean + (all_reduce(mean, group, op="mean") - mean).detach()
    return len(visits) * (visits / visits.sum() * everyones).sum(), visits


@balance("The factor E is missing")
def without_e(decision, group):
    visits = all_reduce(counted(decision), group)
    return (visits / visits.sum() * decision.probabilities.mean(0)).sum(), visits


@balance("divide the visits by their sum, T k")
def divides_by_tokens(decision, group):
    visits = all_reduce(counted(decision), group)
    share = visits / (len(decision.experts) * group.size())
    return len(visits) * (share * decision.probabilities.mean(0)).sum(), visits


@balance("divide by the sum of all of them")
def divides_by_its_own_visits(decision, group):
    visits = all_reduce(counted(decision), group)
    share = visits / counted(decision).sum()
    return len(visits) * (share * decision.probabilities.mean(0)).sum(), visits


@balance("bincount needs minlength=E")
def counts_only_as_far_as_its_tokens_go(decision, group):
    visits = all_reduce(decision.experts.flatten().bincount(), group)
    return len(visits) * (visits / visits.sum() * decision.probabilities.mean(0)).sum(), visits


@balance("no gradient reaches the router")
def detached(decision, group):
    loss, visits = solutions.balance_loss(decision, group)
    return loss.detach(), visits


@balance("the probabilities (not the weights)")
def of_the_weights(decision, group):
    visits = all_reduce(counted(decision), group)
    taken = torch.zeros_like(decision.probabilities).scatter(1, decision.experts, decision.weights)
    return len(visits) * (visits / visits.sum() * taken.mean(0)).sum(), visits


@balance("the visits, [E], do not count all ranks")
def returns_its_own_visits(decision, group):
    return solutions.balance_loss(decision, group)[0], counted(decision)


@balance("bytes were sent where")
def counts_twice(decision, group):
    all_reduce(counted(decision), group)
    return solutions.balance_loss(decision, group)


@balance("An all-gather hands every rank the counts of each")
def gathers_the_visits(decision, group):
    visits = all_gather(counted(decision)[None], group, algorithm="ring").sum(0)
    share = visits / visits.sum()
    return len(visits) * (share * decision.probabilities.mean(0)).sum(), visits


@balance("bytes were sent where")
def takes_the_mean_of_the_shares_too(decision, group):
    loss, visits = solutions.balance_loss(decision, group)
    all_reduce(visits / visits.sum(), group, op="mean")
    return loss, visits


@balance("numbers travel in the dtype that they were given in")
def counts_in_float32(decision, group):
    visits = all_reduce(counted(decision).float(), group)
    return len(visits) * (visits / visits.sum() * decision.probabilities.mean(0)).sum(), visits


@balance("A barrier moves nothing")
def waits_first(decision, group):
    dist.barrier(group=group)
    return solutions.balance_loss(decision, group)


@balance("Return two things")
def returns_the_loss_only(decision, group):
    return solutions.balance_loss(decision, group)[0]


@balance("Return two things")
def returns_no_loss(decision, group):
    solutions.balance_loss(decision, group)


@balance("Right as long as the group is the whole")
def of_the_world(decision, group):
    return solutions.balance_loss(decision, dist.group.WORLD)


@balance("must not go through a collective")
def detaches_the_probabilities(decision, group):
    visits = all_reduce(counted(decision), group)
    mean = decision.probabilities.detach().mean(0)
    return len(visits) * (visits / visits.sum() * mean).sum(), visits


right_balance = Right("balance_loss")


@right_balance
def reduces_by_the_backend(decision, group):
    visits = counted(decision)
    dist.all_reduce(visits, group=group)
    share = visits / visits.sum()
    return len(visits) * (share * decision.probabilities.mean(0)).sum(), visits


@right_dispatch
def a_list_of_the_two(x, counts, group):
    return list(solutions.dispatch(x, counts, group))


@right_balance
def shares_in_float64(decision, group):
    visits = all_reduce(counted(decision), group)
    share = visits.to(decision.probabilities.dtype) / visits.sum()
    return len(visits) * (share * decision.probabilities.mean(0)).sum(), visits


@right_balance
def one_division_at_the_end(decision, group):
    num_tokens, num_experts = decision.probabilities.shape
    visits = all_reduce(counted(decision), group)
    products = (decision.probabilities.sum(0) * visits).sum()
    return products * num_experts / (num_tokens * visits.sum()), visits


@right_balance
def reduces_to_one_who_tells_all(decision, group):
    visits = reduce(counted(decision), 0, group)
    visits = broadcast(visits if group.rank() == 0 else counted(decision), 0, group)
    mean = decision.probabilities.mean(0)
    return [len(visits) * torch.dot(visits.to(mean) / visits.sum(), mean), visits]


@right_balance
def doubling(decision, group):
    one_hot = torch.zeros_like(decision.probabilities, dtype=torch.int64)
    visits = all_reduce(one_hot.scatter(1, decision.experts, 1).sum(0), group, algorithm="doubling")
    mean = decision.probabilities.mean(0)
    return mean.shape[0] * (mean @ (visits.to(mean) / visits.sum())), visits


@right_balance
def adds_in_float64(decision, group):
    visits = all_reduce(counted(decision).double(), group)
    mean = decision.probabilities.mean(0)
    return (len(visits) * visits / visits.sum() * mean).sum(), visits


RIGHT = [
    pytest.param(each.name, fn, id=fn.__name__)
    for each in (right_dispatch, right_combine, right_balance)
    for fn in each.answers
]

# ------------------------------------------------------------------------------------------------

WRONG = [
    pytest.param(name, fn, says, id=fn.__name__)
    for name, wrong in (("dispatch", there), ("combine", back), ("balance_loss", balance))
    for fn, says in wrong.answers
]


@pytest.mark.parametrize("name, fn, says", WRONG)
def test_a_wrong_answer_is_refused_with_the_hint_that_names_it(name, fn, says):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint, verdict


@pytest.mark.parametrize("name", ["dispatch", "combine", "balance_loss"])
def test_the_solution_is_right(name):
    verdict = getattr(check, name).judge(getattr(solutions, name))
    assert verdict.state == "right", verdict


@pytest.mark.parametrize("name, fn", RIGHT)
def test_another_right_answer_is_right(name, fn):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "right", verdict
