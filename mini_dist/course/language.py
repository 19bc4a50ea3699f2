"""What the library says to a learner, in the learner's language: verdicts, predictions, progress.

English is the source and the fallback. A catalog (language_zh.po, gettext) has the other words:

    msgid "Right with {before}. With {where}: {hint}"
    msgstr "{before}时是对的。{where}时：{hint}"

A field in braces matches any text, {n:d} a number, {name:w} a word without spaces. The matched text
is translated in turn, so a sentence may contain another one; {value:v} is left as it is.
The library makes its sentences in English and passes them through `said` where a learner reads
them. Errors stay English, because people search for them.
"""

from __future__ import annotations

import html
import re
from functools import cache
from pathlib import Path

from mini_dist.plan.fields import checks_kinds

CATALOG = Path(__file__).with_name("language_zh.po")
PICTURES = Path(__file__).with_name("pictures_zh.po")  # words in drawings, # for a number
LANGUAGES = {"en": "English", "zh": "中文"}
KINDS = {"d": r"[-+]?\d[\d,.]*", "w": r"\S+", "v": r".+?", "": r".+?"}
IN_SVG = re.compile(r"(<(?:text|title|tspan)\b[^>]*>)([^<]+)(?=</)")
NUMBER = re.compile(r"\d(?:[\d.,]*\d)?")
WITHIN_CHINESE = re.compile("(?<=[\u4e00-\u9fff，。；：、]) (?=[\u4e00-\u9fff])")  # no space there
FIELD = re.compile(r"\{(\w+)(?::([dwv]))?\}")


class Messages:
    """The sentences of a catalog. `said` returns a sentence in its language, or as it came."""

    def __init__(self, path: Path):
        from babel.messages.pofile import read_po

        with path.open("rb") as file:
            found = [m for m in read_po(file) if m.id and m.string and not m.fuzzy]
        self.exact = {m.id: m.string for m in found if not FIELD.search(m.id)}
        templates = [m for m in found if FIELD.search(m.id)]
        templates.sort(key=lambda m: -len(FIELD.sub("", m.id)))  # the most specific ones first
        self.templates = [
            (_pattern(m.id), {name for name, kind in FIELD.findall(m.id) if not kind}, m.string)
            for m in templates
        ]

    def said(self, text: str) -> str:
        """Translate a text, line by line; what no message fits stays English."""
        return "\n".join(map(self.said_in_line, text.split("\n")))

    def said_in_line(self, text: str) -> str:
        before = re.match(r"\s*(?:\d+\. )?", text)[0]  # spaces, and the number of a list
        return before + self.said_in_text(text[len(before) :])

    def said_in_text(self, text: str) -> str:
        if text in self.exact:
            return self.exact[text]
        for wanted, inner, translation in self.templates:
            if found := wanted.fullmatch(text):
                values = found.groupdict()
                values |= {name: self.said_in_line(values[name]) for name in inner}
                return WITHIN_CHINESE.sub("", translation.format(**values))
        return text


def _pattern(message: str) -> re.Pattern:
    """Return a pattern for the texts that a message with fields fits."""
    parts, at = "", 0
    for field in FIELD.finditer(message):
        name, kind = field[1], field[2] or ""
        parts += re.escape(message[at : field.start()]) + f"(?P<{name}>{KINDS[kind]})"
        at = field.end()
    return re.compile(parts + re.escape(message[at:]))


@cache
def messages() -> Messages:
    return Messages(CATALOG)


@checks_kinds
def said(text: str) -> str:
    """Return what a learner reads instead of an English text, in the language of `language()`."""
    from .learner import language  # here, because learner.py imports this module

    return messages().said(text) if language() == "zh" else text


# ---- words in pictures ---------------------------------------------------------------------------


@cache
def words_in_pictures() -> dict[str, str]:
    """Return {words of a drawing, with # for each number: the same words in Chinese}."""
    return Messages(PICTURES).exact


def in_chinese(words: str, known: dict[str, str] | None = None) -> str:
    """Return the words of a drawing in Chinese, or unchanged if no message has them."""
    numbers = NUMBER.findall(words)
    found = (known or words_in_pictures()).get(NUMBER.sub("#", words.strip()))
    if found is None or found.count("#") != len(numbers):
        return words
    return re.sub("#", lambda _: numbers.pop(0), found)


def picture_in_chinese(svg: str, known: dict[str, str] | None = None) -> str:
    """Return the same drawing with its words in Chinese."""

    def translated(found: re.Match) -> str:
        return found[1] + html.escape(in_chinese(html.unescape(found[2]), known), quote=False)

    return IN_SVG.sub(translated, svg)


def drawn(svg: str, alt: str) -> tuple[str, str]:
    """Return a picture and its alternative text in the language of `language()`."""
    from .learner import language

    if language() != "zh":
        return svg, alt
    return picture_in_chinese(svg), in_chinese(alt)
