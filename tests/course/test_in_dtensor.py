"""DTensor and the rules send the same bytes wherever they choose the same collectives."""

import pytest

from mini_dist.collectives.sharding import product
from mini_dist.collectives.sharding.strategies import MESH, SIZES, STRATEGIES
from mini_dist.course.elsewhere.in_dtensor import issued

LINES = {name: (axes, text) for name, axes, text in STRATEGIES}


@pytest.fixture(scope="module")
def together():
    """Return what DTensor issues for each line on the mesh dp x tp."""
    lines = {name: text for name, (axes, text) in LINES.items() if axes is MESH}
    return dict(zip(lines, issued([*lines.values()], MESH, SIZES)))


@pytest.mark.parametrize(
    "name, calls",
    [
        ("DP, a gradient", ["all_reduce dp"]),
        ("ZeRO-3, forward", ["all_gather dp"]),
        ("ZeRO-3, a gradient", ["reduce_scatter dp"]),
        ("TP, into a region", []),
        ("TP, out of it", ["all_reduce tp"]),
        ("SP, into a region", ["all_gather tp"]),
        ("SP, out of it", ["reduce_scatter tp"]),
        ("2D (SUMMA)", ["all_gather tp", "all_gather dp"]),
    ],
)
def test_dtensor_issues_what_the_rules_say(name, calls, together):
    axes, text = LINES[name]
    assert together[name].calls == calls
    assert together[name].sent == product(text, axes, **SIZES).sent


def test_every_rank_has_its_piece_of_the_result(together):
    assert all(each.right for each in together.values())


def test_for_want_of_an_all_to_all_in_gloo_it_gathers(together):
    """torch's shard_dim_alltoall falls back to an all-gather on CPU."""
    axes, text = LINES["EP, to the experts"]
    found = together["EP, to the experts"]
    assert found.calls == ["all_gather tp"]
    assert found.sent == MESH["tp"] * product(text, axes, **SIZES).sent


def test_a_strided_shard_holds_another_order_of_the_axes_and_costs_more():
    axes, text = LINES["3D"]
    (found,) = issued([text], axes, SIZES)
    assert found.right
    assert found.sent > 2 * product(text, axes, **SIZES).sent
    assert (
        found.calls.count("all_gather x") == 2
    )  # It gathers the batch before the product and the result's columns after it.
