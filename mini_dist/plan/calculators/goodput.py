"""How often to save, and how much of a month on thousands of devices is progress.

Failures of many independent parts are random: the time until the next one is exponential, whatever
happened before. A job that fails loses the work since its last save, and the time until the failure
is noticed, the processes are restarted and the save is read. All times are in seconds.

Sources: Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly 2006, "A
higher order estimate of the optimum checkpoint interval for restart dumps", equations 20 and 37;
Grattafiori et al. 2024, "The Llama 3 Herd of Models" (arXiv:2407.21783), section 3.3.4, table 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from ..fields import at_least, checks_kinds

DAY = 86_400.0
# Table 5 of Llama 3's report: unexpected interruptions in 54 days on 16,384 GPUs, by their cause.
LLAMA_3_GPUS, LLAMA_3_SECONDS = 16_384, 54 * DAY
LLAMA_3 = {
    "faulty GPU": 148,
    "GPU HBM3 memory": 72,
    "software bug": 54,
    "network switch or cable": 35,
    "host maintenance": 32,
    "GPU SRAM memory": 19,
    "GPU system processor": 17,
    "NIC": 7,
    "NCCL watchdog timeouts": 7,
    "silent data corruption": 6,
    "GPU thermal interface or sensor": 6,
    "SSD": 3,
    "power supply": 3,
    "server chassis": 2,
    "IO expansion board": 2,
    "dependency": 2,
    "CPU": 2,
    "system memory": 2,
}


def mean_time_between_failures(devices: int, of_one: float) -> float:
    """Return the mean seconds between failures of this many devices; one fails after `of_one`."""
    at_least("devices", devices, 1)
    return at_least("of_one", of_one, 1e-9) / devices


def llama_3_device() -> float:
    """Return the seconds between interruptions per GPU, by Llama 3's 419 on 16,384: 5.8 years."""
    return LLAMA_3_SECONDS * LLAMA_3_GPUS / sum(LLAMA_3.values())


def young(save: float, mtbf: float) -> float:
    """Return the seconds of work between saves that lose the least time: sqrt(2 save mtbf)."""
    return math.sqrt(2 * at_least("save", save, 0) * at_least("mtbf", mtbf, 1e-9))


def daly(save: float, mtbf: float) -> float:
    """Return the best interval if a save is not short compared with mtbf (Daly 2006, eq. 37)."""
    if save >= 2 * at_least("mtbf", mtbf, 1e-9):
        return mtbf
    x = at_least("save", save, 0) / (2 * mtbf)
    return young(save, mtbf) * (1 + math.sqrt(x) / 3 + x / 9) - save


@checks_kinds
@dataclass(frozen=True)
class LongJob:
    """mtbf: mean seconds between failures. save: seconds that training stops for each save.
    interval: seconds of work between two saves. noticed: until the failure is noticed. restart:
    until training continues, including reading the save. survives: the share of failures after
    which the other ranks continue without a restart, which takes `regroup` and costs the work since
    the last copy, at most `copied` seconds."""

    mtbf: float
    save: float
    interval: float
    noticed: float = 0.0
    restart: float = 0.0
    survives: float = 0.0
    regroup: float = 0.0
    copied: float = 0.0

    def __post_init__(self):
        for name in ("mtbf", "interval"):
            at_least(name, getattr(self, name), 1e-9)
        for name in ("save", "noticed", "restart", "survives", "regroup", "copied"):
            at_least(name, getattr(self, name), 0)
        if self.survives > 1:
            raise ValueError(f"survives={self.survives!r} is a share: give 0 to 1")

    def expected(self) -> float:
        """Return the share of time that is progress, for exponential failures (Daly, eq. 20).

        Doing `interval` of work and saving it takes on average mtbf e^(R/mtbf) (e^((interval +
        save)/mtbf) - 1), where R is the time from a failure until work continues. Only for
        survives=0.
        """
        if self.survives:
            raise ValueError(f"survives={self.survives}: no formula here, ask `simulated`")
        away = (self.noticed + self.restart) / self.mtbf
        cycle = (self.interval + self.save) / self.mtbf
        return self.interval / (self.mtbf * math.exp(away) * math.expm1(cycle))


class Month(NamedTuple):
    """Where the seconds went. progress: work that was kept; saving: stopped to save; lost:
    work that was repeated; waiting: until noticed, restarted or regrouped; failures: how many;
    points: (seconds, progress so far) at every change."""

    progress: float
    saving: float
    lost: float
    waiting: float
    failures: int
    points: list[tuple[float, float]]

    @property
    def goodput(self) -> float:
        return self.progress / (self.progress + self.saving + self.lost + self.waiting)


def simulated(job: LongJob, seconds: float = 30 * DAY, seed: int = 0) -> Month:
    """Simulate a month of this job, with random failures that may also strike during a restart.

    After a survived failure the job works again `regroup` seconds later at full speed: a spare is
    there by then. If a spare takes longer, put its delay into `regroup`.
    """
    lot = Random(seed)
    now = done = kept = saving = lost = waiting = 0.0  # done: work since the last save
    failures, points = 0, [(0.0, 0.0)]
    strikes = lot.expovariate(1 / job.mtbf)
    pause = 0.0  # seconds left until work goes on
    while now < seconds:
        end = min(strikes, seconds)
        if pause:  # waiting
            step = min(pause, end - now)
            waiting, pause, now = waiting + step, pause - step, now + step
        elif (
            now + job.interval - done + job.save <= end
        ):  # the save ends before anything else happens
            now += job.interval - done + job.save
            kept, saving, done = kept + job.interval, saving + job.save, 0.0
        else:
            worked = min(end - now, job.interval - done)
            done, saving, now = done + worked, saving + end - now - worked, end
        if now >= strikes:
            failures += 1
            strikes = now + lot.expovariate(1 / job.mtbf)
            if lot.random() < job.survives:
                back = min(done, lot.uniform(0, job.copied))
                pause = job.regroup
            else:
                back, pause = done, job.noticed + job.restart
            done, lost = done - back, lost + back
        points.append((now, kept + done))
    return Month(kept + done, saving, lost, waiting, failures, points)
