"""A small table that looks right in a terminal and on a page."""

from __future__ import annotations

import html
from dataclasses import dataclass

from mini_dist.plan.fields import checks_kinds


@checks_kinds
@dataclass
class Table:
    head: list[str]
    rows: list[tuple]
    title: str = ""

    def cells(self) -> list[list[str]]:
        return [[cell(value) for value in row] for row in self.rows]

    def __repr__(self) -> str:
        lines = [self.head, *self.cells()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.head))]
        right = [not isinstance(value, str) for value in self.rows[0]] if self.rows else []
        text = [self.title] if self.title else []
        for line in lines:
            text.append(
                "  ".join(
                    entry.rjust(width) if right and right[i] else entry.ljust(width)
                    for i, (entry, width) in enumerate(zip(line, widths))
                ).rstrip()
            )
        return "\n".join(text)

    def _repr_html_(self) -> str:
        def line(tag, values):
            align = [
                "left" if self.rows and isinstance(self.rows[0][i], str) else "right"
                for i in range(len(values))
            ]
            return (
                "<tr>"
                + "".join(
                    f"<{tag} style='text-align:{side}'>{html.escape(value)}</{tag}>"
                    for side, value in zip(align, values)
                )
                + "</tr>"
            )

        body = "".join(line("td", row) for row in self.cells())
        caption = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        return f"<table>{caption}{line('th', self.head)}{body}</table>"


def cell(value) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
