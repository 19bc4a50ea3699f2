"""TEACHING.md, lesson by lesson: what a tool generates from lessons and tests is up to date."""

import re

import pytest

from tools import teaching
from tools.minutes import minutes_of

ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([\d; ]+) \| ([\d; ]+) \|$", re.M)
ROUTE = re.compile(r"^\| [^|]+ \| ([^|]*\b\d\d\b[^|]*) \| ([^|]+) \| ([^|]+) \|$", re.M)
FROM_TO = re.compile(r"\b(\d\d)(?:-(\d\d))?\b")


def paths():
    """Return the rows of the table of paths: (audience, lessons, minutes, exercises)."""
    section = teaching.TEACHING.read_text(encoding="utf-8").partition("## Paths")[2]
    return ROW.findall(section.partition("\n## ")[0])


def numbers_in(lessons: str) -> list[str]:
    """Return the lessons that count, without those shown only as a demonstration."""
    told = lessons.partition(", and as a demonstration")[0]
    found = [(int(first), int(last or first)) for first, last in FROM_TO.findall(told)]
    return [f"{number:02}" for first, last in found for number in range(first, last + 1)]


def in_hours(minutes: int) -> str:
    """Return 2 h, 45 min or 4 h 20 min."""
    hours, rest = divmod(minutes, 60)
    return " ".join([f"{hours} h"] * (hours > 0) + [f"{rest} min"] * (rest > 0))


@pytest.mark.parametrize("row", paths(), ids=lambda row: row[0])
def test_a_path_takes_the_minutes_of_its_lessons(row):
    of = {path.stem[:2]: minutes_of(path) for path in teaching.lessons()}
    _, lessons, core, exercises = row
    days = [numbers_in(day) for day in lessons.split(";")]
    assert all(days)
    for stated, name in ((core, "core"), (exercises, "exercises")):
        sums = [sum(of[number][name] for number in day) for day in days]
        assert [int(minutes) for minutes in stated.split(";")] == sums, name


def test_the_routes_of_the_readme_take_the_hours_of_their_lessons():
    of = {path.stem[:2]: minutes_of(path) for path in teaching.lessons()}
    readme = (teaching.ROOT / "README.md").read_text(encoding="utf-8")
    routes = ROUTE.findall(readme.partition("## Routes")[2].partition("\n## ")[0])
    assert len(routes) >= 5
    for lessons, *stated in routes:
        for hours, name in zip(stated, ("core", "exercises"), strict=True):
            total = sum(of[number][name] for number in numbers_in(lessons))
            assert hours == in_hours(total), (lessons, name)


def test_every_lesson_is_on_one_path_of_its_own_or_in_the_week():
    """Rows are unique, cover every lesson, use the right titles, and name labs that exist."""
    titles = {path.stem[:2]: teaching.title(path) for path in teaching.lessons()}
    rows = paths()
    assert len({who for who, *_ in rows}) == len({lessons for _, lessons, *_ in rows}) == len(rows)
    assert {number for _, lessons, *_ in rows for number in numbers_in(lessons)} == set(titles)
    for _, lessons, *_ in rows:
        for number in re.findall(r"(\d\d) [A-Z]", lessons):
            assert titles[number] in lessons
        for lab in re.findall(r"lab (\w+)", lessons):
            assert (teaching.ROOT / f"lessons/labs/{lab}.md").is_file()


def test_minutes_cells_and_exercises_are_those_of_the_lessons():
    text = teaching.TEACHING.read_text(encoding="utf-8")
    assert teaching.teaching(text) == text, "run python tools/teaching.py"


def test_the_wrong_answers_are_those_of_the_tests():
    text = teaching.WRONG.read_text(encoding="utf-8")
    assert teaching.all_wrong_answers() == text, "run python tools/teaching.py"


def test_every_exercise_has_wrong_answers_and_a_place_in_its_lesson():
    from mini_dist import check

    wrong = teaching.WRONG.read_text(encoding="utf-8")
    found = re.findall(r"^### (\w+)$", wrong, flags=re.M)
    assert set(found) == set(check.exercises())
    lessons = teaching.TEACHING.read_text(encoding="utf-8").partition(teaching.BEGIN)[2]
    assert all(f"`{name}`" in lessons for name in check.exercises())


def test_every_link_to_the_wrong_answers_leads_to_a_heading():
    wrong = teaching.WRONG.read_text(encoding="utf-8")
    for lesson in teaching.lessons():
        link = f"docs/wrong_answers.md#{teaching.anchor(lesson)}"
        if link in teaching.TEACHING.read_text(encoding="utf-8"):
            assert f"\n## {teaching.title(lesson)}\n" in wrong


def test_what_a_teacher_has_written_is_left_as_it_is():
    head = f"# Teaching\n\n{teaching.BEGIN}\nHow.\n"
    old = f"{head}\n### 07 Another title\n\nOld facts.\n\n**Ask:** Why?\n"
    new = teaching.teaching(old)
    assert new.startswith(head)
    assert "**Ask:** Why?" in new.partition("### 07 ZeRO")[2].partition("### 08")[0]
    assert "Old facts" not in new and teaching.teaching(new) == new


def test_numbers_in_a_row_are_written_as_one():
    assert teaching.numbers([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"
