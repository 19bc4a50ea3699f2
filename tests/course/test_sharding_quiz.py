"""The quiz finds its answers by trial; the rules, which it does not use, agree."""

import pytest

from mini_dist.collectives.sharding import parse, product
from mini_dist.course.check.sharding_quiz import (
    LENGTH,
    NOTHING,
    OPS,
    answers_of,
    five,
    normal,
    questions,
    score,
)

SEEDS = range(12)


@pytest.fixture(scope="module")
def asked():
    return [question for seed in SEEDS for question in questions(seed)]


def plan_of(expression, axes):
    mesh = dict.fromkeys(axes, 2)
    inputs, _ = parse(expression, mesh)
    return product(expression, mesh, **{dim: LENGTH for each in inputs for dim in each.dims})


def test_the_rules_answer_as_trying_does(asked):
    """The rules give the quiz's collective, or several that send no more bytes."""
    same = 0
    for expression, axes, answer in asked:
        plan = plan_of(expression, axes)
        found = [f"{move.op} {'*'.join(move.axes)}" for move in plan.collectives] or [NOTHING]
        same += found == [answer]
        assert found == [answer] or len(found) > 1, (expression, answer, found)
    assert same >= 0.9 * len(asked)


def test_questions_are_the_same_for_a_seed_and_others_for_another():
    assert questions(1) == questions(1) != questions(2)
    assert len({text for seed in SEEDS for text, _, _ in questions(seed)}) > 4 * len(SEEDS)


def test_every_collective_is_asked_for(asked):
    answers = [answer.split()[0] for *_, answer in asked]
    assert {*OPS, NOTHING} == {*answers}
    assert answers.count(NOTHING) <= len(asked) / 3


@pytest.mark.parametrize(
    "expression, answer",
    [
        ("X[B, F_tp] . W[F_tp, D] -> Y[B, D]", "all_reduce tp"),
        ("X[B, F_tp] . W[F_tp, D] -> Y[B_tp, D]", "reduce_scatter tp"),
        ("X[B_tp, D] . W[D_tp, F] -> H[B_tp, F]", "all_gather tp"),
        ("X[B_tp, D] -> X[B, D_tp]", "all_to_all tp"),
        ("X[B_dp, D] . W[D, F_tp] -> H[B_dp, F_tp]", "nothing"),
        ("X[B, D] . W[D, F] -> H[B_dp, F_tp]", "nothing"),
    ],
)
def test_known_answers(expression, answer):
    assert answers_of(expression, ("dp", "tp")) == (answer,)


def test_there_may_be_no_answer():
    assert answers_of("X[B_dp, D_tp] . W[D, F] -> H[B, F]", ("dp", "tp")) == ()


def test_a_score_says_what_would_have_been_right():
    rights = [answer for *_, answer in questions(4)]
    assert score(4, rights).title == "5 of 5"
    told = score(4, ["all-gather over nowhere", *rights[1:]])
    assert told.title == "4 of 5" and told.rows[0][2] == f"✗ {rights[0]}"
    assert len(five(4).rows) == 5
    with pytest.raises(ValueError, match="give 5 answers"):
        score(4, rights[:3])


@pytest.mark.parametrize(
    "written", ["all-reduce over tp", "all_reduce  tp", ("all_reduce", "tp"), ["all-reduce", "tp"]]
)
def test_an_answer_may_be_written_so(written):
    assert normal(written) == "all_reduce tp"
