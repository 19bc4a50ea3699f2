"""mini_dist.language: what the library says to a learner, in the learner's language."""

import ast
import base64
import json
import re
from pathlib import Path

import pytest
from babel.messages.pofile import read_po

import mini_dist
from mini_dist import check, draw
from mini_dist.course import language, learner
from mini_dist.course.check.engine import RIGHT, Exercise, Verdict, line, on_ranks
from mini_dist.course.lesson import predict, reveal
from tools import zh_library

COURSE = Path(language.__file__).parent


@pytest.fixture(autouse=True)
def no_choice(monkeypatch):
    monkeypatch.setattr(learner, "_chosen", [])


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Set up a separate home and a kernel in which a person has the Chinese lesson 07 open."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JPY_SESSION_NAME", "/course/work/zh/07_zero.ipynb")
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(learner, "AUTOMATIC", {"CI"})
    monkeypatch.setattr(learner, "started_by_a_notebook", lambda: False)
    return tmp_path


def test_it_is_english_until_somebody_chooses(capsys):
    assert mini_dist.language() == "en"
    predict("x", 4)
    assert capsys.readouterr().out == "noted: x = 4\n"
    assert mini_dist.language("zh") == "zh"
    predict("x", 4)
    reveal("x", 5, "bytes")
    assert capsys.readouterr().out == (
        "已记下：x = 4\nx：实测 5 bytes，你的预测是 4 bytes：低了 20 %\n"
    )


def test_a_guess_is_never_translated(capsys):
    mini_dist.language("zh")
    predict("equal", "yes")
    reveal("equal", "no")
    assert capsys.readouterr().out.endswith("equal：实测 no，你的预测是 yes：这次没猜中\n")


def test_every_word_that_a_lesson_has_for_a_value_is_chinese_too():
    lessons = Path(mini_dist.__file__).parent.parent / "lessons"
    texts = [page.read_text() for page in lessons.rglob("*.md")]
    words = {word for text in texts for word in re.findall(r'\bhow="([^"]*)"\)', text)}
    for word in words:
        assert language.messages().said(f"x: {word} 4") != f"x: {word} 4", word
    assert words > {"computed", "planned"}


def test_a_verdict_is_chinese_with_its_measurements_and_its_hint():
    lines = [on_ranks("right gradients on", [True, True]), line("a new line", 3, 3)]
    verdict = Verdict(
        "naive", RIGHT, lines, "With 2 ranks, x: everyone waits to receive, and nobody has sent."
    )
    before = repr(verdict)
    mini_dist.language("zh")
    assert "✓ naive：正确" in repr(verdict) and "2 个 rank 中有 2 个" in repr(verdict)
    assert "2 个 rank、x 时：大家都在等着接收，却没有人发送。" in repr(verdict)
    assert "✓ naive：正确" in verdict._repr_html_() and "a new line" in repr(verdict)
    mini_dist.language("en")
    assert repr(verdict) == before


def test_a_language_that_the_library_does_not_speak_is_refused():
    with pytest.raises(ValueError, match='does not speak \'fr\'; choose "en" or "zh"'):
        mini_dist.language("fr")
    assert mini_dist.language() == "en"


def test_the_choice_is_kept_with_the_progress(home, monkeypatch):
    mini_dist.language("zh")
    kept = json.loads((home / learner.FOLDER / learner.FILE).read_text())
    assert kept == {"lessons": {}, "language": "zh"}
    monkeypatch.setattr(learner, "_chosen", [])  # as in a new kernel
    assert mini_dist.language() == "zh" and "打开过 0" in repr(mini_dist.progress())
    predict("bytes", 3)
    (row,) = [row for row in mini_dist.progress().rows if row.opened]
    assert row.lesson == "07_zero"  # The Chinese notebook counts as the lesson.


def test_nothing_is_kept_outside_of_a_person_s_notebook(home, monkeypatch):
    monkeypatch.setenv("CI", "true")
    assert mini_dist.language("zh") == "zh" and list(home.iterdir()) == []


def test_nothing_is_kept_if_the_learner_has_said_so(home, monkeypatch):
    mini_dist.progress(keep=False)
    mini_dist.language("zh")
    assert "zh" not in (home / learner.FOLDER / learner.FILE).read_text()


def test_a_damaged_setting_is_english(home):
    folder = home / learner.FOLDER
    folder.mkdir()
    (folder / learner.FILE).write_text('{"lessons": {}, "language": ["zh"]}')
    assert mini_dist.language() == "en"


# ---- the catalog ---------------------------------------------------------------------------------

with language.CATALOG.open("rb") as file:
    MESSAGES = [message for message in read_po(file) if message.id]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.id[:40])
def test_a_translation_shows_every_value(message):
    assert message.string
    wanted = {name for name, _ in language.FIELD.findall(message.id)}
    assert set(re.findall(r"\{(\w+)\}", message.string)) == wanted


def test_every_message_is_one_that_the_library_says():
    """If a sentence changed in the code, its translation is left over: update it."""
    said = "\n".join(
        node.value
        for path in COURSE.parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    said = " ".join(said.split())

    def found(message):  # The code may insert words, so look for the pieces.
        pieces = re.split(r"\{[^}]*\}|\d+|[][.:;?,(] ?|'", message)
        pieces = [piece for each in pieces if len(piece := each.strip(" .[]")) > 3]
        return 2 * sum(piece in said for piece in pieces) >= len(pieces)

    sentences = [m.id for m in MESSAGES if len(m.id.split()) > 5]
    assert len(sentences) > 20 and [each for each in sentences if not found(each)] == []


# ---- what the exercises say ----------------------------------------------------------------------

# Four or more English words in a row, other than names in code.
ENGLISH = re.compile(r"(?:(?<![`\w./'\"=(])[a-z]{2,} ){3,}[a-z]{2,}")


def exercises():
    return [each for name in dir(check) if isinstance(each := getattr(check, name), Exercise)]


ENOUGH = 0.95  # the share to translate: authors of English sentences need no Chinese


def test_hints_on_request_are_chinese():
    said = language.messages().said
    hints = [(each.name, hint) for each in exercises() for hint in each._hints]
    english = [each for each in hints if ENGLISH.search(said(each[1]))]
    assert len(hints) > 100 and len(english) <= (1 - ENOUGH) * len(hints), english


def test_the_sentences_of_the_rules_are_in_the_catalog():
    """`python tools/zh_library.py sheet check/MODULE` lists what is not translated.

    Pieces that the code joins are in the catalog as parts of whole sentences."""
    known, number, missing = zh_library.translated(), 0, []
    for path in zh_library.modules():
        for text in zh_library.messages(path):
            piece = max(re.split(r"\{[^}]*\}", text), key=len).strip(" .:")
            if re.match(r"[A-Z{`].*[.?]$", text) and len(text.split()) > 6:
                number += 1
                if not any(piece in each for each in known):
                    missing.append((path.stem, text))
    assert number > 500 and len(missing) <= (1 - ENOUGH) * number, missing


def test_the_catalog_keeps_the_rules_of_the_guide():
    assert [*zh_library.faults()] == []


# ---- words in pictures ---------------------------------------------------------------------------


def test_a_picture_speaks_the_learner_s_language_and_is_the_same_drawing():
    picture = draw.bars({"a": {"parameters": 2.0, "gradients": 3.5}}, "GB on each rank", "rank 0")
    before = picture._repr_html_()
    mini_dist.language("zh")
    after = picture._repr_html_()
    one, other = (
        base64.b64decode(page.partition("base64,")[2][:-2]).decode() for page in (before, after)
    )
    assert "parameters" in one and "参数" in other and "parameters" not in other
    assert language.IN_SVG.sub("", one) == language.IN_SVG.sub("", other)
    assert language.in_chinese("words that no catalog has 4") == "words that no catalog has 4"
