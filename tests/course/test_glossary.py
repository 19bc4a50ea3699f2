"""docs/glossary.md has every word that a lesson lists, with the same translation."""

import re
from pathlib import Path

import pytest

from tools import build_notebooks as tool

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| word", "| ---"))
]
WORDS = {word.strip(): row for row in ROWS for word in row[0].split(",")}


def words_of(lesson):
    """Return (words, translation) pairs from **Words.** rank (进程编号) · PCIe. All of them ..."""
    text = lesson.read_text(encoding="utf-8")
    line = re.search(r"^\*\*Words\.\*\* (.+?)\. All of them", text, re.MULTILINE)
    assert line or "**Words" not in text, "expected '**Words.** word (词) · ... . All of them ...'"
    items = line.group(1).split(" · ") if line else []
    return [re.fullmatch(r"([^()]+?)(?: \((.+)\))?", item).groups("") for item in items]


@pytest.mark.parametrize("lesson", tool.lessons(ROOT), ids=lambda path: path.stem)
def test_the_words_of_a_lesson_are_in_the_glossary(lesson):
    for words, translation in words_of(lesson):
        for word in words.split(","):
            assert word.strip() in WORDS, f"{word.strip()!r} is not in docs/glossary.md"
            known = re.findall(r"[^()、]+", WORDS[word.strip()][1])
            for each in filter(None, translation.split("、")):  # A lesson may use a synonym.
                assert each in [one.strip() for one in known], f"{word.strip()}: {each}, {known}"


def test_every_entry_has_a_word_a_translation_a_meaning_and_a_lesson():
    for row in ROWS:
        assert len(row) == 4 and all(row), row
        assert re.search(r"\b\d\d\b", row[3]), row
        assert re.search(r"[\u4e00-\u9fff]", row[1]), f"{row[0]}: no translation"


def test_no_word_is_explained_twice():
    listed = [word.strip() for row in ROWS for word in row[0].split(",")]
    assert sorted(listed) == sorted(set(listed))


LESSONS = {path.name[:2]: path for path in tool.lessons(ROOT) if path.name[:2].isdigit()}
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])


@each_row
def test_a_lesson_uses_the_words_that_the_glossary_gives_it(row):
    variants = [word.strip().rstrip("s") for word in row[0].split(",")]
    for number in set(re.findall(r"\b\d\d\b", row[3])) & LESSONS.keys():
        text = LESSONS[number].read_text(encoding="utf-8")
        words = re.sub(r"[_\s]+", " ", text.lower())  # `world_size` and "world size" are one word
        used = [w for w in variants if re.search(rf"(?<!\w){re.escape(w.lower())}", words)]
        assert used, f"lesson {number} uses none of {variants}"


def test_links_of_the_glossary_lead_to_notebooks():
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert target.endswith(".ipynb") and (ROOT / "docs" / target).exists(), target
