"""progress: what it keeps of a learner's work, when, where, and how to turn it off."""

import json
import os
import stat
import subprocess
import sys

import pytest

import mini_dist
from mini_dist import check
from mini_dist.course import learner
from mini_dist.course.lesson import predict, reveal


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Set up a separate home and a kernel in which a person has lesson 07 open."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JPY_SESSION_NAME", "/course/notebooks/07_zero.ipynb")
    for name in ("CI", "MINI_DIST_STRICT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(learner, "AUTOMATIC", {"CI"})  # pytest always sets the other variable.
    monkeypatch.setattr(learner, "started_by_a_notebook", lambda: False)
    return tmp_path


def kept(home):
    return json.loads(file_in(home).read_text())["lessons"]


def file_in(home):
    return home / learner.FOLDER / learner.FILE


def judged(monkeypatch, state):
    monkeypatch.setattr(check.Exercise, "judge", lambda self, fn: check.Verdict(self.name, state))
    check.sharded_step(lambda: None)


def test_a_guess_is_kept_with_its_lesson(home):
    predict("bytes", 3)
    predict("factor", "3/19")
    predict("later")
    assert kept(home)["07_zero"]["guesses"] == {"bytes": 3, "factor": "3/19"}


@pytest.mark.parametrize("where", ["work/07_zero.ipynb", "work/07_zero-new.ipynb"])
def test_the_working_copy_and_a_new_version_beside_it_count_as_the_lesson(home, monkeypatch, where):
    monkeypatch.setenv("JPY_SESSION_NAME", f"/course/{where}")
    predict("bytes", 3)
    assert list(kept(home)) == ["07_zero"]


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
    assert list(home.iterdir()) == []


def test_tests_and_nbval_leave_none(home, monkeypatch):
    monkeypatch.setattr(learner, "AUTOMATIC", AUTOMATIC)
    predict("bytes", 3)
    assert list(home.iterdir()) == []


def test_papermill_leaves_none(home, monkeypatch):
    """Papermill starts the kernel itself and gives it no session name."""
    monkeypatch.delenv("JPY_SESSION_NAME")
    predict("bytes", 3)
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    "path",
    ["", "/course/notebooks/labs/plan_sweep.ipynb", "/x/07_mine.ipynb", "/x/07_zero-Copy1.ipynb"],
)
def test_what_is_no_lesson_leaves_none(home, monkeypatch, path):
    monkeypatch.setenv("JPY_SESSION_NAME", path)
    predict("bytes", 3)
    assert list(home.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="needs /proc")
def test_a_kernel_that_a_notebook_has_started_is_told_by_its_parent(tmp_path):
    inner = "from mini_dist.course import learner; print(learner.started_by_a_notebook())"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    environment = {**os.environ, "JPY_SESSION_NAME": "/course/07_zero.ipynb"}
    found = subprocess.run(
        [sys.executable, "-c", outer], env=environment, capture_output=True, text=True
    )
    assert found.stdout.strip() == "True" and learner.started_by_a_notebook() is False


def test_to_begin_again_forgets_nothing(home):
    predict("bytes", 3)
    mini_dist.progress(keep=True)
    assert list(kept(home)) == ["07_zero"]


def test_off_forgets_and_keeps_nothing(home):
    predict("bytes", 3)
    assert "Nothing is kept" in repr(mini_dist.progress(keep=False))
    predict("bytes", 3)
    assert kept(home) == {}
    mini_dist.progress(keep=True)
    predict("bytes", 3)
    assert list(kept(home)) == ["07_zero"]


# ---- a file that is not as it should be ----------------------------------------------------------

GOOD = {"opened": "2026-11-01", "guesses": {"x": 1}, "exercises": {"ring_step": True}}


def put(home, text):
    file_in(home).parent.mkdir(exist_ok=True)
    file_in(home).write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "null", '{"lessons": 3}', '{"lessons": [1]}', "[" * 100_000, b"\xff\xfe{"]
    + [json.dumps({"lessons": {"07_zero": about}}) for about in (None, [], "x", 3, {})]
    + [
        json.dumps({"lessons": {"07_zero": {**GOOD, field: odd}}})
        for field in GOOD
        for odd in (None, 3, [], "" if field != "opened" else {})
    ]
    + [json.dumps({"lessons": {}, "off": "no"})],
)
def test_a_file_that_cannot_be_read_is_kept_aside_and_a_new_one_begun(home, text, capsys):
    put(home, text)
    before = file_in(home).read_bytes()
    assert "Part of the file cannot be read" in repr(mini_dist.progress())
    assert mini_dist.progress()._repr_html_() and file_in(home).read_bytes() == before
    predict("bytes", 3)
    assert kept(home)["07_zero"]["guesses"] == {"bytes": 3}
    (aside,) = (home / learner.FOLDER).glob("*.unreadable-1")
    assert aside.read_bytes() == before and aside.name in capsys.readouterr().err
    assert "cannot be read" not in repr(mini_dist.progress())
    mini_dist.progress(keep=False)
    assert not aside.exists()


def test_what_can_be_read_of_a_damaged_file_is_kept(home, monkeypatch):
    text = json.dumps({"lessons": {"03_ring_and_collectives": GOOD, "05_x": 1}, "newer": [1]})
    put(home, text)
    judged(monkeypatch, "right")
    assert [*kept(home)] == ["03_ring_and_collectives", "07_zero"]
    assert json.loads(file_in(home).read_text())["newer"] == [1]  # a newer version's field
    put(home, text)
    predict("bytes", 3)
    assert len([*(home / learner.FOLDER).glob("*.unreadable-*")]) == 2


def test_a_folder_in_the_file_s_place_stops_nobody(home):
    file_in(home).mkdir(parents=True)
    predict("bytes", 3)
    assert list(kept(home)) == ["07_zero"]


def test_the_file_of_an_earlier_version_is_taken_over(home):
    (home / learner.FORMER).write_text(json.dumps({"lessons": {"03_ring_and_collectives": GOOD}}))
    assert sum(row.guesses for row in mini_dist.progress().rows) == 1
    predict("bytes", 3)
    assert [*kept(home)] == ["03_ring_and_collectives", "07_zero"]
    assert not (home / learner.FORMER).exists()


# ---- several kernels, other users ----------------------------------------------------------------


def test_two_kernels_that_note_at_the_same_time_keep_all(home):
    code = """if True:
        import sys
        from mini_dist.course import learner
        learner.AUTOMATIC = set()
        learner.started_by_a_notebook = lambda: False
        for n in range(100):
            learner.note(guess=(f"{sys.argv[1]} {n}", n))
    """
    lessons = ("07_zero", "07_zero", "09_tensor_parallel")
    kernels = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(kernel)],
            env={**os.environ, "JPY_SESSION_NAME": f"/course/work/{lesson}.ipynb"},
        )
        for kernel, lesson in enumerate(lessons)
    ]
    assert [kernel.wait(60) for kernel in kernels] == [0, 0, 0]
    guesses = {lesson: len(about["guesses"]) for lesson, about in kept(home).items()}
    assert guesses == {"07_zero": 200, "09_tensor_parallel": 100}
    names = sorted(path.name for path in (home / learner.FOLDER).iterdir())
    assert names == ["lock", learner.FILE]


def test_a_kernel_that_is_stopped_while_it_notes_does_not_stop_the_others(home, monkeypatch):
    monkeypatch.setattr(learner, "PATIENCE", 0.05)
    predict("bytes", 3)
    with learner.locked(home / learner.FOLDER / "lock"):
        predict("factor", 4)
    assert kept(home)["07_zero"]["guesses"] == {"bytes": 3}


def test_nobody_else_may_read_what_is_kept(home):
    folder = home / learner.FOLDER
    folder.mkdir(mode=0o755)
    former = os.umask(0)
    try:
        predict("bytes", 3)
    finally:
        os.umask(former)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.iterdir()]}
    assert modes == {learner.FOLDER: 0o700, learner.FILE: 0o600, "lock": 0o600}


def test_a_home_that_cannot_be_written_to_stops_nobody(home, monkeypatch):
    monkeypatch.setenv("HOME", str(home / "nowhere"))
    predict("bytes", 3)
    assert "0 of" in repr(mini_dist.progress())


def test_on_a_page_it_is_a_table_with_a_bar_for_each_lesson(home):
    predict("bytes", 3)
    page = mini_dist.progress()._repr_html_()
    assert page.count("<progress ") == len(mini_dist.progress().rows) and "07_zero" in page


def test_a_lesson_s_name_leads_to_its_notebook_from_the_one_that_is_open(home, monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "/course/work/00_start_here.ipynb")
    predict("bytes", 3)
    page = mini_dist.progress()._repr_html_()
    assert "<a href='07_zero.ipynb'>07_zero</a>" in page
    monkeypatch.setenv("JPY_SESSION_NAME", "/course/work/labs/zero_memory.ipynb")
    assert "<a href='../07_zero.ipynb'>" in mini_dist.progress()._repr_html_()
    monkeypatch.delenv("JPY_SESSION_NAME")
    assert "<a href" not in mini_dist.progress()._repr_html_()


def test_a_lesson_without_exercises_is_read_and_not_0_of_0(home, monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "/course/work/00_start_here.ipynb")
    predict("bytes", 3)
    page = mini_dist.progress()._repr_html_()
    assert "0 of 0" not in page and page.count(">read<") == 1
