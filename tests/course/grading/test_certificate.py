"""A certificate repeats grades.csv for learners who have enough exercises right."""

import csv

import pytest

from mini_dist.course.grade import certificate, report
from mini_dist.course.grade.sandbox import COURSE
from mini_dist.course.grade.submissions import lessons

from .test_report import EVIL, record

ZERO = [each for each in lessons(COURSE / "notebooks") if each.stem == "07_zero"]


@pytest.fixture
def grades(tmp_path):
    all_right = dict.fromkeys(
        ("sharded_step", "backward_in_units", "forward_on_demand"), ("right", "")
    )
    class_ = [
        record("ada", **all_right),
        record("Grace Hopper", sharded_step=("right", ""), backward_in_units=("wrong", "")),
        record(EVIL, **all_right),
    ]
    report.write_csv(tmp_path / "grades.csv", class_, ZERO, {})
    return tmp_path / "grades.csv"


def printed(grades, *arguments):
    assert certificate.main([str(grades), *arguments]) == 0
    return grades.with_name("certificates.html").read_text(encoding="utf-8")


def test_who_has_enough_right_gets_a_page_that_says_what_is_right(grades, capsys):
    page = printed(grades, "--course", "Half a day", "--teacher", "C. Babbage")
    assert page.count("<section>") == 2 and "Grace Hopper" not in page
    assert "has 3 of 3 exercises right" in page and "<code>07 sharded_step</code>" in page
    assert "<h1>Half a day</h1>" in page and "C. Babbage" in page
    assert "2 of 3 learners" in capsys.readouterr().out


def test_the_share_that_is_enough_is_the_teacher_s_choice(grades):
    page = printed(grades, "--share", "0.3")
    assert page.count("<section>") == 3 and "has 1 of 3 exercises right" in page


def test_a_name_is_text(grades):
    assert "<script" not in printed(grades)


def test_a_name_that_the_teacher_corrects_in_the_csv_is_printed(grades):
    rows = list(csv.reader(grades.open(encoding="utf-8-sig")))
    rows[1][0] = "Ada Lovelace"
    with grades.open("w", newline="", encoding="utf-8") as file:  # as a spreadsheet saves it
        csv.writer(file).writerows(rows)
    assert "<h2>Ada Lovelace</h2>" in printed(grades)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name,points\nada,3\n", "is not the grades.csv"),
        ("learner,right,of,alike\nada,1,many,\n", "of ada: 'many' is no number of exercises"),
        (None, "No such file"),
    ],
)
def test_another_file_is_refused_in_a_sentence(tmp_path, capsys, text, said):
    path = tmp_path / "grades.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit):
        certificate.main([str(path)])
    assert said in capsys.readouterr().err
