"""Lesson 14: whoever sends tokens astray, or balances each rank alone, is told so."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from mini_dist import check, ops
from mini_dist.collectives import all_gather, all_reduce, all_to_all
from mini_dist.expert_parallel import Trip
from tests.exercises import solutions, solutions_14
from tests.exercises.wrong import Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions_14)

# --- dispatch ------------------------------------------------------------------------------------

there = Wrong()


def splits(counts, group):
    """[n, E/n] from every rank, rows to and from each rank."""
    theirs = all_to_all(counts, group).view(group.size(), -1)
    return theirs, counts.view(group.size(), -1).sum(1).tolist(), theirs.sum(1).tolist()


def sorting(theirs):
    expert = torch.arange(theirs.shape[1]).repeat(len(theirs))
    return expert.repeat_interleave(theirs.flatten()).argsort(stable=True)


@there("in the order in which they came: by rank")
def leaves_the_rows_as_they_came(x, counts, group):
    theirs, sent, received = splits(counts, group)
    arrived = ops.all_to_all(x, group, sent, received)
    return arrived, Trip(sent, received, torch.arange(len(arrived)), theirs.sum(0).tolist())


@there("Sort by expert, and leave the rows of one expert")
def sorts_backwards(x, counts, group):
    theirs, sent, received = splits(counts, group)
    order = sorting(theirs).flip(0)
    arrived = ops.all_to_all(x, group, sent, received)[order]
    return arrived, Trip(sent, received, order, theirs.sum(0).tolist())


@there("Every rank has the rows of all ranks")
def everything_to_everyone(x, counts, group):
    n = group.size()
    lengths = all_to_all(torch.full((n,), len(x)), group).tolist()
    rows = ops.all_to_all(x.repeat(n, 1), group, [len(x)] * n, lengths)
    order = rows[:, 1].argsort(stable=True)
    return rows[order], Trip([len(x)] * n, lengths, order, counts.tolist())


@there("an all-to-all with splits, not an all-gather")
def gathers_the_rows(x, counts, group):
    lengths = all_to_all(torch.full((group.size(),), len(x)), group).tolist()
    rows = all_gather(x, group, sizes=lengths)
    return rows, Trip(lengths, lengths, torch.arange(len(rows)), counts.tolist())


@there("which lives on rank")
def deals_the_experts_out_like_cards(x, counts, group):
    """Expert e on rank e % n."""
    n = group.size()
    dealt = torch.arange(len(counts)).view(-1, n).T.flatten()  # 0 2 1 3 for two ranks
    starts = counts.cumsum(0) - counts
    rows = torch.cat([x[starts[e] : starts[e] + counts[e]] for e in dealt])
    theirs, sent, received = splits(counts[dealt], group)
    order = sorting(theirs)
    arrived = ops.all_to_all(rows, group, sent, received)[order]
    return arrived, Trip(sent, received, order, theirs.sum(0).tolist())


@there("no gradient comes back")
def sends_rows_by_a_plain_collective(x, counts, group):
    theirs, sent, received = splits(counts, group)
    order = sorting(theirs)
    arrived = all_to_all(x, group, sent, received)[order]
    return arrived, Trip(sent, received, order, theirs.sum(0).tolist())


@there("backend's own all_to_all")
def by_the_backend(x, counts, group):
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    theirs = theirs.view(group.size(), -1)
    sent, received = counts.view(group.size(), -1).sum(1).tolist(), theirs.sum(1).tolist()
    order = sorting(theirs)
    arrived = ops.all_to_all(x, group, sent, received)[order]
    return arrived, Trip(sent, received, order, theirs.sum(0).tolist())


@there("Trip.received of rank")
def mixes_up_to_and_from(x, counts, group):
    theirs, sent, received = splits(counts, group)
    order = sorting(theirs)
    arrived = ops.all_to_all(x, group, sent, received)[order]
    return arrived, Trip(sent, sent, order, theirs.sum(0).tolist())


@there("Trip.visitors of rank")
def counts_its_own_rows_as_visitors(x, counts, group):
    theirs, sent, received = splits(counts, group)
    order = sorting(theirs)
    arrived = ops.all_to_all(x, group, sent, received)[order]
    return arrived, Trip(sent, received, order, counts[: theirs.shape[1]].tolist())


@there("bytes in forward instead of")
def tells_all_counts_to_everyone(x, counts, group):
    n, rank = group.size(), group.rank()
    everyones = [all_to_all(counts.repeat(n), group).view(n, -1)][0]
    per_rank = len(counts) // n
    theirs = everyones[:, rank * per_rank : (rank + 1) * per_rank]
    sent, received = counts.view(n, -1).sum(1).tolist(), theirs.sum(1).tolist()
    order = sorting(theirs)
    arrived = ops.all_to_all(x, group, sent, received)[order]
    return arrived, Trip(sent, received, order, theirs.sum(0).tolist())


@there("With 2 ranks and rows for 4 experts")
def believes_that_all_ranks_send_as_many(x, counts, group):
    sent = counts.view(group.size(), -1).sum(1).tolist()
    arrived = ops.all_to_all(x, group, sent, [sent[group.rank()]] * group.size())
    return arrived, Trip(sent, sent, torch.arange(len(arrived)), counts.tolist())


@there("only those for its own experts: all_to_all, not all_gather")
def gathers_the_counts(x, counts, group):
    n, per_rank = group.size(), len(counts) // group.size()
    first = group.rank() * per_rank
    theirs = all_gather(counts[None], group).view(n, -1)[:, first : first + per_rank]
    sent, received = counts.view(n, -1).sum(1).tolist(), theirs.sum(1).tolist()
    order = sorting(theirs)
    arrived = ops.all_to_all(x, group, sent, received)[order]
    return arrived, Trip(sent, received, order, theirs.sum(0).tolist())


@there("no Trip came back")
def returns_only_the_rows(x, counts, group):
    return solutions.dispatch(x, counts, group)[0]


@there("no Trip came back")
def returns_the_fields_of_a_trip_alone(x, counts, group):
    arrived, trip = solutions.dispatch(x, counts, group)
    return arrived, tuple(trip)


@there("Return two things")
def returns_only_a_trip(x, counts, group):
    theirs, sent, received = splits(counts, group)
    return Trip(sent, received, sorting(theirs), theirs.sum(0).tolist())


# --- combine -------------------------------------------------------------------------------------

back = Wrong()


@back("has answers to rows of other ranks")
def sends_them_in_the_experts_order(answers, trip, group):
    return ops.all_to_all(answers, group, trip.received, trip.sent)


@back("has answers to rows of other ranks")
def sorts_once_more(answers, trip, group):
    return ops.all_to_all(answers[trip.by_expert], group, trip.received, trip.sent)


@back("not at the place of its row")
def turns_each_ranks_answers_round(answers, trip, group):
    parts = solutions.combine(answers, trip, group).split(trip.sent)
    return torch.cat([part.flip(0) for part in parts])


@back("does not cut")
def forgets_to_exchange_the_splits(answers, trip, group):
    as_they_came = answers[trip.by_expert.argsort()]
    return ops.all_to_all(as_they_came, group, trip.sent, trip.received)


@back("no gradient reaches the experts")
def sends_answers_by_a_plain_collective(answers, trip, group):
    return all_to_all(answers[trip.by_expert.argsort()], group, trip.received, trip.sent)


@back("no gradient reaches the experts")
def detaches_them(answers, trip, group):
    return solutions.combine(answers.detach(), trip, group)


@back("each row goes back once")
def sends_them_twice(answers, trip, group):
    solutions.combine(answers.detach(), trip, group)
    return solutions.combine(answers, trip, group)


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


@balance("the visits are not those of all ranks")
def returns_its_own_visits(decision, group):
    return solutions.balance_loss(decision, group)[0], counted(decision)


@balance("bytes were sent where")
def counts_twice(decision, group):
    all_reduce(counted(decision), group)
    return solutions.balance_loss(decision, group)


@balance("library's all_gather")
def gathers_the_visits(decision, group):
    visits = all_gather(counted(decision)[None], group, algorithm="ring").sum(0)
    share = visits / visits.sum()
    return len(visits) * (share * decision.probabilities.mean(0)).sum(), visits


@balance("backend's own all_reduce")
def reduces_by_the_backend(decision, group):
    visits = counted(decision)
    dist.all_reduce(visits, group=group)
    share = visits / visits.sum()
    return len(visits) * (share * decision.probabilities.mean(0)).sum(), visits


# --- other right answers -------------------------------------------------------------------------

right = []


def other(name):
    def keep(fn):
        right.append(pytest.param(name, fn, id=fn.__name__))
        return fn

    return keep


@other("dispatch")
def a_list_of_the_two(x, counts, group):
    return list(solutions.dispatch(x, counts, group))


@other("balance_loss")
def shares_in_float64(decision, group):
    visits = all_reduce(counted(decision), group)
    share = visits.to(decision.probabilities.dtype) / visits.sum()
    return len(visits) * (share * decision.probabilities.mean(0)).sum(), visits


@other("balance_loss")
def one_division_at_the_end(decision, group):
    num_tokens, num_experts = decision.probabilities.shape
    visits = all_reduce(counted(decision), group)
    products = (decision.probabilities.sum(0) * visits).sum()
    return products * num_experts / (num_tokens * decision.experts.numel() * group.size()), visits


# ------------------------------------------------------------------------------------------------

WRONG = [
    pytest.param(name, fn, says, id=fn.__name__)
    for name, wrong in (("dispatch", there), ("combine", back), ("balance_loss", balance))
    for fn, says in wrong.answers
]


@pytest.mark.parametrize("name, fn, says", WRONG)
def test_a_wrong_answer_is_refused_with_the_hint_that_names_it(name, fn, says):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "wrong"
    assert says in verdict.hint


@pytest.mark.parametrize("name", ["dispatch", "combine", "balance_loss"])
def test_the_solution_is_right(name):
    verdict = getattr(check, name).judge(getattr(solutions, name))
    assert verdict.state == "right", verdict


@pytest.mark.parametrize("name, fn", right)
def test_another_right_answer_is_right(name, fn):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "right", verdict
