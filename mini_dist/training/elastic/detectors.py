"""Is it dead, or only late? Who hears a sign of life every so often has to decide.

A detector cannot be both quick and never wrong: a rank on a busy machine is silent as a dead one
is. `FixedTimeout` has one number for that. `PhiAccrual` learns from the beats that came how long a
silence is unusual, and gives a degree of suspicion (Hayashibara et al. 2004, "The phi accrual
failure detector", section 4). `patience` is the shortest timeout that would have been wrong no
more often than allowed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, pstdev
from typing import NamedTuple

from mini_dist.plan.fields import checks_kinds

NEVER = 1e-300  # a probability that is as good as none: phi of it is 300


@checks_kinds
def patience(silences: Sequence[float], allowed: float) -> float:
    """The shortest timeout that at most this share of the silences has exceeded: one of them.

    silences: seconds between two signs of life of a rank that was alive. Raises ValueError for no
    silence, and for a share that is not from 0 to below 1.
    """
    check_silences(silences, allowed)
    most = allowed * len(silences)
    return next(t for t in sorted(silences) if sum(each > t for each in silences) <= most)


def check_silences(silences: Sequence[float], allowed: float) -> None:
    if not silences or not 0 <= allowed < 1:
        raise ValueError(
            f"{len(silences)} silences, allowed={allowed}: give at least one, and a share from 0 "
            "to below 1"
        )


@checks_kinds
@dataclass
class FixedTimeout:
    """Dead is who has been silent for longer than this."""

    seconds: float

    def heard(self, silence: float) -> None:
        """A sign of life, after so many seconds."""

    def timeout(self) -> float:
        """Seconds of silence from which on it suspects."""
        return self.seconds


@checks_kinds
class PhiAccrual:
    """Dead is whose silence has a probability below 10^-phi, if silences are normal.

    window: how many of the last silences it goes by. first: the mean of them before any, and
    least: their smallest standard deviation, without which a rank that was regular for long would
    be suspected at its first hiccup; both in seconds.
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
        """-log10 of the probability that a rank which is alive is silent for longer than this."""
        mean, deviation = self.mean_and_deviation()
        later = math.erfc((silence - mean) / deviation / math.sqrt(2)) / 2
        return -math.log10(max(later, NEVER))

    def timeout(self) -> float:
        """Seconds of silence at which phi reaches the threshold."""
        mean, deviation = self.mean_and_deviation()
        return mean - deviation * NormalDist().inv_cdf(max(10**-self.threshold, NEVER))


class Judged(NamedTuple):
    """false_alarms: of so many `beats`; detection: seconds from a death to the suspicion, if it
    strikes right after a beat, on the mean."""

    beats: int
    false_alarms: int
    detection: float


def judged(detector, silences: Sequence[float]) -> Judged:
    """What a detector makes of a rank that was alive all the time, and how soon it would have
    noticed its death."""
    alarms, timeouts = 0, []
    for silence in silences:
        timeouts.append(detector.timeout())
        alarms += silence > timeouts[-1]
        detector.heard(silence)
    return Judged(len(silences), alarms, fmean(timeouts))
