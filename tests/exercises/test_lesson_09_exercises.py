"""Lesson 09: whoever cuts a layer, a pair or the loss wrongly is told what is wrong."""

import sys

import cloudpickle
import pytest
import torch
from torch.nn import functional

from mini_dist import check, collectives, ops
from mini_dist.collectives import all_reduce
from mini_dist.model import IGNORE_INDEX, TokenLoss
from tests.exercises import solutions_09 as solutions
from tests.exercises.wrong import Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

linear = functional.linear

# -- column -----------------------------------------------------------------------------------

column = Wrong()


@column("does nothing forward and adds up backward")
def enters_without_copy(x, weight, bias, group):
    return linear(x, weight, bias)


@column("a rank keeps the outputs of its own rows")
def gathers_the_outputs(x, weight, bias, group):
    return ops.gather(linear(ops.copy(x, group), weight, bias), group, dim=-1)


@column("The bias is missing")
def column_without_bias(x, weight, bias, group):
    return linear(ops.copy(x, group), weight)


@column("its own: nothing is to be added")
def copies_the_weight(x, weight, bias, group):
    return linear(ops.copy(x, group), ops.copy(weight, group), bias)


@column("nothing else")
def adds_up_forward(x, weight, bias, group):
    return ops.reduce(linear(x, weight, bias), group)


@column("No gradient reaches x")
def column_detaches(x, weight, bias, group):
    return linear(x.detach(), weight, bias)


@column("Forward needs none")
def column_gathers_what_all_have(x, weight, bias, group):
    return linear(ops.all_gather(ops.split(x, group, dim=-1), group, dim=-1), weight, bias)


# -- row --------------------------------------------------------------------------------------

row = Wrong()


@row("The bias is there 4 times")
def bias_before_the_sum(x, weight, bias, group):
    return ops.reduce(linear(x, weight, bias), group)


@row("The bias gets its gradient on some ranks only")
def bias_on_rank_0(x, weight, bias, group):
    return ops.reduce(linear(x, weight, bias if group.rank() == 0 else None), group)


@row("The bias is missing")
def row_without_bias(x, weight, bias, group):
    return ops.reduce(linear(x, weight), group)


@row("one summand of the result")
def keeps_its_summand(x, weight, bias, group):
    return linear(x, weight, bias)


@row("are not differentiable")
def adds_up_behind_autograds_back(x, weight, bias, group):
    y = all_reduce(linear(x, weight), group)
    return y if bias is None else y + bias


@row("Nothing is added")
def row_copies_x(x, weight, bias, group):
    y = ops.reduce(linear(ops.copy(x, group), weight), group)
    return y if bias is None else y + bias


@row("every rank needs the whole sum")
def row_scatters(x, weight, bias, group):
    return ops.reduce_scatter(linear(x, weight), group, dim=-1)


# -- the pair ---------------------------------------------------------------------------------

pair_copy, pair_reduce = Wrong(), Wrong()


def function(forward, backward):
    """A differentiable function of (x, group) from its two directions."""

    def call(x, group):
        class Pair(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return forward(x, group)

            @staticmethod
            def backward(ctx, dy):
                return backward(dy, group)

        return Pair.apply(x)

    return call


def as_it_is(x, group):
    return x.clone()


@pair_copy("its gradient is the sum of all their dy")
def copy_that_is_an_identity(x, group):
    return function(as_it_is, as_it_is)(x, group)


@pair_copy("divided by the number of ranks")
def copy_that_averages(x, group):
    return function(as_it_is, lambda dy, group: all_reduce(dy, group, op="mean"))(x, group)


@pair_copy("copy changes nothing in forward")
def copy_that_adds_up(x, group):
    return function(all_reduce, all_reduce)(x, group)


@pair_copy("some rank it is no tensor")
def copy_that_returns_nothing(x, group):
    function(as_it_is, all_reduce)(x, group)


@pair_reduce("4 times too large")
def reduce_both_ways(x, group):
    return function(all_reduce, all_reduce)(x, group)


@pair_reduce("No gradient comes back")
def reduce_without_autograd(x, group):
    return all_reduce(x, group)


@pair_reduce("wrote into its input")
def reduce_in_place(x, group):
    def in_place(x, group):
        return x.copy_(all_reduce(x, group))

    return function(in_place, as_it_is)(x, group)


@pair_reduce("divided by the number of ranks")
def reduce_that_shares_the_gradient(x, group):
    return function(all_reduce, lambda dy, group: dy / group.size())(x, group)


@pair_reduce("The result is the sum")
def reduce_to_a_mean(x, group):
    return function(lambda x, group: all_reduce(x, group, op="mean"), as_it_is)(x, group)


# -- the loss ---------------------------------------------------------------------------------

loss = Wrong()


def cross_entropy(logits, targets, group, highest=None, add=ops.reduce, ignored=IGNORE_INDEX):
    """The right one, with parts that can be exchanged for wrong ones."""
    width = logits.shape[-1]
    if highest is None:
        highest = all_reduce(logits.detach().amax(-1), group, op="max")
    logits = logits - highest[..., None]
    local = targets - group.rank() * width
    mine = (0 <= local) & (local < width)
    at_target = logits.gather(-1, local.clamp(0, width - 1)[..., None])[..., 0]
    at_target = at_target.where(mine, 0)
    exp_sum, at_target = add(torch.stack([logits.exp().sum(-1), at_target]), group)
    losses = exp_sum.log() - at_target
    counts = targets != ignored
    return TokenLoss(losses[counts].sum(), counts.sum())


@loss("more than three numbers a token")
def gathers_the_logits(logits, targets, group):
    logits = ops.gather(logits, group, dim=-1).flatten(0, -2)
    total = functional.cross_entropy(logits, targets.flatten(), reduction="sum")
    return TokenLoss(total, (targets != IGNORE_INDEX).sum())


@loss("their sums do not fit together")
def subtracts_its_own_maximum(logits, targets, group):
    return cross_entropy(logits, targets, group, highest=logits.detach().amax(-1))


@loss("exp overflows")
def subtracts_nothing(logits, targets, group):
    zero = collectives.all_reduce(logits.detach().amax(-1), group, op="max") * 0
    return cross_entropy(logits, targets, group, highest=zero)


@loss("fewer than three numbers a token")
def sends_no_maximum(logits, targets, group):
    return cross_entropy(logits, targets, group, highest=torch.zeros(()))


@loss("a sum over ranks has to be one that autograd knows")
def adds_up_without_autograd(logits, targets, group):
    return cross_entropy(logits, targets, group, add=all_reduce)


@loss("Targets of IGNORE_INDEX do not count")
def counts_what_is_ignored(logits, targets, group):
    return cross_entropy(logits, targets, group, ignored=-1)


@loss("The ranks have different losses")
def keeps_its_part_of_the_sum(logits, targets, group):
    highest = all_reduce(logits.detach().amax(-1), group, op="max")

    def add(sums, group):
        ops.reduce(sums, group)
        return sums

    return cross_entropy(logits, targets, group, highest=highest, add=add)


@loss("That is the mean")
def returns_the_mean(logits, targets, group):
    total, num_tokens = cross_entropy(logits, targets, group)
    return TokenLoss(total / num_tokens, num_tokens)


@loss("Return TokenLoss")
def returns_the_total_only(logits, targets, group):
    return cross_entropy(logits, targets, group).total


# ---------------------------------------------------------------------------------------------

EXERCISES = {
    "column_linear": column,
    "row_linear": row,
    "copy": pair_copy,
    "reduce": pair_reduce,
    "vocab_parallel_cross_entropy": loss,
}


@pytest.mark.parametrize(
    "name, fn, says",
    [(name, *answer) for name, wrong in EXERCISES.items() for answer in wrong.answers],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_answer_is_refused_with_the_hint_that_names_it(name, fn, says):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint, verdict


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_is_right(name):
    verdict = getattr(check, name).judge(getattr(solutions, name))
    assert verdict.state == "right", verdict


def as_shipped(name):
    from mini_dist import tensor_parallel

    home = ops if name in ("copy", "reduce") else tensor_parallel

    def cell(*args):
        return getattr(home, name)(*args)

    return cell


@pytest.mark.parametrize("name", EXERCISES)
def test_the_library_s_own_is_called_so(name):
    assert getattr(check, name).judge(as_shipped(name)).state == "still the library's"
