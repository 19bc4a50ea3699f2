"""Lesson 10: answers that swap the pair wrongly get a hint that names the mistake."""

import sys

import cloudpickle
import pytest
import torch
from torch.nn import functional

from mini_dist import check, collectives
from mini_dist.collectives import ops
from mini_dist.course.check import sequence_parallel
from mini_dist.strategies import tensor_parallel
from tests.course.exercises import solutions as solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

swap = Wrong()


def inside(x, up, down):
    return functional.gelu(x @ up.T) @ down.T


@swap("leave the region with this rank's part")
def leaves_by_an_all_reduce(x, norm, up, down, bias, group):
    return ops.all_reduce(inside(ops.all_gather(norm(x), group, dim=1), up, down), group) + bias


@swap("an all-reduce followed by a cut sends twice")
def adds_up_then_cuts(x, norm, up, down, bias, group):
    entered = ops.all_gather(norm(x), group, dim=1)
    return ops.split(ops.all_reduce(inside(entered, up, down), group), group, dim=1) + bias


@swap("Enter the region after it")
def norms_the_whole(x, norm, up, down, bias, group):
    entered = norm(ops.all_gather(x, group, dim=1))
    return ops.reduce_scatter(inside(entered, up, down), group, dim=1) + bias


@swap("not join")
def gathers_for_a_use_that_is_alike(x, norm, up, down, bias, group):
    entered = ops.join(norm(x), group, dim=1)
    return ops.reduce_scatter(inside(entered, up, down), group, dim=1) + bias


@swap("The bias is added once per rank")
def bias_before_the_sum(x, norm, up, down, bias, group):
    entered = ops.all_gather(norm(x), group, dim=1)
    return ops.reduce_scatter(inside(entered, up, down) + bias, group, dim=1)


@swap("instead of [2, 3, 6]")
def still_tensor_parallel(x, norm, up, down, bias, group):
    whole = ops.all_gather(x, group, dim=1)
    return ops.all_reduce(inside(ops.copy(norm(whole), group), up, down), group) + bias


@swap("The sequence is dim 1")
def puts_the_parts_together_as_other_sequences(x, norm, up, down, bias, group):
    entered = ops.all_gather(norm(x), group, dim=0)
    return ops.reduce_scatter(inside(entered, up, down), group, dim=0) + bias


@swap("The sequence is dim 1")
def gathers_along_the_batch(x, norm, up, down, bias, group):
    entered = ops.all_gather(norm(x), group, dim=0)
    return ops.reduce_scatter(inside(entered, up, down), group, dim=0) * 2 + bias


@swap("gather the tokens, and leave up and down cut")  # The bytes are right.
def gathers_the_weights(x, norm, up, down, bias, group):
    up, down = ops.all_gather(up, group, dim=0), ops.all_gather(down, group, dim=1)
    return inside(norm(x), up, down) + bias


@swap("Return the result")
def returns_nothing(x, norm, up, down, bias, group):
    sequence(x, norm, up, down, bias, group)


@swap("some gradient does not get through")
def enters_without_autograd(x, norm, up, down, bias, group):
    entered = collectives.all_gather(norm(x), group, dim=1)
    return ops.reduce_scatter(inside(entered, up, down), group, dim=1) + bias


@swap("some gradient does not get through")
def leaves_without_autograd(x, norm, up, down, bias, group):
    entered = ops.all_gather(norm(x), group, dim=1)
    return collectives.reduce_scatter(inside(entered, up, down), group, dim=1) + bias


@swap("numbers were rounded on the way")
def gathers_in_float32(x, norm, up, down, bias, group):
    entered = ops.all_gather(norm(x).float(), group, dim=1).to(x.dtype)
    return ops.reduce_scatter(inside(entered, up, down), group, dim=1) + bias


@swap("A barrier moves nothing")
def waits_for_all(x, norm, up, down, bias, group):
    collectives.barrier(group)
    return sequence(x, norm, up, down, bias, group)


@swap("The bias is missing")
def leaves_out_the_bias(x, norm, up, down, bias, group):
    return sequence(x, norm, up, down, 0, group)


@swap("The norm was not called")
def leaves_out_the_norm(x, norm, up, down, bias, group):
    return sequence(x, lambda x: x, up, down, bias, group)


@swap("gradients of bias")
def adds_up_the_bias_s_gradient(x, norm, up, down, bias, group):
    return sequence(x, norm, up, down, ops.copy(bias, group), group)


@swap("library's mlp")
def swaps_the_pair_of_the_library(x, norm, up, down, bias, group):
    pair = tensor_parallel.ideas.SEQUENCE
    return tensor_parallel.ideas.mlp(norm(x), (up, None), (down, bias), group, pair)


@swap("an all-gather and a reduce-scatter each way are enough")
def gathers_the_norm_s_inputs_too(x, norm, up, down, bias, group):
    y = sequence(x, norm, up, down, bias, group)
    return y + 0 * ops.all_gather(x, group, dim=1).sum()


def sequence(x, norm, up, down, bias, group):
    entered = ops.all_gather(norm(x), group, dim=1)
    return ops.reduce_scatter(inside(entered, up, down), group, dim=1) + bias


@pytest.mark.parametrize("fn, says", swap.answers, ids=swap.names())
def test_a_wrong_swap_is_refused_with_the_hint_that_names_it(fn, says):
    verdict = check.sequence_parallel_mlp.judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint, verdict


def test_the_solution_is_right():
    verdict = check.sequence_parallel_mlp.judge(solutions.sequence_parallel_mlp)
    assert verdict.state == "right", verdict


def writes_gelu_out(x, norm, up, down, bias, group):
    before = functional.linear(ops.all_gather(norm(x), group, dim=1), up)
    hidden = before * torch.special.ndtr(before)
    return ops.reduce_scatter(functional.linear(hidden, down), group, dim=1) + bias


right_swap = Right("sequence_parallel_mlp")
right_swap(writes_gelu_out)


@right_swap
def sequence_by_sequence(x, norm, up, down, bias, group):
    return torch.cat([sequence(each, norm, up, down, bias, group) for each in x.split(1)])


@right_swap
def in_halves_of_the_hidden_features(x, norm, up, down, bias, group):
    entered = ops.all_gather(norm(x), group, dim=1)
    halves = zip(up.tensor_split(2), down.tensor_split(2, dim=1))
    return ops.reduce_scatter(sum(inside(entered, *half) for half in halves), group, dim=1) + bias


@right_swap
def in_halves_of_the_model_s_features(x, norm, up, down, bias, group):
    entered = torch.cat([ops.all_gather(h, group, dim=1) for h in norm(x).chunk(2, -1)], -1)
    halves = inside(entered, up, down).chunk(2, -1)
    return torch.cat([ops.reduce_scatter(half, group, dim=1) for half in halves], -1) + bias


@right_swap
def by_rings_and_classes_of_its_own(x, norm, up, down, bias, group):
    def gather(x):
        return collectives.ring_all_gather(x.transpose(0, 1).contiguous(), group).transpose(0, 1)

    def scatter(x):
        x = x.transpose(0, 1).contiguous()
        return collectives.ring_reduce_scatter(x, group).transpose(0, 1)

    class Enter(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: gather(x))
        backward = staticmethod(lambda ctx, dy: scatter(dy))

    class Leave(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: scatter(x))
        backward = staticmethod(lambda ctx, dy: gather(dy))

    return Leave.apply(inside(Enter.apply(norm(x)), up, down)) + bias


@right_swap
def norms_token_by_token(x, norm, up, down, bias, group):
    normed = torch.stack([norm(token) for token in x.unbind(1)], 1)
    return sequence(normed, lambda x: x, up, down, bias, group)


def test_a_gelu_that_was_not_seen_is_said_to_be_so():
    shown = str(check.sequence_parallel_mlp.judge(writes_gelu_out))
    assert "not seen" in shown and "[]" not in shown


def gathers_the_sequence_as_the_first_dim(x, norm, up, down, bias, group):
    entered = ops.all_gather(norm(x).transpose(0, 1), group, dim=0)  # [S, B, D]
    left = ops.reduce_scatter(inside(entered, up, down), group, dim=0)
    return left.transpose(0, 1) + bias


right_swap(gathers_the_sequence_as_the_first_dim)


@pytest.mark.parametrize("fn", right_swap.answers, ids=lambda fn: fn.__name__)
def test_an_unusual_right_answer_is_right(fn):
    verdict = check.sequence_parallel_mlp.judge(fn)
    assert verdict.state == "right", verdict


def as_shipped(*args):
    return sequence_parallel.sequence_parallel_mlp(*args)


def test_the_library_s_own_is_called_so():
    assert check.sequence_parallel_mlp.judge(as_shipped).state == "still the library's"
