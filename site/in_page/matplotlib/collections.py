"""Many boxes at once."""

from .patches import Rectangle


class PatchCollection:
    def __init__(self, patches, facecolors, edgecolors, linewidths):
        styles = zip(facecolors, edgecolors, linewidths)
        self.boxes = [
            Rectangle(box.place[:2], *box.place[2:], *style) for box, style in zip(patches, styles)
        ]
