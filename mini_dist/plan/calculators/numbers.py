"""One sentence for what cannot be: a number that is none, infinite or too small, no Layout."""

from __future__ import annotations

import math

from ..config import Layout, ModelConfig


def at_least(field: str, value: float, least: float, why: str = "") -> float:
    """The value; ValueError says in one sentence what would be right."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{field}={value!r} is no number: give {least:g} or more.")
    if value < least:
        because = f" ({why})" if why else ""
        raise ValueError(f"{field}={value!r} is too small{because}: give {least:g} or more.")
    return value


def whole(field: str, value: int, why: str = "") -> int:
    """The same for a number of things: an int of 1 or more."""
    at_least(field, value, 1, why)
    if not isinstance(value, int):
        raise ValueError(f"{field}={value!r} is not a whole number: give an int of 1 or more.")
    return value


def cut_by(layout: Layout, config: ModelConfig) -> Layout:
    """The layout, if it is one and can cut the model; ValueError says what would."""
    if not isinstance(layout, Layout):
        raise ValueError(f"layout={layout!r} is no Layout: give one, such as Layout(dp=8, zero=1).")
    return layout.check(config)
