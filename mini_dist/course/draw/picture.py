"""A figure that shows itself in a notebook, and the colours that all figures share."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # A page of the site has no matplotlib.
    from matplotlib.figure import Figure

INK = "#333333"


PHASE_COLORS = {
    "setup": "#e6e6e6",
    "forward": "#9ecae1",
    "backward": "#fdbe85",
    "step": "#a1d99b",
}


RANK_COLORS = [  # the first four still differ when paled, as `scores` does
    "#08519c",
    "#d95f02",
    "#31a354",
    "#756bb1",
    "#6baed6",
    "#de2d26",
    "#999999",
    "#333333",
]


CHUNK_COLORS = ["#9ecae1", "#fdae6b", "#a1d99b", "#dadaeb"]


class Picture:
    """A figure that shows itself in a notebook, with bytes that are the same at each run."""

    def __init__(self, figure: Figure, alt: str):
        self.figure, self.alt = figure, alt

    def _repr_png_(self) -> bytes:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        buffer = io.BytesIO()
        FigureCanvasAgg(self.figure).print_png(buffer, metadata={"Software": None})
        return buffer.getvalue()

    def __repr__(self) -> str:
        return self.alt

    def save(self, path) -> None:
        with open(path, "wb") as file:
            file.write(self._repr_png_())


def canvas(width: float, height: float):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
