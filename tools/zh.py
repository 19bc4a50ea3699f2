"""The Chinese edition: lessons/zh/NAME.po + notebooks/NAME.ipynb -> notebooks/zh/NAME.ipynb.
And of the pages README and TEACHING: lessons/zh/README.po + README.md -> README.zh.md.

    python tools/zh.py                      build what has a catalog, list what is missing or stale
    python tools/zh.py extract NAME ...     write or update the catalog of a lesson or page
    python tools/zh.py sheet NAME           print what is still to be translated, numbered
    python tools/zh.py fill NAME FILE       put a filled sheet into the catalog
    python tools/zh.py show NAME            print the Chinese notebook as Markdown, to read it
    python tools/zh.py check [NAME ...]     report what breaks the rules of lessons/zh/STYLE.md

A catalog is a gettext file. Its messages are the paragraphs, headings, list items, tables and alt
texts of the English lesson, and the comments and strings of its cells that a learner reads. The
rest of a notebook, code and outputs, comes from the English notebook, and no cell runs again. An
English text that has changed is no longer a key of the catalog: until somebody translates it again,
the Chinese notebook shows it in English with a mark.
"""

import argparse
import ast
import base64
import hashlib
import html
import io
import os
import re
import sys
import tokenize
import unicodedata
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jupytext
import nbformat
from babel.messages.catalog import Catalog
from babel.messages.pofile import read_po, write_po
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]

from mini_dist.course import language  # noqa: E402
from tools import build_notebooks as english  # noqa: E402

PAGES = "README.md", "TEACHING.md"
MARK = "〔待译〕"  # before an English text that stands in for its translation
HEADER = """\
msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\\n"
"Content-Transfer-Encoding: 8bit\\n"
"Language: zh_CN\\n"

"""
# Functions that show their arguments to a learner, and which of them are texts.
SAYS = {"print": slice(None), "fold": slice(None), "predict": slice(1), "reveal": slice(0, 3, 2)}
CHINESE = "\u4e00-\u9fff"
MARKDOWN = MarkdownIt()


@dataclass(frozen=True)
class Message:
    """A text to translate, and what it is: "" for a paragraph, or heading, item, table, row (of a
    page's table), picture, formula, comment, string."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Rewritten:
    """A text whose Chinese follows from a rule."""

    text: str
    chinese: str


# ---- from a cell to messages ---------------------------------------------------------------------
# The pieces of a cell are strings, which stay as they are, and texts; joined they are the cell.


def pieces_of_markdown(source):
    pieces, lines, at = [], source.splitlines(keepends=True), 0
    while at < len(lines):
        line, end = lines[at], at + 1
        if line.startswith(("```", "$$")):
            fence = line[:3] if line.startswith("```") else "$$"
            if fence == "```" or line.count("$$") < 2:
                while end < len(lines) and not lines[end].rstrip().endswith(fence):
                    end += 1
                end += 1
            block = "".join(lines[at:end])
            named = fence == "$$" and re.search(r"\\text\{[^}]*[A-Za-z]{2}", block)
            pieces += stripped(block, "formula") if named else [block]
        elif not line.strip():
            pieces.append(line)
        elif picture := re.fullmatch(r"(!\[)([^\]]+)(\]\([^)]+\)\s*)", line):
            pieces += [picture[1], Message(picture[2], "picture"), picture[3]]
        elif heading := re.fullmatch(r"(#+ +)(.+?)(\s*)", line):
            pieces += [heading[1], *text_pieces(heading[2], "heading"), heading[3]]
        elif line.startswith("|"):
            while end < len(lines) and lines[end].startswith("|"):
                end += 1
            pieces += stripped("".join(lines[at:end]), "table")
        else:
            item = re.match(r"\s*(?:[*-]|\d+\.) +", line)
            while end < len(lines) and not re.match(r"\s*$|```|\$\$|[|#]|!\[", lines[end]):
                if re.match(r"\s*(?:[*-]|\d+\.) +", lines[end]):
                    break
                end += 1
            head = item[0] if item else ""
            text = "".join(lines[at:end])[len(head) :]
            pieces += [head, *stripped(text, "item" if item else "")]
        at = end
    return pieces


def stripped(text, kind):
    body = text.rstrip()
    return [*text_pieces(body, kind), text[len(body) :]]


def text_pieces(text, kind):
    """A text as pieces. Its words and its minutes are rewritten by rule; formulas stay."""
    if text.startswith("**Words.** "):
        return [Rewritten(text, words_in_chinese(text))]
    minutes = re.match(r"\*(?=\d+ minutes)(.+?)(?=You need|after \[|\*$)", text)
    if minutes:
        shown = re.sub(r"(\d+) minutes", r"\1 分钟", minutes[1])
        shown = re.sub(r"(\d+) \(exercises\)", r"练习 \1 分钟", shown)
        shown = re.sub(r"(\d+) \(optional\)", r"选读 \1 分钟", shown)
        shown = shown.replace("plus ", "另加").replace(" and ", "、")
        shown = shown.replace(", ", "，").replace(". ", "。")
        rest = text[len(minutes[0]) :].removesuffix("*")
        return ["*", Rewritten(minutes[1], shown), *text_pieces(rest, kind), "*"]
    return [Message(text, kind)] if kind == "formula" or has_words(text) else [text]


def has_words(text):
    bare = re.sub(r"`[^`]*`|\$[^$]*\$|\{[^{}]*\}|\]\([^)]*\)|https?://\S+", "", text)
    return re.search(r"[A-Za-z]{2}", bare) is not None


@cache
def glossary():
    """{English word: its Chinese} of docs/glossary.md, without what else is said."""
    return {word: each[0] for word, each in accepted().items()}


@cache
def accepted():
    """{English word: (its Chinese, shorter forms of it)}; what else is said is not accepted."""
    words = {}
    for line in (ROOT / "docs/glossary.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith(("| word", "| ---")):
            english_words, chinese = (cell.strip() for cell in line.strip("|").split("|")[:2])
            names = [word.strip() for word in english_words.split(",")]
            split = [each.strip() for each in re.sub(r" \([^)]*\)", "", chinese).split("、")]
            same = split if len(split) == len(names) else [split[0]] * len(names)
            others = "、".join(re.findall(r"\(([^)]*)\)", chinese)).split("、")
            for name, first in zip(names, same):
                words[name] = (first, *(each for each in others if each and each in first))
    return words


def words_in_chinese(line):
    """**Words.** rank (进程编号) · ... of a lesson, with the words of the glossary."""
    listed = re.match(r"\*\*Words\.\*\* (.+?)\. All of them", line)[1]
    shown = []
    for item in listed.split(" · "):
        names = [name.strip() for name in re.sub(r" \(.*", "", item).split(",")]
        chinese = "、".join(dict.fromkeys(glossary()[name] for name in names))
        latin = ", ".join(name for name in names if name not in chinese)
        shown.append(f"{chinese}（{latin}）" if latin else chinese)
    return f"**术语。** {' · '.join(shown)}。这些词都收在[术语表](../docs/glossary.md)里。"


def pieces_of_code(source):
    """Comments and strings that a learner reads, and the code between them."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a magic of IPython
        return [source]
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(row, column):  # (ast counts bytes)
        return starts[row - 1] + len(lines[row - 1].encode()[:column].decode())

    found, column = [], []
    for node, role in strings_read(tree):
        span = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
        found.append((*span, String(source[slice(*span)], node, role, column)))
    found += comments(source, starts)
    pieces, at = [], 0
    for begin, end, piece in sorted(found, key=lambda each: each[0]):
        pieces += [source[at:begin], piece]
        at = end
    return [*pieces, source[at:]]


def strings_read(tree):
    """(node, role) of docstrings, of strings that SAYS shows, and of a table's head and title."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            yield node.body[0].value, "docstring"
        name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
        said = node.args[SAYS[name]] if name in SAYS else []
        if name == "Table":
            said = [*getattr(node.args[0], "elts", []), *node.args[2:]]
        for each in said:
            if is_text(each) and has_words(template(each)):
                first = name == "print" and each is node.args[0] and len(node.args) > 1
                yield each, "label" if first else "table" if name == "Table" else "said"


def is_text(node):
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def template(node):
    """A string's text; of an f-string with its braces, as in the source."""
    if isinstance(node, ast.Constant):
        return node.value
    text = ""
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += part.value.replace("{", "{{").replace("}", "}}")
        else:
            text += ast.unparse(ast.JoinedStr([part]))[2:-1]
    return text


def as_written(source):
    """The text of an f-string with its values as the cell has them; None if quotes or nested braces
    leave more than one reading."""
    literal = re.compile(r"(f?)\"((?:[^\"\\{}]|\{[^{}\"\\]*\})*)\"\s*")
    text, at = "", 0
    while at < len(source):
        found = literal.match(source, at)
        if not found or (not found[1] and "{" in found[2]):
            return None
        text, at = text + found[2], found.end()
    return text


class String:
    """A string of a cell. role: "label" is what a print shows before its values.

    Labels of a cell may have spaces at their ends, up to a common column. The spaces are no part of
    the text, and the Chinese labels get a column of their own.
    """

    kind = "string"

    def __init__(self, source, node, role, column):
        self.source, self.is_template = source, isinstance(node, ast.JoinedStr)
        written = as_written(source) if self.is_template else None
        self.whole, self.role = written or template(node), role
        self.text = self.whole.rstrip(" ") if role == "label" else self.whole
        self.column = column
        if role == "label" and not self.is_template:
            column.append(self)

    def shown(self, chinese):
        """The text in Chinese, with spaces up to the column if the English labels have one."""
        text = chinese[self.text]
        if self not in self.column or all(each.text == each.whole for each in self.column):
            return text + self.whole[len(self.text) :]
        column = max(width(chinese.get(each.text, each.text)) for each in self.column)
        return text + " " * (column - width(text))

    def in_source(self, chinese):
        text = self.shown(chinese).replace("\\", "\\\\")
        quotes = '"""' if self.source.startswith('"""') else '"'
        if quotes == '"':
            text = text.replace('"', '\\"').replace("\n", "\\n")
        return f"{'f' * self.is_template}{quotes}{text}{quotes}"


class Comment:
    """A comment of a cell, of one line or more with the same indent."""

    kind = "comment"

    def __init__(self, source):
        self.source = source
        self.lines = source.split("\n")
        self.text = " ".join(line.strip().lstrip("#").strip() for line in self.lines)

    def in_source(self, chinese):
        if len(self.lines) == 1:
            return f"# {chinese[self.text]}"
        indent = re.match(r"\s*", self.lines[1])[0]
        lines = folded(chinese[self.text], 96 - len(indent))
        return f"\n{indent}".join(f"# {line}" for line in lines)


def comments(source, starts):
    """(start, end, Comment): lines that only hold a comment are joined with their neighbors."""
    runs = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or not has_words(token.string):
            continue
        if re.match(r"# (noqa|type:)", token.string):
            continue
        (row, column), alone = token.start, not token.line[: token.start[1]].strip()
        begin, end = starts[row - 1] + column, starts[row - 1] + token.end[1]
        if alone and runs and runs[-1][2:] == (row - 1, column):
            runs[-1] = (runs[-1][0], end, row, column)
        else:
            runs.append((begin, end, row if alone else None, column))
    return [(begin, end, Comment(source[begin:end])) for begin, end, _, _ in runs]


def width(text):
    """How many columns a text takes in a monospaced font."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def folded(text, columns):
    """Lines of at most this width, broken at a space or between Chinese letters."""
    lines = [""]
    for part in re.findall(rf"[{CHINESE}][，。；：、？！）”]*|\s+|[^{CHINESE}\s]+", text):
        if width(lines[-1] + part) > columns:
            lines[-1] = lines[-1].rstrip()
            lines.append("")
        lines[-1] += part if lines[-1] or part.strip() else ""
    return lines


# ---- lessons and catalogs ------------------------------------------------------------------------


@cache
def cells_in(text):
    return jupytext.reads(text, fmt="md").cells


def cells_of(lesson):
    """The cells of an English lesson, with links as they are in its text."""
    return cells_in(lesson.read_text(encoding="utf-8"))


def is_page(lesson):
    return lesson.name in PAGES


def pieces_of_page(page):
    """A page as pieces. Each row of a table is a text of its own: the rows of these pages change
    one at a time."""
    for piece in pieces_of_markdown(page.read_text(encoding="utf-8")):
        if isinstance(piece, Message) and piece.kind == "table":
            for row in re.split(r"(\n)", piece.text):
                yield Message(row, "row") if has_words(row) else row
        else:
            yield piece


def pieces_of(cell):
    return pieces_in(cell.source, cell.cell_type)


@cache
def pieces_in(source, cell_type):
    return (pieces_of_markdown if cell_type == "markdown" else pieces_of_code)(source)


def messages(lesson):
    """{text: kind} of everything in a lesson or page that is to be translated, in its order."""
    if is_page(lesson):
        return {
            each.text: each.kind for each in pieces_of_page(lesson) if isinstance(each, Message)
        }
    return messages_in(lesson.read_text(encoding="utf-8"))


@cache
def messages_in(text):
    found = {}
    for cell in cells_in(text):
        for piece in pieces_of(cell):
            if isinstance(piece, (Message, String, Comment)):
                found.setdefault(piece.text, piece.kind)
    return found


def catalog_of(lesson, root=ROOT):
    """Where the catalog of a lesson or page lives."""
    if is_page(lesson):
        return root / "lessons/zh" / f"{lesson.stem}.po"
    return (root / "lessons/zh" / lesson.relative_to(root / "lessons")).with_suffix(".po")


def notebook_of(lesson, root=ROOT):
    """Where the Chinese notebook of a lesson, or the Chinese page, lives."""
    if is_page(lesson):
        return lesson.with_suffix(".zh.md")
    path = english.notebook_of(lesson, root)
    return root / "notebooks/zh" / path.relative_to(root / "notebooks")


def read(path):
    """The catalog in a file; an empty one if there is no file."""
    if not path.exists():
        return Catalog(locale="zh_CN")
    with path.open("rb") as file:
        return read_po(file, locale="zh_CN", abort_invalid=True)


def translations(path):
    """{English: Chinese} of a catalog, without what is stale (fuzzy) or empty."""
    return translations_in(path.read_bytes()) if path.exists() else {}


@cache
def translations_in(content):
    catalog = read_po(io.BytesIO(content), locale="zh_CN", abort_invalid=True)
    return {m.id: m.string for m in catalog if m.id and m.string and not m.fuzzy}


def write(path, catalog):
    for message in catalog:
        message.flags &= {"fuzzy"}  # (babel takes formulas for Python's format strings)
    file = io.BytesIO()
    write_po(file, catalog, width=0, omit_header=True, ignore_obsolete=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEADER + file.getvalue().decode().strip() + "\n", encoding="utf-8")


def extract(lesson, root=ROOT):
    """Bring the catalog up to date with its lesson.

    A translation whose English has changed is kept as fuzzy, with the former English above it.
    """
    fresh = Catalog()
    for text, kind in messages(lesson).items():
        fresh.add(text, auto_comments=[kind] if kind else [])
    catalog = read(catalog_of(lesson, root))
    before = {message.id: former(message) for message in catalog if message.id}
    catalog.update(fresh)
    ordered = Catalog(locale="zh_CN")
    for text in messages(lesson):
        message = ordered[text] = catalog[text]
        if message.fuzzy:
            changed = message.previous_id[0] if message.previous_id else ""
            message.auto_comments.append(WAS + (before.get(text) or changed))
    write(catalog_of(lesson, root), ordered)


WAS = "before: "  # (babel does not read what gettext has for this, the lines that begin with #|)


def former(message):
    """The English text to which a fuzzy translation belongs; "" of another message."""
    found = "".join(f"{line} " for line in message.auto_comments).partition(WAS)
    return found[2].strip()


# ---- sheets: a way to translate many messages without writing gettext's escapes ------------------

NUMBER = re.compile(r"^=== (\d+)(?: .*)?\n", re.M)


def sheet(lesson, root=ROOT):
    """The messages that are not translated, under their numbers in the lesson. Below a text that
    has changed stands what it was, and how that was translated."""
    known, catalog = translations(catalog_of(lesson, root)), read(catalog_of(lesson, root))
    shown = []
    for number, (text, kind) in enumerate(messages(lesson).items(), 1):
        if text not in known:
            shown += [f"=== {number} {kind}".rstrip(), text, ""]
            if text in catalog and catalog[text].fuzzy:
                shown += ["--- before:", former(catalog[text]), catalog[text].string, ""]
    return "\n".join(shown)


def fill(lesson, filled, root=ROOT):
    """Put the texts of a filled sheet into the catalog; return how many."""
    extract(lesson, root)
    catalog, texts = read(catalog_of(lesson, root)), list(messages(lesson))
    parts = NUMBER.split(filled)[1:]
    for number, chinese in zip(parts[::2], parts[1::2]):
        if not 1 <= int(number) <= len(texts):
            raise ValueError(f"=== {number}: {lesson.stem} has messages 1 to {len(texts)}")
        message = catalog[texts[int(number) - 1]]
        message.string = chinese.strip("\n").rstrip()  # (a printed line may begin with spaces)
        message.flags.discard("fuzzy")
        message.auto_comments = [*filter(None, [messages(lesson)[message.id]])]
    write(catalog_of(lesson, root), catalog)
    return len(parts) // 2


# ---- the notebook --------------------------------------------------------------------------------

LANGUAGE_CELL = 'import mini_dist\n\nmini_dist.language("zh")  # 提示和判定用中文显示'


def build(lesson, root=ROOT):
    """The Chinese notebook of a lesson, from its catalog and its English notebook."""
    notebook = notebook_in(english.notebook_of(lesson, root))
    chinese, source = translations(catalog_of(lesson, root)), cells_of(lesson)
    translated = all_translated(root)
    before = len(notebook.cells) - len(source) - bool(english.navigation(lesson, root))
    for cell, original in zip(notebook.cells[before:], source):
        if cell.cell_type == "markdown":
            text = "".join(markdown_piece(each, chinese) for each in pieces_of(original))
            text = relink(english.relink(text, lesson, root), lesson, translated, root)
            cell.source = with_chinese_figures(text, lesson, root)
        else:
            said = [p for p in pieces_of(original) if isinstance(p, String) and p.text in chinese]
            cell.source = "".join(code_piece(each, chinese) for each in pieces_of(original))
            for output in cell.outputs:
                translate_output(output, original.source, said, chinese)
    if english.navigation(lesson, root):
        notebook.cells[-1].source = navigation(lesson, translated, root)
    missing = sum(text not in chinese for text in messages(lesson))
    first = notebook.cells[before]
    title, _, rest = first.source.partition("\n")
    first.source = f"{title}\n\n{about(lesson, missing, root)}\n{rest}"
    setting = nbformat.v4.new_code_cell(LANGUAGE_CELL, execution_count=None)
    setting.id = hashlib.sha1(f"{lesson.stem}:language".encode()).hexdigest()[:16]
    notebook.cells.insert(before + 1, setting)
    notebook.metadata[english.STAMP] = nbformat.from_dict(
        {"lesson": lesson.relative_to(root).as_posix(), "language": "zh"}
    )
    return notebook


def build_page(page, root=ROOT):
    """The Chinese text of a page, from its catalog and its English text. Links to a section's
    English name go on working."""
    chinese = translations(catalog_of(page, root))
    text = "".join(markdown_piece(each, chinese) for each in pieces_of_page(page))
    text = relink(text, page, all_translated(root), root).replace(
        "four_ranks.svg", "four_ranks.zh.svg"
    )
    missing = sum(each not in chinese for each in messages(page))
    text = text.replace(
        f"[中文]({notebook_of(page, root).name})", f"[English]({page.name}){unfinished(missing)}。"
    )
    english_names = re.findall(r"^(##+ )(.+)", page.read_text(encoding="utf-8"), re.M)
    for level, name in english_names:
        slug = re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-")
        shown = level + chinese.get(name, f"{MARK} {name}")
        text = text.replace(f"\n{shown}\n", f'\n<a id="{slug}"></a>\n\n{shown}\n')
    return text


def all_translated(root):
    """{English notebook or page: its Chinese one}."""
    lessons = {english.notebook_of(each, root): each for each in english.lessons(root)}
    pages = {root / name: root / name for name in PAGES}
    return {
        path: notebook_of(each, root)
        for path, each in {**lessons, **pages}.items()
        if catalog_of(each, root).exists()
    }


def unfinished(missing):
    return f"；有 {missing} 处尚未译出或等待更新，暂以英文显示" if missing else ""


def about(lesson, missing, root):
    there = os.path.relpath(english.notebook_of(lesson, root), notebook_of(lesson, root).parent)
    return f"[English]({there}) · 代码与英文版相同，输出来自同一次运行{unfinished(missing)}。"


def markdown_piece(piece, chinese):
    if isinstance(piece, str):
        return piece
    if isinstance(piece, Rewritten):
        return piece.chinese
    if piece.text in chinese:
        return chinese[piece.text]
    if piece.kind == "picture":
        return piece.text
    if piece.kind == "row":
        return piece.text.replace("| ", f"| {MARK} ", 1)
    return f"{MARK}\n\n{piece.text}" if piece.kind == "table" else f"{MARK} {piece.text}"


def code_piece(piece, chinese):
    if isinstance(piece, str):
        return piece
    return piece.in_source(chinese) if piece.text in chinese else piece.source


def relink(markdown, lesson, translated, root):
    """Links as seen from notebooks/zh/. translated: {English notebook: its Chinese one}."""
    home = root if is_page(lesson) else english.notebook_of(lesson, root).parent
    here = notebook_of(lesson, root).parent

    def moved(link):
        target = Path(os.path.normpath(home / link[2]))
        return link[1] + Path(os.path.relpath(translated.get(target, target), here)).as_posix()

    return re.sub(r'(\]\(|src=")(?![a-z]+:|#|/)([^)#"\s]+)', moved, markdown)


def with_chinese_figures(text, lesson, root):
    def moved(found):
        there = root / FIGURES / "zh" / found[2]
        return f"{found[1]}zh/{found[2]}" if there.exists() else found[0]

    return re.sub(rf"({FIGURES}/)([\w-]+\.svg)", moved, text)


def navigation(lesson, translated, root):
    def titled(link):
        arrow, title, back, stem = link.groups()
        known = translations(catalog_of(lesson.with_name(f"{stem}.md"), root))
        return f"[{arrow or ''}{known.get(title, title)}{back or ''}]({stem}.ipynb)"

    links = re.sub(r"\[(← )?(.*?)( →)?\]\((\w+)\.ipynb\)", titled, english.navigation(lesson, root))
    return "---\n" + relink(links, lesson, translated, root)


# ---- pictures ------------------------------------------------------------------------------------

IMAGE = re.compile(r'alt="([^"]*)"([^>]*src="data:image/svg\+xml;base64,)([^"]+)')
FIGURES = "lessons/figures"


def image_in_chinese(found):
    alt = html.escape(language.in_chinese(html.unescape(found[1])))
    svg = language.picture_in_chinese(base64.b64decode(found[3]).decode())
    return f'alt="{alt}"{found[2]}{base64.b64encode(svg.encode()).decode()}'


def figures_in_chinese(root=ROOT):
    """{path: SVG} of the drawings of all lessons, with Chinese words. A drawing's title is its
    alternative text, which the lesson's catalog has."""
    titles = {
        language.NUMBER.sub("#", text): language.NUMBER.sub("#", chinese)
        for lesson in english.lessons(root)
        for text, chinese in translations(catalog_of(lesson, root)).items()
        if messages(lesson).get(text) == "picture"
    }
    known = titles | language.words_in_pictures()
    there = {path: path.parent / "zh" / path.name for path in (root / FIGURES).glob("*.svg")}
    there |= {path: path.with_suffix(".zh.svg") for path in (root / "docs").glob("four_ranks.svg")}
    return {
        there[path]: language.picture_in_chinese(path.read_text("utf-8"), known)
        for path in sorted(there)
    }


# ---- outputs: what a cell printed, in the words of its translated strings ------------------------


def translate_output(output, source, said, chinese):
    """Replace what the cell's strings and the library said in English; values stay.

    The library's own words are looked up where it says them in the learner's language: in a cell
    with a prediction or an exercise. Of a table only the HTML changes, which is what is shown.
    """
    speaks = re.search(r"\b(reveal|predict|check\.\w+|ask\.\w+)\(", source)
    library = language.messages() if speaks else None

    def printed(text):
        for string in said:
            if string.role != "table":
                text = spoken(string, chinese, text)
        return library.said(text) if library else text

    def page(text):
        heads = {s.text: chinese[s.text] for s in said if s.role == "table"}

        def between(found):
            plain_text = html.unescape(found[0])
            shown = heads.get(plain_text) or printed(plain_text)
            return found[0] if shown == plain_text else html.escape(shown)

        return re.sub(r"(?<=>)[^<>]+(?=<)", between, text)

    if output.output_type == "stream" and output.name == "stdout":
        output.text = printed(output.text)
    data = output.get("data", {})
    if "text/markdown" in data or any("<svg" in str(value) for value in data.values()):
        return  # source of the library, or a picture
    if "<img" in data.get("text/html", ""):
        data["text/html"] = IMAGE.sub(image_in_chinese, data["text/html"])
    for kind, change in (("text/plain", printed), ("text/html", page)):
        if kind in data and "<img" not in data[kind]:
            data[kind] = change(data[kind])


def parts_of(text):
    """A template as [literal, (expression, format), literal, ...]."""
    found = ast.parse("f" + repr_of(text), mode="eval").body.values if text else []
    return [
        part.value if isinstance(part, ast.Constant) else ast.unparse(ast.JoinedStr([part]))[2:-1]
        for part in found
    ], [isinstance(part, ast.Constant) for part in found]


def repr_of(text):
    return '"""' + text.replace("\\", "\\\\").replace('"', '\\"') + '"""'


FORMATTED = r"( *[-+]?(?:[\d,]*\.?\d+(?:e[-+]\d+)?%?|inf|nan))"  # of a format such as 5.1f


def group_for(part, after):
    """A number, where the format says so. Else any text (a list is one value, whatever is in it)
    up to a colon that follows it; it may contain spaces, so that a name stays whole."""
    if re.search(r":[^:]*[\d,.][feg%]}$", part):
        return FORMATTED
    until = rf"(?!{re.escape(after)})" if after.startswith(":") else ""
    return rf"((?:\[[^\[\]\n]*\]|{until}.)*?)"


def patterns(string):
    """Regular expressions of how a string of a cell is printed: up to the end of its line, or
    before other values."""
    if not string.is_template:
        edge = r"(?!\w)" if string.text[-1].isalnum() else ""
        return [rf"(?<!\w){re.escape(string.whole)}{edge}"]
    parts, literal = parts_of(string.whole)
    body = "".join(
        re.escape(part) if is_literal else group_for(part, after)
        for part, is_literal, after in zip(parts, literal, [*parts[1:], ""])
    )
    ends = ["$", "(?=[ :,])", *[""] * literal[-1]]
    return [rf"(?m)(?:^|(?<=[\s，：])){body}{end}" for end in ends]


def spoken(string, chinese, text):
    """A printed text with one string of the cell in Chinese, its values as they were printed."""

    def translated(found):
        if not string.is_template:
            return string.shown(chinese)
        names = [part for part, is_literal in zip(*parts_of(string.whole)) if not is_literal]
        values = dict(zip(names, found.groups()))
        wanted = zip(*parts_of(string.shown(chinese)))
        return "".join(part if is_literal else values[part] for part, is_literal in wanted)

    for each in patterns(string):
        text, number = re.subn(each, translated, text)
        if number:
            break
    return text


# ---- checks --------------------------------------------------------------------------------------

# Words of the glossary that are ordinary English words too: which one is meant, a reader knows.
ORDINARY = set(
    "launch push pull send receive root reduce round unit block code combine capacity dropped "
    "group tree chunk axis draft ring lane schedule gather scatter stage segment elastic fencing "
    "hang overlap dispatch rank worker parameter shard node grid mesh resume decode replica "
    "replicated placement hook bucket draft copy expert grid uplink collective overflow underflow "
    "unit replay clipping in flight layout interleaved regret offload ZeRO position doubling offer "
    "utilization".split()
)


@cache
def instead():
    """{what nobody writes here: what is written}, from a table of lessons/zh/STYLE.md."""
    text = (ROOT / "lessons/zh/STYLE.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| 不写：([^|]+) \|", text, re.M)
    return {wrong: right for right, many in rows for wrong in many.split("、")}


def plain(text):
    """A text without code, formulas, addresses and emphasis; X stands for code and formulas."""
    text = re.sub(r"`[^`]*`|\$[^$]*\$|\{[^{}]*\}", "X", text)
    text = re.sub(r"([。：？！])\*\* ", r"\1", text)  # (CommonMark asks for this space)
    return re.sub(r"\*+|!?\[|\]\([^)]*\)|\]|https?://\S+", "", text)


def faults(text, chinese, kind=""):
    """What is wrong with one translation, a sentence each."""
    said = plain(chinese)
    if kind == "formula":
        bare = [re.sub(r"\\text\{[^}]*\}", "", each) for each in (text, chinese)]
        if bare[0] != bare[1]:
            yield r"a formula may change in \text{...} only"
    elif kind != "string":
        for name, pattern in (
            ("formulas", r"\$[^$]+\$"),
            ("code", r"`[^`]+`"),
            ("links", r"\]\(([^)]+)\)"),
        ):
            have, want = (Counter(re.findall(pattern, each)) for each in (chinese, text))
            if have != want:
                yield f"{name}: {sorted((have - want).elements())} here and not in English, " + (
                    f"{sorted((want - have).elements())} in English only"
                )
    elif "{" in text and sorted(values_of(text)) != sorted(values_of(chinese)):
        yield f"values: {values_of(chinese)} here, {values_of(text)} in English"
    if not re.search("illion|thousand|dozen", text):
        digits = set(re.findall(r"\d+(?:\.\d+)?", plain(text)))
        if lost := digits - set(re.findall(r"\d+(?:\.\d+)?", said)):
            yield f"numbers: {sorted(lost)} in English only"
    for found in re.findall(rf"[{CHINESE}][A-Za-z0-9]|[A-Za-z0-9%][{CHINESE}]", said):
        yield f"a space between Chinese and Latin: {found}"
    for found in re.findall(rf"[{CHINESE}][,.;:?!](?!\w)|[{CHINESE}]\(|\([{CHINESE}]", said):
        yield f"Chinese punctuation: {found}"
    for found in re.findall(rf'[{CHINESE}]"|"[{CHINESE}]', said):
        yield f"Chinese quotation marks: {found}"
    for found in re.findall(
        r"(?<!\|) [，。；：、？！（）“”]|[，。；：、？！（）] (?=[^\s|])", said
    ):
        yield f"no space beside Chinese punctuation: {found!r}"
    if kind not in ("string", "comment", "picture") and "*" in text:
        shown = MARKDOWN.renderInline(re.sub(r"`[^`]*`|\$[^$]*\$", "X", chinese))
        if re.search(r"\*(?! )", shown):
            yield "emphasis that no page shows: put （English） and punctuation outside of ** **"
    for wrong, right in instead().items():
        if wrong in said:
            yield f"{right}, not {wrong}"
    yield from terms_missing(text, chinese)


def values_of(text):
    try:
        parts, literal = parts_of(text)
    except SyntaxError:
        return ["a brace that does not close"]
    return [part for part, is_literal in zip(parts, literal) if not is_literal]


def terms_missing(text, chinese):
    """Words of the glossary in the English text whose Chinese is not in the translation."""
    bare = re.sub(r"[-\s]+", " ", re.sub(r"\w*_\w*", "X", plain(text).lower()))
    for word, spelled, right in terms():
        if spelled in bare:
            bare, number = re.subn(rf"(?<!\w){re.escape(spelled)}(?:s|es)?(?!\w)", "~", bare)
            if number and not any(each.lower() in chinese.lower() for each in (word, *right)):
                yield f"term: {word} is {right[0]}"


@cache
def terms():
    """(word, how it is spelled here, its Chinese), the longest first: they hold shorter ones."""
    found = [(w, re.sub("[-_]", " ", w.lower()), right) for w, right in accepted().items()]
    return sorted((each for each in found if each[0] not in ORDINARY), key=lambda w: -len(w[0]))


def check(lesson, root=ROOT):
    """What is wrong in a lesson's catalog, a line each."""
    kinds, done = messages(lesson), translations(catalog_of(lesson, root))
    for text, chinese in done.items():
        if text in kinds:
            for fault in faults(text, chinese, kinds[text]):
                yield f"{lesson.stem}: {fault}\n    {chinese[:90]}"
    if is_page(lesson):
        return
    for text in predictions_lost(lesson, done):
        yield f"{lesson.stem}: reveal() would not find the prediction {text!r}"
    for text in printed_in_english(lesson, done, root):
        yield f"{lesson.stem}: leave this in English, as its output cannot be changed: {text}"


def predictions_lost(lesson, done):
    """Names of predictions that no reveal() of the Chinese notebook would find."""
    names = {"predict": [], "reveal": []}
    for cell in cells_of(lesson):
        tree = ast.parse(cell.source) if cell.cell_type == "code" and "(" in cell.source else None
        for node in ast.walk(tree) if tree and re.search("predict|reveal", cell.source) else ():
            call = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            if call in names and is_text(node.args[0]):
                source = ast.get_source_segment(cell.source, node.args[0])
                names[call].append(String(source, node.args[0], "said", []))
    for predicted in names["predict"]:
        revealed = {
            spoken(each, done, predicted.text) for each in names["reveal"] if each.text in done
        }
        name = done.get(predicted.text, predicted.text)
        if name != predicted.text and name not in revealed:
            yield predicted.text


def printed_in_english(lesson, done, root=ROOT):
    """Strings that are translated in a cell and still English in the output below it."""
    if not done:
        return
    cells = {cell.id: cell for cell in build(lesson, root).cells}
    for cell in notebook_in(english.notebook_of(lesson, root)).cells:
        if cell.cell_type != "code":
            continue
        before, after = (
            "".join(o.get("text", "") for o in each.outputs if o.output_type == "stream")
            for each in (cell, cells[cell.id])
        )
        for piece in pieces_of_code(cell.source):
            changed = isinstance(piece, String) and done.get(piece.text, piece.text) != piece.text
            if changed and piece.role != "table":
                literal = max(re.split(r"\{[^{}]*\}", piece.text), key=len).strip()
                if literal in before and literal in after:
                    yield piece.text


@dataclass(frozen=True)
class Count:
    """How much of a lesson is translated. stale: its English has changed since."""

    messages: int
    translated: int
    stale: int


def count(lesson, root=ROOT):
    wanted, catalog = messages(lesson), read(catalog_of(lesson, root))
    done = translations(catalog_of(lesson, root))
    fuzzy = sum(message.fuzzy and message.id in wanted for message in catalog if message.id)
    gone = sum(text not in wanted for text in done)
    return Count(len(wanted), sum(text in done for text in wanted), fuzzy + gone)


def notebook_in(path):
    """The notebook in a file, which the build has validated."""
    return nbformat.v4.reads_json(path.read_text(encoding="utf-8"))


def text_of(notebook):
    return nbformat.v4.writes_json(notebook) + "\n"


def built(lesson, root=ROOT):
    """What the file of a Chinese notebook or page is to hold."""
    return build_page(lesson, root) if is_page(lesson) else text_of(build(lesson, root))


def is_fresh(lesson, root=ROOT):
    path = notebook_of(lesson, root)
    return path.exists() and path.read_text(encoding="utf-8") == built(lesson, root)


# ---- the command ---------------------------------------------------------------------------------


def build_all(chosen, root):
    for path, svg in figures_in_chinese(root).items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(svg, encoding="utf-8")
    found = {lesson: count(lesson, root) for lesson in chosen}
    for lesson in found:
        if catalog_of(lesson, root).exists():
            path = notebook_of(lesson, root)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(built(lesson, root), encoding="utf-8")
    print("lesson                          translated  missing  stale")
    for lesson, so_far in found.items():
        missing = so_far.messages - so_far.translated
        print(
            f"{lesson.stem:30}  {so_far.translated:4} of {so_far.messages:3}  {missing:7}  "
            f"{so_far.stale or '':5}".rstrip()
        )
    done = [sum(getattr(each, name) for each in found.values()) for name in ("translated", "stale")]
    print(f"{done[0]} of {sum(each.messages for each in found.values())} texts, {done[1]} stale")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", default="build")
    parser.add_argument("names", nargs="*", help="lessons, e.g. 02_naive_data_parallel or 02")
    options = parser.parse_args(argv)
    names, filled = list(options.names), None
    if options.what == "fill":
        *names, filled = names
    course = [*english.lessons(ROOT), *(ROOT / name for name in PAGES)]
    chosen = [
        lesson
        for lesson in course
        if not names or any(re.match(rf"{name}(_|$)", lesson.stem) for name in names)
    ]
    if not chosen:
        parser.error(f"no lesson called {', '.join(names)}")
    if options.what == "build":
        build_all(chosen, ROOT)
    elif options.what == "extract" and names:
        for lesson in chosen:
            extract(lesson)
    elif options.what == "sheet" and len(chosen) == 1:
        print(sheet(chosen[0]), end="")
    elif options.what == "fill" and len(chosen) == 1:
        number = fill(chosen[0], Path(filled).read_text(encoding="utf-8"))
        print(f"{number} texts are in {catalog_of(chosen[0]).relative_to(ROOT)}")
    elif options.what == "show" and len(chosen) == 1:
        page = is_page(chosen[0])
        print(build_page(chosen[0]) if page else jupytext.writes(build(chosen[0]), fmt="md"))
    elif options.what == "check":
        found = [line for lesson in chosen for line in check(lesson)]
        print("\n".join([*found, f"{len(found)} faults"]))
        return int(bool(found))
    else:
        parser.error("build, check, extract NAME ..., sheet NAME, fill NAME FILE or show NAME")
    return 0


if __name__ == "__main__":
    sys.exit(main())
