"""Figure and axes with fixed places, as SVG. Lengths are points, as matplotlib has them."""

from __future__ import annotations

import math
from html import escape
from itertools import count
from types import SimpleNamespace

INK = "#333333"
ANCHORS = {"left": "start", "center": "middle", "right": "end"}
RISE = {"bottom": 0.0, "baseline": 0.0, "center": 0.36, "top": 0.73}  # of a letter, in sizes
DASHES = {"--": "4 3", ":": "1.2 2", "-": "none"}
SCALES = {  # ColorBrewer's, which matplotlib interpolates
    "YlGn": "ffffe5 f7fcb9 d9f0a3 addd8e 78c679 41ab5d 238443 006837 004529",
    "Purples": "fcfbfd efedf5 dadaeb bcbddc 9e9ac8 807dba 6a51a3 54278f 3f007d",
}


def rgb(color) -> str:
    if isinstance(color, str):
        return color
    return "#" + "".join(f"{round(255 * part):02x}" for part in color[:3])


def on_scale(name: str, share: float) -> str:
    """The colour at 0 to 1 of a scale, between its nine."""
    stops = SCALES[name].split()
    place = min(max(share, 0.0), 1.0) * (len(stops) - 1)
    low = min(int(place), len(stops) - 2)
    pairs = [
        (int(stops[low][i : i + 2], 16), int(stops[low + 1][i : i + 2], 16)) for i in (0, 2, 4)
    ]
    return rgb([(a + (place - low) * (b - a)) / 255 for a, b in pairs])


def many(value, length: int) -> list:
    """One value for each, or the same for all. A colour is one value."""
    single = isinstance(value, (str, int, float))
    return [value] * length if single else list(value)


def each(value) -> list:
    return [value] if isinstance(value, (int, float)) else list(value)


class Figure:
    def __init__(self, figsize, dpi=100, **_):
        self.width, self.height = (72 * side for side in figsize)
        self.parts: list[tuple[float, int, object]] = []
        self.order = count()
        self.axes: list[Axes] = []
        self.transFigure = lambda x, y: (x * self.width, (1 - y) * self.height)

    def add(self, draw, zorder=1.0) -> None:
        self.parts.append((zorder, next(self.order), draw))

    def add_axes(self, place) -> Axes:
        self.axes.append(Axes(self, place))
        return self.axes[-1]

    def text(self, x, y, text, **style) -> None:
        self.add(lambda: label(*self.transFigure(x, y), text, **style), 3)

    def svg(self, alt: str) -> str:
        layers = [part for axes in self.axes for part in axes.frame()] + sorted(
            self.parts, key=lambda part: part[:2]
        )
        body = "".join(draw() for _, _, draw in layers)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'role="img" aria-label="{escape(alt)}" font-family="DejaVu Sans, Verdana, sans-serif">'
            f"<title>{escape(alt)}</title>{body}</svg>"
        )


def label(x, y, text, *, fontsize=10, size=None, color=INK, ha="left", va="baseline",
          weight="normal", rotation=0, **_) -> str:  # fmt: skip
    size = size or fontsize
    turned = f' transform="rotate({-rotation} {x:.1f} {y:.1f})"' if rotation else ""
    return (
        f'<text x="{x:.1f}" y="{y + RISE[va] * size:.1f}" font-size="{size}" fill="{rgb(color)}" '
        f'text-anchor="{ANCHORS[ha]}" font-weight="{weight}" xml:space="preserve"{turned}>'
        f"{escape(str(text))}</text>"
    )


def path(points, color=INK, linewidth=1.5, linestyle="-", fill="none", alpha=1.0) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    shape = "polygon" if fill != "none" else "polyline"
    return (
        f'<{shape} points="{places}" fill="{rgb(fill)}" stroke="{rgb(color)}" opacity="{alpha}" '
        f'stroke-width="{linewidth}" stroke-dasharray="{DASHES.get(linestyle, "none")}"/>'
    )


class Axes:
    def __init__(self, figure: Figure, place):
        left, low, width, height = place
        self.figure = figure
        self.box = SimpleNamespace(
            left=left * figure.width,
            top=(1 - low - height) * figure.height,
            width=width * figure.width,
            height=height * figure.height,
        )
        sides = {side: Side() for side in ("left", "bottom", "top", "right")}
        self.spines = Spines(sides)
        self.x_limits = self.y_limits = None
        self.seen: list[tuple[float, float]] = []  # corners of what was drawn
        self.floors: list[tuple[str, float]] = []  # where a bar stands, no margin is left
        self.labels: list[tuple[str, str]] = []  # of the legend, with colours
        self.face, self.shown = "none", True
        self.xaxis, self.yaxis = (SimpleNamespace(labelpad=4.0) for _ in "xy")
        self.transData = self.at
        self.transAxes = lambda x, y: (
            self.box.left + x * self.box.width,
            self.box.top + (1 - y) * self.box.height,
        )

    # ---- where things are ----

    def get_xaxis_transform(self):
        return lambda x, y: (self.at(x, 0)[0], self.transAxes(0, y)[1])

    def get_yaxis_transform(self):
        return lambda x, y: (self.transAxes(x, 0)[0], self.at(0, y)[1])

    def at(self, x, y) -> tuple[float, float]:
        (x0, x1), (y0, y1) = self.get_xlim(), self.get_ylim()
        return self.transAxes((x - x0) / ((x1 - x0) or 1), (y - y0) / ((y1 - y0) or 1))

    def inside(self, place) -> tuple[float, float]:
        """The nearest place inside the axes: what is too long ends at their border."""
        x, y = place
        here = self.box
        return (
            min(max(x, here.left), here.left + here.width),
            min(max(y, here.top), here.top + here.height),
        )

    def get_xlim(self):
        return self.x_limits or self.around("x", [x for x, _ in self.seen])

    def get_ylim(self):
        return self.y_limits or self.around("y", [y for _, y in self.seen])

    def around(self, axis, values):
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        margin = 0.05 * ((high - low) or 1)
        stands = [floor for name, floor in self.floors if name == axis]
        return low - margin * (low not in stands), high + margin * (high not in stands)

    def set_xlim(self, left, right=None):
        left, right = (
            left if right is None and not isinstance(left, (int, float)) else (left, right)
        )
        self.x_limits = left, self.get_xlim()[1] if right is None else right

    def set_ylim(self, low, high=None):
        low, high = low if high is None and not isinstance(low, (int, float)) else (low, high)
        self.y_limits = low, self.get_ylim()[1] if high is None else high

    def invert_yaxis(self):
        self.y_limits = self.get_ylim()[::-1]

    # ---- names ----

    def set(self, **values):
        for name, value in values.items():
            getattr(self, f"set_{name}")(value)

    def set_xlabel(self, text, fontsize=10):
        def draw():
            x, y = self.transAxes(0.5, 0)
            return label(x, y + self.xaxis.labelpad + 4, text, size=fontsize, ha="center", va="top")

        self.figure.add(draw, 3)

    def set_ylabel(self, text, fontsize=10):
        def draw():
            x, y = self.transAxes(0, 0.5)
            x -= self.yaxis.labelpad + 4
            return label(x, y, text, size=fontsize, ha="center", rotation=90)

        self.figure.add(draw, 3)

    def set_title(self, text, fontsize=12, loc="center"):
        def draw():
            x, y = self.transAxes({"left": 0, "center": 0.5, "right": 1}[loc], 1)
            return label(x, y - 6, text, size=fontsize, ha=loc)

        self.figure.add(draw, 3)

    def set_xticks(self, places):
        assert not places, "ticks() of draw.labels marks the places"

    set_yticks = set_xticks

    def set_facecolor(self, color):
        self.face = color

    def axis(self, what):
        assert what == "off"
        self.shown = False

    def legend(self, ncols=1, loc="upper right", bbox_to_anchor=None, fontsize=10, frameon=True):
        def draw():
            wide, high = 6.2 * max(len(name) for name, _ in self.labels) + 26, 1.45 * fontsize
            rows = -(-len(self.labels) // ncols)
            vertical, horizontal = loc.split()
            width, height = wide * min(ncols, len(self.labels)), high * rows
            if bbox_to_anchor:
                x, y = self.transAxes(*bbox_to_anchor)
            else:
                x = self.transAxes({"left": 0.02, "center": 0.5, "right": 0.98}[horizontal], 0)[0]
                y = self.transAxes(0, {"lower": 0.03, "center": 0.5, "upper": 0.97}[vertical])[1]
            x -= width * {"left": 0, "center": 0.5, "right": 1}[horizontal]
            y -= height * {"upper": 0, "center": 0.5, "lower": 1}[vertical]
            said = ""
            for number, (name, color) in enumerate(self.labels):
                column, row = divmod(number, rows)
                left, middle = x + column * wide, y + (row + 0.5) * high
                said += box(left, middle - fontsize / 3, 2 * fontsize, 0.7 * fontsize, color)
                said += label(left + 2.6 * fontsize, middle, name, size=fontsize, va="center")
            return said

        self.figure.add(draw, 5)

    def frame(self):
        if not self.shown:
            return
        if self.face != "none":
            corners = self.box.left, self.box.top, self.box.width, self.box.height
            yield 0, 0, lambda: box(*corners, self.face)
        ends = {"left": (0, 0, 0, 1), "right": (1, 0, 1, 1), "bottom": (0, 0, 1, 0),
                "top": (0, 1, 1, 1)}  # fmt: skip
        for side, (x0, y0, x1, y1) in ends.items():
            if self.spines[side].visible:
                line = [self.transAxes(x0, y0), self.transAxes(x1, y1)]
                yield 0, 0, lambda line=line: path(line, linewidth=0.8)

    # ---- what is drawn ----

    def text(self, x, y, text, transform=None, **style):
        self.figure.add(lambda: label(*(transform or self.at)(x, y), text, **style), 3)

    def annotate(self, text, xy, xytext, arrowprops=None, textcoords="data", bbox=None, **style):
        def draw():
            if arrowprops is not None:
                return arrow(self.at(*xytext), self.at(*xy), arrowprops)
            assert textcoords == "offset points"
            x, y = self.at(*xy)
            return label(x + xytext[0], y - xytext[1], text, **style)

        self.figure.add(draw, 3)

    def rectangle(self, x, y, width, height, color, edgecolor="none", linewidth=0.0, alpha=1.0):
        self.seen += [(x, y), (x + width, y + height)]

        def draw():
            (x0, y0), (x1, y1) = map(self.inside, (self.at(x, y), self.at(x + width, y + height)))
            return box(min(x0, x1), min(y0, y1), abs(x1 - x0), abs(y1 - y0), color, edgecolor,
                       linewidth, alpha)  # fmt: skip

        self.figure.add(draw)

    def barh(self, y, width, height=0.8, left=0.0, color="#1f77b4", label=None):
        rows = each(y)
        self.floors += [("x", floor) for floor in many(left, len(rows))]
        for row, w, x, paint in zip(
            rows, many(width, len(rows)), many(left, len(rows)), many(color, len(rows))
        ):
            self.rectangle(x, row - height / 2, w, height, paint)
        if label:
            self.labels.append((label, color))

    def bar(self, x, height, width=0.8, bottom=0.0, color="#1f77b4", label=None):
        columns = each(x)
        self.floors += [("y", floor) for floor in many(bottom, len(columns))]
        styles = (many(value, len(columns)) for value in (height, bottom, color))
        for column, h, y, paint in zip(columns, *styles):
            self.rectangle(column - width / 2, y, width, h, paint)
        if label:
            self.labels.append((label, color))

    def broken_barh(self, intervals, rows, color, edgecolor="none", linewidth=0.0):
        for left, width in intervals:
            self.rectangle(left, rows[0], width, rows[1], color, edgecolor, linewidth)

    def stairs(self, tops, edges, baseline, fill, color):
        assert fill
        for top, low, left, right in zip(tops, baseline, edges, edges[1:]):
            self.rectangle(left, low, right - left, top - low, color)

    def fill_between(self, xs, low, high, color, linewidth=0.0):
        points = [*zip(xs, high), *zip(reversed(xs), reversed(low))]
        self.seen += points
        self.figure.add(
            lambda: path([self.at(*point) for point in points], "none", linewidth, fill=color)
        )

    def imshow(self, rows, cmap=None, vmin=0.0, vmax=1.0, aspect=None, interpolation=None):
        height, width = len(rows), len(rows[0])
        self.x_limits, self.y_limits = (-0.5, width - 0.5), (height - 0.5, -0.5)
        if aspect != "auto":  # cells are squares
            side = min(self.box.width / width, self.box.height / height)
            self.box.left += (self.box.width - side * width) / 2
            self.box.top += (self.box.height - side * height) / 2
            self.box.width, self.box.height = side * width, side * height
        for y, row in enumerate(rows):
            for x, value in enumerate(row):
                if cmap is None:
                    self.rectangle(x - 0.5, y - 0.5, 1, 1, rgb(value))
                elif not math.isnan(value):
                    share = (value - vmin) / (vmax - vmin)
                    self.rectangle(x - 0.5, y - 0.5, 1, 1, on_scale(cmap, share))

    def add_patch(self, patch):
        self.rectangle(*patch.place, *patch.style)

    def add_collection(self, collection):
        for patch in collection.boxes:
            self.add_patch(patch)

    def plot(self, xs, ys, style="-", color="#1f77b4", linewidth=1.5, alpha=1.0, markersize=6,
             markerfacecolor=None, markeredgecolor=None, mew=1.0, zorder=2, linestyle=None,
             label=None):  # fmt: skip
        points = list(zip(each(xs), each(ys)))
        self.seen += points
        marker = next((mark for mark in "os" if mark in style), "")
        line = linestyle or style.replace(marker, "")
        face, edge = markerfacecolor or color, markeredgecolor or color

        def draw():
            places = [self.at(*point) for point in points]
            said = path(places, color, linewidth, line, alpha=alpha) if line else ""
            half = markersize / 2
            if marker == "o":
                for x, y in places:
                    said += circle(x, y, half, face, edge, mew, alpha)
            elif marker == "s":
                for x, y in places:
                    said += box(x - half, y - half, 2 * half, 2 * half, face, edge, mew, alpha)
            return said

        self.figure.add(draw, zorder)
        if label:
            self.labels.append((label, color))

    def step(self, xs, ys, where, color, linewidth=1.5, label=None):
        assert where == "post"
        corners = [(x, y) for x, before, y in zip(xs[1:], ys, ys[1:]) for y in (before, y)]
        self.plot([xs[0], *(x for x, _ in corners)], [ys[0], *(y for _, y in corners)],
                  color=color, linewidth=linewidth, label=label)  # fmt: skip

    def scatter(self, xs, ys, c, s, zorder=1):
        points = list(zip(xs, ys))
        self.seen += points
        self.figure.add(
            lambda: "".join(
                circle(*self.at(*point), math.sqrt(s / math.pi), color, color)
                for point, color in zip(points, many(c, len(points)))
            ),
            zorder,
        )

    def line(self, ends, transform, color, linestyle, linewidth, alpha, zorder):
        self.figure.add(
            lambda: path(
                [transform(*end) for end in ends], color, linewidth, linestyle, alpha=alpha
            ),
            zorder,
        )

    def axvline(self, x, color=INK, linestyle="-", linewidth=1.5, alpha=1.0, zorder=2):
        ends = (x, 0), (x, 1)
        self.line(ends, self.get_xaxis_transform(), color, linestyle, linewidth, alpha, zorder)

    def axhline(self, y, color=INK, linestyle="-", linewidth=1.5, alpha=1.0, zorder=2):
        ends = (0, y), (1, y)
        self.line(ends, self.get_yaxis_transform(), color, linestyle, linewidth, alpha, zorder)

    def axhspan(self, low, high, color, zorder=1):
        def draw():
            (x0, y0), (x1, y1) = (self.get_yaxis_transform()(*end) for end in ((0, high), (1, low)))
            return box(x0, y0, x1 - x0, y1 - y0, color)

        self.figure.add(draw, zorder)

    def vlines(self, xs, lows, highs, colors=None, color=INK, linewidth=1.5, alpha=1.0,
               transform=None):  # fmt: skip
        xs = list(xs)
        lows, highs = many(lows, len(xs)), many(highs, len(xs))
        if transform is None:
            self.seen += [*zip(xs, lows), *zip(xs, highs)]
        for x, low, high, paint in zip(xs, lows, highs, many(colors or color, len(xs))):
            ends = (x, low), (x, high)
            self.line(ends, transform or self.at, paint, "-", linewidth, alpha, 2)


class Side:
    visible = True

    def set_visible(self, visible):
        self.visible = visible


class Spines(dict):
    def __getitem__(self, names):
        if isinstance(names, str):
            return super().__getitem__(names)
        sides = [self[name] for name in names]
        return SimpleNamespace(
            set_visible=lambda shown: [side.set_visible(shown) for side in sides]
        )


def box(x, y, width, height, color, edgecolor="none", linewidth=0.0, alpha=1.0) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" '
        f'fill="{rgb(color)}" stroke="{rgb(edgecolor)}" stroke-width="{linewidth}" '
        f'opacity="{alpha}"/>'
    )


def circle(x, y, radius, face, edge, linewidth=1.0, alpha=1.0) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.2f}" fill="{rgb(face)}" '
        f'stroke="{rgb(edge)}" stroke-width="{linewidth}" opacity="{alpha}"/>'
    )


def arrow(start, end, style) -> str:
    (x0, y0), (x1, y1) = start, end
    length = math.hypot(x1 - x0, y1 - y0) or 1
    ux, uy = (x1 - x0) / length, (y1 - y0) / length
    color = style.get("color", INK)
    head = [(x1, y1), (x1 - 6 * ux - 2.5 * uy, y1 - 6 * uy + 2.5 * ux),
            (x1 - 6 * ux + 2.5 * uy, y1 - 6 * uy - 2.5 * ux)]  # fmt: skip
    line = path([start, (x1 - 5 * ux, y1 - 5 * uy)], color, style.get("lw", 1.0))
    return line + path(head, "none", fill=color)
