"""Amdahl, Gustafson, joules and dollars by hand; fits recover the share behind the times."""

import pytest

from mini_dist.plan.calculators.energy import energy, price
from mini_dist.plan.calculators.scaling import amdahl, fit_amdahl, fit_gustafson, gustafson


def test_the_laws_by_hand():
    assert amdahl(8, 0.1) == pytest.approx(1 / (0.1 + 0.9 / 8))
    assert gustafson(8, 0.1) == pytest.approx(0.1 + 0.9 * 8)
    assert amdahl(1, 0.3) == gustafson(1, 0.3) == 1
    assert amdahl(10**9, 0.1) < 10 < gustafson(10**9, 0.1)


@pytest.mark.parametrize("serial", [0.0, 0.05, 0.5, 1.0])
def test_a_fit_finds_the_share_that_made_the_times(serial):
    counts = (1, 2, 4, 8, 64)
    strong = {n: 7 / amdahl(n, serial) for n in counts}
    assert fit_amdahl(strong) == pytest.approx(serial)
    assert fit_amdahl({n: t for n, t in strong.items() if n > 1}) == pytest.approx(serial)
    weak = {n: 7 * n / gustafson(n, serial) for n in counts}
    assert fit_gustafson(weak) == pytest.approx(serial)


@pytest.mark.parametrize("fit", [fit_amdahl, fit_gustafson])
@pytest.mark.parametrize("seconds", [{}, {1: 2.0}, {1: 2.0, 0: 1.0}, {1: 2.0, 2: 0.0}])
def test_too_little_to_fit_is_refused(fit, seconds):
    with pytest.raises(ValueError, match="tells no scaling"):
        fit(seconds)


def test_weak_scaling_needs_the_time_of_one():
    with pytest.raises(ValueError, match="give the time of one|weak scaling compares with one"):
        fit_gustafson({2: 1.0, 4: 1.0})


def test_energy_and_price_by_hand():
    """1,000 W at 500 tokens/s is 2 J per token; the price is 7.2 dollars/h at 2 tokens/s."""
    assert energy(500, 10, watts=80, pue=1.25)["for a token"] == pytest.approx(2.0)
    assert price(2, 2, 3.6)["for a million tokens"] == pytest.approx(1e6 * 7.2 / 3600 / 2)
    half, twice = price(100, 8, 2.0), price(200, 16, 2.0)
    assert half["for a million tokens"] == pytest.approx(twice["for a million tokens"])


@pytest.mark.parametrize("wrong", [0, -1, True, "700"])
def test_what_cannot_be_is_named(wrong):
    with pytest.raises(ValueError, match=r"^watts=.* gives no answer"):
        energy(1.0, 1, watts=wrong)
    with pytest.raises(ValueError, match=r"^dollars_per_hour="):
        price(1.0, 1, wrong)
