"""A drawing board: boxes, arrows and words in one style, written as SVG.

Coordinates are in pixels from the upper left corner. Colours have the meaning that they have in the
course's figures: ranks and chunks by number, forward blue, backward orange.
"""

from __future__ import annotations

from html import escape

INK, GRAY, LINE = "#333333", "#737373", "#8c8c8c"
RANKS = ["#c6dbef", "#fdd0a2", "#c7e9c0", "#dadaeb", "#fcbba1", "#d9d9d9", "#fee391", "#ccece6"]
FORWARD, BACKWARD, MESSAGE, WRONG = "#9ecae1", "#fdae6b", "#31a354", "#de2d26"
# The same, dark enough on white for lines and words, without colours, too (4.5 : 1, as in WCAG 2).
DARK = {FORWARD: "#2171b5", BACKWARD: "#bd4300", MESSAGE: "#1b7837"}
LETTER = 0.56  # mean width of a letter of a sans-serif font, in sizes


class Board:
    """A picture of `width` x `height`; `title` says to those who do not see it what it shows."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height = width, height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def box(self, x, y, width, height, words="", fill="white", size=13, dashed=False, line=INK):
        """A box with words in its middle, one line each where they contain line feeds.

        Raises ValueError if they do not fit.
        """
        dashes = ' stroke-dasharray="5 4"' * dashed
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{fill}" stroke="{line}"{dashes}/>'
        )
        lines = words.split("\n") if words else []
        if lines and (
            max(map(len, lines)) * LETTER * size > width or len(lines) * 1.2 * size > height
        ):
            raise ValueError(f"{words!r} in size {size} does not fit into {width} x {height}")
        top = y + height / 2 - (len(lines) - 1) * 0.6 * size
        for number, text in enumerate(lines):
            self.words(x + width / 2, top + 1.2 * number * size, text, size)

    def words(self, x, y, text, size=13, color=INK, anchor="middle", bold=False):
        """Words around (x, y), or from there ("start"), or up to there ("end"). Raises ValueError
        if they run over the edge."""
        length = len(text) * LETTER * size
        left = x - {"start": 0, "middle": 0.5, "end": 1}[anchor] * length
        if left < 0 or left + length > self.width or not 0 < y < self.height:
            raise ValueError(f"{text!r} at ({x:g}, {y:g}) runs over the edge of the picture")
        weight, color = ' font-weight="bold"' * bold, DARK.get(color, color)
        self.parts.append(
            f'<text x="{x:g}" y="{y + 0.35 * size:g}" font-size="{size:g}" fill="{color}" '
            f'text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def line(self, x1, y1, x2, y2, color=LINE, width=1.5, dashed=False):
        dashes, color = ' stroke-dasharray="5 4"' * dashed, DARK.get(color, color)
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" '
            f'stroke-width="{width:g}"{dashes}/>'
        )

    def arrow(self, x1, y1, x2, y2, words="", color=INK, width=1.8, bend=0.0, dashed=False):
        """An arrow to (x2, y2), bent to its left by `bend` pixels, its words beside its middle."""
        dx, dy, color = x2 - x1, y2 - y1, DARK.get(color, color)
        length = (dx * dx + dy * dy) ** 0.5
        normal = (dy / length, -dx / length)
        middle = ((x1 + x2) / 2 + 2 * bend * normal[0], (y1 + y2) / 2 + 2 * bend * normal[1])
        ahead = (x2 - middle[0], y2 - middle[1]) if bend else (dx, dy)
        far = (ahead[0] ** 2 + ahead[1] ** 2) ** 0.5
        ux, uy = ahead[0] / far, ahead[1] / far
        tip = 4 + 2 * width
        base = (x2 - tip * ux, y2 - tip * uy)
        left = (base[0] - 0.45 * tip * uy, base[1] + 0.45 * tip * ux)
        right = (base[0] + 0.45 * tip * uy, base[1] - 0.45 * tip * ux)
        dashes = ' stroke-dasharray="5 4"' * dashed
        self.parts.append(
            f'<path d="M{x1:.1f} {y1:.1f} Q{middle[0]:.1f} {middle[1]:.1f} '
            f'{base[0]:.1f} {base[1]:.1f}" fill="none" stroke="{color}" '
            f'stroke-width="{width:g}"{dashes}/>'
        )
        corners = " ".join(f"{px:.1f},{py:.1f}" for px, py in ((x2, y2), left, right))
        self.parts.append(f'<polygon points="{corners}" fill="{color}"/>')
        if words:
            shift = bend + (11 if bend >= 0 else -11)
            x, y = (x1 + x2) / 2 + shift * normal[0], (y1 + y2) / 2 + shift * normal[1]
            upright = abs(dy) > abs(dx)
            anchor = "middle" if not upright else "start" if shift * normal[0] > 0 else "end"
            self.words(x, y, words, 12, color, anchor)

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])
