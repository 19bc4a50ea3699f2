"""Lesson 22: wrong answers get a hint that names the mistake; right answers may differ."""

from __future__ import annotations

import sys

import cloudpickle
import pytest

from mini_dist import check
from tests.course.exercises import solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

wrong, right = Wrong(), Right("deepspeed_bytes")
LIMIT = "stage3_param_persistence_threshold"
TOGETHER = "use_multi_rank_bucket_allreduce"


def together(zero):
    return zero.get(TOGETHER, True) or not zero.get("reduce_scatter", True)


@wrong("as long as use_multi_rank_bucket_allreduce is true")
def as_the_paper_says(zero, sizes, k, n):
    return solutions.deepspeed_bytes(dict(zero, **{TOGETHER: False}), sizes, k, n)


@wrong("as long as use_multi_rank_bucket_allreduce is true")
def believes_the_default_whatever_is_said(zero, sizes, k, n):
    return solutions.deepspeed_bytes(dict(zero, **{TOGETHER: True}), sizes, k, n)


@wrong("Numbers, not bytes")
def numbers(zero, sizes, k, n):
    return solutions.deepspeed_bytes(zero, sizes, k, n) / 4


@wrong("All ranks together")
def of_one_rank(zero, sizes, k, n):
    return solutions.deepspeed_bytes(zero, sizes, k, n) / n


@wrong("All ranks together")
def without_the_ranks(zero, sizes, k, n):
    return solutions.deepspeed_bytes(zero, sizes, k, 2)


@wrong("Return a number")
def says_nothing(zero, sizes, k, n):
    solutions.deepspeed_bytes(zero, sizes, k, n)


@wrong("After the step the ranks gather")
def gathers_nothing_where_parts_are_reduced(zero, sizes, k, n):
    found = solutions.deepspeed_bytes(zero, sizes, k, n)
    apart = zero.get("stage", 0) == 1 and not zero.get(TOGETHER, True)
    return found - 4 * (n - 1) * sum(sizes) * apart


@wrong("Stages 1 and 2 gather parameters once a step")
def forgets_the_gather(zero, sizes, k, n):
    gather = 4 * (n - 1) * sum(sizes) if zero.get("stage", 0) in (1, 2) else 0
    return solutions.deepspeed_bytes(zero, sizes, k, n) - gather


@wrong("it reduces them after each micro-batch")
def stage_2_as_stage_1(zero, sizes, k, n):
    k = k if zero.get("stage", 0) == 3 else 1
    return solutions.deepspeed_bytes(zero, sizes, k, n)


@wrong("Stage 1 holds whole gradients")
def stage_1_as_stage_2(zero, sizes, k, n):
    stage = 2 if zero.get("stage", 0) == 1 else zero.get("stage", 0)
    return solutions.deepspeed_bytes(dict(zero, stage=stage), sizes, k, n)


@wrong("Stage 0 is data parallelism")
def stage_0_as_stage_1(zero, sizes, k, n):
    return solutions.deepspeed_bytes(dict(zero, stage=zero.get("stage", 0) or 1), sizes, k, n)


@wrong("With reduce_scatter false")
def does_not_know_reduce_scatter(zero, sizes, k, n):
    return solutions.deepspeed_bytes(dict(zero, reduce_scatter=True), sizes, k, n)


@wrong("does not send itself its own part")
def each_to_all_and_to_itself(zero, sizes, k, n):
    return solutions.deepspeed_bytes(zero, sizes, k, n + 1)


@wrong("stay whole")
def nothing_persists(zero, sizes, k, n):
    return solutions.deepspeed_bytes(dict(zero, **{LIMIT: 0}), sizes, k, n)


@wrong("those of at most the threshold")
def below_the_threshold_only(zero, sizes, k, n):
    limit = zero.get(LIMIT, 100_000) - 1
    return solutions.deepspeed_bytes(dict(zero, **{LIMIT: limit}), sizes, k, n)


@wrong("n - 1 is 0")
def n_for_n_less_1(zero, sizes, k, n):
    """This is right for two or more ranks; only the case of one rank exposes it."""
    return solutions.deepspeed_bytes(zero, sizes, k, n) or 4 * sum(sizes)


@right
def message_by_message(zero, sizes, k, n):
    sent = 0
    for size in sizes:
        if zero.get("stage", 0) == 3:
            large = size > zero.get(LIMIT, 100_000)
            sent += size * (3 * k if large else k + 1)
        elif zero.get("stage", 0) == 2:
            sent += size * (k * (1 + together(zero)) + 1)
        elif zero.get("stage", 0) == 1:
            sent += size * (1 + together(zero) + 1)
        else:
            sent += 2 * size
    return sent * 4 * (n - 1)


@right
def by_table(zero, sizes, k, n):
    apart = not together(zero)
    table = {0: 2, 1: 2 if apart else 3, 2: k + 1 if apart else 2 * k + 1}
    if zero.get("stage", 0) in table:
        return float(4 * (n - 1) * table[zero.get("stage", 0)] * sum(sizes))
    large = [size for size in sizes if size > zero.get(LIMIT, 1e5)]
    return 4 * (n - 1) * ((k + 1) * sum(sizes) + (2 * k - 1) * sum(large))


@right
def rank_by_rank(zero, sizes, k, n):
    def gather(numbers):
        return sum(numbers * 4 * (n - 1) / n for _ in range(n))

    total, stage = sum(sizes), zero.get("stage", 0)
    small = sum(s for s in sizes if s <= zero.get(LIMIT, 100_000))
    if stage == 3:
        return round(gather(small) + k * (2 * gather(total - small) + gather(total)))
    reduce = gather(total) * (2 if stage == 0 or together(zero) else 1)
    return round(reduce * (k if stage == 2 else 1) + (gather(total) if stage else 0))


@right
def by_cases(zero, sizes, k, n):
    match zero.get("stage", 0):
        case 0:
            factor = 2
        case 1:
            factor = 3 if together(zero) else 2
        case 2:
            factor = 1 + (2 * k if together(zero) else k)
        case _:
            threshold = zero.get(LIMIT, 100_000)
            moved = sum(s * (k + 1 if s <= threshold else 3 * k) for s in sizes)
            return moved * (n - 1) * 4
    return factor * sum(sizes) * (n - 1) * 4


@pytest.mark.parametrize("fn, says", wrong.answers, ids=lambda each: getattr(each, "__name__", ""))
def test_a_known_mistake_is_refused_and_named(fn, says):
    verdict = check.deepspeed_bytes.judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint, verdict.hint


@pytest.mark.parametrize("fn", right.answers, ids=lambda fn: fn.__name__)
def test_a_right_answer_may_look_otherwise(fn):
    verdict = check.deepspeed_bytes.judge(fn)
    assert verdict.state == "right", verdict


def test_the_printed_solution_is_right():
    assert check.deepspeed_bytes.judge(solutions.deepspeed_bytes).state == "right"
