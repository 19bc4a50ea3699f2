"""One sentence for all errors in which a number of ranks must divide a size."""

from __future__ import annotations


def check_divides(divisor: int, size: int, what: str, by: str = "") -> None:
    """Raise ValueError unless `divisor` divides `size`; name the nearest sizes that work.

    what: the name of the size. by: the divisor in words; by default it is a number of ranks.
    All ranks call it with the same numbers and raise together, so none is left waiting.
    """
    if size % divisor:
        below = size // divisor * divisor
        nearest = " or ".join(str(near) for near in (below, below + divisor) if near)
        by = by or f"the number of ranks, {divisor},"
        raise ValueError(f"{by} must divide {what}={size}: {nearest} would do")
