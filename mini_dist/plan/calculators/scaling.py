"""How a job scales: two laws, and how to fit them to measured times.

Strong scaling keeps the work and adds devices: Amdahl 1967. Weak scaling lets the work grow with
the devices: Gustafson 1988. Both have one number, the share of the time that more devices do not
shorten; the first takes it of one device's time, the second of the many's.
"""

from __future__ import annotations

from collections.abc import Mapping


def amdahl(n: int, serial: float) -> float:
    """Speed-up of n devices on the work of one: 1 / (s + (1 - s) / n), never above 1 / s."""
    return 1 / (serial + (1 - serial) / n)


def gustafson(n: int, serial: float) -> float:
    """Work that n devices do in one's time, in its units: s + (1 - s) n, without a limit."""
    return serial + (1 - serial) * n


def fit_amdahl(seconds: Mapping[int, float]) -> float:
    """The serial share of strong-scaling times {devices: seconds}: least squares of a + b / n.

    Raises ValueError for fewer than two numbers of devices."""
    check(seconds)
    xs, ys = [1 / n for n in seconds], list(seconds.values())
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    b = sum((xi - x) * (yi - y) for xi, yi in zip(xs, ys)) / sum((xi - x) ** 2 for xi in xs)
    a = y - b * x
    return a / (a + b)


def fit_gustafson(seconds: Mapping[int, float]) -> float:
    """Return the serial share of weak-scaling times {devices: seconds}, with equal work per device.

    The time of one, `seconds[1]`, is the unit. Raises ValueError if it is not there, or nothing
    else."""
    check(seconds)
    if 1 not in seconds:
        raise ValueError(
            f"devices {sorted(seconds)}: weak scaling compares with one, give its time"
        )
    lost = {n: n - n * seconds[1] / t for n, t in seconds.items() if n > 1}  # of n times the work
    return sum(x * (n - 1) for n, x in lost.items()) / sum((n - 1) ** 2 for n in lost)


def check(seconds: Mapping[int, float]) -> None:
    if len(seconds) < 2 or min(seconds) < 1 or min(seconds.values()) <= 0:
        raise ValueError(
            f"{dict(seconds)} tells no scaling: give seconds above 0 for two numbers of devices"
        )
