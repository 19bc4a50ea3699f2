"""draw: a figure shows what is in the record, all of it, the same at each run."""

import sys

import cloudpickle
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mini_dist import draw, launch
from mini_dist.collectives import pairwise_all_to_all, ring_all_reduce, star_all_reduce
from mini_dist.collectives.emulate import BusyInterval
from mini_dist.collectives.mesh import Grid
from mini_dist.course.draw import labels
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


def texts(picture):
    (axes,) = picture.figure.axes
    return [text.get_text() for text in axes.texts]


def arrows(picture):
    """How many: matplotlib keeps an arrow as a text without words."""
    return texts(picture).count("")


# -- pictures ---------------------------------------------------------------------------------


def test_a_picture_is_the_same_bytes_each_time_it_is_drawn(seen):
    first, second = (draw.collective(seen[ring_all_reduce])._repr_png_() for _ in range(2))
    assert first == second
    assert first.startswith(b"\x89PNG") and b"Software" not in first


def test_a_picture_says_in_words_what_it_shows_and_can_be_saved(ledger, tmp_path):
    picture = draw.traffic(ledger)
    assert repr(picture) == f"traffic between 3 ranks, {ledger.total_bytes():,} bytes in all"
    picture.save(tmp_path / "traffic.png")
    assert (tmp_path / "traffic.png").read_bytes() == picture._repr_png_()


# -- timeline ---------------------------------------------------------------------------------


def test_the_timeline_has_a_bar_for_each_phase_and_each_communication(ledger):
    picture = draw.timeline(ledger)
    (axes,) = picture.figure.axes
    phases = sum(len(changes) for changes in ledger.phases)
    calls = len(ledger.calls())
    assert calls == 3 * 2 * 2  # ranks, steps, parameters
    assert calls < len(axes.patches) <= phases + calls  # (what ended before the run is left out)
    labels = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert "ring_all_reduce" in labels and "send" not in labels
    assert {"forward", "backward", "step"} <= set(labels)


def test_the_timeline_names_every_rank_once_the_first_on_top(ledger):
    (axes,) = draw.timeline(ledger).figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 2", "rank 1", "rank 0"]


def test_calls_that_overlap_are_drawn_above_each_other():
    def overlapping(group):
        works = [torch.distributed.all_reduce(torch.ones(9), group=group, async_op=True)] * 1
        works.append(torch.distributed.all_reduce(torch.ones(9), group=group, async_op=True))
        [work.wait() for work in works]

    found = launch(overlapping, 2).ledger
    for comm in found.comms:  # as slow as need be: both at the same time
        comm.start, comm.end = found.span[comm.rank]
    (axes,) = draw.timeline(found).figure.axes
    heights = sorted(
        {round(patch.get_y(), 3) for patch in axes.patches if patch.get_height() < 0.2}
    )
    assert len(heights) == 2 * 2  # ranks, calls


# -- traffic ----------------------------------------------------------------------------------


def test_traffic_shows_every_number_of_the_matrix_in_the_unit_that_it_names(ledger):
    picture = draw.traffic(ledger)
    matrix = ledger.traffic()
    shown = sorted(float(text) for text in texts(picture))
    assert shown == sorted(float(f"{n:.3g}") for row in matrix for n in row if n)
    assert picture.figure.axes[0].get_title() == "bytes sent"


@pytest.mark.parametrize("length, unit", [(1_000, "kB"), (1_000_000, "MB")])
def test_traffic_names_its_unit_also_below_a_title(length, unit):
    def sends(group):
        torch.distributed.broadcast(torch.ones(length), 0, group=group)

    picture = draw.traffic(launch(sends, 2).ledger, "a broadcast")
    assert picture.figure.axes[0].get_title() == f"a broadcast, {unit} sent"
    assert texts(picture) == ["4"]


# -- curves and bars --------------------------------------------------------------------------


def test_a_curve_has_a_line_for_each_name():
    (axes,) = draw.curve({"a": [3.0, 2.0], "b": [1.0, 0.5]}, "step", "loss").figure.axes
    assert {line.get_label(): list(line.get_ydata()) for line in axes.lines} == {
        "a": [3.0, 2.0],
        "b": [1.0, 0.5],
    }


def test_a_curve_of_a_pair_stands_over_the_first_of_it():
    (axes,) = draw.curve({"a": ([0.5, 2.0], [3.0, 1.0])}, "seconds", "loss").figure.axes
    assert axes.lines[0].get_xdata().tolist() == [0.5, 2.0]
    assert axes.lines[0].get_ydata().tolist() == [3.0, 1.0]


def test_staleness_has_a_panel_a_race_and_a_point_an_update():
    race = [0.1, 0.2, 0.3], [Applied(1, 0), Applied(2, 1), Applied(1, 2)]
    panels = draw.staleness({"one": race, "two": race}, until=0.5).figure.axes
    assert [axes.get_title("left") for axes in panels] == ["one", "two"]
    of_one, of_two = panels[0].lines
    assert [*zip(of_one.get_xdata(), of_one.get_ydata())] == [(0.1, 0), (0.3, 2)]
    assert [*zip(of_two.get_xdata(), of_two.get_ydata())] == [(0.2, 1)]
    assert panels[1].get_xlim() == (0, 0.5)


def test_a_scatter_has_a_named_point_for_each_entry():
    (axes,) = draw.scatter({"a": (1.0, 2.0), "b": (100.0, 3.0)}, "bytes", "loss").figure.axes
    points = [tuple(each.get_offsets()[0]) for each in axes.collections]
    assert points == [(1.0, 2.0), (100.0, 3.0)]
    assert [each.get_text() for each in axes.texts] == ["a", "b"]
    assert axes.get_xscale() == "log"


def test_bars_stand_at_their_place_as_high_as_their_value():
    groups = {"ours": {2: 1.0, 8: 7.0}, "theirs": {8: 1.75}}
    (axes,) = draw.bars(groups, "models", x="ranks").figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "8"]
    centers = [(round(p.get_x() + p.get_width() / 2), p.get_height()) for p in axes.patches]
    assert centers == [(0, 1.0), (1, 7.0), (1, 1.75)]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("ranks", "models")


# -- collective -------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [ring_all_reduce, star_all_reduce, pairwise_all_to_all])
def test_a_collective_has_an_arrow_for_each_message_and_a_box_for_each_number(fn, seen):
    picture = draw.collective(seen[fn])
    assert arrows(picture) == len(messages(seen[fn].run.ledger))
    numbers = seen[fn].inputs + seen[fn].results + [m for sends in seen[fn].carried for m in sends]
    assert len(picture.figure.axes[0].patches) == sum(map(len, numbers))


def test_a_box_says_whose_terms_are_in_it(seen):
    shown = texts(draw.collective(seen[ring_all_reduce]))
    assert shown.count("a₀") == 1  # rank 0's own, that nobody is sent: it joins at the end
    assert shown.count("a₁") == 2  # rank 1's own, and what rank 2 receives in the first round
    assert shown.count("a₁₂₃") == 1
    assert shown.count("a₀₁₂₃") == 3 + 4  # gathered by three, and in four results


def test_a_strong_edge_marks_the_sums_that_are_complete(seen):
    (axes,) = draw.collective(seen[ring_all_reduce]).figure.axes
    strong = [patch for patch in axes.patches if patch.get_linewidth() > 1]
    assert len(strong) == 3 * 4 + 4 * 4  # what is gathered, and the results
    (axes,) = draw.collective(seen[pairwise_all_to_all]).figure.axes
    assert not [patch for patch in axes.patches if patch.get_linewidth() > 1]


def test_boxes_of_a_collective_do_not_overlap(seen):
    for watched in seen.values():
        (axes,) = draw.collective(watched).figure.axes
        boxes = [(p.get_x(), p.get_y(), p.get_width(), p.get_height()) for p in axes.patches]
        for i, (x, y, width, height) in enumerate(boxes):
            for u, v, w, h in boxes[:i]:
                assert x + width <= u or u + w <= x or y + height <= v or v + h <= y


def test_columns_are_named_from_input_to_result(seen):
    shown = texts(draw.collective(seen[star_all_reduce], "star"))
    names = [text for text in shown if text.startswith(("input", "step", "result"))]
    assert names == ["input", "step 1", "step 2", "result"]


# -- links ----------------------------------------------------------------------------------------


def points(axes):
    return [tuple(line.get_xydata()[-1]) for line in axes.lines if line.get_marker() == "o"]


def test_a_fit_shows_each_measurement_and_its_ratio_to_the_line():
    link = Link(latency=1.0, bandwidth=2.0)
    picture = draw.link_fit([2, 20], [2.0, 33.0], link)
    above, below = picture.figure.axes
    assert points(above) == [(20, 33.0)]
    assert points(below) == [(20, 3.0)]  # the line says 1 + 20 / 2
    assert "worst ratio is 3.00" in repr(picture)


def test_a_message_too_fast_counts_as_a_misfit_too():
    picture = draw.link_fit([2, 20], [0.5, 22.0], Link(latency=1.0, bandwidth=2.0))
    assert "worst ratio is 0.25" in repr(picture)


def test_flights_are_lines_from_sender_and_start_to_receiver_and_end():
    run = [Flight(0, 2, 8, 0.0, 1.0), Flight(2, 1, 4, 1.0, 3.0)]
    picture = draw.flights({"mine": run}, size=3)
    (axes,) = picture.figure.axes
    assert [line.get_xydata().tolist() for line in axes.lines] == [
        [[0.0, 0], [1.0, 2]],
        [[1.0, 2], [3.0, 1]],
    ]
    thick, thin = (line.get_linewidth() for line in axes.lines)
    assert thick > thin


# -- rank grids ------------------------------------------------------------------------------------


def colors_of(panel):
    """The colour of each rank of a panel."""
    squares = [patch for patch in panel.patches if patch.get_fill()]
    return {int(t.get_text()): s.get_facecolor() for s, t in zip(squares, panel.texts)}


def test_ranks_of_one_group_have_one_colour_and_neighbouring_groups_do_not():
    grid = Grid(pp=4, dp=2, tp=2)
    picture = draw.rank_grid(grid, ranks_per_node=8)
    panels = {axes.get_title(): axes for axes in picture.figure.axes if axes.get_title()}
    assert list(panels) == ["pp", "dp", "tp"]
    for axis, panel in panels.items():
        colors = colors_of(panel)
        for ranks in grid.groups(axis):
            assert len({colors[rank] for rank in ranks}) == 1
        assert len(set(colors.values())) == len(grid.groups(axis))  # 8 at most: none shared
        frames = [patch for patch in panel.patches if not patch.get_fill()]
        assert [(f.get_width(), f.get_height()) for f in frames] == [(4, 2), (4, 2)]
    assert "tp: [0, 1], [2, 3]" in repr(picture)


def test_a_product_of_axes_has_a_panel_too_and_nodes_must_fit():
    grid = Grid(pp=2, dp=2, cp=2, tp=2, ep=2)
    picture = draw.rank_grid(grid, ("dp", "cp"), "ep")
    assert [axes.get_title() for axes in picture.figure.axes] == ["dp*cp", "ep"]
    with pytest.raises(ValueError, match="ranks_per_node=3 does not fit rows of 8 ranks"):
        draw.rank_grid(grid, ranks_per_node=3)


# -- pipelines ------------------------------------------------------------------------------------


def written(axes):
    return [each for each in axes.collections if isinstance(each, labels.Labels)]


def drawn(axes):
    return [each for each in axes.collections if not isinstance(each, labels.Labels)]


def bars_of(axes):
    """(left, width) of every bar on a panel, in order."""
    paths = [path for bars in drawn(axes) for path in bars.get_paths()]
    boxes = [path.get_extents() for path in paths]
    return sorted((round(box.x0, 6), round(box.width, 6), round(box.y0 + 0.43)) for box in boxes)


def test_a_gantt_has_a_bar_for_each_action_at_its_time():
    timelines = {
        "GPipe": simulate(gpipe(2, 3)),
        "ZB-H1": simulate(zb_h1(2, 3)),
        "ZB-V": simulate(zb_v(2, 2)),
    }
    picture = draw.gantt(timelines, "ms", scale=10)
    for axes, timeline in zip(picture.figure.axes, timelines.values()):
        assert bars_of(axes) == sorted(
            (10 * start, 10 * (end - start), rank)
            for rank, spans in enumerate(timeline.spans)
            for _, start, end in spans
        )
        (numbers,) = written(axes)
        micros = [
            (str(action.micro), [5 * (start + end), rank])
            for rank, spans in enumerate(timeline.spans)
            for action, start, end in spans
        ]
        assert list(zip(numbers.labels, numbers.get_offsets().tolist())) == micros
    bubble = simulate(gpipe(2, 3)).bubble
    assert picture.figure.axes[0].get_title(loc="left") == f"GPipe: bubble {100 * bubble:.1f} %"


def test_a_rank_that_woke_late_and_caught_up_is_not_drawn_twice_at_once():
    schedule = naive(1, 1)
    spans = [Span(Action(0, "F", 0), 0.0, 4.0), Span(Action(0, "B", 0), 3.0, 5.0)]
    (axes,) = draw.gantt({"": Timeline(schedule, (tuple(spans),))}).figure.axes
    assert bars_of(axes) == [(0.0, 4.0, 0), (4.0, 1.0, 0)]


def test_chunks_of_a_rank_have_colors_of_their_own():
    (axes,) = draw.gantt({"": simulate(interleaved(2, 2, chunks=2))}).figure.axes
    colors = {tuple(color) for bars in drawn(axes) for color in bars.get_facecolor()}
    assert len(colors) == 2 * 2  # F and B of two chunks


def test_held_steps_up_to_what_each_rank_holds_at_most():
    timelines = {"GPipe": simulate(gpipe(3, 4)), "1F1B": simulate(one_f_one_b(3, 4))}
    picture = draw.held(timelines)
    for axes, timeline in zip(picture.figure.axes, timelines.values()):
        assert [max(line.get_ydata()) for line in axes.lines] == timeline.peak_in_flight
    assert repr(picture) == "activations held at most: GPipe [4, 4, 4]; 1F1B [3, 2, 1]"


# -- a sequence cut over ranks --------------------------------------------------------------------


def test_scores_are_counted_and_coloured_by_the_rank_of_their_query():
    placements = {"halves": [[0, 1], [2, 3]], "mirrored": [[0, 3], [1, 2]]}
    picture = draw.scores(placements)
    assert repr(picture).endswith("halves: 3, 7; mirrored: 5, 5")
    for axes, table in zip(picture.figure.axes, placements.values()):
        image = axes.images[0].get_array()
        owner = {position: rank for rank, row in enumerate(table) for position in row}
        for query in range(4):
            own = [
                tuple(image[query, key]) for key in range(query + 1) if owner[key] == owner[query]
            ]
            others = [
                tuple(image[query, key]) for key in range(query) if owner[key] != owner[query]
            ]
            masked = [tuple(image[query, key]) for key in range(query + 1, 4)]
            assert len(set(own)) == 1 and not set(own) & set(others)
            assert set(masked) <= {(1.0, 1.0, 1.0)} and (1.0, 1.0, 1.0) not in own + others


def test_devices_have_a_bar_for_each_interval_where_and_as_long_as_it_was():
    rows = [[BusyInterval(0, 0.0, 0.002, 0.0), BusyInterval(1, 0.003, 0.004, 0.0)], []]
    picture = draw.devices({"run": rows})
    (axes,) = picture.figure.axes
    bars = [
        (bar.get_x(), bar.get_width(), bar.get_y() + bar.get_height() / 2) for bar in axes.patches
    ]
    assert bars == [pytest.approx((0, 2, 0)), pytest.approx((3, 1, 0))]
    assert [text.get_text() for text in axes.texts] == ["0", "1"]
    assert repr(picture) == "run: 4 ms, devices busy 38 %"  # 3 of 2 * 4 ms


def test_overlap_draws_each_interval_where_it_was_computing_above_sending():
    from mini_dist.collectives.emulate import BusyInterval

    computed = [BusyInterval("F0", 0.0, 0.002, 0.0), BusyInterval("B0", 0.002, 0.006, 0.0)]
    sent = [BusyInterval("R0", 0.004, 0.010, 0.0)]
    picture = draw.overlap({"mine": (computed, sent)})
    (panel,) = picture.figure.axes
    bars = [(round(p.get_x(), 6), round(p.get_width(), 6)) for p in panel.patches]
    assert bars == [(0, 2), (2, 4), (4, 6)]  # ms
    rows = [round(p.get_y() + p.get_height() / 2) for p in panel.patches]
    assert rows == [0, 0, 1]
    assert repr(picture) == "mine: 10.0 ms"


# -- labels ---------------------------------------------------------------------------------------


def box(put, **bare):
    """The dots that `put` draws on axes of fixed place: lowest and highest row and column."""
    figure = Figure(figsize=(3, 2), dpi=100)
    axes = figure.add_axes((0.3, 0.3, 0.6, 0.6), xlim=(0, 10), ylim=(0, 5), **bare)
    axes.spines[:].set_visible(False)
    put(axes)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    rows, columns = np.nonzero(np.asarray(canvas.buffer_rgba())[::-1, :, :3].min(-1) < 200)
    return np.array([rows.min(), rows.max(), columns.min(), columns.max()])


@pytest.mark.parametrize("ha", ["left", "center", "right"])
def test_a_label_is_where_a_text_would_be(ha):
    bare = dict(xticks=[], yticks=[])
    here = box(lambda axes: labels.write(axes, ["137"], [7], [2], ha=ha), **bare)
    text = dict(fontsize=8, ha=ha, va="center")
    assert abs(here - box(lambda axes: axes.text(7, 2, "137", **text), **bare)).max() <= 2


def test_ticks_are_where_matplotlibs_are():
    def theirs(axes):
        axes.set_xticks([2, 8], ["2", "eight"])
        axes.set_yticks([1, 4], ["one", "4"])
        axes.tick_params(labelsize=8)

    ours = box(lambda axes: labels.ticks(axes, {2: "2", 8: "eight"}, {1: "one", 4: "4"}))
    assert abs(ours - box(theirs)).max() <= 2


def test_round_places_are_inside_and_few():
    assert labels.round_places(0, 165) == [0, 20, 40, 60, 80, 100, 120, 140, 160]
    assert labels.round_places(0, 4.2, 3) == [0, 2, 4]
    assert labels.numbered([0, 0.5]) == {0: "0", 0.5: "0.5"}
