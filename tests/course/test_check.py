"""check: what a verdict says, when a grader's run fails, and what help a learner gets."""

import re
import sys

import cloudpickle
import pytest
import torch

from mini_dist import check, launch
from mini_dist.collectives import exchange, ring_all_reduce, tree_all_reduce
from mini_dist.course.check.collectives import EQUAL, AllReduce, Case, trial
from mini_dist.course.check.engine import advice

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest


def delegates(x, group):
    return ring_all_reduce(x, group)


def whole_tensors(x, group):
    rank, size = group.rank(), group.size()
    total = moving = x.clone()
    for _ in range(size - 1):
        moving = exchange(moving, (rank + 1) % size, (rank - 1) % size, group)
        total = total + moving
    return total


def halves_of_the_library(x, group):
    from mini_dist.collectives import ring_all_gather, ring_reduce_scatter

    return ring_all_gather(ring_reduce_scatter(x, group), group)


# -- states -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wrong():
    return check.ring_all_reduce.judge(whole_tensors)


def test_a_function_that_calls_the_library_is_still_the_librarys():
    verdict = check.ring_all_reduce.judge(delegates)
    assert verdict.state == "still the library's"
    assert "delegates" in verdict.hint


def test_an_exercise_may_use_the_parts_that_it_names():
    assert check.ring_all_reduce.judge(halves_of_the_library).state == "right"


def test_another_function_of_the_library_is_not_an_answer():
    verdict = check.ring_all_reduce.judge(lambda x, group: tree_all_reduce(x, group))
    assert verdict.state == "wrong"
    assert "library's tree_all_reduce" in verdict.hint


def test_a_wrong_answer_shows_measured_beside_expected(wrong):
    line = {line.what: line for line in wrong.lines}["bytes sent by a rank"]
    assert (line.measured, line.expected, line.ok) == (24_000, 12_000, False)
    assert wrong.state == "wrong" and wrong.hint


def test_only_the_first_case_that_fails_is_run(wrong):
    assert not any("ranks," in line.what for line in wrong.lines)


# -- a grader ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [delegates, whole_tensors])
def test_strict_raises_unless_it_is_right(fn, monkeypatch):
    monkeypatch.setenv("MINI_DIST_STRICT", "1")
    with pytest.raises(check.CheckFailed, match="ring_all_reduce"):
        check.ring_all_reduce(fn)


def test_strict_returns_what_is_right(monkeypatch):
    monkeypatch.setenv("MINI_DIST_STRICT", "1")
    assert check.ring_all_reduce(halves_of_the_library).state == "right"


def test_without_strict_nothing_is_raised(monkeypatch):
    monkeypatch.delenv("MINI_DIST_STRICT", raising=False)
    assert check.ring_all_reduce(whole_tensors).state == "wrong"


# -- a run that fails -------------------------------------------------------------------------


def test_an_exception_names_the_case_and_the_learners_line():
    def stumbles(x, group):
        return x.tensor_split(group.size())[group.size()]

    verdict = check.ring_reduce_scatter.judge(stumbles)
    assert verdict.state == "wrong"
    assert "With 4 ranks, 1000 numbers of float64" in verdict.hint
    assert "x.tensor_split(group.size())[group.size()]" in verdict.hint


def test_what_was_wrong_before_a_failure_is_told_first():
    def wrong_then_raises(x, group):
        if group.size() < 4:
            raise ValueError("three is a crowd")
        return whole_tensors(x, group)

    assert "whole tensors" in check.ring_all_reduce.judge(wrong_then_raises).hint


@pytest.mark.parametrize(
    "text, says",
    [
        ("deadlock: ...\n  rank 0 has waited 1 s in send(x) for rank 1", "everyone sends first"),
        (
            "deadlock: ...\n  rank 0 has waited 1 s in recv(x) for rank 1",
            "everyone waits to receive",
        ),
        (
            "deadlock: ...\n  rank 0 has waited 1 s in recv(x)\n  rank 1 has waited 1 s in send(x)",
            "",
        ),
        ("rank 1 raised ValueError", ""),
    ],
)
def test_a_deadlock_is_explained_where_it_is_a_usual_one(text, says):
    assert (says in advice(text)) if says else advice(text) == ""


# -- what is measured -------------------------------------------------------------------------


def measured(fn, size=4):
    case = Case((12,))
    return AllReduce(case, launch(trial, size, (fn, case), quiet=True))


def test_the_measured_numbers_are_those_of_the_run():
    m = measured(ring_all_reduce)
    assert m.by_rank == [2 * 9 * 8] * 4  # 2 (n-1)/n of 12 numbers of 8 bytes
    assert (m.messages, m.rounds, m.largest) == ([6] * 4, 6, 3 * 8)
    assert m.to_neighbours and m.hub is None and all(m.right) and m.backend == []


def test_a_tree_is_not_a_ring_and_has_no_hub():
    m = measured(tree_all_reduce)
    assert not m.to_neighbours and m.hub is None


def test_cases_change_one_thing_at_a_time():
    """A failing case then shows which change made it fail."""
    (_, first), *others = EQUAL
    assert [case.dtype == first.dtype for _, case in others] == [True, False, False, True]
    assert len({size for size, _ in EQUAL}) == len(EQUAL)


def test_every_ranks_input_is_its_own_and_whole():
    inputs = Case((100,)).inputs(4)
    assert all(not torch.equal(a, b) for i, a in enumerate(inputs) for b in inputs[:i])
    assert all(torch.equal(x, x.round()) for x in inputs)


# -- help -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", check.exercises())
def test_the_ladder_has_two_hints_a_skeleton_and_a_solution(name, capsys):
    exercise = getattr(check, name)
    exercise.hint(1)
    exercise.hint(2)
    first, second = capsys.readouterr().out.split("\n", 1)
    assert first and second.strip() and first != second
    exercise.skeleton()
    skeleton = capsys.readouterr().out
    compile(skeleton, "<skeleton>", "exec")
    assert "..." in skeleton
    exercise.solution()
    assert exercise.answer() in capsys.readouterr().out


def test_a_hint_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="ring_all_reduce has hints 1 to 2, not 3"):
        check.ring_all_reduce.hint(3)


def test_an_unknown_exercise_names_those_there_are():
    with pytest.raises(AttributeError, match="'ring_all_redcue'; there are .*ring_all_reduce"):
        check.ring_all_redcue  # noqa: B018


def test_exercises_are_found_by_completion():
    assert set(check.exercises()) <= set(dir(check))


# -- on the page ------------------------------------------------------------------------------


def test_a_verdict_reads_well_in_a_terminal(wrong):
    title, head, *_ = repr(wrong).splitlines()
    assert title == "✗ ring_all_reduce: wrong"
    assert head.split() == ["measured", "expected"]
    assert repr(wrong).endswith(wrong.hint)


def test_a_verdict_on_a_page_escapes_what_a_learner_wrote(wrong):
    wrong = check.Verdict("x", "wrong", wrong.lines, "a <b> & c")
    page = wrong._repr_html_()
    assert "a &lt;b&gt; &amp; c" in page
    assert re.search(r"24000</td>.*12000</td>.*✗", page)
