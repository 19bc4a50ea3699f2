"""The words below an explorer's picture, as HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable

from mini_dist.plan.calculators import Breakdown, readable

SHORT = 24  # letters: a cell with fewer stays on one line


def table(rows: Iterable[Iterable], head: Iterable = (), caption: str = "") -> str:
    """Rows of text, aligned left; everything is escaped."""

    def line(tag: str, cells: Iterable) -> str:
        said = ""
        for cell in map(str, cells):
            whole = ";white-space:nowrap" * (len(cell) < SHORT)
            said += f"<{tag} style='text-align:left{whole}'>{html.escape(cell)}</{tag}>"
        return f"<tr>{said}</tr>"

    head = list(head)
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    body = "".join(line("td", row) for row in rows)
    return f"<table>{title}{line('th', head) if head else ''}{body}</table>"


def breakdown(shown: Breakdown) -> str:
    """A breakdown: each line with its formula and source."""
    rows = [
        (line.name, readable(line.value, line.unit), line.formula, line.source) for line in shown
    ]
    return table(rows, caption=shown.title)


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"
