"""One sentence for the many places where a number of ranks must divide a size."""

from __future__ import annotations


def check_divides(divisor: int, size: int, what: str, by: str = "") -> None:
    """Raises ValueError unless `divisor` divides `size`; it names the nearest sizes that would do.

    what: what the size is called. by: the divisor in words; without them it is a number of ranks.
    All ranks call it with the same numbers and find out alike, so that none is left waiting.
    """
    if size % divisor:
        below = size // divisor * divisor
        nearest = " or ".join(str(near) for near in (below, below + divisor) if near)
        by = by or f"the number of ranks, {divisor},"
        raise ValueError(f"{by} must divide {what}={size}: {nearest} would do")
