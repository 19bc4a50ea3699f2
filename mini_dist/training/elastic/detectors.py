"""Is a rank dead, or only late? A rank that receives regular heartbeats has to decide.

A detector cannot be both quick and always right: a rank on a busy machine is as silent as a dead
one. `FixedTimeout` uses one number. `PhiAccrual` learns from earlier heartbeats which silence is
unusual, and returns a degree of suspicion (Hayashibara et al. 2004, "The phi accrual
failure detector", section 4). `patience` is the shortest timeout with at most the allowed rate of
false alarms.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, pstdev
from typing import NamedTuple

from mini_dist.plan.fields import checks_kinds

NEVER = 1e-300  # a probability that is as good as zero: its phi is 300


@checks_kinds
def patience(silences: Sequence[float], allowed: float) -> float:
    """Return the shortest timeout, one of the silences, that at most this share of them exceeded.

    silences: seconds between two heartbeats of a rank that was alive. Raises ValueError for no
    silence, and for a share that is not from 0 to below 1.
    """
    check_silences(silences, allowed)
    n = len(silences)
    return next(t for t in sorted(silences) if sum(each > t for each in silences) / n <= allowed)


def check_silences(silences: Sequence[float], allowed: float) -> None:
    if not silences or not 0 <= allowed < 1:
        raise ValueError(
            f"{len(silences)} silences, allowed={allowed}: give at least one, and a share from 0 "
            "to below 1"
        )


@checks_kinds
@dataclass
class FixedTimeout:
    """Suspect a rank that has been silent for longer than this."""

    seconds: float

    def heard(self, silence: float) -> None:
        """Note a heartbeat, this many seconds after the last."""

    def timeout(self) -> float:
        """Return the seconds of silence after which it suspects the rank."""
        return self.seconds


@checks_kinds
class PhiAccrual:
    """Suspect a rank whose silence has a probability below 10^-phi, for normally distributed
    silences.

    window: how many of the last silences count. first: their mean before there are any; least: the
    smallest standard deviation, without which a long-regular rank would be suspected at its first
    delay; both in seconds.
    """

    def __init__(self, phi: float, first: float, least: float | None = None, window: int = 100):
        if not phi > 0 or not first > 0:
            raise ValueError(f"phi={phi}, first={first}: give both above 0")
        self.threshold, self.first = phi, first
        self.least = first / 10 if least is None else least
        self.silences: deque[float] = deque(maxlen=window)

    def heard(self, silence: float) -> None:
        self.silences.append(silence)

    def mean_and_deviation(self) -> tuple[float, float]:
        if len(self.silences) < 2:
            return self.first, max(self.first / 4, self.least)
        return fmean(self.silences), max(pstdev(self.silences), self.least)

    def phi(self, silence: float) -> float:
        """Return -log10 of the probability that a live rank is silent for longer than this."""
        mean, deviation = self.mean_and_deviation()
        later = math.erfc((silence - mean) / deviation / math.sqrt(2)) / 2
        return -math.log10(max(later, NEVER))

    def timeout(self) -> float:
        """Return the seconds of silence at which phi reaches the threshold."""
        mean, deviation = self.mean_and_deviation()
        return mean - deviation * NormalDist().inv_cdf(max(10**-self.threshold, NEVER))


class Judged(NamedTuple):
    """false_alarms: among this many `beats`; detection: mean seconds from a death right after a
    heartbeat to the suspicion."""

    beats: int
    false_alarms: int
    detection: float


def judged(detector, silences: Sequence[float]) -> Judged:
    """Evaluate a detector on a rank that was always alive: its false alarms, and how soon it would
    have noticed a death."""
    alarms, timeouts = 0, []
    for silence in silences:
        timeouts.append(detector.timeout())
        alarms += silence > timeouts[-1]
        detector.heard(silence)
    return Judged(len(silences), alarms, fmean(timeouts))
