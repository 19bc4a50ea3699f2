"""The Chinese edition: its cells do what the English cells do, and outdated text is marked."""

import ast
import base64
import functools
import html
import re
from collections import Counter
from pathlib import Path

import nbformat
import pytest

from mini_dist.course import language
from tools import build_notebooks as english
from tools import zh

ROOT = Path(__file__).resolve().parents[2]
LESSONS = english.lessons(ROOT)
CHINESE = [lesson for lesson in LESSONS if zh.catalog_of(lesson).exists()]
each_translated = pytest.mark.parametrize("lesson", CHINESE, ids=lambda path: path.stem)


@functools.cache
def both(lesson):
    """Return (English cell, Chinese cell) pairs, without the cell that chooses the language."""
    here = zh.notebook_in(english.notebook_of(lesson, ROOT)).cells
    there = zh.notebook_in(zh.notebook_of(lesson)).cells
    setting = [cell for cell in there if cell.source == zh.LANGUAGE_CELL]
    assert len(setting) == 1 and setting[0].outputs == []
    return list(zip(here, [cell for cell in there if cell not in setting], strict=True))


# ---- the notebooks -------------------------------------------------------------------------------


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_the_pieces_of_a_lesson_are_all_of_it(lesson):
    for cell in zh.cells_of(lesson):
        pieces = zh.pieces_of(cell)
        texts = [p if isinstance(p, str) else getattr(p, "source", p.text) for p in pieces]
        assert "".join(texts) == cell.source


@each_translated
def test_a_chinese_notebook_is_fresh(lesson):
    """If this fails, `make zh` rebuilds the notebook without running a cell."""
    assert zh.is_fresh(lesson), f"run `make zh`: {zh.notebook_of(lesson)} is out of date"
    nbformat.validate(zh.notebook_in(zh.notebook_of(lesson)))


class WithoutWords(ast.NodeTransformer):
    """Blank the strings that a learner reads; keep the values of an f-string, in any order."""

    def visit_FunctionDef(self, node):
        if ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    visit_ClassDef = visit_FunctionDef

    def visit_Call(self, node):
        self.generic_visit(node)
        name = getattr(node.func, "id", "")
        if name in ("print", "fold"):
            node.args = [self.blank(each) for each in node.args]
        elif name in ("predict", "reveal"):
            node.args = [self.blank(e) if n != 1 else e for n, e in enumerate(node.args)]
        elif name == "Table":
            node.args[2:] = map(self.blank, node.args[2:])
            if isinstance(node.args[0], ast.List):
                node.args[0].elts = [self.blank(each) for each in node.args[0].elts]
        return node

    def blank(self, node):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return ast.Constant("")
        if isinstance(node, ast.JoinedStr):
            values = [each for each in node.values if isinstance(each, ast.FormattedValue)]
            return ast.JoinedStr(sorted(values, key=ast.dump))
        return node


def code_of(cell):
    try:
        return ast.dump(WithoutWords().visit(ast.parse(cell.source)))
    except SyntaxError:  # an IPython magic
        return cell.source


@each_translated
def test_cells_do_what_the_english_cells_do(lesson):
    for here, there in both(lesson):
        for key in ("cell_type", "id", "metadata"):
            assert here[key] == there[key]
        if here.cell_type == "code":
            assert code_of(here) == code_of(there), there.source


def bare(page):
    """Return a page without its pictures, which `drawing` compares."""
    return re.sub(r"base64,[^\"]+", "", page)


def drawing(page):
    """Return an output's pictures without their words, and the numbers in those words."""
    svgs = [base64.b64decode(found[3]).decode() for found in zh.IMAGE.finditer(page)]
    words = [html.unescape(found[2]) for svg in svgs for found in language.IN_SVG.finditer(svg)]
    without = [language.IN_SVG.sub(r"\1", svg) for svg in svgs]
    return without, [language.NUMBER.findall(text) for text in words]


def test_words_in_pictures_are_chinese_and_their_numbers_stay():
    known, words = language.words_in_pictures(), set()
    for english_words, chinese in known.items():
        assert english_words.count("#") == chinese.count("#"), english_words
    for lesson in LESSONS:
        for cell in zh.notebook_in(english.notebook_of(lesson, ROOT)).cells:
            for output in cell.get("outputs", []):
                for found in zh.IMAGE.finditer(output.get("data", {}).get("text/html", "")):
                    svg = base64.b64decode(found[3]).decode()
                    words |= {html.unescape(each[2]) for each in language.IN_SVG.finditer(svg)}
    words = {text for text in words if re.search("[A-Za-z]{2}", text)}
    missing = {text for text in words if language.NUMBER.sub("#", text.strip()) not in known}
    assert len(words) > 300 and len(missing) < 0.05 * len(words), missing


def test_the_drawings_of_lessons_are_there_with_chinese_words():
    """If this fails, `make zh` redraws them."""
    drawn = zh.figures_in_chinese()
    assert len(drawn) > 30
    for path, svg in drawn.items():
        source = path.parents[path.parent.name == "zh"] / path.name.replace(".zh.", ".")
        original = source.read_text(encoding="utf-8")
        assert path.read_text(encoding="utf-8") == svg
        assert language.IN_SVG.sub("", original) == language.IN_SVG.sub("", svg)
        assert re.search(f"[{zh.CHINESE}]", svg), path


@each_translated
def test_outputs_are_those_of_the_english_run(lesson):
    """Outputs have the same kinds in the same order, and every printed number."""
    number = r"\d+(?:[.,]\d+)*"
    for here, there in both(lesson):
        assert here.get("execution_count") == there.get("execution_count")
        for one, other in zip(here.get("outputs", []), there.get("outputs", []), strict=True):
            assert one.output_type == other.output_type
            data, translated = one.get("data", {}), other.get("data", {})
            assert list(data) == list(translated)
            for kind in data:
                if kind.startswith("image/"):
                    assert data[kind] == translated[kind]
                elif "<img" in data[kind]:
                    assert drawing(data[kind]) == drawing(translated[kind])
            before, after = (html.unescape(bare("".join(english.texts(o)))) for o in (one, other))
            lost = Counter(re.findall(number, before)) - Counter(re.findall(number, after))
            assert not lost, there.source


@each_translated
def test_links_lead_somewhere(lesson):
    notebook = zh.notebook_of(lesson)
    for _, cell in both(lesson):
        for target in re.findall(r"\]\(([^)#\s]+)", cell.source * (cell.cell_type == "markdown")):
            if not re.match(r"[a-z]+:", target):
                assert (notebook.parent / target).exists(), target


@each_translated
def test_a_translation_keeps_the_rules_of_the_guide(lesson):
    """Terms, formulas, code, numbers, punctuation: lessons/zh/STYLE.md."""
    assert list(zh.check(lesson)) == []


each_page = pytest.mark.parametrize("name", zh.PAGES)


@each_page
def test_a_chinese_page_is_fresh_keeps_the_rules_and_its_links_lead_somewhere(name):
    page = ROOT / name
    text = zh.notebook_of(page).read_text(encoding="utf-8")
    assert text == zh.build_page(page) and [*zh.check(page)] == []
    pieces = [p if isinstance(p, str) else p.text for p in zh.pieces_of_page(page)]
    assert "".join(pieces) == page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?", text):
        assert (ROOT / target).exists(), target
        if target.endswith(".zh.md") and anchor:
            assert f'<a id="{anchor}"></a>' in (ROOT / target).read_text(encoding="utf-8")


def test_a_row_of_a_page_that_is_not_translated_is_marked_in_its_first_cell(tmp_path):
    (tmp_path / "lessons").mkdir()
    page = tmp_path / "README.md"
    page.write_text(
        "# Rings\n\n[中文](README.zh.md)\n\n## Parts\n\n| a word | 4 |\n| --- | --- |\n"
    )
    zh.fill(page, "=== 1\n环\n=== 2\n部分\n", tmp_path)
    assert zh.build_page(page, tmp_path) == (
        "# 环\n\n[English](README.md)；有 1 处尚未译出或等待更新，暂以英文显示。\n\n"
        '<a id="parts"></a>\n\n## 部分\n\n| 〔待译〕 a word | 4 |\n| --- | --- |\n'
    )


def test_every_catalog_and_notebook_has_its_lesson():
    catalogs = {zh.catalog_of(each) for each in [*CHINESE, *(ROOT / name for name in zh.PAGES)]}
    assert catalogs == {*(ROOT / "lessons/zh").rglob("*.po")}
    notebooks = {*(ROOT / "notebooks/zh").rglob("*.ipynb")}
    assert {zh.notebook_of(lesson) for lesson in CHINESE} == {
        path for path in notebooks if ".ipynb_checkpoints" not in path.parts
    }


# ---- a course of one lesson ----------------------------------------------------------------------

LESSON = """# 01 Rings

*20 minutes, plus 5 (exercises). You need: nothing.*

A ring sends $\\frac{n-1}{n} N$ bytes.

* It is *fast*.

```python tags=["nbval-check-output"]
n, sent = 4, 3_000  # four ranks
print(f"{n} ranks send {sent:,} bytes")
print("all of it:  ", True)
```
"""
TEXTS = {
    "01 Rings": "01 环",
    "You need: nothing.": "先修：无。",
    "A ring sends $\\frac{n-1}{n} N$ bytes.": "一个环发送 $\\frac{n-1}{n} N$ 字节。",
    "It is *fast*.": "它很*快*。",
    "four ranks": "四个 rank",
    "{n} ranks send {sent:,} bytes": "共 {sent:,} 字节，由 {n} 个 rank 发送",
    "all of it:": "全部：",
}


@pytest.fixture
def course(tmp_path):
    """Create one lesson, its English notebook, which was not run, and its catalog."""
    lesson = tmp_path / "lessons/01_rings.md"
    lesson.parent.mkdir()
    put(lesson, LESSON)
    numbered = "".join(f"=== {n}\n{TEXTS[text]}\n" for n, text in enumerate(zh.messages(lesson), 1))
    assert zh.fill(lesson, numbered, tmp_path) == len(TEXTS)
    return lesson


def put(lesson, text):
    """Write the lesson, and its notebook as if it had run."""
    lesson.write_text(text)
    root = lesson.parents[1]
    notebook = english.convert(lesson, root)
    printed = "4 ranks send 3,000 bytes\nall of it:   True\n"
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text=printed)]
    path = english.notebook_of(lesson, root)
    path.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, path)


def page(lesson):
    return "\n".join(cell.source for cell in zh.build(lesson, lesson.parents[1]).cells)


def test_a_lesson_becomes_chinese_and_its_output_with_it(course):
    cells = zh.build(course, course.parents[1]).cells
    assert cells[0].source == (
        "# 01 环\n\n[English](../01_rings.ipynb) · 代码与英文版相同，输出来自同一次运行。\n\n"
        "*20 分钟，另加练习 5 分钟。先修：无。*\n\n"
        "一个环发送 $\\frac{n-1}{n} N$ 字节。\n\n* 它很*快*。"
    )
    assert cells[2].source == (
        "n, sent = 4, 3_000  # 四个 rank\n"
        'print(f"共 {sent:,} 字节，由 {n} 个 rank 发送")\nprint("全部：", True)'
    )
    assert cells[2].outputs[0].text == "共 3,000 字节，由 4 个 rank 发送\n全部： True\n"
    assert zh.count(course, course.parents[1]) == zh.Count(7, 7, 0)


def test_a_paragraph_that_has_changed_is_shown_in_english_with_a_mark(course):
    root = course.parents[1]
    put(course, LESSON.replace("sends", "always sends"))
    for _ in range(2):  # before and after an update of the catalog
        assert f"{zh.MARK} A ring always sends $\\frac{{n-1}}{{n}} N$ bytes." in page(course)
        assert "有 1 处尚未译出" in page(course) and "它很*快*" in page(course)
        assert zh.count(course, root) == zh.Count(7, 6, 1)
        zh.extract(course, root)
    todo = zh.sheet(course, root)
    assert "=== 3\nA ring always sends" in todo
    assert "--- before:\nA ring sends $\\frac{n-1}{n} N$ bytes.\n一个环发送" in todo
    zh.fill(course, "=== 3\n一个环总是发送 $\\frac{n-1}{n} N$ 字节。\n", root)
    assert zh.MARK not in page(course) and zh.count(course, root) == zh.Count(7, 7, 0)
    assert zh.sheet(course, root) == ""


def test_a_code_text_without_translation_stays_english_in_cell_and_output(course):
    put(course, LESSON.replace("all of it:", "the rest:"))
    cells = zh.build(course, course.parents[1]).cells
    assert 'print("the rest:  ", True)' in cells[2].source
    assert "the rest" not in cells[2].outputs[0].text  # put() had printed the old words.


def test_a_sheet_with_a_number_that_is_no_text_s_is_refused(course):
    with pytest.raises(ValueError, match="messages 1 to 7"):
        zh.fill(course, "=== 8\n词\n", course.parents[1])


@pytest.mark.parametrize(
    ("text", "chinese", "fault"),
    [
        ("$n$ ranks", "$m$ 个 rank", "formulas"),
        ("call `f`", "调用 `g`", "code"),
        ("see [it](a.md)", "见[它](b.md)", "links"),
        ("it takes 4 s", "用时 5 s", "numbers"),
        ("many ranks", "多个rank", "a space between"),
        ("many ranks", "rank 很多.", "Chinese punctuation"),
        ("many (really)", "很多(真的)", "Chinese punctuation"),
        ('it is "fast"', '它"快"', "quotation marks"),
        ("a, b", "甲， 乙", "no space beside"),
        ("the **gather**", "这叫**收集（gather）**的操作", "emphasis"),
        ("every token", "每个词元", "token, not 词元"),
        ("tensor parallelism", "矩阵的并行", "term: tensor parallelism is 张量并行"),
        ("an all-reduce", "一次集合操作", "term: all-reduce is all-reduce"),
    ],
)
def test_what_is_wrong_with_a_translation_is_said(text, chinese, fault):
    assert any(fault in found for found in zh.faults(text, chinese)), [*zh.faults(text, chinese)]


@pytest.mark.parametrize(
    ("text", "chinese"),
    [
        ("**Quiz.** Answer before you open.", "**小测。** 先作答，再展开。"),
        ("gradients of 7 billion parameters", "70 亿参数的梯度"),
        ("the bubble: 25 % of $t$", "流水线气泡：$t$ 的 25 %"),
        ("**gather**, then `f(x)`", "先**收集**（gather），再 `f(x)`"),
        ("the ledger of lesson 00", "第 00 课的账本"),
    ],
)
def test_a_good_translation_has_no_fault(text, chinese):
    assert [*zh.faults(text, chinese)] == []


def test_values_of_a_string_may_move_and_must_stay():
    text = "rank {rank} sends {n:,} bytes"
    assert [*zh.faults(text, "发送 {n:,} 字节的是 rank {rank}", "string")] == []
    assert [*zh.faults(text, "rank {rank} 发送 {n} 字节", "string")]


@pytest.mark.parametrize(
    "english, text, chinese, shown",
    [
        (
            "{name:9} {1e3 * s:5.1f} ms a step",
            "one place  50.0 ms a step",
            "{name:9} 每步 {1e3 * s:5.1f} ms",
            "one place 每步  50.0 ms",
        ),
        (
            "fullest of {n}: {x:.1f} GB",
            "fullest of 128: 10.7 GB, of one: 18.1 GB",
            "{n} 块：{x:.1f} GB",
            "128 块：10.7 GB, of one: 18.1 GB",
        ),
    ],
)
def test_values_of_an_output_stay_what_they_are(english, text, chinese, shown):
    source = f'f"{english}"'
    string = zh.String(source, ast.parse(source, mode="eval").body, "said", [])
    assert zh.spoken(string, {english: chinese}, text) == shown
