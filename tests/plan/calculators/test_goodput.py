"""How often to save, and how much of a month is progress: formulas and a simulation."""

import math

import pytest

from mini_dist.course.widgets import goodput_of_a_month
from mini_dist.plan.calculators import goodput
from mini_dist.plan.calculators.goodput import DAY, LongJob, daly, simulated, young

M = 3.1 * 3600


def test_llama_3s_table_adds_up_to_what_its_report_says():
    assert sum(goodput.LLAMA_3.values()) == 419
    hours = goodput.mean_time_between_failures(16_384, goodput.llama_3_device()) / 3600
    assert hours == pytest.approx(54 * 24 / 419)


@pytest.mark.parametrize("save, interval, away", [(60, 1000, 0), (60, 1000, 900), (600, 5000, 60)])
def test_the_simulation_is_dalys_formula(save, interval, away):
    job = LongJob(M, save, interval, restart=away)
    found = simulated(job, 3000 * DAY, seed=1).goodput
    assert found == pytest.approx(job.expected(), abs=0.005)


@pytest.mark.parametrize("save", [1, 60, 600, 3600])
def test_no_other_interval_is_better_than_dalys_by_a_thousandth(save):
    best = LongJob(M, save, daly(save, M)).expected()
    others = [LongJob(M, save, daly(save, M) * factor).expected() for factor in (0.5, 0.8, 1.25, 2)]
    assert best > max(others) - 0.001


def test_for_a_short_save_young_and_daly_agree():
    assert daly(0.01, M) == pytest.approx(young(0.01, M), rel=0.01)
    assert young(60, M) == pytest.approx(math.sqrt(120 * M))
    assert daly(3 * M, M) == M


def test_every_second_of_the_month_is_accounted_for():
    job = LongJob(M, 60, 900, noticed=300, restart=600, survives=0.5, regroup=30, copied=60)
    month = simulated(job, 30 * DAY, seed=3)
    whole = month.progress + month.saving + month.lost + month.waiting
    assert whole == pytest.approx(30 * DAY) and month.failures > 100
    assert month.points[-1][1] == pytest.approx(month.progress)


def test_who_survives_failures_loses_less():
    found = [
        simulated(LongJob(M, 5, 300, 300, 600, share, 30, 60)).goodput for share in (0, 0.5, 1)
    ]
    assert found == sorted(found) and found[2] > 0.97


@pytest.mark.parametrize("wrong", [{"mtbf": 0}, {"interval": 0}, {"save": -1}, {"survives": 2}])
def test_what_cannot_be_is_told(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LongJob(**{"mtbf": M, "save": 60, "interval": 900, **wrong})


def test_the_explorer_says_what_the_calculator_says():
    explorer = goodput_of_a_month(devices=1024, save_seconds=30.0, seed=2)
    years = explorer.values["years_of_one"] * 365 * DAY
    mtbf = goodput.mean_time_between_failures(1024, years)
    job = LongJob(mtbf, 30, daly(30, mtbf), 300, 600, 0, 30, 60)
    month = simulated(job, 30 * DAY, 2)
    assert f"{month.failures:,} failures in 30 days" in explorer.html
    assert (
        f"Goodput {month.goodput:.1%}" in explorer.html and f"{job.expected():.1%}" in explorer.html
    )
