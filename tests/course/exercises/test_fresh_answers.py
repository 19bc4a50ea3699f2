"""Answers of kinds once new to the checks: wrong ones are refused, right ones accepted."""

import cloudpickle
import pytest

from mini_dist import check
from tests.course.exercises import fresh_early, fresh_late

MODULES = (fresh_early, fresh_late)
for module in MODULES:
    cloudpickle.register_pickle_by_value(module)  # like a notebook's functions
WRONG = [each for module in MODULES for each in module.fresh.wrong_answers]
RIGHT = [each for module in MODULES for each in module.fresh.right_answers]


@pytest.mark.parametrize("name, fn, says", WRONG, ids=[f"{n}-{f.__name__}" for n, f, _ in WRONG])
def test_a_fresh_wrong_answer_is_refused(name, fn, says):
    verdict = check.exercises()[name].judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint, verdict


@pytest.mark.parametrize("name, fn", RIGHT, ids=[f"{n}-{f.__name__}" for n, f in RIGHT])
def test_a_fresh_right_answer_is_accepted(name, fn):
    verdict = check.exercises()[name].judge(fn)
    assert verdict.state == "right", verdict
