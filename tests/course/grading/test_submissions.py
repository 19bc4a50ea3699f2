"""Submissions are found and read, whatever learners call their files."""

import io
import json
import os
import re
import time
import zipfile

import nbformat
import pytest

from mini_dist.course.grade import submissions
from mini_dist.course.grade.alike import normalised
from mini_dist.course.grade.sandbox import COURSE
from mini_dist.course.grade.submissions import find, lessons, read_cells, which_lesson, written
from tests.course.grading.classroom import CLASS, hand_in, lesson, only, solved, text_of, zipped

KNOWN = lessons(COURSE / "notebooks")
BY_NUMBER = {each.stem[:2]: each for each in KNOWN}


def test_each_entry_is_a_learner_a_notebook_a_folder_or_a_zip(tmp_path):
    names = ["bela.ipynb", "张伟.zip", "his own way", "nothing"]
    hand_in(names, tmp_path)
    found = {each.learner: each for each in find(tmp_path)}
    assert {n: len(s.notebooks) for n, s in found.items()} == {
        "bela": 1,
        "张伟": 1,
        "his own way": 1,
        "nothing": 0,
    }


def test_a_zip_of_the_whole_class_is_read_like_a_folder(tmp_path):
    files = {f"{who}/x.ipynb": lesson("02") for who in ("ada", "bela")}
    (tmp_path / "all.zip").write_bytes(zipped(files))
    assert [(s.learner, len(s.notebooks)) for s in find(tmp_path / "all.zip")] == [
        ("ada", 1),
        ("bela", 1),
    ]


def test_an_expression_finds_the_learner_in_flat_names(tmp_path):
    for name in ("ada_1_02.ipynb", "ada_2_03.ipynb", "bela_7_02.ipynb"):
        (tmp_path / name).write_text(text_of(lesson("02")))
    found = find(tmp_path, r"^([a-z]+)_")
    assert {s.learner: len(s.notebooks) for s in found} == {"ada": 2, "bela": 1}


@pytest.mark.parametrize(
    "name", [n for n, learner in CLASS.items() if ".zip" in n or ".ipynb" in n]
)
def test_what_cannot_be_read_is_a_sentence_and_no_error(tmp_path, name):
    hand_in([name], tmp_path)
    (submission,) = find(tmp_path)
    for text in submission.notebooks.values():
        try:
            which_lesson(read_cells(text), KNOWN)
        except ValueError as error:
            assert "it is no notebook" in str(error)
    assert submission.notebooks or submission.problems or name == "out of the zip.zip"


@pytest.mark.parametrize("path", ["../x.ipynb", "/etc/x.ipynb", "a/../../x.ipynb", "..\\x.ipynb"])
def test_no_member_of_a_zip_leads_out_of_it(tmp_path, path):
    (tmp_path / "a.zip").write_bytes(zipped({path: lesson("02"), "in.ipynb": lesson("02")}))
    (submission,) = find(tmp_path)
    assert list(submission.notebooks) == ["in.ipynb"]


def test_a_zip_that_unpacks_to_more_than_there_is_room_for_is_read_no_further(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(submissions, "MOST_BYTES", 1 << 20)
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.ipynb", bytes(50 << 20))
    (tmp_path / "a.zip").write_bytes(data.getvalue())
    (submission,) = find(tmp_path)
    assert submission.notebooks == {} and "holds too much" in submission.problems[0]


def damaged(name):
    data = bytearray(zipped({name: os.urandom(500).hex().encode()}))
    at = data.index(name.encode()) + len(name) + 20  # inside the stored data
    data[at] ^= 1
    return bytes(data)


@pytest.mark.parametrize("name", ["in.zip", "a.ipynb"])
def test_a_damaged_zip_is_a_sentence_and_the_others_are_read(tmp_path, name):
    (tmp_path / "ada.zip").write_bytes(damaged(name))
    (tmp_path / "bela.ipynb").write_text(text_of(lesson("02")))
    ada, bela = find(tmp_path)
    assert f"{name}: cannot be read (Bad CRC" in ada.problems[0] and bela.notebooks


def test_damage_that_zlib_finds_is_a_sentence(tmp_path):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.ipynb", os.urandom(2000).hex())
    broken = bytearray(data.getvalue())
    broken[60:90] = b"\xff" * 30
    (tmp_path / "ada.zip").write_bytes(broken)
    (ada,) = find(tmp_path)
    assert "a.ipynb: cannot be read (Error" in ada.problems[0]


def test_zips_in_a_zip_share_one_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(submissions, "MOST_IN_ALL", 10 << 20)
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.py", b" " * (4 << 20))
    (tmp_path / "ada.zip").write_bytes(zipped({f"{n}.zip": inner.getvalue() for n in range(9)}))
    (ada,) = find(tmp_path)
    assert len(ada.files) == 2 and ["holds too much" in told for told in ada.problems] == [True]


def test_in_a_zip_of_the_class_nobody_takes_anothers_room(tmp_path, monkeypatch):
    monkeypatch.setattr(submissions, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(submissions, "MOST_FILES", 20)
    files = {f"ada/{n}.py": b"" for n in range(30)} | {"bela/big.py": bytes(2 << 20)}
    (tmp_path / "all.zip").write_bytes(zipped({**files, "cem/a.ipynb": lesson("02")}))
    ada, bela, cem = find(tmp_path / "all.zip")
    assert len(ada.files) == 20 and "too much" in bela.problems[0] and cem.notebooks


def test_of_a_folder_no_more_is_read_than_there_is_room_for(tmp_path, monkeypatch):
    monkeypatch.setattr(submissions.Submission, "__init__", of_little_room)
    (tmp_path / "ada").mkdir()
    for n in range(5):
        (tmp_path / "ada" / f"{n}.py").write_bytes(b" " * 400)
    (ada,) = find(tmp_path)
    assert len(ada.files) == 2 and ["reading ended" in told for told in ada.problems] == [True]


def of_little_room(self, learner):
    self.learner, self.room = learner, 1000
    self.notebooks, self.files, self.progress, self.problems = {}, {}, {}, []


def test_what_has_no_end_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "a.ipynb")
    (submission,) = find(tmp_path)
    assert "is no file" in submission.problems[0]


def test_deep_json_is_a_sentence(tmp_path):
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada/mini_dist-progress.json").write_text("[" * 200_000)
    (ada,) = find(tmp_path)
    assert "cannot be read" in ada.problems[0]


def test_what_is_inside_of_an_entry_names_nobody_else(tmp_path):
    """The learner chooses the names of its files."""
    (tmp_path / "mallory_1.zip").write_bytes(zipped({"ada_2.ipynb": lesson("02")}))
    (tmp_path / "ada_2.ipynb").write_text(text_of(lesson("02")))
    found = {s.learner: len(s.notebooks) for s in find(tmp_path, r"([a-z]+)_\d")}
    assert found == {"ada": 1, "mallory": 1}


def test_two_notebooks_of_one_name_are_both_kept(tmp_path):
    (tmp_path / "x_ada.zip").write_bytes(zipped({"a.ipynb": "1"}))
    (tmp_path / "y_ada.zip").write_bytes(zipped({"a.ipynb": "2"}))
    (ada,) = find(tmp_path, "ada")
    assert sorted(ada.notebooks.values()) == ["1", "2"]


DEEP = ["x = " + "-" * 20_000 + "1", "x = " + "+".join(["1"] * 700), "x = " + "(" * 500]


@pytest.mark.parametrize("source", DEEP, ids=["minus", "plus", "brackets"])
def test_code_too_deep_to_read_is_like_nothing(source):
    assert submissions.definitions([f"{source} # f"], {"f"}) == [] and normalised(source) == ""


def test_a_function_that_is_written_many_times_is_read_once():
    """40,000 definitions in a cell took the grader an hour, because reading had no limit."""
    cells = [f"def f(): {n}\n" * 16_000 for n in range(20)]
    began = time.monotonic()
    assert submissions.definitions(cells, {"f"})[0] == "def f(): 0"
    assert time.monotonic() - began < 20


def test_old_notebooks_and_odd_ones_are_told_in_a_sentence():
    old = {"nbformat": 3, "worksheets": [{"cells": []}]}
    for found, told in {
        json.dumps(old): "it is in nbformat 3, and nbformat 4 is read",
        "{}": "it is no notebook (it has no 'cells')",
        '{"cells": [{}]}': "it is no notebook (it has no 'cell_type')",
        "{": "it is no notebook (it is no JSON",
        "[" * 100_000: "it is no notebook (RecursionError",
        '{"cells": 3}': "it is no notebook (TypeError",
    }.items():
        with pytest.raises(ValueError, match=re.escape(told)):
            read_cells(found)


def test_links_are_not_followed(tmp_path):
    os.symlink("/etc/passwd", tmp_path / "a.ipynb")
    (submission,) = find(tmp_path)
    assert submission.notebooks == {} and "is a link" in submission.problems[0]


@pytest.mark.parametrize("name", ["a.ipynb", "a.zip", "mini_dist-progress.json"])
def test_hard_links_are_not_read(tmp_path, name):
    (tmp_path / "secret").write_bytes(zipped({"a.ipynb": "{}"}))
    (tmp_path / "in/ada").mkdir(parents=True)
    os.link(tmp_path / "secret", tmp_path / "in/ada" / name)
    (submission,) = find(tmp_path / "in")
    assert submission.notebooks == {} and submission.progress == {}
    assert "is a hard link, to a file that has 2 names" in submission.problems[0]


@pytest.mark.parametrize("number", ["02", "03", "07"])
def test_a_lesson_is_found_by_its_cells(number):
    cells = read_cells(text_of(lesson(number, solved)))
    assert which_lesson(cells, KNOWN).stem.startswith(number)


@pytest.mark.parametrize("number", ["02", "03", "07"])
def test_a_lesson_is_found_without_ids_by_its_title_or_its_exercises(number):
    notebook = lesson(number, solved)
    for cell in notebook.cells:
        cell.pop("id")
    cells = read_cells(text_of(notebook))
    assert which_lesson(cells, KNOWN).stem.startswith(number)
    assert which_lesson(cells[1:], KNOWN).stem.startswith(number)


def test_a_notebook_of_another_course_is_none():
    cells = [nbformat.v4.new_code_cell("print(1)"), nbformat.v4.new_markdown_cell("# Cooking")]
    assert which_lesson(read_cells(text_of(nbformat.v4.new_notebook(cells=cells))), KNOWN) is None


def stands(number, exercise, change):
    return written(read_cells(text_of(lesson(number, change))), BY_NUMBER[number], exercise)


def test_what_stands_in_a_notebook_is_told_apart():
    name = "sharded_step"
    assert stands("07", name, lambda _, cell: cell).as_shipped
    whole = stands("07", name, solved)
    assert whole.source.startswith("def sharded_step(") and not (whole.note or whole.as_shipped)
    assert stands("07", name, only(name, lambda cell: None)).missing
    gone = stands("07", name, only(name, lambda cell: cell.partition("check.")[0]))
    assert gone.note == "the call of check.sharded_step was removed" and not gone.missing
    edited = only(name, lambda cell: cell.replace("(sharded_step)", "(lambda *a: 1)"))
    assert stands("07", name, edited).note == "the call of check.sharded_step was edited"


# ---- alike ---------------------------------------------------------------------------------------

ONE = '''
def mean(x, group):
    """The mean."""
    total = all_reduce(x, group)  # first the sum
    return total / group.size()
'''


@pytest.mark.parametrize(
    "old, new",
    [
        ("total", "s"),
        ("mean(x, group)", "average(x: Tensor, group) -> Tensor"),
        ("  # first the sum", ""),
        ('    """The mean."""\n', ""),
        ("(x, group)", "(x,\n        group)"),
        ("def", "import torch\n\n\ndef"),
    ],
)
def test_other_names_comments_and_layout_say_the_same(old, new):
    assert normalised(ONE.replace(old, new)) == normalised(ONE)


@pytest.mark.parametrize(
    "old, new",
    [("all_reduce", "ring_all_reduce"), ("/", "*"), ("size", "rank"), (" / ", " / 1 / ")],
)
def test_another_program_says_something_else(old, new):
    assert normalised(ONE.replace(old, new)) != normalised(ONE)


def test_what_is_no_code_is_like_nothing():
    assert normalised("def") == ""
