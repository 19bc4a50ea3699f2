"""Tables that look right in a terminal and on a page: every room's text and HTML come from here."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .fields import checks_kinds


@checks_kinds
@dataclass
class Table:
    head: list[str]
    rows: list[tuple]
    title: str = ""

    def cells(self) -> list[list[str]]:
        return [[cell(value) for value in row] for row in self.rows]

    def sides(self) -> list[str]:
        """Text is aligned left and numbers right, as the first row has them."""
        if not self.rows:
            return ["right"] * len(self.head)
        return ["left" if isinstance(value, str) else "right" for value in self.rows[0]]

    def __repr__(self) -> str:
        lines = [self.head, *self.cells()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.head))]
        right = [side == "right" and bool(self.rows) for side in self.sides()]
        text = [self.title] if self.title else []
        for line in lines:
            entries = zip(line, widths, right)
            text.append("  ".join(e.rjust(w) if r else e.ljust(w) for e, w, r in entries).rstrip())
        return "\n".join(text)

    def _repr_html_(self) -> str:
        return html_table(self.cells(), self.head, self.title, self.sides())


def cell(value) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


class Markup(str):
    """Text that is HTML already."""


@checks_kinds
def html_table(
    rows: Iterable[Iterable],
    head: Iterable = (),
    caption: str = "",
    sides: Sequence[str] | None = None,
    styles: Iterable[str] = (),
) -> str:
    """Write an HTML table. Every cell is escaped that is not Markup.

    sides: "left" or "right" for each column, all left if None. styles: CSS of each row.
    """
    rows, styles = [list(row) for row in rows], list(styles)

    def line(tag: str, values: list, style: str = "") -> str:
        entries = ""
        for side, value in zip(sides or ["left"] * len(values), values):
            entries += f"<{tag} style='text-align:{side}'>{escaped(value)}</{tag}>"
        return f"<tr style='{style}'>{entries}</tr>" if style else f"<tr>{entries}</tr>"

    head = list(head)
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    top = line("th", head) if head else ""
    body = "".join(line("td", row, style) for row, style in zip(rows, styles or [""] * len(rows)))
    return f"<table>{title}{top}{body}</table>"


def escaped(value) -> str:
    return value if isinstance(value, Markup) else html.escape(str(value))
