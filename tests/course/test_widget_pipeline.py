"""The explorer of lesson 12 shows what the simulator and a run give for the lists it names."""

import pytest

from mini_dist.course.lab import ParameterError
from mini_dist.course.widgets import pipeline
from mini_dist.course.widgets.explorer import WRONG
from mini_dist.plan.schedule import ScheduleError, Times, gpipe, interleaved, simulate

UNIT = Times(1, 1, 1)


def cells(shown):
    """Return the table's rows, keyed by their first cell."""
    rows = [row.split("<td") for row in shown.html.split("<tr>")[2:]]
    text = [[cell.split(">", 1)[1].split("<")[0] for cell in row[1:]] for row in rows]
    return {row[0]: row[1:] for row in text}


@pytest.mark.parametrize("p, m, v", [(4, 8, 2), (2, 3, 1), (8, 16, 3), (1, 4, 1)])
def test_the_formula_is_what_even_stages_and_free_messages_take(p, m, v):
    """The formula and the simulator are independent."""
    for name in ("naive", "gpipe", "1f1b", "interleaved", "pipedream"):
        schedule = pipeline.schedule_of(name, p, m, v)
        bubble, _ = pipeline.predicted(name, p, m, v, UNIT)
        found = simulate(schedule, pipeline.thin(UNIT, schedule))
        assert found.bubble == pytest.approx(bubble), (name, p, m, v)


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "zb_v"])
def test_zero_bubble_formulas_hold_over_the_longest_span_with_enough_micro_batches(name):
    for p in (2, 4):
        schedule = pipeline.schedule_of(name, p, 4 * p)
        bubble, _ = pipeline.predicted(name, p, 4 * p, 1, UNIT)
        found = simulate(schedule, pipeline.thin(UNIT, schedule))
        assert found.bubble_over_longest_span == pytest.approx(bubble), (name, p)


def test_thin_stages_share_the_time_of_a_rank():
    times = pipeline.thin(Times(3, 6, 9, 1), interleaved(2, 4, chunks=3))
    assert times == Times(1, 2, 3, 1)  # The size of a message does not change.
    assert pipeline.thin(UNIT, gpipe(2, 4)) == UNIT


def test_the_page_shows_formula_simulation_and_memory():
    shown = pipeline.explorer()
    row = cells(shown)["bubble: idle / makespan"]
    assert row[0].startswith("27.3 %") and row[1] == "27.3 %"
    assert "share: 4, 3, 2, 1. Messages in a step: 48." in shown.html
    assert repr(shown.picture) == "1F1B, 4 ranks: bubble simulated 27.3 %"


def test_thin_stages_hold_thin_activations_in_the_picture_too():
    shown = pipeline.explorer(schedule="interleaved", num_micro_batches=8)
    panel = shown.picture.panels[-1]
    assert len(panel.yticks) > 2
    assert all(place == 2 * float(label) for place, label in panel.yticks.items())
    highest = max(y for line in panel.marks for _, y in line.points)
    assert f"share: {highest / 2:g}," in shown.html  # 5.5 on rank 0, as the page says


def test_the_formula_of_a_zero_bubble_schedule_stands_where_it_belongs():
    rows = cells(pipeline.explorer(schedule="zb_h2", num_micro_batches=16))
    assert rows["bubble: idle / makespan"][0] == ""
    row = rows["over the longest single rank&#x27;s span (zero-bubble)"]
    assert row[0].startswith("0.0 %") and row[1] == "0.0 %"


def test_a_measured_run_is_shown_beside_and_took_the_time_it_says():
    shown = pipeline.explorer(num_ranks=2, num_micro_batches=2, measured=True)
    simulated, measured = cells(shown)["makespan, ms"][1:]
    assert float(measured) >= 0.9 * float(simulated)  # The end is read from the wall clock.
    assert "measured" in repr(shown.picture)


def test_asynchronous_schedules_say_how_many_versions_they_keep():
    shown = pipeline.explorer(schedule="pipedream")
    assert "Weight versions kept: 4, 3, 2, 1." in shown.html


def test_what_a_schedule_cannot_take_is_one_sentence_with_what_would_work():
    shown = pipeline.explorer()
    with pytest.raises(ScheduleError, match="8 or 10 would work"):
        shown.change(schedule="interleaved", num_micro_batches=9)
    with pytest.raises(ScheduleError, match="7 is too few, 8 or more would work"):
        shown.change(schedule="dualpipe_v", num_micro_batches=7)
    with pytest.raises(ParameterError, match="did you mean 1f1b"):
        shown.change(schedule="1f2b")
    assert shown.values["schedule"] == "1f1b"


@pytest.mark.parametrize("name", pipeline.NAMES)
def test_every_schedule_can_be_drawn(name):
    for p, m in [(1, 1), (8, 32)]:
        try:
            shown = pipeline.explorer(schedule=name, num_ranks=p, num_micro_batches=m)
        except ScheduleError:
            assert name == "dualpipe_v" and m < 2 * p
            continue
        assert shown.picture.html().count("<svg") == 2


def test_a_moved_control_changes_picture_and_page():
    grid, seen = pipeline.explorer().view.children
    image, page = seen.children
    controls = {control.description: control for control in grid.children}
    before = image.value, page.value
    controls["num micro batches"].value = 4
    assert "42.9 %" in page.value and image.value != before[0]
    controls["schedule"].value = "dualpipe_v"
    assert "4 is too few, 8 or more would work" in page.value and WRONG in page.value
