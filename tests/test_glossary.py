"""docs/glossary.md: every word that a lesson lists is in it, with the same translation."""

import re
from pathlib import Path

import pytest

from tools import build_notebooks as tool

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| word", "| ---"))
]
WORDS = {word.strip(): row for row in ROWS for word in row[0].split(",")}


def words_of(lesson):
    """(words, translation) of its line **Words.** rank (进程编号) · PCIe. All of them ..."""
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
            known = WORDS[word.strip()][1]
            assert translation in known, f"{word.strip()}: {translation} here, {known} there"


def test_every_entry_has_a_word_a_translation_a_meaning_and_a_lesson():
    for row in ROWS:
        assert len(row) == 4 and all(row), row
        assert re.search(r"\b\d\d\b", row[3]), row
        assert re.search(r"[\u4e00-\u9fff]", row[1]), f"{row[0]}: no translation"


def test_no_word_is_explained_twice():
    listed = [word.strip() for row in ROWS for word in row[0].split(",")]
    assert sorted(listed) == sorted(set(listed))
