"""Tensor parallelism in one, two and three dimensions: what an MLP sends and keeps, and from how
many devices on a grid sends less.

Bytes sent, by all devices together, forward and backward, of an MLP D -> F -> D on T tokens:

    1D   4 (p - 1) T D                           [S19] two all-reduces of T D
    2D   3 (sqrt(p) - 1) (T D + T F + 2 D F)     [XY21] section 3: SUMMA moves x and w, three times
    3D   4 (cbrt(p) - 1) (T D + T F + D F)       [B21] section 3: x, w and y, once each way

Kept for backward, a device (x, before GELU, after GELU; 3D as written keeps what it gathered):

    1D   T D + 2 T F / p
    2D   (T D + 2 T F) / p
    3D   T F / p + (T D + T F + 2 D F) / cbrt(p)^2

Sources: [S19] Shoeybi et al. 2019, section 3; [XY21] Xu and You 2021, arXiv:2104.05343; [B21] Bian
et al. 2021, arXiv:2105.14450. The formulas are derived from the pages (tensor_parallel/ideas.py and
grids.py) and compared with their ledgers by tests/strategies/test_tensor_parallel_grids.py.
"""

from __future__ import annotations

from ..fields import at_least
from .lines import Breakdown, Line

POWER = {"1d": 1, "2d": 2, "3d": 3}


def side_of(way: str, size: int) -> int:
    """Devices along a side of the grid. Raises ValueError for a number that makes no such grid."""
    if way not in POWER:
        raise ValueError(f"way={way!r} is none of {', '.join(map(repr, POWER))}.")
    at_least("size", size, 1)
    power = POWER[way]
    side = round(size ** (1 / power))
    if side**power != size:
        below = max(1, side - (side**power > size))
        grids = f"{below**power} or {(below + 1) ** power}"
        raise ValueError(f"size={size} devices make no {way} grid with equal sides: {grids} do.")
    return side


def tensor_grid(
    way: str, tokens: int, d_model: int, d_ffn: int, size: int, itemsize: int = 2
) -> Breakdown:
    """Bytes of an MLP under "1d", "2d" or "3d" tensor parallelism: sent by a device (the mean), and
    kept by each for backward."""
    T, D, F, p, q = tokens, d_model, d_ffn, size, side_of(way, size)
    sent, formula, source = {
        "1d": (4 * (p - 1) * T * D, "4 (p-1) TD / p", "[S19] section 3"),
        "2d": (3 * (q - 1) * (T * D + T * F + 2 * D * F), "3 (q-1) (TD + TF + 2DF) / p", "[XY21]"),
        "3d": (4 * (q - 1) * (T * D + T * F + D * F), "4 (q-1) (TD + TF + DF) / p", "[B21]"),
    }[way]
    kept, kept_formula = {
        "1d": (T * D + 2 * T * F / p, "TD + 2TF/p"),
        "2d": ((T * D + 2 * T * F) / p, "(TD + 2TF)/p"),
        "3d": (T * F / p + (T * D + T * F + 2 * D * F) / q**2, "TF/p + (TD + TF + 2DF)/q^2"),
    }[way]
    return Breakdown(
        f"an MLP on {size} devices, {way}",
        (
            Line("sent", itemsize * sent / p, "bytes", f"{itemsize} * {formula}", source),
            Line("kept", itemsize * kept, "bytes", f"{itemsize} * ({kept_formula})", source),
        ),
    )


def grid_sends_less_from(
    way: str, tokens: int, d_model: int, d_ffn: int, most: int = 2**20
) -> int | None:
    """The smallest number of devices from which a "2d" or "3d" grid sends less than one row of as
    many; None if none up to `most` does."""
    side = 2
    while side ** POWER[way] <= most:
        size = side ** POWER[way]
        grid, row = (tensor_grid(each, tokens, d_model, d_ffn, size) for each in (way, "1d"))
        if grid["sent"] < row["sent"]:
            return size  # and from here on: a row's bytes grow with p, a grid's with its side
        side += 1
    return None
