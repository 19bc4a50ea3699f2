"""Make text of a learner's harmless for a terminal, a page and a spreadsheet.

A name may hold an escape sequence that empties the terminal, U+202E, which turns what follows
around, or a line end that makes a second line of the teacher's table. All of these are shown as
Python writes them: \\x1b, \\u202e, \\n.
"""

from __future__ import annotations

import unicodedata

JOINERS = "\u200c\u200d"  # Persian and Indic names, and emoji, are written with them
FORMULA = "=+-@\u2212"  # what a formula begins with in a spreadsheet
SEPARATORS = ";,|"  # of cells; which of them depends on the country of who opens the file


def printable(text: object, keep: str = "") -> str:
    """Return the text with every character that controls something written out, but for `keep`."""
    return "".join(
        letter.encode("unicode_escape").decode()
        if controls(letter) and letter not in keep
        else letter
        for letter in str(text)
    )


def controls(letter: str) -> bool:
    """Whether it is a control or format character, half of a pair, or an end of a line."""
    kind = unicodedata.category(letter)
    return (kind[0] == "C" or kind in ("Zl", "Zp")) and letter not in JOINERS


def cell(text: object) -> str:
    """Return the text for a cell of a CSV file, with a quote before all that begins a formula."""
    parts, begins = [], True
    for letter in printable(text):
        plain = unicodedata.normalize("NFKC", letter)  # (full-width forms are also formulas)
        if begins and not letter.isspace():
            parts.append("'" * (plain[:1] in FORMULA))
            begins = False
        begins = begins or plain in SEPARATORS
        parts.append(letter)
    return "".join(parts)
