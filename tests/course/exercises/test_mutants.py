"""The judge refuses a fixed sample of each printed solution's mutants; mutate.py tries them all."""

import pytest

from tests.course.exercises import mutate
from tests.course.exercises.equivalent import EQUIVALENT

PARTS = 16  # The exercises are split into this many cases.


@pytest.mark.parametrize("part", range(PARTS))
def test_the_sample_is_refused_or_listed_with_the_reason(part, capsys):
    exercises = sorted(mutate.check.exercises())[part::PARTS]
    status = mutate.main(["--sample", "2", "--seed", "1", *exercises])
    assert status == 0, capsys.readouterr().out


def test_what_is_listed_as_making_no_difference_is_a_mutant_and_has_a_reason():
    exercises = mutate.check.exercises()
    for name, listed in EQUIVALENT.items():
        known = {mutant.what for mutant in mutate.mutants(exercises[name].answer())}
        assert set(listed) <= known, f"{name}: {set(listed) - known}"
        assert all(len(reason) > 10 for reason in listed.values())
