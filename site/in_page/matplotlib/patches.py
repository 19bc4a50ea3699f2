"""Boxes, to be put into axes or a collection."""


class Rectangle:
    def __init__(self, corner, width, height, facecolor="#1f77b4", edgecolor="none", linewidth=1.0):
        self.place = (*corner, width, height)
        self.style = facecolor, edgecolor, linewidth


class Patch:
    def __init__(self, color="none", label=""):
        self.color, self.label = color, label
