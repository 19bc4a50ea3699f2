"""progress: what is kept of a learner's work, when, where, and how it is ended."""

import json
import os

import pytest

import mini_dist
from mini_dist import check, learner
from mini_dist.lesson import predict, reveal


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home of its own, and a kernel in which a person has opened lesson 07."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JPY_SESSION_NAME", "/course/notebooks/07_zero.ipynb")
    for name in ("CI", "MINI_DIST_STRICT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(learner, "AUTOMATIC", {"CI"})  # (pytest sets the other one all the time)
    monkeypatch.setattr(learner, "started_by_a_notebook", lambda: False)
    return tmp_path


def kept(home):
    return json.loads((home / learner.FILE).read_text())["lessons"]


def judged(monkeypatch, state):
    monkeypatch.setattr(check.Exercise, "judge", lambda self, fn: check.Verdict(self.name, state))
    check.sharded_step(lambda: None)


def test_a_guess_is_kept_with_its_lesson(home):
    predict("bytes", 3)
    predict("factor", "3/19")
    predict("later")
    assert kept(home)["07_zero"]["guesses"] == {"bytes": 3, "factor": "3/19"}


def test_a_lesson_without_a_guess_counts_as_opened(home):
    predict("bytes")
    reveal("bytes", 4)
    assert list(kept(home)) == ["07_zero"] and "guesses made" in repr(mini_dist.progress())


def test_an_exercise_that_was_right_stays_so(home, monkeypatch):
    judged(monkeypatch, "wrong")
    assert kept(home)["07_zero"]["exercises"] == {"sharded_step": False}
    judged(monkeypatch, "right")
    judged(monkeypatch, "wrong")
    assert kept(home)["07_zero"]["exercises"] == {"sharded_step": True}
    (row,) = [row for row in mini_dist.progress().rows if row.opened]
    assert (row.lesson, row.right, row.exercises) == ("07_zero", 1, 3)


def test_the_exercises_of_the_course_are_counted_whole():
    assert sum(row.exercises for row in mini_dist.progress().rows) == len(check.exercises())


AUTOMATIC = learner.AUTOMATIC


def test_ci_leaves_no_trace(home, monkeypatch):
    monkeypatch.setenv("CI", "true")
    predict("bytes", 3)
    assert not (home / learner.FILE).exists()


def test_tests_and_nbval_leave_none(home, monkeypatch):
    monkeypatch.setattr(learner, "AUTOMATIC", AUTOMATIC)
    predict("bytes", 3)
    assert not (home / learner.FILE).exists()


def test_papermill_leaves_none(home, monkeypatch):
    """It starts a kernel itself, and tells it of no session."""
    monkeypatch.delenv("JPY_SESSION_NAME")
    predict("bytes", 3)
    assert not (home / learner.FILE).exists()


@pytest.mark.parametrize(
    "path", ["", "/course/notebooks/labs/plan_sweep.ipynb", "/x/07_mine.ipynb"]
)
def test_what_is_no_lesson_leaves_none(home, monkeypatch, path):
    monkeypatch.setenv("JPY_SESSION_NAME", path)
    predict("bytes", 3)
    assert not (home / learner.FILE).exists()


@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="only Linux tells")
def test_a_kernel_that_a_notebook_has_started_is_told_by_its_parent(tmp_path):
    import subprocess
    import sys

    inner = "from mini_dist import learner; print(learner.started_by_a_notebook())"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    environment = {**os.environ, "JPY_SESSION_NAME": "/course/07_zero.ipynb"}
    found = subprocess.run(
        [sys.executable, "-c", outer], env=environment, capture_output=True, text=True
    )
    assert found.stdout.strip() == "True" and learner.started_by_a_notebook() is False


def test_off_forgets_and_keeps_nothing(home):
    predict("bytes", 3)
    assert "Nothing is kept" in repr(mini_dist.progress(keep=False))
    predict("bytes", 3)
    assert kept(home) == {}
    mini_dist.progress(keep=True)
    predict("bytes", 3)
    assert list(kept(home)) == ["07_zero"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"lessons": 3}'])
def test_a_file_that_cannot_be_read_is_begun_anew(home, text):
    (home / learner.FILE).write_text(text)
    predict("bytes", 3)
    assert list(kept(home)) == ["07_zero"]


def test_a_home_that_cannot_be_written_to_stops_nobody(home, monkeypatch):
    monkeypatch.setenv("HOME", str(home / "nowhere"))
    predict("bytes", 3)
    assert "0 of" in repr(mini_dist.progress())


def test_on_a_page_it_is_a_table_with_a_bar_for_each_lesson(home):
    predict("bytes", 3)
    page = mini_dist.progress()._repr_html_()
    assert page.count("<progress ") == len(mini_dist.progress().rows) and "07_zero" in page
