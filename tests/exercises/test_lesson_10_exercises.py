"""Lesson 10: whoever swaps the pair wrongly is told what is wrong."""

import sys

import cloudpickle
import pytest
import torch
from torch.nn import functional

from mini_dist import check, ops
from mini_dist.check import tensor_parallel
from tests.exercises import solutions_09 as solutions
from tests.exercises.wrong import Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

swap = Wrong()


def inside(x, up, down):
    return functional.gelu(x @ up.T) @ down.T


@swap("leave the region with this rank's part")
def leaves_by_an_all_reduce(x, norm, up, down, bias, group):
    return ops.reduce(inside(ops.all_gather(norm(x), group, dim=1), up, down), group) + bias


@swap("an all-reduce followed by a cut sends twice")
def adds_up_then_cuts(x, norm, up, down, bias, group):
    entered = ops.all_gather(norm(x), group, dim=1)
    return ops.split(ops.reduce(inside(entered, up, down), group), group, dim=1) + bias


@swap("Enter the region after it")
def norms_the_whole(x, norm, up, down, bias, group):
    entered = norm(ops.all_gather(x, group, dim=1))
    return ops.reduce_scatter(inside(entered, up, down), group, dim=1) + bias


@swap("not gather")
def gathers_for_a_use_that_is_alike(x, norm, up, down, bias, group):
    entered = ops.gather(norm(x), group, dim=1)
    return ops.reduce_scatter(inside(entered, up, down), group, dim=1) + bias


@swap("The bias is there once a rank")
def bias_before_the_sum(x, norm, up, down, bias, group):
    entered = ops.all_gather(norm(x), group, dim=1)
    return ops.reduce_scatter(inside(entered, up, down) + bias, group, dim=1)


@swap("instead of [2, 3, 6]")
def still_tensor_parallel(x, norm, up, down, bias, group):
    whole = ops.all_gather(x, group, dim=1)
    return ops.reduce(inside(ops.copy(norm(whole), group), up, down), group) + bias


@swap("The sequence is dim 1")
def puts_the_parts_together_as_other_sequences(x, norm, up, down, bias, group):
    entered = ops.all_gather(norm(x), group, dim=0)
    return ops.reduce_scatter(inside(entered, up, down), group, dim=0) + bias


@swap("The sequence is dim 1")
def gathers_along_the_batch(x, norm, up, down, bias, group):
    entered = ops.all_gather(norm(x), group, dim=0)
    return ops.reduce_scatter(inside(entered, up, down), group, dim=0) * 2 + bias


@swap("gather the tokens, and leave up and down cut")  # (it sends as many bytes as it should)
def gathers_the_weights(x, norm, up, down, bias, group):
    up, down = ops.all_gather(up, group, dim=0), ops.all_gather(down, group, dim=1)
    return inside(norm(x), up, down) + bias


@swap("Return the result")
def returns_nothing(x, norm, up, down, bias, group):
    sequence(x, norm, up, down, bias, group)


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


def test_a_gelu_written_out_is_right_too():
    assert check.sequence_parallel_mlp.judge(writes_gelu_out).state == "right"


def test_a_gelu_that_was_not_seen_is_said_to_be_so():
    shown = str(check.sequence_parallel_mlp.judge(writes_gelu_out))
    assert "not seen" in shown and "[]" not in shown


def gathers_the_sequence_as_the_first_dim(x, norm, up, down, bias, group):
    entered = ops.all_gather(norm(x).transpose(0, 1), group, dim=0)  # [S, B, D]
    left = ops.reduce_scatter(inside(entered, up, down), group, dim=0)
    return left.transpose(0, 1) + bias


def test_the_sequence_may_be_gathered_as_the_first_dim():
    verdict = check.sequence_parallel_mlp.judge(gathers_the_sequence_as_the_first_dim)
    assert verdict.state == "right", verdict


def as_shipped(*args):
    return tensor_parallel.sequence_parallel_mlp(*args)


def test_the_library_s_own_is_called_so():
    assert check.sequence_parallel_mlp.judge(as_shipped).state == "still the library's"
