"""The teacher gets points, states and notes on similar answers, and nothing that runs."""

import csv
import re
import unicodedata

import pytest

from mini_dist.course.grade import report
from mini_dist.course.grade.grading import Graded, Notebook, Record
from mini_dist.course.grade.printable import controls, printable
from mini_dist.course.grade.sandbox import COURSE
from mini_dist.course.grade.submissions import lessons

ZERO = [each for each in lessons(COURSE / "notebooks") if each.stem == "07_zero"]
EVIL = "<script>alert(1)</script>"


def record(learner, **states):
    exercises = {name: Graded(state, code=code) for name, (state, code) in states.items()}
    notebooks = [Notebook("x.ipynb", "07_zero", exercises=exercises)]
    return Record(learner, "", notebooks)


def rows(tmp_path, records, same=None):
    report.write_csv(tmp_path / "grades.csv", records, ZERO, same or {})
    return list(csv.DictReader((tmp_path / "grades.csv").open(encoding="utf-8-sig")))


def test_only_right_answers_count_of_all_that_the_lesson_asks(tmp_path):
    ada = record("ada", sharded_step=("right", "a"), backward_in_units=("wrong", "b"))
    (row,) = rows(tmp_path, [ada])
    assert (row["right"], row["of"]) == ("1", "3")
    assert row["07 backward_in_units"] == "wrong" and row["07 forward_on_demand"] == ""


def test_of_two_notebooks_of_a_lesson_the_better_counts():
    ada = record("ada", sharded_step=("wrong", ""))
    ada.notebooks += record("ada", sharded_step=("right", "")).notebooks
    assert ada.best("sharded_step").state == "right"


def test_alike_are_those_with_the_same_code_and_who_has_the_printed_one():
    class_ = [record(who, sharded_step=("right", code)) for who, code in zip("abcd", "xxyz")]
    assert report.alike(class_, {"sharded_step": "z"}) == {
        ("a", "sharded_step"): ["b"],
        ("b", "sharded_step"): ["a"],
        ("d", "sharded_step"): ["the printed solution"],
    }


def test_what_a_learner_wrote_is_text_on_the_page():
    ada = Record(EVIL, "", [], [EVIL])
    graded = Graded("wrong", [[EVIL] * 4], EVIL, EVIL, EVIL)
    ada.notebooks = [Notebook(EVIL, "07_zero", EVIL, exercises={"sharded_step": graded})]
    page = report.page(ada, ZERO)
    assert "<script" not in page and page.count("&lt;script&gt;") == 12
    class_ = report.overview([ada], ZERO, {EVIL: "script"}, {(EVIL, "sharded_step"): [EVIL]})
    assert "<script" not in class_


def test_a_page_that_is_handed_out_names_nobody_else(tmp_path):
    class_ = [record(who, sharded_step=("right", "x")) for who in ("ada", "bela")]
    same = report.alike(class_, {"sharded_step": "x"})
    page = report.page(class_[0], ZERO)
    assert "bela" not in page and "printed" not in page
    told = report.overview(class_, ZERO, {"ada": "a", "bela": "b"}, same)
    assert "&#9888; the same code, but for names: sharded_step: bela, the printed solution" in told
    assert rows(tmp_path, class_, same)[0]["alike"] == "sharded_step: bela, the printed solution"


def test_the_page_of_the_class_has_a_column_for_each_exercise_and_marks_what_is_odd():
    ada = record("ada", sharded_step=("right", "a"), backward_in_units=("wrong", "b"))
    bela = Record("bela", "", problems=["x.zip: the zip cannot be read"])
    told = report.overview([ada, bela], ZERO, {"ada": "a", "bela": "b"}, {})
    for name in ZERO[0].functions:
        assert f"<th>07 {name}" in told
    states = "<td class=right>right</td><td class=wrong>wrong</td><td class=note></td>"
    assert states in told
    assert told.count("&#9888;") == 1 and "&#9888; x.zip: the zip cannot be read" in told


def test_a_page_links_the_notebook_that_ran_and_none_that_is_not_there():
    ada = record("ada", sharded_step=("not reached", ""))
    assert "href" not in report.page(ada, ZERO)
    ada.notebooks[0].executed = "1-07_zero.ipynb"
    assert "href='1-07_zero.ipynb'" in report.page(ada, ZERO)


def test_no_cell_of_the_csv_is_a_formula(tmp_path):
    ada = Record("=cmd()", "", problems=["+1"])
    (row,) = rows(tmp_path, [ada])
    assert row["learner"] == "'=cmd()" and row["notes"] == "'+1"


@pytest.mark.parametrize(
    "name",
    [
        "=cmd",
        "\n=cmd",
        "＝cmd",
        "\t+1",
        " =cmd",
        "\r\n＠x",
        "－1",
        "﹢1",
        "\u2212 1",
        "@x",
        "-2+3",
        "a;=cmd",
    ],
)
def test_no_name_is_a_formula_or_more_than_one_line(name, tmp_path):
    (row,) = rows(tmp_path, [Record(name, "", problems=["all right", name])])
    for told in (row["learner"], row["notes"]):
        assert "\n" not in told and "\r" not in told
        for cell in re.split("[;,|]", told):
            plain = unicodedata.normalize("NFKC", cell.strip())
            assert plain[:1] not in ("=", "+", "-", "@", "\u2212"), told


CONTROLS = {
    "\x1b[2J": r"\x1b[2J",
    "a\u202eb": r"a\u202eb",
    "a\nb": r"a\nb",
    "\u2028": r"\u2028",
    "\x9b1m": r"\x9b1m",
    "\ud800": r"\ud800",
    "\u2066\u200f": r"\u2066\u200f",
    "張偉 é": "張偉 é",
    "می\u200cخواهم": "می\u200cخواهم",
}


@pytest.mark.parametrize("name", CONTROLS, ids=ascii)
def test_a_name_controls_neither_terminal_nor_page_nor_table(name, tmp_path):
    assert printable(name) == CONTROLS[name]
    ada = Record(name, "", problems=[name])
    (row,) = rows(tmp_path, [ada])
    pages = report.page(ada, ZERO) + report.overview([ada], ZERO, {name: "x"}, {})
    assert row["learner"] == CONTROLS[name] and CONTROLS[name] in pages
    told = row["learner"] + row["notes"] + pages.replace("\n", "")
    assert not any(map(controls, told))


def test_no_letter_at_all_passes_that_controls_something(tmp_path):
    letters = map(chr, [*range(0x3100), *range(0xD700, 0x10000), *range(0xE0000, 0xE0200)])
    assert not any(map(controls, printable("".join(letters))))


def test_learners_of_one_plain_name_get_folders_of_their_own():
    taken = {}
    names = [report.folder_of(name, taken) for name in ("a b", "a/b", "A b", "..", "张伟")]
    assert names == ["a_b", "a_b-2", "A_b-3", "learner", "张伟"]


def test_progress_is_merged_where_it_was_handed_in(tmp_path):
    ada = Record("ada", "", progress={"lessons": {"07_zero": {"guesses": {"x": 1, "y": 2}}}})
    (row,) = rows(tmp_path, [ada])
    assert (row["guesses"], row["lessons opened"]) == ("2", "07")
    for odd in ({"lessons": 3}, {"lessons": {"07": 3}}, {"lessons": {"07": {"guesses": 5}}}):
        rows(tmp_path, [Record("ada", "", progress=odd)])


def test_a_record_comes_back_as_it_was_written_and_half_a_one_not_at_all(tmp_path):
    ada = record("ada", sharded_step=("right", "x"))
    ada.write(tmp_path / "ada/grade.json")
    assert Record.read(tmp_path / "ada/grade.json") == ada
    (tmp_path / "half.json").write_text((tmp_path / "ada/grade.json").read_text()[:100])
    assert Record.read(tmp_path / "half.json") is None


@pytest.mark.parametrize("learner", ["grades.csv", "index.html", "INDEX.html", "x" * 300])
def test_no_learners_folder_stands_in_the_way_of_the_grades(learner):
    name = report.folder_of(learner, {})
    assert name.lower() not in ("grades.csv", "index.html") and len(name) < 100
