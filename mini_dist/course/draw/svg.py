"""A small canvas: axes, bars, lines and words as SVG, for a notebook and for a web page alike.

    panel = Panel(300, 200, x=(0, 10), y=(-0.5, 1.5), xlabel="GiB")
    panel.box(0, -0.4, 7, 0.4, "#3182bd")
    Drawing([panel], "a bar of 7 GiB")

SVG follows the theme of its page: the ink is the color of the words around it. A panel keeps its
marks in the units of its data, so a test can read them. A narrow page stacks the panels of a
drawing, and no panel shrinks so far that its letters become smaller than 11 pixels.
"""

from __future__ import annotations

import base64
import math
import textwrap
from collections.abc import Iterable
from html import escape
from itertools import groupby
from typing import NamedTuple

INK, LIMIT = "currentColor", "#e34a33"  # LIMIT: for the capacity of a device
FAINT = 0.15  # opacity of the ink in bands, empty cells and guides
SIZE, SMALLEST = 13, 11  # pixels: height of the letters as drawn, and their minimum
LETTER = 0.6  # mean width of a sans-serif letter, as a share of its height
WIDEST = 720  # pixels of a row of panels


class Box(NamedTuple):
    """A filled rectangle between two corners."""

    x0: float
    y0: float
    x1: float
    y1: float
    color: str
    alpha: float
    gap: float  # pixels left free at its right edge


class Line(NamedTuple):
    """A line through points; `filled` makes it the border of an area."""

    points: list[tuple[float, float]]
    color: str
    width: float
    dash: str
    alpha: float
    filled: bool
    head: bool  # an arrow's


class Dot(NamedTuple):
    x: float
    y: float
    color: str
    radius: float  # pixels
    filled: bool


class Words(NamedTuple):
    x: float
    y: float
    text: str
    color: str
    anchor: str  # start, middle or end
    bold: bool
    shift: tuple[float, float]  # pixels, right and down


class Panel:
    """A plot of `width` x `height` pixels with the words around it; x, y: (first, last) value.

    `xticks` and `yticks` map a value to its label. `legend` maps a name to its color.
    """

    def __init__(self, width: float, height: float, x, y, *, title="", xlabel="", ylabel="",
                 xticks=None, yticks=None, legend=None, sides="lb"):  # fmt: skip
        self.width, self.height, self.x, self.y = width, height, x, y
        self.title, self.xlabel, self.ylabel = title, xlabel, ylabel
        self.xticks, self.yticks, self.legend = xticks or {}, yticks or {}, legend or {}
        self.sides = sides  # which axes have a line: l(eft), b(ottom)
        self.marks: list[Box | Line | Dot | Words] = []

    def box(self, x0, y0, x1, y1, color, alpha=1.0, gap=0.0) -> None:
        self.marks.append(Box(x0, y0, x1, y1, color, alpha, gap))

    def line(self, points: Iterable, color=INK, width=1.6, dash="", alpha=1.0, filled=False,
             head=False) -> None:  # fmt: skip
        self.marks.append(Line(list(points), color, width, dash, alpha, filled, head))

    def guide(self, x=None, y=None, color=INK, width=1.2, dash="4 3", alpha=1.0) -> None:
        """Draw a line across the whole panel, at a value of x or of y."""
        ends = [(x, end) for end in self.y] if y is None else [(end, y) for end in self.x]
        self.line(ends, color, width, dash, alpha)

    def dot(self, x, y, color, radius=3.5, filled=True) -> None:
        self.marks.append(Dot(x, y, color, radius, filled))

    def words(self, x, y, text, color=INK, anchor="start", bold=False, shift=(0, 0)) -> None:
        self.marks.append(Words(x, y, str(text), color, anchor, bold, shift))

    def share(self, across: float, up: float) -> tuple[float, float]:
        """Return the values of x and y at these shares of the plot's width and height."""
        (x0, x1), (y0, y1) = self.x, self.y
        return x0 + across * (x1 - x0), y0 + up * (y1 - y0)

    # ---- as SVG ----

    def layout(self) -> None:
        """Place the plot inside the panel and leave room for the words around it."""
        self.titles = textwrap.wrap(self.title, max(1, int(self.width / (LETTER * SIZE))))
        widest = max((len(label) for label in self.yticks.values()), default=0)
        self.left = 8 + LETTER * SIZE * widest + 6 * bool(widest) + 18 * bool(self.ylabel)
        ends = [len(label) for label in self.xticks.values()][-1:]
        self.right = self.width - max(8, LETTER * SIZE * max(ends, default=0) / 2)
        self.top = 6 + 17 * len(self.titles) + 18 * len(self.legend_rows())
        self.bottom = self.height - 6 - 18 * bool(self.xticks) - 17 * bool(self.xlabel)

    def legend_rows(self) -> list[list[tuple[float, str, str]]]:
        """Return the rows of the legend, lists of (left edge, name, color)."""
        rows, x = [], math.inf
        for name, color in self.legend.items():
            width = 16 + LETTER * SIZE * len(name) + 12
            if x + width > self.width:
                rows.append([])
                x = 8
            rows[-1].append((x, name, color))
            x += width
        return rows

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the pixel of a value. A value beyond an axis gets the pixel at its border."""
        (x0, x1), (y0, y1) = self.x, self.y
        across = min(max((x - x0) / ((x1 - x0) or 1), 0), 1)
        up = min(max((y - y0) / ((y1 - y0) or 1), 0), 1)
        return (
            self.left + across * (self.right - self.left),
            self.bottom - up * (self.bottom - self.top),
        )

    def inside(self) -> str:
        """Return the panel's SVG without the <svg> element around it."""
        self.layout()
        parts = []
        kind = lambda mark: (type(mark), mark[4:] if isinstance(mark, Box) else ())  # noqa: E731
        for (of, style), marks in groupby(self.marks, kind):
            if of is Box:  # one path for all boxes of a style
                parts.append(self.boxes(list(marks), *style))
            else:
                parts += [getattr(self, f"as_{of.__name__.lower()}")(mark) for mark in marks]
        return "".join([*parts, *self.frame()])

    def boxes(self, boxes: list[Box], color: str, alpha: float, gap: float) -> str:
        d, rows = "", {}
        for box in boxes:
            (x0, y0), (x1, y1) = self.at(box.x0, box.y0), self.at(box.x1, box.y1)
            x1 -= gap if x1 - x0 > 2 * gap else 0
            rows.setdefault((y0, y1), []).append((x0, x1))
        for (y0, y1), spans in rows.items():
            for x0, x1 in joined(spans) if alpha == 1 else spans:
                d += f"M{n(x0)} {n(y0)}H{n(x1)}V{n(y1)}H{n(x0)}Z"
        crisp = 'shape-rendering="crispEdges"'  # no seams between neighbors
        return f'<path d="{d}" fill="{color}" {crisp}{opacity(alpha)}/>'

    def as_line(self, line: Line) -> str:
        points = [self.at(*point) for point in line.points]
        places = " ".join(f"{n(x)},{n(y)}" for x, y in points)
        if line.filled:
            return f'<polygon points="{places}" fill="{line.color}"{opacity(line.alpha)}/>'
        dash = f' stroke-dasharray="{line.dash}"' * bool(line.dash)
        said = (
            f'<polyline points="{places}" fill="none" stroke="{line.color}" '
            f'style="stroke:{near_ink(line.color)}" '
            f'stroke-width="{line.width:g}"{dash}{opacity(line.alpha)}/>'
        )
        return said + (arrow_head(*points[-2:], line.color) if line.head else "")

    def as_dot(self, dot: Dot) -> str:
        x, y = self.at(dot.x, dot.y)
        paint = f'fill="{dot.color}"' if dot.filled else f'fill="none" stroke="{dot.color}"'
        return f'<circle cx="{n(x)}" cy="{n(y)}" r="{dot.radius:g}" {paint}/>'

    def as_words(self, words: Words) -> str:
        x, y = self.at(words.x, words.y)
        x, y = x + words.shift[0], y + words.shift[1]
        if words.anchor == "start":  # A label at the last bar stays inside the panel.
            x = max(0, min(x, self.width - LETTER * SIZE * len(words.text)))
        return text(x, y, words.text, words.anchor, words.color, words.bold)

    def frame(self) -> Iterable[str]:
        """Yield the SVG of axes, ticks, labels, title and legend."""
        ends = {"l": f"M{n(self.left)} {n(self.top)}V{n(self.bottom)}",
                "b": f"M{n(self.left)} {n(self.bottom)}H{n(self.right)}"}  # fmt: skip
        d = "".join(ends[side] for side in self.sides)
        for value, label in self.xticks.items():
            x, _ = self.at(value, self.y[0])
            d += f"M{n(x)} {n(self.bottom)}v4"
            yield text(x, self.bottom + 12, label, "middle")
        for value, label in self.yticks.items():
            _, y = self.at(self.x[0], value)
            d += f"M{n(self.left)} {n(y)}h-4"
            yield text(self.left - 6, y, label, "end")
        if d:
            yield f'<path d="{d}" fill="none" stroke="{INK}"/>'
        middle, center = (self.left + self.right) / 2, (self.top + self.bottom) / 2
        if self.xlabel:
            yield text(middle, self.height - 9, self.xlabel, "middle")
        if self.ylabel:
            turned = text(0, 0, self.ylabel, "middle")
            yield f'<g transform="translate(10 {n(center)}) rotate(-90)">{turned}</g>'
        for row, title in enumerate(self.titles):
            yield text(8, 10 + 17 * row, title)
        for row, names in enumerate(self.legend_rows()):
            y = 10 + 17 * len(self.titles) + 18 * row
            for x, name, color in names:
                yield f'<rect x="{n(x)}" y="{y - 5}" width="11" height="11" fill="{color}"/>'
                yield text(x + 16, y, name)


class Drawing:
    """Panels side by side. `alt` says in words what they show; `title` stands above them all."""

    def __init__(self, panels: Iterable[Panel], alt: str, title: str = "", color: str = INK):
        self.panels, self.alt, self.title, self.color = list(panels), alt, title, color

    def html(self) -> str:
        """Return the panels as inline SVG in the colors of the page, as many per row as fit."""
        panels = ""
        for panel in self.panels:
            least = panel.width * SMALLEST / SIZE
            panels += (
                f'<svg viewBox="0 0 {panel.width:g} {panel.height:g}" {FONT} aria-hidden="true" '
                f'style="flex:1 1 {least:.0f}px;min-width:{least:.0f}px;max-width:{panel.width:g}px'
                f'">{panel.inside()}</svg>'
            )
        above = (
            f'<div style="font-weight:bold;color:{near_ink(self.color)}">{escape(self.title)}</div>'
        )
        return (
            f'<div class="picture" role="img" aria-label="{escape(self.alt)}">'
            f"{above if self.title else ''}"
            f'<div style="display:flex;flex-wrap:wrap;gap:4px 16px;overflow-x:auto">{panels}</div>'
            "</div>"
        )

    def rows(self) -> list[list[Panel]]:
        """Return the rows of panels on a wide page."""
        rows: list[list[Panel]] = []
        for panel in self.panels:
            if not rows or sum(p.width for p in rows[-1]) + panel.width > WIDEST:
                rows.append([])
            rows[-1].append(panel)
        return rows

    @property
    def height(self) -> float:
        """The height in pixels on a wide page."""
        heights = [max(panel.height for panel in row) for row in self.rows()]
        return 24 * bool(self.title) + sum(heights)

    def svg(self) -> str:
        """Return one standalone picture, light or dark as the reader prefers."""
        top, rows, parts = 24 * bool(self.title), self.rows(), []
        for row in rows:
            left = 0.0
            for panel in row:
                parts.append(f'<svg x="{left:g}" y="{top:g}">{panel.inside()}</svg>')
                left += panel.width
            top += max(panel.height for panel in row)
        width = max((sum(panel.width for panel in row) for row in rows), default=0)
        above = text(8, 12, self.title, "start", self.color, True) if self.title else ""
        return standalone(width, top, self.alt, above + "".join(parts))

    def _repr_html_(self) -> str:
        """Return an image with its alternative text. JupyterLab would not show a bare SVG in a
        notebook that it does not trust yet, such as a copied one."""
        from ..language import drawn  # imported late: a page that only draws does not need it

        svg, alt = drawn(self.svg(), self.alt)
        source = base64.b64encode(svg.encode()).decode()
        return (
            f'<img alt="{escape(alt)}" style="max-width:100%" '
            f'src="data:image/svg+xml;base64,{source}">'
        )

    def __repr__(self) -> str:
        return self.alt

    def save(self, path) -> None:
        """Write the standalone picture, an SVG file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg())


FONT = f'font-family="sans-serif" font-size="{SIZE}"'
LIGHT, DARK = ("#222222", "#ffffff"), ("#dddddd", "#1e1e1e")  # ink and paper
# The paper changes with the ink, so the picture can be read on any page, even if its theme is
# not the one that the reader's system prefers.
THEMES = (
    f"<style>@media(prefers-color-scheme:dark){{svg{{color:{DARK[0]}}}"
    f".paper{{fill:{DARK[1]}}}}}</style>"
)


def standalone(width: float, height: float, title: str, inside: str) -> str:
    """Return an SVG file, light or dark as the reader prefers; `title` says what it shows."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" {FONT} role="img" color="{LIGHT[0]}">'
        f"<title>{escape(title)}</title>{THEMES}"
        f'<rect class="paper" width="{width:g}" height="{height:g}" fill="{LIGHT[1]}"/>'
        f"{inside}</svg>\n"
    )


def text(x, y, said, anchor="start", color=INK, bold=False, size=SIZE) -> str:
    anchored = f' text-anchor="{anchor}"' * (anchor != "start")
    weight = ' font-weight="bold"' * bold + f' font-size="{size:g}"' * (size != SIZE)
    style = "" if color == INK else f' style="fill:{near_ink(color)}"'
    return (
        f'<text x="{n(x)}" y="{n(y + 0.35 * size)}" fill="{color}"{style}{anchored}{weight}>'
        f"{escape(str(said))}</text>"
    )


def joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join spans of pixels that no eye can tell apart, such as thousands of kernels in a row."""
    found: list[tuple[float, float]] = []
    for x0, x1 in sorted((min(span), max(span)) for span in spans):
        if found and x0 - found[-1][1] < 0.2:
            first, last = found.pop()
            x0, x1 = first, max(last, x1)
        found.append((x0, x1))
    return found


def near_ink(color: str) -> str:
    """Mix a color of words or lines with the ink, so that they stand out on light and dark pages.

    Black and white stay: they are for words inside a box, whatever the page.
    """
    plain = color in (INK, "#ffffff", "#000000")
    return color if plain else f"color-mix(in srgb,{color} 65%,{INK})"


def ink_on(color: str) -> str:
    """Return black or white, whichever can be read on this color."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    bright = sum(share * part**2.2 for share, part in zip((0.2126, 0.7152, 0.0722), parts))
    return "#000000" if bright > 0.18 else "#ffffff"


def n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def opacity(alpha: float) -> str:
    return f' opacity="{alpha:.3g}"' * (alpha != 1)


def arrow_head(start, end, color: str, size: float = 7.0) -> str:
    """Return the head, `size` pixels long, of an arrow from `start` to `end`."""
    (x0, y0), (x1, y1) = start, end
    length = math.hypot(x1 - x0, y1 - y0) or 1
    back = size * (x1 - x0) / length, size * (y1 - y0) / length
    corners = [(x1, y1)]
    for side in (0.45, -0.45):
        corners.append((x1 - back[0] - side * back[1], y1 - back[1] + side * back[0]))
    places = " ".join(f"{n(x)},{n(y)}" for x, y in corners)
    return f'<polygon points="{places}" fill="{color}" style="fill:{near_ink(color)}"/>'


def numbered(places: Iterable[float]) -> dict[float, str]:
    """Map places to labels: each place is its own label."""
    return {place: f"{place:g}" for place in places}


def round_places(least: float, most: float, intervals: int = 6) -> list[float]:
    """Return round numbers from `least` to `most`, with at most `intervals` steps."""
    rough = (most - least) / intervals or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough * (1 - 1e-9))
    first, last = math.ceil(least / step - 1e-9), math.floor(most / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def around(values: Iterable[float], margin: float = 0.05) -> tuple[float, float]:
    """Return the limits of an axis: the least and the largest value with a margin."""
    values = list(values) or [0.0]  # A curve without points gets an empty panel.
    low, high = min(values), max(values)
    free = margin * ((high - low) or 1)
    return low - free, high + free


def powers(low: float, high: float) -> dict[float, str]:
    """Map each whole exponent from `low` to `high` to its power of ten as a label."""
    exponents = range(math.ceil(low), math.floor(high) + 1)
    return {float(k): f"{10**k:,}" if 0 <= k < 7 else f"1e{k}" for k in exponents}
