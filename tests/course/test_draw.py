"""draw: a figure shows everything in the record and looks the same in every run."""

import re
import sys
from math import log10
from pathlib import Path
from xml.etree import ElementTree

import cloudpickle
import pytest
import torch

from mini_dist import draw, launch
from mini_dist.collectives import pairwise_all_to_all, ring_all_reduce, star_all_reduce
from mini_dist.collectives.emulate import BusyInterval
from mini_dist.collectives.mesh import Grid
from mini_dist.course.draw import palette, svg
from mini_dist.course.draw.svg import Box, Dot, Drawing, Line, Panel, Words
from mini_dist.plan.calculators.links import Link
from mini_dist.plan.schedule import (
    Action,
    Span,
    Timeline,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    simulate,
    zb_h1,
    zb_v,
)
from mini_dist.ranks.ledger.flights import Flight
from mini_dist.ranks.ledger.steps import messages
from mini_dist.ranks.watch import watch
from mini_dist.strategies.asynchronous import Applied

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest


def train(group):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        for parameter in model.parameters():
            parameter.grad = ring_all_reduce(parameter.grad, group)
    return model


@pytest.fixture(scope="module")
def ledger():
    return launch(train, 3).ledger


@pytest.fixture(scope="module")
def seen():
    return {fn: watch(fn) for fn in (ring_all_reduce, star_all_reduce, pairwise_all_to_all)}


def of(kind, panel):
    """Return the marks of one kind on a panel, in order."""
    return [mark for mark in panel.marks if isinstance(mark, kind)]


def texts(picture):
    (panel,) = picture.panels
    return [words.text for words in of(Words, panel)]


def arrows(picture):
    (panel,) = picture.panels
    return sum(line.head for line in of(Line, panel))


# -- pictures ---------------------------------------------------------------------------------


def test_a_picture_is_the_same_words_each_time_it_is_drawn(seen):
    first, second = (draw.collective(seen[ring_all_reduce]) for _ in range(2))
    assert first.svg() == second.svg() and first._repr_html_() == second._repr_html_()


def test_a_picture_says_in_words_what_it_shows_and_can_be_saved(ledger, tmp_path):
    picture = draw.traffic(ledger)
    said = f"traffic between 3 ranks, {ledger.total_bytes():,} bytes in all"
    assert repr(picture) == said
    assert f'<img alt="{said}"' in picture._repr_html_()
    assert f'aria-label="{said}"' in picture.html() and f"<title>{said}</title>" in picture.svg()
    picture.save(tmp_path / "traffic.svg")
    assert (tmp_path / "traffic.svg").read_text() == picture.svg()


def test_a_picture_is_well_formed_and_escapes_what_it_is_told():
    panel = Panel(300, 200, (0, 1), (0, 1), title="a < b & c", legend={"<i>": "#3182bd"})
    panel.words(0, 0, "<b>")
    picture = Drawing([panel], 'says "<&>"', title="<u>")
    root = ElementTree.fromstring(picture.svg())
    found = {element.text for element in root.iter() if element.text}
    assert {"a < b & c", "<i>", "<b>", "<u>", 'says "<&>"'} <= found
    assert ElementTree.fromstring(picture.html()).get("aria-label") == 'says "<&>"'


def test_a_mark_is_where_its_value_is_and_ends_at_the_border_of_the_axes():
    panel = Panel(300, 200, (0, 10), (5, 0), xticks={0: "0"})
    panel.layout()
    left, bottom = panel.at(0, 5)
    right, top = panel.at(10, 0)
    assert (left, bottom, right, top) == (panel.left, panel.bottom, panel.right, panel.top)
    assert panel.at(2.5, 2.5) == (left + (right - left) / 4, (top + bottom) / 2)
    assert panel.at(99, -99) == (right, top)


def test_boxes_that_no_eye_can_tell_apart_are_one_and_others_stay_apart():
    panel = Panel(700, 100, (0, 1e4), (0, 1))
    for start in range(10_000):
        panel.box(start, 0, start + 1, 1, "#3182bd")
    assert len(panel.inside()) < 1000
    assert svg.joined([(0, 1), (1.1, 2), (5, 4), (10, 11)]) == [(0, 2), (4, 5), (10, 11)]


def test_letters_never_get_smaller_than_11_pixels():
    picture = Drawing([Panel(400, 200, (0, 1), (0, 1)), Panel(900, 200, (0, 1), (0, 1))], "")
    least = [int(width) for width in re.findall(r"min-width:(\d+)px", picture.html())]
    assert [round(svg.SIZE * narrow / wide) for narrow, wide in zip(least, (400, 900))] == [11, 11]


def contrast(a, b):
    """Return the contrast ratio of two colors, as defined in WCAG 2."""

    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear))

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def as_seen(color, ink):
    """Return the color that near_ink() makes of `color` on a page with this ink."""
    if color in (svg.INK, "#ffffff", "#000000"):
        return ink if color == svg.INK else color
    pairs = [(int(color[i : i + 2], 16), int(ink[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(0.65 * own + 0.35 * near):02x}" for own, near in pairs)


@pytest.mark.parametrize("ink, paper", [svg.LIGHT, svg.DARK])
def test_colored_lines_and_words_can_be_told_from_a_light_and_a_dark_page(ink, paper):
    assert contrast(ink, paper) > 10
    for color in {*palette.RANK_COLORS, *palette.LINE_COLORS, *palette.BAR_COLORS, svg.LIMIT}:
        assert contrast(as_seen(color, ink), paper) > 3, color  # WCAG 2 requires 3:1 here.


FIGURES = sorted((Path(__file__).resolve().parents[2] / "lessons/figures").glob("*.svg"))
SEEN = {"text": ("fill", 4.5), "path": ("stroke", 3), "polygon": ("fill", 3)}


@pytest.mark.parametrize("ink, paper", [svg.LIGHT, svg.DARK])
@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_words_and_lines_of_a_drawing_can_be_seen_in_light_in_dark_and_in_print(path, ink, paper):
    root = ElementTree.parse(path).getroot()
    tags = {tag: list(root.iter(f"{{http://www.w3.org/2000/svg}}{tag}")) for tag in SEEN}
    assert tags["text"]
    colors = {(t, e.get(SEEN[t][0])) for t, elements in tags.items() for e in elements}
    inside = {"#000000", "#ffffff"}  # ink_on() picks these for text in a colored box.
    faint = [
        (tag, color)
        for tag, color in colors
        if color not in inside and contrast(as_seen(color, ink), paper) < SEEN[tag][1]
    ]
    assert faint == []


@pytest.mark.parametrize("color", [*palette.CHUNK_COLORS, *palette.RANK_COLORS, "#ffffff"])
def test_a_number_in_a_box_can_be_read(color):
    assert contrast(svg.ink_on(color), color) > 4.5


# -- timeline ---------------------------------------------------------------------------------


def test_the_timeline_has_a_bar_for_each_phase_and_each_communication(ledger):
    picture = draw.timeline(ledger)
    (panel,) = picture.panels
    phases = sum(len(changes) for changes in ledger.phases)
    calls = len(ledger.calls())
    assert calls == 3 * 2 * 2  # ranks, steps, parameters
    bars = of(Box, panel)
    assert calls < len(bars) <= phases + calls  # Phases that ended before the run have no bar.
    labels = list(panel.legend)
    assert "ring_all_reduce" in labels and "send" not in labels
    assert {"forward", "backward", "step"} <= set(labels)


def test_the_timeline_names_every_rank_once_the_first_on_top(ledger):
    (panel,) = draw.timeline(ledger).panels
    assert panel.yticks == {0: "rank 0", 1: "rank 1", 2: "rank 2"} and panel.y[0] > panel.y[1]


def test_calls_that_overlap_are_drawn_above_each_other():
    def overlapping(group):
        works = [torch.distributed.all_reduce(torch.ones(9), group=group, async_op=True)] * 1
        works.append(torch.distributed.all_reduce(torch.ones(9), group=group, async_op=True))
        [work.wait() for work in works]

    found = launch(overlapping, 2).ledger
    for comm in found.comms:  # Each call now spans the whole run, so the two overlap.
        comm.start, comm.end = found.span[comm.rank]
    (panel,) = draw.timeline(found).panels
    heights = {round(box.y0, 3) for box in of(Box, panel) if box.y1 - box.y0 < 0.2}
    assert len(heights) == 2 * 2  # ranks, calls


# -- traffic ----------------------------------------------------------------------------------


def test_traffic_shows_every_number_of_the_matrix_in_the_unit_that_it_names(ledger):
    picture = draw.traffic(ledger)
    matrix = ledger.traffic()
    shown = sorted(float(text) for text in texts(picture))
    assert shown == sorted(float(f"{n:.3g}") for row in matrix for n in row if n)
    assert picture.panels[0].title == "bytes sent"


@pytest.mark.parametrize("length, unit", [(1_000, "kB"), (1_000_000, "MB")])
def test_traffic_names_its_unit_also_below_a_title(length, unit):
    def sends(group):
        torch.distributed.broadcast(torch.ones(length), 0, group=group)

    picture = draw.traffic(launch(sends, 2).ledger, "a broadcast")
    assert picture.panels[0].title == f"a broadcast, {unit} sent"
    assert texts(picture) == ["4"]


# -- curves and bars --------------------------------------------------------------------------


def test_a_curve_has_a_line_for_each_name():
    (panel,) = draw.curve({"a": [3.0, 2.0], "b": [1.0, 0.5]}, "step", "loss").panels
    a, b = of(Line, panel)
    assert a.points == [(0, 3.0), (1, 2.0)] and b.points == [(0, 1.0), (1, 0.5)]
    assert panel.legend == {"a": a.color, "b": b.color}


def test_a_curve_of_a_pair_stands_over_the_first_of_it():
    (panel,) = draw.curve({"a": ([0.5, 2.0], [3.0, 1.0])}, "seconds", "loss").panels
    assert panel.marks[0].points == [(0.5, 3.0), (2.0, 1.0)]


def test_staleness_has_a_panel_a_race_and_a_point_an_update():
    race = [0.1, 0.2, 0.3], [Applied(1, 0), Applied(2, 1), Applied(1, 2)]
    panels = draw.staleness({"one": race, "two": race}, until=0.5).panels
    assert [panel.title for panel in panels] == ["one", "two"]
    for panel in panels:
        dots = [(dot.x, dot.y, dot.color) for dot in of(Dot, panel)]
        one, two = panels[0].legend["worker 1"], panels[0].legend["worker 2"]
        assert dots == [(0.1, 0, one), (0.2, 1, two), (0.3, 2, one)] and one != two
        assert panel.x == (0, 0.5)


def test_a_scatter_has_a_named_point_for_each_entry():
    (panel,) = draw.scatter({"a": (1.0, 2.0), "b": (100.0, 3.0)}, "bytes", "loss").panels
    assert [(dot.x, dot.y) for dot in of(Dot, panel)] == [(0, 2.0), (2, 3.0)]  # powers of ten
    assert [words.text for words in of(Words, panel)] == ["a", "b"]
    assert panel.xticks == {0: "1", 1: "10", 2: "100"}


def test_bars_stand_at_their_place_as_high_as_their_value():
    groups = {"ours": {2: 1.0, 8: 7.0}, "theirs": {8: 1.75}}
    (panel,) = draw.bars(groups, "models", x="ranks").panels
    assert panel.xticks == {0: "2", 1: "8"}
    centers = [(round((box.x0 + box.x1) / 2), box.y1) for box in of(Box, panel)]
    assert centers == [(0, 1.0), (1, 7.0), (1, 1.75)]
    assert (panel.xlabel, panel.ylabel) == ("ranks", "models")


def test_bars_with_long_names_lie():
    names = [f"the name of place {i}, which is long" for i in range(6)]
    (panel,) = draw.bars({"ours": dict.fromkeys(names, 2.0)}, "s", x="where").panels
    assert panel.yticks == dict(enumerate(names)) and panel.xlabel == "s"
    assert {(box.x0, box.x1) for box in of(Box, panel)} == {(0, 2.0)}


# -- collective -------------------------------------------------------------------------------


def outer(picture):
    """Return the boxes of the numbers; each has a second box inside, in its chunk's color."""
    (panel,) = picture.panels
    return of(Box, panel)[::2]


@pytest.mark.parametrize("fn", [ring_all_reduce, star_all_reduce, pairwise_all_to_all])
def test_a_collective_has_an_arrow_for_each_message_and_a_box_for_each_number(fn, seen):
    picture = draw.collective(seen[fn])
    assert arrows(picture) == len(messages(seen[fn].run.ledger))
    numbers = seen[fn].inputs + seen[fn].results + [m for sends in seen[fn].carried for m in sends]
    assert len(outer(picture)) == sum(map(len, numbers))


def test_a_box_says_whose_terms_are_in_it(seen):
    shown = texts(draw.collective(seen[ring_all_reduce]))
    assert shown.count("a₀") == 1  # only in rank 0's input: it is added last
    assert shown.count("a₁") == 2  # in rank 1's input and in the first message to rank 2
    assert shown.count("a₁₂₃") == 1
    assert shown.count("a₀₁₂₃") == 3 + 4  # in three gathered messages and four results


def test_a_strong_edge_marks_the_sums_that_are_complete(seen):
    strong = [box for box in outer(draw.collective(seen[ring_all_reduce])) if box.color == svg.INK]
    assert len(strong) == 3 * 4 + 4 * 4  # the gathered messages and the results
    others = outer(draw.collective(seen[pairwise_all_to_all]))
    assert svg.INK not in {box.color for box in others}


def test_boxes_of_a_collective_do_not_overlap(seen):
    for watched in seen.values():
        boxes = outer(draw.collective(watched))
        for i, a in enumerate(boxes):
            for b in boxes[:i]:
                assert a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 or b.y1 <= a.y0


def test_columns_are_named_from_input_to_result(seen):
    shown = texts(draw.collective(seen[star_all_reduce], "star"))
    names = [text for text in shown if text.startswith(("input", "step", "result"))]
    assert names == ["input", "step 1", "step 2", "result"]


# -- links ----------------------------------------------------------------------------------------


def test_a_fit_shows_each_measurement_and_its_ratio_to_the_line():
    link = Link(latency=1.0, bandwidth=2.0)
    picture = draw.link_fit([2, 20], [2.0, 33.0], link)
    above, below = ([(dot.x, dot.y) for dot in of(Dot, panel)] for panel in picture.panels)
    assert above == [(log10(2), log10(2.0)), (log10(20), log10(33.0))]
    assert below == [(log10(2), 1.0), (log10(20), 3.0)]  # The fitted line is 1 + size / 2.
    assert "worst ratio is 3.00" in repr(picture)


def test_a_message_too_fast_counts_as_a_misfit_too():
    picture = draw.link_fit([2, 20], [0.5, 22.0], Link(latency=1.0, bandwidth=2.0))
    assert "worst ratio is 0.25" in repr(picture)


def test_flights_are_lines_from_sender_and_start_to_receiver_and_end():
    run = [Flight(0, 2, 8, 0.0, 1.0), Flight(2, 1, 4, 1.0, 3.0)]
    picture = draw.flights({"mine": run}, size=3)
    (panel,) = picture.panels
    thick, thin = [line for line in of(Line, panel) if line.color != svg.INK]
    assert thick.points == [(0.0, 0), (1.0, 2)] and thin.points == [(1.0, 2), (3.0, 1)]
    assert thick.width > thin.width


# -- rank grids ------------------------------------------------------------------------------------


def colors_of(panel):
    """Return the color of each rank of a panel: the color of the square around its number."""
    return {
        int(words.text): box.color
        for words in of(Words, panel)
        for box in of(Box, panel)
        if box.x0 < words.x < box.x1 and box.y0 < words.y < box.y1
    }


def test_ranks_of_one_group_have_one_color_and_neighboring_groups_do_not():
    grid = Grid(pp=4, dp=2, tp=2)
    picture = draw.rank_grid(grid, ranks_per_node=8)
    panels = {panel.title: panel for panel in picture.panels}
    assert list(panels) == ["pp", "dp", "tp"]
    for axis, panel in panels.items():
        colors = colors_of(panel)
        for ranks in grid.groups(axis):
            assert len({colors[rank] for rank in ranks}) == 1
        assert len(set(colors.values())) == len(grid.groups(axis))  # up to 8: no color is shared
        frames = [(line.points[0], line.points[2]) for line in of(Line, panel)]
        assert frames == [((0, 0), (4, 2)), ((0, 2), (4, 4))]
    assert "tp: [0, 1], [2, 3]" in repr(picture)


def test_a_product_of_axes_has_a_panel_too_and_nodes_must_fit():
    grid = Grid(pp=2, dp=2, cp=2, tp=2, ep=2)
    picture = draw.rank_grid(grid, ("dp", "cp"), "ep")
    assert [panel.title for panel in picture.panels] == ["dp*cp", "ep"]
    with pytest.raises(ValueError, match="ranks_per_node=3 does not fit rows of 8 ranks"):
        draw.rank_grid(grid, ranks_per_node=3)


# -- pipelines ------------------------------------------------------------------------------------


def bars_of(panel):
    """Return (left, width, row) of every bar on a panel, in order."""
    return sorted(
        (round(box.x0, 6), round(box.x1 - box.x0, 6), round((box.y0 + box.y1) / 2))
        for box in of(Box, panel)
    )


def test_a_gantt_has_a_bar_for_each_action_at_its_time():
    timelines = {
        "GPipe": simulate(gpipe(2, 3)),
        "ZB-H1": simulate(zb_h1(2, 3)),
        "ZB-V": simulate(zb_v(2, 2)),
    }
    picture = draw.gantt(timelines, "ms", scale=10)
    for panel, timeline in zip(picture.panels, timelines.values()):
        assert bars_of(panel) == sorted(
            (10 * start, 10 * (end - start), rank)
            for rank, spans in enumerate(timeline.spans)
            for _, start, end in spans
        )
        numbers = [(words.text, words.x, words.y) for words in of(Words, panel)]
        assert numbers == [
            (str(action.micro), 5 * (start + end), rank)
            for rank, spans in enumerate(timeline.spans)
            for action, start, end in spans
        ]
    bubble = simulate(gpipe(2, 3)).bubble
    assert picture.panels[0].title == f"GPipe: bubble {100 * bubble:.1f} %"


def test_a_rank_that_woke_late_and_caught_up_is_not_drawn_twice_at_once():
    schedule = naive(1, 1)
    spans = [Span(Action(0, "F", 0), 0.0, 4.0), Span(Action(0, "B", 0), 3.0, 5.0)]
    (panel,) = draw.gantt({"": Timeline(schedule, (tuple(spans),))}).panels
    assert bars_of(panel) == [(0.0, 4.0, 0), (4.0, 1.0, 0)]


def test_chunks_of_a_rank_have_colors_of_their_own():
    (panel,) = draw.gantt({"": simulate(interleaved(2, 2, chunks=2))}).panels
    assert len({box.color for box in of(Box, panel)}) == 2 * 2  # F and B of two chunks


def test_held_steps_up_to_what_each_rank_holds_at_most():
    timelines = {"GPipe": simulate(gpipe(3, 4)), "1F1B": simulate(one_f_one_b(3, 4))}
    picture = draw.held(timelines)
    for panel, timeline in zip(picture.panels, timelines.values()):
        held = [max(y for _, y in line.points) for line in of(Line, panel)]
        assert held == timeline.peak_in_flight
    assert repr(picture) == "activations held at most: GPipe [4, 4, 4]; 1F1B [3, 2, 1]"


# -- a sequence split over ranks ------------------------------------------------------------------


def test_scores_are_counted_and_coloured_by_the_rank_of_their_query():
    placements = {"halves": [[0, 1], [2, 3]], "mirrored": [[0, 3], [1, 2]]}
    picture = draw.scores(placements)
    assert repr(picture).endswith("halves: 3, 7; mirrored: 5, 5")
    for panel, table in zip(picture.panels, placements.values()):
        colors = [palette.RANK_COLORS[rank] for rank in range(2)]
        found = {
            (round(box.y0 + 0.5), key): (colors.index(box.color), box.alpha == 1)
            for box in of(Box, panel)
            for key in range(round(box.x0 + 0.5), round(box.x1 + 0.5))
        }
        owner = {position: rank for rank, row in enumerate(table) for position in row}
        assert found == {
            (query, key): (owner[query], owner[key] == owner[query])
            for query in range(4)
            for key in range(query + 1)
        }


def test_devices_have_a_bar_for_each_interval_where_and_as_long_as_it_was():
    rows = [[BusyInterval(0, 0.0, 0.002, 0.0), BusyInterval(1, 0.003, 0.004, 0.0)], []]
    picture = draw.devices({"run": rows})
    (panel,) = picture.panels
    assert bars_of(panel) == [(0, 2, 0), (3, 1, 0)]
    assert texts(picture) == ["0", "1"]
    assert repr(picture) == "run: 4 ms, devices busy 38 %"  # 3 of 2 * 4 ms


def test_overlap_draws_each_interval_where_it_was_computing_above_sending():
    from mini_dist.collectives.emulate import BusyInterval

    computed = [BusyInterval("F0", 0.0, 0.002, 0.0), BusyInterval("B0", 0.002, 0.006, 0.0)]
    sent = [BusyInterval("R0", 0.004, 0.010, 0.0)]
    picture = draw.overlap({"mine": (computed, sent)})
    (panel,) = picture.panels
    assert bars_of(panel) == [(0, 2, 0), (2, 4, 0), (4, 6, 1)]  # ms
    assert repr(picture) == "mine: 10.0 ms"


# -- ticks ----------------------------------------------------------------------------------------


def test_round_places_are_inside_and_few():
    assert svg.round_places(0, 165, 9) == [0, 20, 40, 60, 80, 100, 120, 140, 160]
    assert svg.round_places(0, 4.2, 3) == [0, 2, 4]
    assert svg.numbered([0, 0.5]) == {0: "0", 0.5: "0.5"}
    assert svg.powers(-1.2, 3) == {-1: "1e-1", 0: "1", 1: "10", 2: "100", 3: "1,000"}
