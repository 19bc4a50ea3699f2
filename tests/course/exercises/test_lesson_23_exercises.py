"""Lesson 23: shardings that send too much, blocks from the wrong rank, guessed collectives."""

import sys

import cloudpickle
import pytest
import torch

from mini_dist import check
from mini_dist.collectives import all_gather, broadcast, star_broadcast, tree_broadcast
from tests.course.exercises import solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

MISSING = solutions.missing_collective  # Made here, since the judge would notice it in a call.

wrong_specs, wrong_step, wrong_quiz = Wrong(), Wrong(), Wrong()
right_specs, right_step = Right("one_all_reduce"), Right("summa_step")
right_quiz = Right("missing_collective")

RIGHT_SPECS = {"x": ("dp", None), "v": (None, "tp"), "w": ("tp", None), "y": ("dp", None)}


# ---- one all-reduce ----


@wrong_specs("which of its dims is F?")
def both_by_columns():
    return {**RIGHT_SPECS, "w": (None, "tp")}


@wrong_specs("which of its dims is F?")
def both_by_rows():
    return {**RIGHT_SPECS, "v": ("tp", None)}


@wrong_specs("A weight is whole on every rank of tp")
def weights_whole():
    return {**RIGHT_SPECS, "v": (None, None), "w": (None, None)}


@wrong_specs("y comes out in other pieces than x")
def sequence_parallel():
    return {**RIGHT_SPECS, "y": (("dp", "tp"), None)}


@wrong_specs("x goes in with its batch cut over dp")
def x_cut_by_both():
    return {**RIGHT_SPECS, "x": (("dp", "tp"), None)}


@wrong_specs("The weights are right, but you ask for y as y[B, D]")
def y_whole():
    return {**RIGHT_SPECS, "y": (None, None)}


@wrong_specs("x=[None, None, None] is no pair")
def a_dim_too_many():
    return {**RIGHT_SPECS, "x": (None, None, None)}


@wrong_specs("axis tp is used twice")
def an_axis_twice():
    return {**RIGHT_SPECS, "v": ("tp", "tp")}


@wrong_specs("the mesh has no axis 'model'")
def another_axis():
    return {**RIGHT_SPECS, "v": (None, "model")}


@wrong_specs("v='tp' is no pair")
def no_pair():
    return {**RIGHT_SPECS, "v": "tp"}


@wrong_specs("Return a dict with a pair for each of x, v, w, y")
def a_tuple():
    return tuple(RIGHT_SPECS.values())


@right_specs
def x_whole_and_cut_where_it_is():
    return {**RIGHT_SPECS, "x": (None, None)}


@right_specs
def in_lists():
    return {name: list(spec) for name, spec in RIGHT_SPECS.items()}


@right_specs
def axes_in_tuples():
    return {"x": (("dp",), ()), "v": ((), ("tp",)), "w": (("tp",), None), "y": (("dp",), None)}


class Spec:
    """Like JAX's PartitionSpec: it is no tuple, and dims that are not named are whole."""

    def __init__(self, *parts):
        self.parts = parts

    def __iter__(self):
        return iter(self.parts)

    def __len__(self):
        return len(self.parts)


@right_specs
def in_short_specs():
    return {"x": Spec("dp"), "v": Spec(None, "tp"), "w": Spec("tp"), "y": Spec("dp", None)}


# ---- a step of SUMMA ----


@wrong_step("Each rank has multiplied its own two blocks")
def sends_nothing(a, b, step, row, column):
    return a @ b


@wrong_step("Wrong blocks. A's block travels along the row")
def row_and_column_exchanged(a, b, step, row, column):
    return broadcast(a, step, column) @ broadcast(b, step, row)


@wrong_step("This is the whole product")
def all_steps(a, b, step, row, column):
    return sum(broadcast(a, each, row) @ broadcast(b, each, column) for each in range(row.size()))


@wrong_step("one block of A goes to its row")
def gathers_all(a, b, step, row, column):
    blocks = all_gather(a[None].contiguous(), row), all_gather(b[None].contiguous(), column)
    return blocks[0][step] @ blocks[1][step]


@wrong_step("Wrong blocks")
def forgets_b(a, b, step, row, column):
    return broadcast(a, step, row) @ b


@wrong_step("Wrong blocks")
def always_the_first(a, b, step, row, column):
    return broadcast(a, 0, row) @ broadcast(b, 0, column)


@wrong_step("a tensor [I/q, K/q]")
def returns_nothing(a, b, step, row, column):
    broadcast(a, step, row) @ broadcast(b, step, column)


@wrong_step("a tensor [I/q, K/q]")
def does_nothing_at_all(a, b, step, row, column):
    pass


@right_step
def by_stars(a, b, step, row, column):
    return torch.matmul(star_broadcast(a, step, row), star_broadcast(b, step, column))


@right_step
def b_first(a, b, step, row, column):
    theirs = tree_broadcast(b, step, column)
    return tree_broadcast(a, step, row) @ theirs


@right_step
def column_by_column(a, b, step, row, column):
    a, b = broadcast(a, step, row), broadcast(b, step, column)
    return torch.stack([a @ each for each in b.unbind(1)], 1)


@right_step
def in_one_einsum(a, b, step, row, column):
    a, b = broadcast(a, step, row), broadcast(b, step, column)
    return torch.einsum("ij,jk->ik", a, b)


# ---- the missing collective ----


@wrong_quiz("not nothing")
def always_nothing():
    return ["nothing"] * 5


@wrong_quiz("Return a list of 5 answers")
def four():
    return ["nothing"] * 4


@wrong_quiz("Return a list of 5 answers")
def a_word():
    return "all_gather X"


def answers():
    return MISSING()


@wrong_quiz("4 of 5.")
def one_is_wrong():
    found = answers()
    return [*found[:-1], "all_reduce " + found[-1].split()[-1]]


@wrong_quiz("reduce_scatter Y works, and sends 16 numbers; another one sends 8")
def dearer():
    return ["reduce_scatter Y", *answers()[1:]]


@wrong_quiz("all_gather Y works, and sends")
def dearer_by_a_gather():
    return ["all_gather Y", *answers()[1:]]


@wrong_quiz("'allgather_Y' is none of all_gather, reduce_scatter")
def another_word():
    return ["allgather_Y", *answers()[1:]]


@wrong_quiz("the right collective. Over which axes, in which order?")
def the_other_axis():
    first, *others = answers()
    return [first.replace("Y", "X"), *others]


@right_quiz
def with_dashes():
    return [answer.replace("_", "-", 2).replace(" ", " over ") for answer in answers()]


@right_quiz
def as_calls():
    return [answer.title().replace("_", "").replace(" ", "(") for answer in answers()]


@right_quiz
def in_capitals():
    return [
        None if a == "nothing" else f"{a.split()[0].upper()} on {a.split()[1]}" for a in answers()
    ]


@right_quiz
def in_pairs():
    return tuple(tuple(answer.split()) for answer in answers())


WRONG = [
    (name, fn, says)
    for name, wrong in (
        ("one_all_reduce", wrong_specs),
        ("summa_step", wrong_step),
        ("missing_collective", wrong_quiz),
    )
    for fn, says in wrong.answers
]
RIGHT = [
    (right.name, fn) for right in (right_specs, right_step, right_quiz) for fn in right.answers
]


@pytest.mark.parametrize("name, fn, says", WRONG, ids=lambda each: getattr(each, "__name__", ""))
def test_a_known_mistake_is_refused_and_named(name, fn, says):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint, verdict.hint


@pytest.mark.parametrize("name, fn", RIGHT, ids=lambda each: getattr(each, "__name__", ""))
def test_a_right_answer_may_look_otherwise(name, fn):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "right", verdict


@pytest.mark.parametrize("name", ["one_all_reduce", "summa_step", "missing_collective"])
def test_the_printed_solution_is_right(name):
    assert getattr(check, name).judge(getattr(solutions, name)).state == "right"
