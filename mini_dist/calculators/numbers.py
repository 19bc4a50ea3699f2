"""One sentence for a number that cannot be: not a number, infinite, or too small."""

from __future__ import annotations

import math


def at_least(field: str, value: float, least: float, why: str = "") -> float:
    """The value; ValueError says in one sentence what would be right."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{field}={value!r} is no number: give {least:g} or more.")
    if value < least:
        because = f" ({why})" if why else ""
        raise ValueError(f"{field}={value!r} is too small{because}: give {least:g} or more.")
    return value
