"""The workshop kit: slides and a script generated from the current lessons."""

import re
from pathlib import Path

import pytest

from tools import minutes, workshop, zh

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
every_lesson = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@every_lesson
def test_slides_hold_the_core_s_pictures_exercises_and_what_to_remember(path):
    notebook = zh.notebook_in(path)
    cells = [*workshop.slides_of(workshop.sections_of(notebook), workshop.WORDS["en"])]
    shown = [cell for cell in cells if cell.metadata["slideshow"]["slide_type"] != "notes"]
    text = "\n".join(cell.source for cell in shown)
    core = minutes.core_and_optional(
        (ROOT / "lessons" / f"{path.stem}.md").read_text(encoding="utf-8")
    )[0]
    for picture in re.findall(r"^!\[.*\((figures/[^)]+)\)", core, re.M):
        assert picture in text
    for name in minutes.CHECKED.findall(core):
        assert f"check.{name}(" in text
    assert cells[-2].source.startswith("## What to remember")
    assert not re.search(r"^#+ .*\(optional\)", text, re.M)


@every_lesson
def test_no_verdict_and_no_answer_is_on_a_slide(path):
    notebook = zh.notebook_in(path)
    for cell in workshop.slides_of(workshop.sections_of(notebook), workshop.WORDS["en"]):
        if cell.cell_type == "code":
            assert "YOUR TURN" not in cell.source or not cell.outputs
            assert "fold(" not in cell.source


@every_lesson
def test_the_script_s_minutes_are_those_of_the_lesson(path):
    stated = minutes.minutes_of(ROOT / "lessons" / f"{path.stem}.md")
    lines = [*workshop.script_of(path.stem, zh.notebook_in(path))]
    exercises = sum(line.minutes for line in lines if "exercise" in line.what)
    reading = sum(line.minutes for line in lines) - exercises
    assert stated["core"] - 10 < reading <= stated["core"] + 1
    assert exercises <= stated["exercises"]


def test_a_class_works_at_most_80_minutes_between_breaks_and_eats_at_noon():
    lines = [workshop.Line(f"part {n}", 25) for n in range(16)]
    plan = [*workshop.with_breaks(lines, 9 * 60)]
    blocks = [0]
    for _, line in plan:
        if line.what.startswith("**"):
            blocks.append(0)
        blocks[-1] += line.minutes * (line in lines)
    assert max(blocks[:-2]) <= workshop.WITHOUT_BREAK >= blocks[-2] - workshop.WITHOUT_BREAK / 2
    (lunch,) = [at for at, line in plan if line.what == "**lunch**"]
    assert 11.5 * 60 <= lunch < 14 * 60
    assert [line for _, line in plan if line in lines] == lines
    assert plan[-1][0] == 9 * 60 + 16 * 25 + sum(
        line.minutes for _, line in plan if line.what in ("**break**", "**lunch**")
    )


@pytest.mark.skipif(
    not (workshop.NODE_MODULES / "reveal.js").is_dir(), reason="make site-tools installs reveal.js"
)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_kit_needs_no_network(tmp_path, language):
    workshop.main(["half-day", "--language", language, "--out", str(tmp_path)])
    folder = tmp_path / "half-day"
    pages = sorted(folder.glob("[0-9]*.html"))
    assert len(pages) == 3
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|link)[^>]*?(?:src|href)="([^"]+)"', text)
        for address in loaded:
            assert address.startswith("data:") or (folder / address).is_file(), address
    links = re.findall(r'href="([^"]+)"', (folder / "index.html").read_text(encoding="utf-8"))
    assert {page.name for page in pages} <= {*links}


@pytest.mark.parametrize(
    ("arguments", "said"), [(["77"], "no lesson 77"), (["02", "--start", "noon"], "time of day")]
)
def test_what_there_is_not_is_refused_in_a_sentence(arguments, said, capsys):
    with pytest.raises(SystemExit):
        workshop.main(arguments)
    assert said in capsys.readouterr().err
