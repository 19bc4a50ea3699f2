"""Labels and ticks, as mini_dist/course/draw/labels.py has them for matplotlib."""

from __future__ import annotations

import math

from matplotlib.figure import label as as_text
from matplotlib.figure import many, path

from .picture import INK

LABEL, MARK, GAP = 8, 3.5, 3.5  # points: size of labels, of the marks of ticks, between them


def write(axes, labels, xs, ys, *, size=LABEL, color=INK, ha="center", va="center",
          transform=None, shift=(0.0, 0.0)) -> None:  # fmt: skip
    labels, place = list(labels), transform or axes.transData
    for label, x, y, ink in zip(labels, xs, ys, many(color, len(labels))):

        def draw(label=label, x=x, y=y, ink=ink):
            left, top = place(x, y)
            style = dict(size=size, color=ink, ha=ha, va=va)
            return as_text(left + shift[0], top - shift[1], label, **style)

        axes.figure.add(draw, 3)


def ticks(axes, x=None, y=None) -> None:
    def mark(place, step):
        ends = place, (place[0] + step[0], place[1] + step[1])
        return path(ends, linewidth=0.8)

    along_x, along_y = axes.get_xaxis_transform(), axes.get_yaxis_transform()
    for at in x or {}:
        axes.figure.add(lambda at=at: mark(along_x(at, 0), (0, MARK)), 3)
    for at in y or {}:
        axes.figure.add(lambda at=at: mark(along_y(0, at), (-MARK, 0)), 3)
    if x:
        below = dict(va="top", transform=along_x, shift=(0, -MARK - GAP))
        write(axes, x.values(), x, [0] * len(x), **below)
        axes.xaxis.labelpad += MARK + GAP + LABEL
    if y:
        beside = dict(ha="right", transform=along_y, shift=(-MARK - GAP, 0))
        write(axes, y.values(), [0] * len(y), y, **beside)
        axes.yaxis.labelpad += MARK + GAP + 0.6 * LABEL * max(map(len, y.values()))


def numbered(places) -> dict[float, str]:
    return {place: f"{place:g}" for place in places}


def round_places(least: float, most: float, intervals: int = 9) -> list[float]:
    """Round numbers from `least` to `most`, that many steps at most."""
    rough = (most - least) / intervals or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough * (1 - 1e-9))
    first, last = math.ceil(least / step - 1e-9), math.floor(most / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]
