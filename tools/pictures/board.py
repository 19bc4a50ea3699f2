"""A drawing board: boxes, arrows and words in one style, written as SVG.

mini_dist/course/draw/svg.py draws axes and the data on them. This board draws what has no axes, in
pixels from the upper left corner, and refuses words that do not fit. Both have one ink and one
paper, light or dark as the reader prefers. Colors mean what they mean in the course's figures:
ranks and chunks by number, forward blue, backward orange.
"""

from __future__ import annotations

from mini_dist.course.draw.svg import INK, arrow_head, ink_on, near_ink, standalone, text

GRAY, LINE, PAPER = "#737373", "#8c8c8c", "#ffffff"
RANKS = ["#c6dbef", "#fdd0a2", "#c7e9c0", "#dadaeb", "#fcbba1", "#d9d9d9", "#fee391", "#ccece6"]
FORWARD, BACKWARD, MESSAGE, WRONG = "#9ecae1", "#fdae6b", "#31a354", "#de2d26"
# The same, dark enough for lines and words on a white page.
DARK = {FORWARD: "#2171b5", BACKWARD: "#bd4300", MESSAGE: "#1b7837"}
LETTER = 0.56  # mean width of a letter of a sans-serif font, in sizes


class Board:
    """A picture of `width` x `height`; `title` says to those who do not see it what it shows."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(self, x, y, width, height, words="", fill=PAPER, size=13, dashed=False, line=INK):
        """A box with words in its middle, one line each where they contain line feeds.

        Raises ValueError if they do not fit.
        """
        paint = f'class="paper" fill="{PAPER}"' if fill == PAPER else f'fill="{fill}"'
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'{paint} stroke="{line}"{dashes(dashed)}/>'
        )
        lines = words.split("\n") if words else []
        if lines and (
            max(map(len, lines)) * LETTER * size > width or len(lines) * 1.2 * size > height
        ):
            raise ValueError(f"{words!r} in size {size} does not fit into {width} x {height}")
        top = y + height / 2 - (len(lines) - 1) * 0.6 * size
        color = INK if fill in (PAPER, "none") else ink_on(fill)
        for number, said in enumerate(lines):
            self.words(x + width / 2, top + 1.2 * number * size, said, size, color)

    def words(self, x, y, said, size=13, color=INK, anchor="middle", bold=False):
        """Words around (x, y), or from there ("start"), or up to there ("end"). Raises ValueError
        if they run over the edge."""
        length = len(said) * LETTER * size
        left = x - {"start": 0, "middle": 0.5, "end": 1}[anchor] * length
        if left < 0 or left + length > self.width or not 0 < y < self.height:
            raise ValueError(f"{said!r} at ({x:g}, {y:g}) runs over the edge of the picture")
        self.parts.append(text(x, y, said, anchor, DARK.get(color, color), bold, size))

    def line(self, x1, y1, x2, y2, color=LINE, width=1.5, dashed=False):
        self.stroke(f"M{x1:g} {y1:g}L{x2:g} {y2:g}", DARK.get(color, color), width, dashed)

    def stroke(self, d, color, width, dashed):
        self.parts.append(
            f'<path d="{d}" fill="none" stroke="{color}" style="stroke:{near_ink(color)}" '
            f'stroke-width="{width:g}"{dashes(dashed)}/>'
        )

    def arrow(self, x1, y1, x2, y2, words="", color=INK, width=1.8, bend=0.0, dashed=False):
        """Draw an arrow to (x2, y2), bent to its left by `bend` pixels, with words at its
        middle."""
        dx, dy, color = x2 - x1, y2 - y1, DARK.get(color, color)
        length = (dx * dx + dy * dy) ** 0.5
        normal = (dy / length, -dx / length)
        middle = ((x1 + x2) / 2 + 2 * bend * normal[0], (y1 + y2) / 2 + 2 * bend * normal[1])
        before = middle if bend else (x1, y1)
        far = ((x2 - before[0]) ** 2 + (y2 - before[1]) ** 2) ** 0.5
        tip = 4 + 2 * width
        base = [to - tip * (to - came) / far for to, came in zip((x2, y2), before)]
        d = f"M{x1:.1f} {y1:.1f}Q{middle[0]:.1f} {middle[1]:.1f} {base[0]:.1f} {base[1]:.1f}"
        self.stroke(d, color, width, dashed)
        self.parts.append(arrow_head(before, (x2, y2), color, tip))
        if words:
            shift = bend + (11 if bend >= 0 else -11)
            x, y = (x1 + x2) / 2 + shift * normal[0], (y1 + y2) / 2 + shift * normal[1]
            upright = abs(dy) > abs(dx)
            anchor = "middle" if not upright else "start" if shift * normal[0] > 0 else "end"
            self.words(x, y, words, 12, color, anchor)

    def svg(self) -> str:
        return standalone(self.width, self.height, self.title, "\n".join(["", *self.parts, ""]))


def dashes(dashed: bool) -> str:
    return ' stroke-dasharray="5 4"' * dashed
