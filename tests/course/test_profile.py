"""Where a step's time went: the parts add up, the straggler is named, noise is measured."""

import random
import sys
import time

import cloudpickle
import pytest
import torch

from mini_dist import all_reduce, launch
from mini_dist.course.profile import (
    PARTS,
    NoiseScale,
    Span,
    Timeline,
    bandwidths,
    profiled,
    stragglers,
    where_it_went,
)
from mini_dist.course.profile.spans import length, union, within, without
from mini_dist.ranks.ledger import Comm, Ledger

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest


# ---- intervals -----------------------------------------------------------------------------------


def covered(intervals, moment):
    return any(start <= moment < end for start, end in intervals)


@pytest.mark.parametrize("seed", range(30))
def test_intervals_are_sets_of_moments(seed):
    dice = random.Random(seed)

    def some():
        starts = [dice.randrange(30) for _ in range(dice.randrange(6))]
        return [(start, start + dice.randrange(8)) for start in starts]

    one, two = some(), some()
    left, both = without(union(one), union(two)), within(one, 5, 20)
    for moment in range(40):
        there = covered(one, moment + 0.5)
        assert covered(union(one), moment + 0.5) == there
        assert covered(left, moment + 0.5) == (there and not covered(two, moment + 0.5))
        assert covered(both, moment + 0.5) == (there and 5 <= moment < 20)
    assert length(union(one)) == sum(covered(one, moment + 0.5) for moment in range(40))


# ---- where it went -------------------------------------------------------------------------------


def parts(*spans, start=0.0, end=10.0):
    went = where_it_went(Timeline([[(start, end)]], [list(spans)]))
    assert sum(went.seconds[0].values()) == pytest.approx(went.step[0])
    return {part: value for part, value in went.seconds[0].items() if value}, went.waited[0]


def test_what_nobody_named_is_unexplained():
    found, _ = parts(Span("forward", "region", 1, 8), Span("aten::mm", "compute", 2, 5))
    assert found == {"compute": 3, "host": 4, "unexplained": 3}


def test_an_operator_outside_of_any_region_is_compute_all_the_same():
    found, _ = parts(Span("aten::mm", "compute", 2, 5))
    assert found == {"compute": 3, "unexplained": 7}


def test_nested_operators_count_once():
    found, _ = parts(Span("aten::linear", "compute", 2, 5), Span("aten::addmm", "compute", 3, 4))
    assert found["compute"] == 3


def test_a_communication_is_hidden_where_an_operator_runs_and_exposed_elsewhere():
    found, _ = parts(Span("send", "communication", 1, 9), Span("aten::mm", "compute", 0, 6))
    assert found == {"compute": 6, "communication": 3, "unexplained": 1}


def test_operators_inside_of_a_collective_that_blocks_belong_to_it():
    ring = Span("ring_all_reduce", "communication", 2, 8, blocks=True)
    found, _ = parts(ring, Span("aten::add", "compute", 4, 5))
    assert found == {"communication": 6, "unexplained": 4}


def test_waiting_ends_when_the_last_one_has_come_and_names_it():
    found, whom = parts(Span("all_reduce", "communication", 2, 9, blocks=True, late=(3, 6.0)))
    assert found == {"waiting": 4, "communication": 3, "unexplained": 3}
    assert whom == {3: 4}


def test_nobody_waits_for_one_who_came_before():
    found, whom = parts(Span("all_reduce", "communication", 2, 9, late=(3, 2.0)))
    assert found["communication"] == 7 and "waiting" not in found and sum(whom.values()) == 0


def test_waiting_beside_an_operator_costs_nothing():
    comm = Span("all_reduce", "communication", 2, 9, late=(3, 6.0))
    found, whom = parts(comm, Span("aten::mm", "compute", 0, 5))
    assert found == {"compute": 5, "waiting": 1, "communication": 3, "unexplained": 1}
    assert whom == {3: 1}


def test_data_comes_before_what_runs_in_its_region():
    found, _ = parts(Span("data", "data", 1, 4), Span("aten::index", "compute", 2, 3))
    assert found == {"data": 3, "unexplained": 7}


def test_what_lies_outside_of_the_step_is_not_its():
    found, _ = parts(Span("aten::mm", "compute", -5, 2), Span("data", "data", 9, 99))
    assert found == {"compute": 2, "data": 1, "unexplained": 7}


def test_steps_can_be_left_out_at_the_beginning():
    timeline = Timeline([[(0, 10), (10, 12)]], [[Span("aten::mm", "compute", 0, 11)]])
    assert where_it_went(timeline, skip=1).seconds[0]["compute"] == 1


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_add_up_whatever_happened(seed):
    dice = random.Random(seed)
    spans = []
    for _ in range(30):
        start = dice.uniform(-2, 11)
        kind = dice.choice(["data", "compute", "communication", "region"])
        late = (1, start + dice.uniform(-1, 2)) if kind == "communication" else None
        end = start + dice.uniform(0, 3)
        spans.append(Span(kind, kind, start, end, blocks=dice.random() < 0.5, late=late))
    found, whom = parts(*spans)
    assert all(value > -1e-12 for value in found.values()) and set(found) <= set(PARTS)
    assert sum(whom.values()) == pytest.approx(found.get("waiting", 0.0))


# ---- from a run ----------------------------------------------------------------------------------


def recorded(group):
    x = torch.randn(64, 64)
    with profiled(group) as profile:
        for _ in range(2):
            with profile.step():
                with profile.region("data"):
                    time.sleep(0.001)
                with profile.region("forward"):
                    y = x @ x
                with profile.region("average"):
                    all_reduce(y, group)
    return profile.spans


@pytest.fixture(scope="module")
def run():
    return launch(recorded, 3)


def test_both_witnesses_are_on_one_clock(run):
    """A collective in the ledger lies inside the region that torch.profiler recorded around it."""
    timeline = Timeline.of(run.ledger, run.results)
    for spans in timeline.spans:
        regions = [s for s in spans if s.name == "average"]
        calls = [s for s in spans if s.kind == "communication"]
        assert len(regions) == len(calls) == 2
        for region, call in zip(regions, calls):
            assert region.start - 1e-4 < call.start <= call.end < region.end + 1e-4


def test_steps_regions_and_operators_are_told_apart(run):
    for spans in run.results:
        kinds = {kind: [s.name for s in spans if s.kind == kind] for kind in ("step", "region")}
        assert len(kinds["step"]) == 2
        assert kinds["region"] == ["forward", "average"] * 2
        assert sum(s.kind == "data" for s in spans) == 2
        assert "aten::mm" in {s.name for s in spans if s.kind == "compute"}


def test_of_a_real_run_the_parts_add_up_and_each_is_there(run):
    went = where_it_went(Timeline.of(run.ledger, run.results))
    for found, step in zip(went.seconds, went.step):
        assert sum(found.values()) == pytest.approx(step)
        assert found["data"] >= 0.001 and found["compute"] > 0 and found["communication"] > 0
    assert "unexplained" in repr(went) and "<table>" in went._repr_html_()


def test_who_marks_no_step_is_told():
    ledger = Ledger([], [[]], [None], [(0.0, 1.0)])
    with pytest.raises(ValueError, match="rank 0 has no step"):
        Timeline.of(ledger, [[Span("x", "compute", 0, 1)]])


# ---- arrivals ------------------------------------------------------------------------------------


def meeting(starts, end, op="all_reduce", nbytes=1000):
    group = tuple(range(len(starts)))
    return [
        Comm(rank, op, "world", group, "float32", nbytes, start, end, "step", None)
        for rank, start in enumerate(starts)
    ]


def ledger_of(*meetings):
    comms = sorted((comm for each in meetings for comm in each), key=lambda c: (c.rank, c.start))
    size = len(meetings[0])
    return Ledger(comms, [[] for _ in range(size)], [None] * size, [(0.0, 99.0)] * size)


def test_the_straggler_is_who_comes_last_and_pays_for_what_the_others_wait():
    table = stragglers(ledger_of(meeting([0, 5, 1], 6), meeting([7, 9, 8], 10)))
    assert [row[:3] for row in table.rows] == [(0, 2, 0), (1, 2, 2), (2, 2, 0)]
    assert table.rows[1][4] == "12000.0"  # ms: 5 + 4 in the first meeting, 2 + 1 in the second


def test_only_what_was_asked_for_is_counted():
    run = ledger_of(meeting([0, 5], 6), meeting([7, 6], 8, op="broadcast"))
    assert [row[1:3] for row in stragglers(run, "all_reduce").rows] == [(1, 0), (1, 1)]


@pytest.mark.parametrize(
    "op, nbytes, bytes_, algbw, busbw",
    [
        ("all_reduce", 10**9, 10**9, 0.5, 0.75),
        ("ring_all_reduce", 10**9, 10**9, 0.5, 0.75),
        ("all_gather", 10**9, 4 * 10**9, 2.0, 1.5),
        ("reduce_scatter", 4 * 10**9, 4 * 10**9, 2.0, 1.5),
        ("all_to_all", 4 * 10**9, 4 * 10**9, 2.0, 1.5),
        ("broadcast", 10**9, 10**9, 0.5, 0.5),
    ],
)
def test_bandwidths_are_those_of_nccl_tests_from_the_last_arrival_on(
    op, nbytes, bytes_, algbw, busbw
):
    (row,) = bandwidths(ledger_of(meeting([0, 7, 1, 2], 9, op, nbytes))).rows
    assert row == (op, bytes_, 1, "2000000", f"{algbw:.3f}", f"{busbw:.3f}")


# ---- the gradient noise scale --------------------------------------------------------------------


def test_two_squares_give_the_variance_and_the_signal_that_made_them():
    """|g_b|^2 = |G|^2 + T/b for b = 4 and b = 16, with |G|^2 = 3 and T = 24."""
    noise = NoiseScale(4, 4)
    noise.add_squares(3 + 24 / 4, 3 + 24 / 16)
    assert (noise.variance, noise.signal, noise.rows) == pytest.approx((24, 3, 8))


def test_the_ratio_of_means_not_the_mean_of_ratios():
    noise = NoiseScale(1, 2)
    for few, many in ((3.0, 2.0), (5.0, 4.0)):
        noise.add_squares(few, many)
    assert noise.rows == pytest.approx(((4 - 3) / (1 - 1 / 2)) / (2 * 3 - 4))


def test_nothing_but_noise_is_infinite_and_one_rank_is_refused():
    noise = NoiseScale(1, 2)
    noise.add_squares(4.0, 2.0)
    assert noise.rows == float("inf")
    with pytest.raises(ValueError, match="2 of them at least"):
        NoiseScale(8, 1)


def measured(group):
    noise = NoiseScale(1, group.size())
    mine = [torch.tensor([1.0, 2.0]) * (group.rank() + 1), torch.ones(1)]
    mean = [all_reduce(g, group, op="mean") for g in mine]
    noise.add(mine, mean, group)
    return noise.squares


def test_on_ranks_the_squares_are_the_ranks_mean_and_that_of_the_mean():
    for few, many in launch(measured, 3).results:
        assert few == pytest.approx((6 + 21 + 46) / 3)
        assert many == pytest.approx(5 * 4 + 1)
