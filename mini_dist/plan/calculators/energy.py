"""Energy and dollars per token: explicit models, so that each factor can be questioned."""

from __future__ import annotations

from .lines import Breakdown, Line


def energy(tokens_per_second: float, devices: int, watts: float, pue: float = 1.1) -> Breakdown:
    """Return joules per token: all devices at `watts`, whatever they do, times the building's
    overhead.

    watts: per device; its TDP is an upper bound for the device and excludes its host. pue: power
    of the building over power of the machines. Raises ValueError for a value that is not above 0.
    """
    check(tokens_per_second=tokens_per_second, devices=devices, watts=watts, pue=pue)
    power = devices * watts * pue
    return Breakdown(
        "energy",
        (
            Line("power", power, "W", f"{devices:,} devices * {watts:g} W * {pue:g}", "stated"),
            Line("for a token", power / tokens_per_second, "J", "power / tokens per second"),
        ),
    )


def price(tokens_per_second: float, devices: int, dollars_per_hour: float) -> Breakdown:
    """Return dollars per million tokens, for this price per device and hour."""
    check(tokens_per_second=tokens_per_second, devices=devices, dollars_per_hour=dollars_per_hour)
    second = devices * dollars_per_hour / 3600
    return Breakdown(
        "price",
        (
            Line("rent", second, "dollars/s", f"{devices:,} devices * {dollars_per_hour:g} / 3600"),
            Line(
                "for a million tokens",
                1e6 * second / tokens_per_second,
                "dollars",
                "1e6 * rent / tokens per second",
            ),
        ),
    )


def check(**given: float) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(f"{name}={value!r} gives no answer: give a number above 0.")
