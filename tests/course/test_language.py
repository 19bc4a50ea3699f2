"""mini_dist.language: what the library says to a learner, in the learner's language."""

import ast
import json
import re
from pathlib import Path

import pytest
from babel.messages.pofile import read_po

import mini_dist
from mini_dist.course import language, learner
from mini_dist.course.check.engine import RIGHT, Verdict, line, on_ranks
from mini_dist.course.lesson import predict, reveal

COURSE = Path(language.__file__).parent


@pytest.fixture(autouse=True)
def no_choice(monkeypatch):
    monkeypatch.setattr(learner, "_chosen", [])


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home of its own, and a kernel in which a person has opened the Chinese lesson 07."""
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
    monkeypatch.setattr(learner, "_chosen", [])  # the next kernel
    assert mini_dist.language() == "zh" and "打开过 0" in repr(mini_dist.progress())
    predict("bytes", 3)
    (row,) = [row for row in mini_dist.progress().rows if row.opened]
    assert row.lesson == "07_zero"  # the Chinese notebook is the lesson


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
    """A sentence that has changed in the code leaves its translation behind: adapt it."""
    said = "\n".join(
        node.value
        for path in COURSE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    said = " ".join(said.split())

    def words_of(message):
        return language.FIELD.sub(" ", message).split()

    def found(message):  # (the code may put a word into it, so not all of it in one piece)
        words = words_of(message)
        runs = [" ".join(words[at : at + 3]) for at in range(len(words) - 2)]
        return 2 * sum(run in said for run in runs) >= len(runs)

    sentences = [m.id for m in MESSAGES if len(words_of(m.id)) > 5]
    assert len(sentences) > 20 and [each for each in sentences if not found(each)] == []
