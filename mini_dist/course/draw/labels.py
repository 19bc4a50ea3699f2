"""Labels and ticks that are drawn fast, for figures that follow a slider.

matplotlib lays a Text out anew for every picture, and a tick is two Texts and three lines: most of
a small picture's time. Here a label is the outline of its letters, made once, and many labels are
one collection, as the dots of a scatter are. No layout engine knows of their size.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate

import numpy as np
from matplotlib.collections import PathCollection
from matplotlib.lines import Line2D
from matplotlib.markers import TICKDOWN, TICKLEFT
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Affine2D

from .picture import INK

LABEL, MARK, GAP = 8, 3.5, 3.5  # points: size of labels, of the marks of ticks, between them


CAPITAL = 0.73  # height of a digit or capital letter in DejaVu Sans, in sizes


class Labels(PathCollection):
    """Words in a picture; `labels` are they."""

    def __init__(self, labels: list[str], outlines: list[Path], **style):
        super().__init__(outlines, **style)
        self.labels = labels
        self.set_in_layout(False)


def write(axes, labels: Iterable[str], xs, ys, *, size=LABEL, color=INK, ha="center", va="center",
          transform=None, shift=(0.0, 0.0)) -> None:  # fmt: skip
    """Labels of one line at these places. color: one, or one for each; shift: in points."""
    labels = list(labels)
    style = dict(
        offsets=list(zip(xs, ys)),
        offset_transform=transform or axes.transData,
        transform=Affine2D().translate(*shift).scale(1 / 72) + axes.figure.dpi_scale_trans,
        facecolors=color,
        linewidths=0,
        clip_on=False,
        zorder=3,
    )
    axes.add_artist(Labels(labels, [outline(label, size, ha, va) for label in labels], **style))


@lru_cache(maxsize=4096)
def outline(label: str, size: float, ha: str, va: str) -> Path:
    """The letters of a label around its place, in points."""
    letters = [letter(each) for each in label]
    starts = [0.0, *accumulate(advance for _, advance in letters)]
    width = starts[-1]
    left = {"left": 0.0, "center": -width / 2, "right": -width}[ha]
    low = {"bottom": 0.0, "center": -CAPITAL / 2, "top": -CAPITAL}[va]
    placed = [path.vertices + (start + left, low) for (path, _), start in zip(letters, starts)]
    codes = [path.codes for path, _ in letters]
    return Path(size * np.concatenate(placed), np.concatenate(codes))


@lru_cache(maxsize=1024)
def letter(each: str) -> tuple[Path, float]:
    """Its outline at size 1, and how far behind it the next one stands."""
    before, bar = (TextPath((0, 0), text, 1).get_extents().x1 for text in (each + "|", "|"))
    nothing = Path(np.empty((0, 2)), np.empty(0, Path.code_type))
    return nothing if each.isspace() else TextPath((0, 0), each, 1), before - bar


def ticks(axes, x: dict[float, str] | None = None, y: dict[float, str] | None = None) -> None:
    """Mark these places of the axes with these labels, instead of matplotlib's ticks."""

    def mark(xs, ys, marker, transform):
        style = dict(linestyle="", marker=marker, markersize=MARK, markeredgewidth=0.8)
        axes.add_artist(Line2D(xs, ys, color=INK, clip_on=False, transform=transform, **style))

    axes.set_xticks([])
    axes.set_yticks([])
    if x:
        places, edge, along = list(x), [0] * len(x), axes.get_xaxis_transform()
        mark(places, edge, TICKDOWN, along)
        below = dict(va="top", transform=along, shift=(0, -MARK - GAP))
        write(axes, x.values(), places, edge, **below)
        axes.xaxis.labelpad += MARK + GAP + LABEL
    if y:
        places, edge, along = list(y), [0] * len(y), axes.get_yaxis_transform()
        mark(edge, places, TICKLEFT, along)
        beside = dict(ha="right", transform=along, shift=(-MARK - GAP, 0))
        write(axes, y.values(), edge, places, **beside)
        axes.yaxis.labelpad += MARK + GAP + 0.6 * LABEL * max(map(len, y.values()))


def numbered(places: Iterable[float]) -> dict[float, str]:
    """Places that are their own labels."""
    return {place: f"{place:g}" for place in places}


def round_places(least: float, most: float, intervals: int = 9) -> list[float]:
    """Round numbers from `least` to `most`, that many steps at most, as matplotlib chooses them."""
    places = MaxNLocator(nbins=intervals, steps=[1, 2, 5, 10]).tick_values(least, most)
    return [float(place) for place in places if least <= place <= most]
