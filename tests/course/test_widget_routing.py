"""The explorer of lesson 14 shows what the library's router, capacity and all-to-all would do."""

import re
from itertools import product

import pytest
import torch

from mini_dist import launch
from mini_dist.course.draw.svg import Box, Words
from mini_dist.course.lab import ParameterError
from mini_dist.course.widgets import expert_routing, routing
from mini_dist.strategies.expert_parallel import dispatch


def numbers(html):
    """Return the table's right column, keyed by the left one."""
    cells = re.findall(r"<td[^>]*>(.*?)</td>", html)
    return dict(zip(cells[0::2], cells[1::2]))


def rows_received(went, group):
    """Dispatch this many rows between real ranks; return how many arrive."""
    counts = went[group.rank()]
    return len(dispatch(torch.zeros(int(counts.sum()), 1), counts, group)[0])


@pytest.mark.parametrize("capacity_factor", ["none", "1.25"])
def test_rows_of_the_matrix_are_those_that_ranks_receive(capacity_factor):
    shown = routing.traffic(8, 2, 4, 1.0, capacity_factor)
    arriving = routing.between_ranks(shown).sum(0).tolist()
    run = launch(rows_received, 4, (shown.went,))
    assert run.results == arriving


def test_every_token_wants_k_experts_and_capacity_cuts_per_rank():
    shown = routing.traffic(8, 2, 4, 2.0, "1.0")
    assert shown.wanted.sum(1).tolist() == [2 * routing.TOKENS] * 4
    assert shown.capacity == 2 * routing.TOKENS // 8
    assert torch.equal(shown.went, shown.wanted.clamp(max=shown.capacity))


def test_the_more_some_experts_are_liked_the_busier_the_first_and_the_more_is_dropped():
    tables = [numbers(routing.render(liking=liking)[1]) for liking in (0.0, 0.5, 2.0)]
    busiest = [float(table["busiest expert / mean"]) for table in tables]
    assert busiest[0] < 1.2 < busiest[1] < busiest[2]
    assert {table["dropped"] for table in tables} == {"0.0%"}
    dropped = [
        float(numbers(routing.render(liking=liking, capacity_factor="1.0")[1])["dropped"][:-1])
        for liking in (0.0, 0.5, 2.0)
    ]
    assert 0 < dropped[0] < dropped[1] < dropped[2]


def test_on_one_rank_nothing_leaves():
    table = numbers(routing.render(num_ranks=1)[1])
    assert table["rows that leave their rank"] == f"0 of {2 * routing.TOKENS}"


def test_bars_and_matrix_are_the_numbers():
    picture, _ = routing.render(num_experts=4, num_ranks=2, capacity_factor="1.0")
    left, right = picture.panels
    shown = routing.traffic(4, 2, 2, 0.5, "1.0")
    dropped, answered = (
        [mark.y1 for mark in left.marks if isinstance(mark, Box) and mark.color == color]
        for color in (routing.DROPPED, routing.KEPT)
    )
    assert dropped == shown.wanted.sum(0).tolist() and answered == shown.went.sum(0).tolist()
    counts = [str(count) for row in routing.between_ranks(shown).tolist() for count in row]
    written = [(mark.x, mark.y, mark.text) for mark in right.marks if isinstance(mark, Words)]
    assert written == [
        (to, source, count) for (source, to), count in zip(product(range(2), repeat=2), counts)
    ]


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_rows_that_stay_at_home_have_no_colour(num_ranks):
    picture, html = routing.render(num_ranks=num_ranks)
    marks = picture.panels[1].marks
    colored = {(m.y0 + 0.5, m.x0 + 0.5) for m in marks if isinstance(m, Box)}
    assert all(source != target for source, target in colored)
    counts = {(m.y, m.x): int(m.text) for m in marks if isinstance(m, Words)}
    leave = numbers(html)["rows that leave their rank"]
    assert sum(counts[pair] for pair in colored) == int(leave.split(" of ")[0])


def test_what_cannot_be_is_refused_and_the_explorer_starts_where_it_is_told():
    with pytest.raises(ParameterError, match="8 ranks need as many experts"):
        routing.render(num_experts=4, num_ranks=8)
    with pytest.raises(ParameterError, match="cannot visit 8 of 4 experts"):
        routing.render(num_experts=4, top_k=8)
    assert expert_routing(top_k=4).values["top_k"] == 4
