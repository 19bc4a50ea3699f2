"""An answer that can be checked: a list of lines, each with its formula and source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """One item of a breakdown: its name, value, unit, formula and source."""

    name: str
    value: float
    unit: str
    formula: str
    source: str = ""

    def __str__(self):
        return f"{self.name}: {readable(self.value, self.unit)} = {self.formula}"


@dataclass(frozen=True)
class Breakdown:
    """Lines that add up to `total` (if they share a unit); `b["name"]` is one line's value."""

    title: str
    lines: tuple[Line, ...]

    def __post_init__(self):
        object.__setattr__(self, "lines", tuple(self.lines))

    @property
    def total(self) -> float:
        units = sorted({line.unit for line in self.lines})
        if len(units) > 1:
            raise ValueError(f"{self.title}: lines in {', '.join(units)} do not add up.")
        return sum(line.value for line in self.lines)

    @property
    def unit(self) -> str:
        return self.lines[0].unit if self.lines else ""

    def __getitem__(self, name: str) -> float:
        for line in self.lines:
            if line.name == name:
                return line.value
        raise KeyError(
            f"{name!r} is not a line of {self.title!r}: "
            f"it has {', '.join(line.name for line in self.lines)}"
        )

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def table(self) -> str:
        """The breakdown as text: name, value, formula, source, and the total below."""
        rows = [
            (line.name, readable(line.value, line.unit), line.formula, line.source)
            for line in self.lines
        ]
        if len({line.unit for line in self.lines}) == 1:
            rows.append(("total", readable(self.total, self.unit), "", ""))
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        lines = [self.title]
        for name, value, formula, source in rows:
            lines.append(
                f"  {name:<{widths[0]}}  {value:>{widths[1]}}  "
                f"{formula:<{widths[2]}}  {source}".rstrip()
            )
        return "\n".join(lines)

    __str__ = table


def readable(value: float, unit: str = "") -> str:
    """Write a number as people say it: 1.56 billion parameters, 45.6 GiB, 2.1 ms."""
    if unit == "bytes":  # memory in binary units, as allocators and nvidia-smi print it
        for scale, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
            if abs(value) >= scale:
                return f"{value / scale:.2f} {name}"
        return f"{value:.0f} bytes"
    if unit == "s":
        for scale, name in ((365.25 * 86400, "years"), (86400, "days"), (1, "s"), (1e-3, "ms")):
            if abs(value) >= scale:
                return f"{value / scale:.4g} {name}"
        return f"{value * 1e6:.3g} us"
    for scale, prefix in (
        (1e24, "Y"),
        (1e21, "Z"),
        (1e18, "E"),
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
        (1e3, "k"),
    ):
        if abs(value) >= scale:
            # as one writes them: 312 TFLOP/s, but 1.558 G parameters
            return f"{value / scale:.4g} {prefix}{'' if unit.startswith('FLOP') else ' '}{unit}"
    return f"{value:.4g} {unit}".rstrip()
