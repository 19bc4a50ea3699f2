"""The words below an explorer's picture, as HTML."""

from __future__ import annotations

from mini_dist.plan.calculators import Breakdown, readable
from mini_dist.plan.tables import escaped
from mini_dist.plan.tables import html_table as table


def breakdown(shown: Breakdown) -> str:
    """Return a breakdown as a table: each line with its formula and source."""
    rows = [
        (line.name, readable(line.value, line.unit), line.formula, line.source) for line in shown
    ]
    return table(rows, caption=shown.title)


def paragraph(text: str) -> str:
    return f"<p>{escaped(text)}</p>"
