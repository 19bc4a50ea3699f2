"""Exercises of lesson 25: a timeout with few false alarms, new shares, a group without the dead.

The first two need no ranks. In the third, the dead ranks are processes that do nothing: a rank that
waits for one of them waits forever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from mini_dist.collectives import all_reduce
from mini_dist.training.elastic import detectors, ideas

from .engine import Exercise, Line, Measured, line, on_ranks, yes
from .measures import plain
from .ways import Complaint

# ---- a timeout that is seldom wrong -------------------------------------------------------------


@dataclass(frozen=True)
class Silences:
    """Seconds between heartbeats of a living rank. allowed: a share that a float holds exactly."""

    seconds: tuple[float, ...]
    allowed: float

    def __str__(self) -> str:
        return f"{len(self.seconds)} silences, allowed={self.allowed}"

    def alarms(self, timeout: float) -> int:
        return sum(each > timeout for each in self.seconds)


def patience_trial(fn, case: Silences, group):
    return plain(fn(list(case.seconds), case.allowed))


class Timeout(Measured):
    def measure(self):
        self.timeout, seconds = self.results[0], self.case.seconds
        self.most = math.floor(self.case.allowed * len(seconds))
        self.expected = sorted(seconds)[len(seconds) - 1 - self.most]
        self.is_number = isinstance(self.timeout, Real) and not isinstance(self.timeout, bool)

    def lines(self) -> list[Line]:
        if not self.is_number:
            return [line("returns", type(self.timeout).__name__, "a number of seconds")]
        alarms = self.case.alarms(self.timeout)
        return [
            Line("false alarms", alarms, f"at most {self.most}", alarms <= self.most),
            line("seconds", self.timeout, self.expected),
        ]

    def mistake(self) -> str:
        if not self.is_number:
            return "Return the timeout, a number of seconds."
        alarms, count = self.case.alarms(self.timeout), len(self.case.seconds)
        if alarms > self.most:
            return (
                f"With this timeout {alarms} of the {count} silences would have been false alarms, "
                f"and a share of {self.case.allowed} allows {self.most}: an alarm is a silence "
                "that is longer than the timeout."
            )
        return (
            f"It is wrong rarely enough, but longer than necessary: {self.expected} s gives "
            f"{self.case.alarms(self.expected)} false alarms of {self.most} allowed. A "
            "silence as long as the timeout is no alarm yet."
        )


# ---- new shares ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Devices:
    batch_size: int
    seconds: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.batch_size} samples, seconds={list(self.seconds)}"

    def step(self, taken) -> float:
        return max(count * each for count, each in zip(taken, self.seconds))


def shares_trial(fn, case: Devices, group):
    return plain(fn(case.batch_size, list(case.seconds)))


class Shared(Measured):
    def measure(self):
        self.found, n = self.results[0], len(self.case.seconds)
        self.are_counts = (
            isinstance(self.found, (list, tuple))
            and len(self.found) == n
            and all(isinstance(each, Integral) and each >= 0 for each in self.found)
        )
        self.best = self.case.step(ideas.shares(self.case.batch_size, self.case.seconds))

    def lines(self) -> list[Line]:
        if not self.are_counts:
            return [yes("a list with a number of samples for each device", False)]
        step = self.case.step(self.found)
        same = math.isclose(step, self.best, rel_tol=1e-6, abs_tol=1e-12)
        return [
            line("samples in all", sum(self.found), self.case.batch_size),
            Line("seconds of a step", f"{step:g}", f"{self.best:g}", same),
        ]

    def mistake(self) -> str:
        n, B = len(self.case.seconds), self.case.batch_size
        if not self.are_counts:
            return f"Return a list of {n} whole numbers, from 0, one for each device in order."
        if sum(self.found) != B:
            return (
                f"These are {sum(self.found)} samples, and the batch has {B}: shares that are "
                "rounded one by one rarely add up. Deal them out until none is left."
            )
        if B > 2 * n and max(self.found) - min(self.found) <= 1:
            return "Equal shares: all wait for the slowest device. Give it fewer samples."
        slow, fast = (self.case.seconds.index(f(self.case.seconds)) for f in (max, min))
        if self.found[slow] > self.found[fast]:
            return (
                "The slowest device has more samples than the fastest. `seconds` is what one "
                "sample takes: the more seconds, the fewer samples."
            )
        return (
            f"A step takes {self.case.step(self.found):g} s, and {self.best:g} s is possible. "
            "Shares in proportion to speed are not whole numbers, and which way to round matters: "
            "give the next sample to the device that would finish it first."
        )


# ---- the group without the dead -----------------------------------------------------------------


@dataclass(frozen=True)
class Deaths:
    """steps: how many each rank has done, None for a dead one. They determine its state."""

    steps: tuple[int | None, ...]
    length: int = 40
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        gone = sorted(self.dead)
        dead = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))} dead" if gone else "none"
        return f"{dead}, the others after steps {[s for s in self.steps if s is not None]}"

    @property
    def dead(self) -> set[int]:
        return {rank for rank, step in enumerate(self.steps) if step is None}

    def state(self, step: int) -> Tensor:
        """Return the state after a step: numbers that need all digits of their dtype."""
        dice = torch.Generator().manual_seed(step)
        return (1000 * torch.randn(self.length, generator=dice, dtype=torch.float64)).to(self.dtype)


def rebuild_trial(fn, case: Deaths, group):
    rank = group.rank()
    if rank in case.dead:
        return None
    step = case.steps[rank]
    came = fn(case.state(step), step, set(case.dead), group)
    if not isinstance(came, (tuple, list)) or len(came) != 3 or not hasattr(came[0], "rank"):
        raise Complaint("Return three things: the group of the living, the state, its steps.")
    there, state, found = came[0], came[1], plain(came[2])
    ones = all_reduce(torch.ones(1), there)  # the new group must work
    return there.rank(), there.size(), int(ones), state, found


class Rebuilt(Measured):
    def measure(self):
        case = self.case
        self.alive = [rank for rank in range(self.size) if rank not in case.dead]
        self.step = max(case.steps[rank] for rank in self.alive)
        self.expected = case.state(self.step)
        self.found = [self.results[rank] for rank in self.alive]
        self.groups = [
            found[:3] == (place, len(self.alive), len(self.alive))
            for place, found in enumerate(self.found)
        ]
        self.states = [
            isinstance(state, Tensor)
            and state.dtype == case.dtype
            and torch.equal(state, self.expected)
            for *_, state, _ in self.found
        ]
        self.steps = [step == self.step for *_, step in self.found]
        self.most = (len(self.alive) - 1) * (self.expected.nbytes + 8)  # 8: for its step
        self.large = sum(
            comm.sent for comm in self.run.ledger.leaves() if comm.nbytes > 8 * self.size
        )

    def lines(self) -> list[Line]:
        bound = f"at most {self.most}"
        return [
            on_ranks("in a group of the living, in their order", self.groups),
            on_ranks("the state of the rank with the most steps", self.states),
            on_ranks("its number of steps", self.steps),
            Line("bytes of state sent", self.large, bound, self.large <= self.most),
        ]

    def mistake(self) -> str:
        if not all(self.groups):
            return (
                "The new group must have all ranks of `group` that are not in `dead`, in their "
                "order, and no others: Members(group, alive)."
            )
        if not all(self.steps):
            return (
                f"The most steps that anyone has done are {self.step}: all go on there. A rank "
                "that did this step had every gradient."
            )
        if not all(self.states):
            return (
                "The state must be the one of a rank that has done the most steps, to the last bit "
                "and in its own dtype: not the mean, and not the first rank's. Its place in "
                "the *new* group is the root of the broadcast."
            )
        return (
            f"Right, but {self.large:,} bytes of state were sent, and {self.most:,} do: first find "
            "out which rank has the most steps, by one number per rank, then broadcast its state."
        )

    @staticmethod
    def raised(error: str) -> str:
        if "deadlock" not in error and "timeout" not in error.lower():
            return ""
        return (
            "everyone waits. A collective over the old `group` waits for the dead. Use one over "
            "the living only, which all of them enter.\n"
        )


EXERCISES = [
    Exercise(
        "patience",
        detectors.patience,
        patience_trial,
        [
            (1, Silences((0.10, 0.12, 0.55, 0.11, 0.09, 0.30, 0.10, 0.13), 0.25)),
            (1, Silences((0.10, 0.12, 0.55, 0.11, 0.09, 0.30, 0.10, 0.13), 0.0)),
            (1, Silences((3.0, 1.0, 2.0, 5.0, 4.0, 9.0, 7.0), 0.25)),
            (1, Silences((0.2, 0.2, 0.9, 0.9, 0.2, 0.9, 0.2, 0.9), 0.25)),
            (1, Silences((0.5,), 0.5)),
            (1, Silences((0.4, 0.1, 0.3, 0.2), 0.75)),
        ],
        Timeout,
        hints=[
            "Which timeouts matter? Between two of the observed silences the number of "
            "alarms does not change, so the answer is one of them.",
            "Sort the silences. A timeout equal to one of them is wrong for those that are longer, "
            "not for itself. Take the shortest for which these are at most allowed * n.",
        ],
        skeleton="""\
def patience(silences, allowed):
    for timeout in sorted(silences):
        alarms = ...                        # how many silences are longer
        if ...:
            return timeout""",
    ),
    Exercise(
        "shares",
        ideas.shares,
        shares_trial,
        [
            *((1, Devices(12, each)) for each in ((1.0, 1.0, 2.0), (1.0, 1.0, 1.0, 1.0))),
            *((1, Devices(3, each)) for each in ((1.0, 6.0, 1.0), (2.0, 0.5, 0.5))),
            *((1, Devices(10, each)) for each in ((2.0, 0.5, 1.0), (0.25, 1.0), (1.0, 10.0))),
            *((1, Devices(7, each)) for each in ((3.0, 2.0, 2.5, 10.0), (1.0, 1.0, 1.0), (3.0,))),
            (1, Devices(1, (4.0, 2.0, 4.0))),
            (1, Devices(3, (0.0001, 0.0002))),
            (1, Devices(4, (1.0, 5.0, 5.0))),
        ],
        Shared,
        hints=[
            "Deal the samples out one at a time. A device that has k of them and gets another is "
            "done after (k + 1) * its seconds.",
            "Each sample goes to the device for which (taken + 1) * seconds is smallest.",
        ],
        skeleton="""\
def shares(batch_size, seconds):
    taken = [0] * len(seconds)
    for _ in range(batch_size):
        device = min(range(len(seconds)), key=lambda d: ...)
        taken[device] += 1
    return taken""",
    ),
    Exercise(
        "rebuild",
        ideas.rebuild,
        rebuild_trial,
        [
            (4, Deaths((5, 6, None, 6))),
            (4, Deaths((None, 6, 7, 6))),
            (5, Deaths((2, None, 2, None, 1), dtype=torch.float64)),
            (3, Deaths((7, 7, 7))),
            (3, Deaths((4, None, 9), 7)),
            (3, Deaths((2**24, 2**24 + 1, None))),  # float32 has no room for these digits
            (2, Deaths((None, 8))),
        ],
        Rebuilt,
        hints=[
            "The living: range(group.size()) without the dead. Members(group, alive) is a group "
            "of these. From then on communicate in this group only.",
            "All-gather the steps, one number per rank: the index of the largest is the root "
            "from which the state is broadcast.",
        ],
        skeleton="""\
def rebuild(state, step, dead, group):
    alive = ...
    there = Members(group, alive)
    steps = all_gather(torch.tensor([step]), there)
    root = ...
    return there, broadcast(...), ...""",
    ),
]
