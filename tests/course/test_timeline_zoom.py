"""The explorer of a timeline shows a part of a run: what overlaps the window, on five rows."""

import pytest
import torch

from mini_dist import all_reduce, launch
from mini_dist.course import draw
from mini_dist.course.lab import ParameterError
from mini_dist.course.widgets.timeline import timeline_zoom


def two_sums(group):
    for _ in range(2):
        all_reduce(torch.zeros(1000), group)


@pytest.fixture(scope="module")
def run():
    return launch(two_sums, 6)


def window_of(call, run):
    """Return the beginning and the end of a call, in milliseconds from the first start."""
    began = min(start for start, _ in run.ledger.span)
    return 1e3 * (call.start - began), 1e3 * (call.end - began)


def test_the_whole_run_is_what_the_drawing_shows_of_its_rows(run):
    explorer = timeline_zoom(run)
    assert explorer.picture.svg() == draw.timeline(run, rows=range(5)).svg()
    assert explorer.html.count("<td style='text-align:left'>2</td>") == 5  # two calls on each row


def test_a_window_around_one_call_leaves_the_other_out(run):
    first, second = run.ledger.calls(rank=0)
    begin = window_of(first, run)[0] / 2
    end = (window_of(first, run)[1] + window_of(second, run)[0]) / 2
    length = timeline_zoom(run).declared["from_ms"].most
    explorer = timeline_zoom(run, from_ms=begin, share=max((end - begin) / length, 0.001))
    assert "<td style='text-align:left'>1</td>" in explorer.html.split("rank 1")[0]


def test_the_window_stays_inside_the_run_and_rows_inside_the_ranks(run):
    last = timeline_zoom(run).declared["from_ms"].most
    explorer = timeline_zoom(run, from_ms=last, share=0.5, first_row=1)
    assert "rank 5" in explorer.picture.svg() and "rank 0" not in explorer.picture.svg()
    with pytest.raises(ParameterError, match="first_row=2 is out of range"):
        explorer.change(first_row=2)
    assert "first_row" not in timeline_zoom(launch(two_sums, 2)).shown(explorer.values)
