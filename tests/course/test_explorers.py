"""The explorers of lesson 17 show the calculators' results and explain them."""

import re

import pytest

from mini_dist.collectives.mesh import Grid
from mini_dist.course.draw.svg import Box, Line
from mini_dist.course.lab import ParameterError
from mini_dist.course.widgets import (
    compare_with_published,
    layout_planner,
    memory,
    memory_waterfall,
    planner,
    published_runs,
    rank_grid,
    scaling,
    scaling_curve,
)
from mini_dist.course.widgets.explorer import WRONG
from mini_dist.course.widgets.grid import COLORS, peers
from mini_dist.plan.calculators import (
    Layout,
    device_memory,
    hardware,
    model,
    peak_memory,
    plan,
    rank_memory,
    readable,
    step_time,
    step_volume,
)
from mini_dist.plan.calculators.layouts import Search
from mini_dist.plan.calculators.published import korthikanti_2022, later, megatron_2021

ALL = (memory_waterfall, rank_grid, layout_planner, scaling_curve, compare_with_published)
MOVED = {  # per explorer: a control, its new value, values that must be refused
    memory_waterfall: ("micro_batch_size", 4, dict(tp=2, model="gpt2-xl")),  # 25 heads
    rank_grid: ("rank", 3, dict(rank=20)),
    layout_planner: ("tp", 4, dict(num_gpus=8, model="llama3-405b")),
    scaling_curve: ("num_gpus", 1024, dict(batch=8, pp=1, tp=1, micro_batch_size=8)),
    compare_with_published: ("straggler", 1.2, None),
}


def words(html):
    return re.sub(r"<[^>]+>", " ", html)


def parts(explorer):
    grid, seen = explorer.view.children
    return {c.description.replace(" ", "_"): c for c in grid.children}, *seen.children


# ---- all of them -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", ALL)
def test_a_moved_control_changes_picture_and_words(make):
    explorer = make()
    controls, image, page = parts(explorer)
    name, value, _ = MOVED[make]
    before = image.value, page.value
    controls[name].value = value
    assert image.value != before[0] and page.value != before[1]
    assert image.value.count("<svg") and WRONG not in page.value
    picture, html = explorer.render(**{**explorer.values, name: value})
    assert image.value == picture.html() and html in page.value


@pytest.mark.parametrize("make", [make for make in ALL if MOVED[make][2]])
def test_what_cannot_be_is_said_in_red_and_the_picture_stays(make):
    explorer = make()
    controls, image, page = parts(explorer)
    before = image.value
    wrong = MOVED[make][2]
    for name, value in wrong.items():
        controls[name].value = value
    assert WRONG in page.value
    assert len(wrong) > 1 or image.value == before


@pytest.mark.parametrize("make", ALL)
def test_the_same_values_draw_the_same_bytes(make):
    assert make().picture.html() == make().picture.html()


# ---- memory ----------------------------------------------------------------------------------


def test_the_waterfall_is_the_fullest_ranks_and_ends_at_what_a_device_needs():
    picture, html = memory.render("llama3-70b", dp=4, tp=8, pp=4, sequence_parallel=True)
    config = model("llama3-70b").replace(seq_len=8192)
    layout = Layout(pp=4, dp=4, tp=8, sequence_parallel=True, zero=1, num_micro_batches=8)
    peak = peak_memory(config, layout)
    left, right = picture.panels
    bars = [mark for mark in left.marks if isinstance(mark, Box)]
    widths = [(bar.x1 - bar.x0) * 2**30 for bar in bars]
    assert widths[: len(peak.lines)] == pytest.approx([line.value for line in peak])
    assert widths[-1] == pytest.approx(device_memory(peak.total))
    ends = [bar.x1 for bar in bars[:-1]]
    assert [bar.x0 for bar in bars[1:-1]] == pytest.approx(ends[:-1])
    (limit,) = [mark for mark in left.marks if isinstance(mark, Line)]
    assert {x for x, _ in limit.points} == {hardware("h100").device.memory_bytes / 2**30}
    tops = [mark.y1 for mark in right.marks if isinstance(mark, Box)][-4:]
    assert tops == pytest.approx(
        [rank_memory(config, layout, pp_rank=rank).total / 2**30 for rank in range(4)]
    )
    assert readable(peak["activations"], "bytes") in words(html)


def test_fits_or_not_is_what_the_planner_says():
    found = plan(
        "llama3-8b",
        "h100",
        8,
        16 * 8192,
        search=Search((1, 2), recompute_every=(1,), num_simulated=0),
    )
    for layout, fits in [(c.layout, True) for c in found.candidates] + [
        (d.layout, False) for d in found.dropped if d.reason == "memory"
    ]:
        if layout.num_chunks > 1:
            continue
        picture, _ = memory.render(
            "llama3-8b",
            **layout.axes,
            zero=layout.zero,
            micro_batch_size=layout.micro_batch_size,
            num_micro_batches=layout.num_micro_batches,
            sequence_parallel=layout.sequence_parallel,
            recompute=layout.recompute,
        )
        assert ("does not fit" not in picture.alt) == fits


def test_one_change_keeps_devices_and_batch_or_says_so():
    config = model("llama3-8b")
    layout = Layout(dp=8, zero=1, micro_batch_size=2, num_micro_batches=8)
    changes = dict(memory.one_change(config, layout, "megatron-core"))
    assert list(changes.values()) == sorted(changes.values())
    tp = layout.replace(tp=2, dp=4, num_micro_batches=16, sequence_parallel=True)
    assert tp.world_size == 8 and tp.global_batch_size == layout.global_batch_size
    assert changes["tp=2, dp=4"] == device_memory(peak_memory(config, tp).total)
    full = layout.replace(recompute="full")
    assert changes["full recompute"] == device_memory(peak_memory(config, full).total)
    assert "sequence parallel" not in changes  # it would do nothing without tp
    # A change that cannot shard the model is not offered: gpt2-xl has 25 heads.
    assert not any(
        "tp=2" in what for what, _ in memory.one_change(model("gpt2-xl"), layout, "fsdp")
    )


def test_the_remedies_for_what_does_not_fit_are_marked():
    picture, html = memory.render("llama3-8b", dp=8)
    assert "does not fit" in picture.alt and "activations" in picture.alt
    rows = [words(row) for row in html.split("<tr>")]
    assert any("full recompute" in row and "fits" in row for row in rows)


# ---- the rank grid -----------------------------------------------------------------------------


def test_pairs_are_coloured_by_the_axis_they_differ_in():
    explorer = rank_grid(pp=4, dp=2, cp=1, tp=2, axis="dp")
    boxes = [mark for mark in explorer.picture.panels[1].marks if isinstance(mark, Box)]
    colors = {(box.y0 + 0.5, box.x0 + 0.5): (box.color, box.alpha == 1) for box in boxes}
    grid = Grid(pp=4, dp=2, cp=1, tp=2)
    for a in range(16):
        for b in range(16):
            here, there = grid.coordinates(a), grid.coordinates(b)
            differ = [axis for axis in grid.axes if here[axis] != there[axis]]
            if len(differ) == 1 and (differ != ["pp"] or abs(here["pp"] - there["pp"]) == 1):
                assert colors.pop((a, b)) == (COLORS[differ[0]], differ == ["dp"])
    assert not colors


def test_what_a_rank_sends_is_the_volume_of_its_stage():
    layout = Layout(pp=4, dp=2, tp=2, sequence_parallel=True, zero=1, num_micro_batches=8)
    for rank, stage in ((0, 0), (5, 1), (15, 3)):
        explorer = rank_grid(pp=4, dp=2, cp=1, tp=2, rank=rank, axis="pp")
        for line in step_volume(model("llama3-8b"), layout, pp_rank=stage):
            assert readable(line.value, "bytes") in words(explorer.html)


def test_a_pipeline_rank_talks_with_the_stages_beside_it_and_others_with_everyone():
    assert peers("pp", [0, 4, 8, 12], 4) == [0, 8]
    assert peers("pp", [0, 4, 8, 12], 0) == [4] and peers("pp", [0, 4, 8, 12], 12) == [8]
    assert peers("tp", [0, 1, 2, 3], 2) == [0, 1, 3]


def test_gradients_go_over_dp_and_cp():
    explorer = rank_grid(pp=1, dp=2, cp=2, tp=2, rank=0)
    row = next(row for row in explorer.html.split("<tr>") if "dp and cp" in words(row))
    assert " 2 4 6 " in words(row)


def test_inside_or_between_nodes_depends_on_the_node():
    def where(ranks_per_node):
        page = rank_grid(pp=1, dp=2, cp=1, tp=4, ranks_per_node=ranks_per_node).html
        return next(words(row) for row in page.split("<tr>") if words(row).split()[0] == "tp")

    assert "inside the node" in where(4) and "between nodes" in where(2)


def test_too_many_ranks_and_experts_without_experts_are_refused():
    with pytest.raises(ParameterError, match="128 ranks are too many to draw"):
        rank_grid(pp=4, dp=4, tp=8)
    with pytest.raises(ValueError, match="ep=2 needs a model with experts"):
        rank_grid(dp=4, tp=1, pp=1, ep=2)
    assert "tokens to their experts" in rank_grid(dp=4, ep=2, model="mixtral-8x7b").html


# ---- the planner -------------------------------------------------------------------------------


def test_a_cell_holds_the_fastest_layout_with_that_tp_and_pp():
    found = planner.search("llama3-8b", "h100", 64, 4 * 2**20)
    cells = planner.best_of_cells(found)
    for (tp, pp), best in cells.items():
        rivals = [c for c in found.candidates if (c.layout.tp, c.layout.pp) == (tp, pp)]
        assert best.time.seconds == min(c.time.seconds for c in rivals)
    assert found.best in cells.values()


def test_an_empty_cell_says_what_is_too_much_or_cannot_be():
    found = planner.search("llama3-70b", "h100", 64, 2**20)
    cells = planner.best_of_cells(found)
    assert (1, 2) not in cells
    assert "tp=1, pp=2 does not fit" in planner.why(found, cells, 1, 2)
    assert "No layout with tp=8, pp=32 was tried" in planner.why(found, cells, 8, 32)


def test_layouts_that_are_not_on_the_map_do_not_break_it():
    found = planner.search("llama3-8b", "h100", 24, 12 * 8192 * 16)
    assert {c.layout.pp for c in found.candidates} - set(planner.PP)
    assert layout_planner(model="llama3-8b", num_gpus=24).picture


def test_a_slower_choice_is_compared_with_the_winner():
    explorer = layout_planner(tp=8, pp=16)
    assert "faster than" in explorer.html and "saves" in explorer.html
    best = planner.search("llama3-70b", "h100", 512, 4 * 2**20).best.layout
    explorer = layout_planner(tp=best.tp, pp=best.pp)
    assert "No other layout that was tried is faster" in explorer.html


# ---- scaling -----------------------------------------------------------------------------------

SETTINGS = ("llama3-8b", "h100", 2, 2, 1, "none", 1, 256)


def test_strong_scaling_keeps_the_batch_and_weak_scaling_the_work_of_a_rank():
    strong = scaling.curve(*SETTINGS, scaling.STRONG)
    assert {point.layout.global_batch_size for point in strong.values()} == {256}
    weak = scaling.curve(*SETTINGS, scaling.WEAK)
    assert len({point.layout.num_micro_batches for point in weak.values()}) == 1
    for size, point in [*strong.items(), *weak.items()]:
        assert point.layout.world_size == size
        assert point.time == step_time(model("llama3-8b"), point.layout, "h100")


def test_strong_scaling_ends_where_a_replica_has_no_micro_batch_left():
    strong = scaling.curve(*SETTINGS, scaling.STRONG)
    assert max(strong) == 256 * 2 * 2 and max(scaling.curve(*SETTINGS, scaling.WEAK)) == 16384
    explorer = scaling_curve(model="llama3-8b", tp=2, pp=2, batch=256, num_gpus=4096)
    assert "the batch is used up at 1,024 GPUs" in explorer.html


def test_the_shares_of_a_step_are_all_of_it():
    for point in scaling.curve(
        "llama3-70b", "h100", 8, 4, 1, "full", 1, 1024, scaling.STRONG
    ).values():
        shares = scaling.shares(point.time)
        assert sum(shares.values()) == pytest.approx(1)
        assert (
            shares["recomputing"] > 0.05
            and shares["pipeline"] > 0
            and shares["layers' messages"] > 0
        )


# ---- published runs ------------------------------------------------------------------------------


def test_every_published_run_is_there_and_predicted_as_the_calculators_do():
    runs = megatron_2021() + korthikanti_2022() + later()
    assert list(published_runs.RUNS) == [run.name for run in runs]
    for run in runs:
        assert published_runs.predict(run.name, 1.0, 1.0, 1.0).seconds == pytest.approx(
            run.predicted().seconds
        )


def test_worse_machines_are_slower():
    for name in published_runs.RUNS:
        plain = published_runs.predict(name, 1.0, 1.0, 1.0).seconds
        assert published_runs.predict(name, 1.2, 1.0, 1.0).seconds > plain
        assert published_runs.predict(name, 1.0, 1.0, 0.8).seconds > plain
        assert published_runs.predict(name, 1.0, 0.5, 1.0).seconds >= plain
    assert (  # Its pipeline and its gradients cross nodes, so the network matters.
        published_runs.predict("BLOOM-176B", 1.0, 0.5, 1.0).seconds
        > published_runs.predict("BLOOM-176B", 1.0, 1.0, 1.0).seconds
    )


def test_measured_llama_3_is_the_papers_utilisation():
    # Table 4 of the paper prints TFLOP/s and rounds the MFU to 43 % and 41 %.
    for run, tflops in zip(later(), (430, 400)):
        time = run.predicted()
        mfu = time.mfu * time.seconds / run.seconds
        assert mfu == pytest.approx(tflops / 989)


def test_the_page_names_the_error_of_the_run_and_of_all():
    off = [run.predicted().seconds / run.seconds - 1 for run, _ in published_runs.RUNS.values()]
    text = words(compare_with_published(run="BLOOM-176B").html)
    assert f"mean error {sum(map(abs, off)) / len(off):.1%}" in text
    assert f"largest {max(off, key=abs):+.1%}" in text


@pytest.mark.parametrize("straggler", [1.0, 1.5])
def test_the_page_says_whether_the_run_lies_inside_the_interval(straggler):
    run, _ = published_runs.RUNS["BLOOM-176B"]
    time = published_runs.predict("BLOOM-176B", straggler, 1.0, 1.0)
    where = "inside" if time.low <= run.seconds <= time.high else "outside"
    assert where == ("inside" if straggler == 1.0 else "outside")
    text = words(compare_with_published(run="BLOOM-176B", straggler=straggler).html)
    assert f"measured lies {where} " in text
