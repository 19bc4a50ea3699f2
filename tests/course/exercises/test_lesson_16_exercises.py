"""Lesson 16: a wrong diagnosis is refused with the evidence against it; symptoms are honest."""

from collections import OrderedDict

import numpy
import pytest

from mini_dist import check
from mini_dist.course.check import clinic
from tests.course.exercises import solutions
from tests.course.exercises.registry import Right

RIGHT = solutions.diagnoses()


def wrong(**changes):
    return lambda: {**RIGHT, **changes}


WRONG = {
    "nothing": (lambda: None, "A NoneType came back"),
    "a list": (lambda: list(RIGHT.items()), "A list came back"),
    "the rank first": (
        wrong(A=(1, "uneven batches")),
        "Patient A: give (disease, rank or ranks), first",
    ),
    "a rank as text": (wrong(B=("wrong dtype", "3")), "a rank as a number, such as 3"),
    "ranks as text": (wrong(D=("swapped group order", "12")), "or several ranks as (0, 3)"),
    "no rank at all": (wrong(C=("diverged weights", None)), "not None"),
    "a list for a disease": (wrong(A=(["uneven batches"], 1)), "with one of"),
    "an error": (lambda: RIGHT["F"], "Your function raised KeyError"),
    "one is missing": (
        lambda: {name: answer for name, answer in RIGHT.items() if name != "D"},
        "Patient D: give (disease, rank or ranks)",
    ),
    "an unknown disease": (wrong(B=("flu", 3)), "with one of"),
    "no rank": (wrong(E="skipped collective"), "Patient E: give (disease, rank or ranks)"),
    "A: the symptom for the cause": (
        wrong(A=("skipped collective", 1)),
        "does not have skipped collective. A rank has returned",
    ),
    "A: one that waits": (wrong(A=("uneven batches", 0)), "has uneven batches, but not there"),
    "B: took any disagreement for a skipped one": (
        wrong(B=("skipped collective", 3)),
        "The shapes that met are equal; read what stands before the brackets",
    ),
    "B: the rank that noticed": (wrong(B=("wrong dtype", 0)), "has wrong dtype, but not there"),
    "C: what does not fail": (
        wrong(C=("uneven batches", 1)),
        "should be equal on all ranks after each step",
    ),
    "C: another rank": (wrong(C=("diverged weights", 0)), "but not there"),
    "D: took any wait for uneven batches": (
        wrong(D=("uneven batches", 2)),
        "no rank has returned, and no two ranks disagree",
    ),
    "D: one rank alone": (wrong(D=("swapped group order", 1)), "but not there"),
    "D: neighbours": (
        wrong(D=("swapped group order", (0, 1))),
        "which rank waits for which: a ring",
    ),
    "D: all": (wrong(D=("swapped group order", (0, 1, 2, 3))), "but not there"),
    "E: another number of elements": (
        wrong(E=("wrong dtype", 2)),
        "met in one operation with different shapes",
    ),
    "E: the rank that waits": (wrong(E=("skipped collective", 0)), "which rank is already at"),
}


@pytest.mark.parametrize("answers, says", WRONG.values(), ids=WRONG)
def test_a_wrong_diagnosis_is_refused_with_what_speaks_against_it(answers, says):
    verdict = check.diagnoses.judge(answers)
    assert verdict.state == "wrong"
    assert says in verdict.hint


def test_no_hint_names_the_right_disease():
    for patient, sick in clinic.patients().items():
        other = next(d for d in clinic.DISEASES if d != sick.disease)
        hint = check.diagnoses.judge(wrong(**{patient: (other, 0)})).hint
        assert sick.disease not in hint


def test_the_solution_is_right_whichever_side_of_the_swap_is_named():
    assert check.diagnoses.judge(solutions.diagnoses).state == "right"
    assert check.diagnoses.judge(wrong(D=("swapped group order", [2, 1]))).state == "right"


right_diagnoses = Right("diagnoses")


@right_diagnoses
def in_lists():
    return {name: [disease, [ranks] if isinstance(ranks, int) else list(ranks)]
            for name, (disease, ranks) in RIGHT.items()}  # fmt: skip


@right_diagnoses
def in_sets_and_numbers_of_numpy():
    return {**RIGHT, "A": ("uneven batches", numpy.int64(1)), "D": ("swapped group order", {0, 3})}


@right_diagnoses
def one_by_one():
    told = OrderedDict(F="nobody")
    for name in "EDCBA":
        told[name] = RIGHT[name]
    return told


@right_diagnoses
def by_another_visit():
    """Find the rank whose sum of the weights differs from the others."""
    last = [steps[-1][1] for steps in clinic.visit("C").results]
    odd = next(rank for rank in range(4) if last.count(last[rank]) == 1)
    return {**RIGHT, "C": ("diverged weights", odd)}


@pytest.mark.parametrize("fn", right_diagnoses.answers, ids=lambda fn: fn.__name__)
def test_other_ways_to_say_it_are_right(fn):
    verdict = check.diagnoses.judge(fn)
    assert verdict.state == "right", verdict


def a_copy():
    return dict(clinic.diagnoses())


def from_the_patients():
    return {n: (sick.disease, tuple(sick.ranks[0])) for n, sick in clinic.patients().items()}


def what_is_printed():
    cell = {}
    exec(check.diagnoses.answer(), cell)
    return cell["diagnoses"]()


@pytest.mark.parametrize("fn", [clinic.diagnoses, a_copy, from_the_patients, what_is_printed])
def test_what_the_file_says_is_no_answer_and_nothing_is_told(fn):
    verdict = check.diagnoses.judge(fn)
    assert verdict.state != "right" and verdict.lines == []


asked_before = dict(clinic.diagnoses())


def test_what_was_asked_in_an_earlier_cell_is_no_answer():
    verdict = check.diagnoses.judge(lambda: {**asked_before})
    assert verdict.state == "wrong" and "uses asked_before, which was there" in verdict.hint


def test_as_shipped_it_is_still_the_librarys():
    for fn in (clinic.diagnoses, a_copy):
        assert check.diagnoses.judge(fn).state == "still the library's"


SYMPTOMS = {
    "A": ["deadlock: ranks 0, 2 and 3 wait", "rank 1 has returned"],
    "B": ["do not agree on an operation", "rank 3 calls send(float64[1, 8]"],
    "D": ["deadlock: ranks 0, 1, 2 and 3 wait", *(f"rank {r} has waited" for r in range(4))],
    "E": [
        "do not agree on an operation",
        "rank 0 calls all_reduce(float32[1]) as its collective number 8",
        "rank 2 calls all_reduce(float32[1, 8]) as its collective number 8",
    ],
}


@pytest.mark.parametrize("patient", SYMPTOMS)
def test_the_symptoms_tell_the_disease(patient):
    told = str(clinic.visit(patient))
    for symptom in SYMPTOMS[patient]:
        assert symptom in told
    assert "File" not in told and " s in" not in told  # It is the same on every machine.


def test_the_silent_patient_shows_only_where_ranks_should_be_alike():
    seen = clinic.visit("C")
    weights = [[weights for _, weights in step] for step in zip(*seen.results)]
    assert [len(set(step)) for step in weights] == [1, 1, 2, 2, 2, 2]
    assert weights[2][0] == weights[2][2] == weights[2][3] != weights[2][1]


def test_a_healthy_training_has_no_symptoms():
    """Otherwise the clinic itself would be faulty."""
    run = clinic.launch(clinic.train, clinic.RANKS, (clinic.average, {}))
    assert len({tuple(w for _, w in steps) for steps in run.results}) == 1


def test_an_unknown_patient_is_told():
    with pytest.raises(KeyError, match="no patient 'F'; there are A, B, C, D, E"):
        clinic.visit("F")
