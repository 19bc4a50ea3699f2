"""Lesson 17: bad plans are told what costs them most, and asking the planner does not count."""

import sys

import cloudpickle
import pytest

from mini_dist import check
from mini_dist.plan.calculators import device_memory, hardware, peak_memory, plan, step_time
from mini_dist.plan.calculators import model as model_preset
from mini_dist.plan.calculators.layouts import Search, layouts
from mini_dist.plan.config import Layout
from tests.course.exercises import solutions as solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

planned = Wrong()


@planned("A dict came back")
def a_dict():
    return {"dp": 512}


@planned("A NoneType came back")
def nothing():
    Layout(dp=512)


@planned("With the other axes as they are, dp would be 16")
def too_few_devices():
    return Layout(pp=4, dp=8, tp=8, sequence_parallel=True, zero=1, num_micro_batches=64)


@planned("448, and there are 512 devices. 56 does not divide 512")
def no_dp_will_do():
    return Layout(pp=7, dp=8, tp=8, sequence_parallel=True, zero=1, num_micro_batches=64)


@planned("A step has 512")
def twice_the_batch():
    return Layout(pp=4, dp=16, tp=8, sequence_parallel=True, zero=1, num_micro_batches=64)


@planned("tp=128 does not divide num_heads=64")
def heads_cut_too_often():
    return Layout(pp=1, dp=4, tp=128, sequence_parallel=True, zero=1, num_micro_batches=128)


@planned("It does not fit. The largest part is gradients")
def zero_1_and_nothing_else():
    return Layout(dp=512, zero=1, recompute="full")


@planned("It does not fit. The largest part is activations")
def too_large_micro_batches():
    return Layout(dp=64, tp=8, sequence_parallel=True, zero=2, micro_batch_size=8)


@planned("Your largest extra cost is pipeline bubble")
def a_deep_pipeline_with_few_micro_batches():
    return Layout(pp=16, dp=32, zero=1, num_micro_batches=16, recompute="full")


@planned("sends activations over the network")
def tp_across_nodes():
    return Layout(dp=16, tp=32, sequence_parallel=True, zero=1, num_micro_batches=32)


@planned("Your largest extra cost is recomputed")
def recompute_though_there_is_room():
    cut = dict(pp=8, dp=16, tp=4, schedule="interleaved", num_chunks=5)
    return Layout(sequence_parallel=True, zero=1, num_micro_batches=32, recompute="full", **cut)


@planned("It fits, but on h100-hf a step takes")
def fully_sharded():
    return Layout(dp=512, zero=3, recompute="full")


@planned("Its ring has 128 ranks")
def sharded_with_tp():
    return Layout(dp=128, tp=4, sequence_parallel=True, zero=3, num_micro_batches=4)


@planned("Your largest extra cost is tp collectives")
def the_layout_of_every_blog_post():
    return Layout(pp=4, dp=16, tp=8, sequence_parallel=True, zero=1, num_micro_batches=32)


# An earlier cell of the lesson defines these.
found = plan("llama3-70b", "h100", 512, 4 * 2**20)
best = found.best.layout
ranked = [candidate.layout for candidate in found.candidates[:5]]


@planned("Your function uses found, which was there before it was called")
def the_lessons_own():
    return found.best.layout


@planned("Your function uses best")
def a_copy_of_the_lessons_own():
    return best.replace(zero=best.zero)


@planned("Your function uses ranked")
def the_first_of_the_lessons():
    return sorted(ranked, key=lambda layout: layout.tp)[0]


@planned("A tuple came back")
def numbers():
    return 512, 1, 3


@pytest.mark.parametrize("fn, says", planned.answers, ids=planned.names())
def test_a_bad_plan_is_refused_with_the_hint_that_names_it(fn, says):
    verdict = check.layout_for_70b.judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint, verdict


def test_the_solution_is_right():
    verdict = check.layout_for_70b.judge(solutions.layout_for_70b)
    assert verdict.state == "right", verdict


def test_asking_the_planner_is_the_librarys_work():
    def asked():
        return plan("llama3-70b", "h100", 512, 4 * 2**20).best.layout

    assert check.layout_for_70b.judge(asked).state == "still the library's"


another_layout = Right("layout_for_70b")


NODES = dict(tp=8, dp=16, sequence_parallel=True, zero=1, num_micro_batches=32)
MINE = Layout(pp=4, schedule="interleaved", num_chunks=10, **NODES)


@another_layout
def tp_over_the_whole_node():
    return Layout(pp=4, schedule="interleaved", num_chunks=10, **NODES)


@another_layout
def defined_in_a_cell_above():
    return MINE


@another_layout
def changed_step_by_step():
    layout = Layout(dp=512)
    for change in ({"dp": 16, "tp": 4, "sequence_parallel": True}, {"zero": 1, "pp": 8}):
        layout = layout.replace(**change)
    return layout.replace(num_micro_batches=32, schedule="interleaved", num_chunks=10)


@another_layout
def computed_from_the_job():
    devices, sequences, tp, pp = 512, 4 * 2**20 // 8192, 8, 2
    dp = devices // tp // pp
    cut = dict(pp=pp, schedule="interleaved", num_chunks=5)
    return Layout(
        tp=tp, dp=dp, num_micro_batches=sequences // dp, zero=1, sequence_parallel=tp > 1, **cut
    )


@another_layout
def the_fastest_of_some():
    def fits(layout):
        peak = peak_memory(model_preset("llama3-70b"), layout).total
        return device_memory(peak) <= hardware("h100").device.memory_bytes

    return fastest(fits)


@pytest.mark.parametrize("fn", another_layout.answers, ids=lambda fn: fn.__name__)
def test_another_good_layout_is_right_too(fn):
    verdict = check.layout_for_70b.judge(fn)
    assert verdict.state == "right", verdict


def test_the_regret_is_told_for_each_network():
    verdict = check.layout_for_70b.judge(fully_sharded)
    regrets = []
    for machine in ("h100", "h100-hf"):
        best = plan("llama3-70b", machine, 512, 4 * 2**20).best.time.seconds
        layout = fully_sharded()
        mine = step_time(model_preset("llama3-70b"), layout, machine, simulate=True).seconds
        regrets.append(mine / best - 1)
    assert 0 < regrets[0] < 0.1 < regrets[1]  # good only on the undisturbed network
    assert [line.measured for line in verdict.lines[-2:]] == [f"{r:.1%}" for r in regrets], verdict


def fastest(fits):
    """Plan by hand: return the fastest of three pipelines that pass `fits`."""
    config = model_preset("llama3-70b")
    cut = dict(sequence_parallel=True, zero=1, tp=4, schedule="interleaved")
    tried = [
        Layout(pp=8, dp=16, num_micro_batches=32, num_chunks=2, **cut),
        Layout(pp=8, dp=16, num_micro_batches=32, num_chunks=5, **cut),
        Layout(pp=4, dp=32, num_micro_batches=16, num_chunks=10, **cut),
    ]
    return min(filter(fits, tried), key=lambda layout: step_time(config, layout, "h100").seconds)


def test_who_looks_at_time_alone_is_told_of_memory():
    verdict = check.layout_for_70b.judge(lambda: fastest(lambda layout: True))
    assert verdict.state == "wrong" and "It does not fit" in verdict.hint


def test_no_layout_that_the_planner_tried_is_better_than_its_best():
    from mini_dist.course.check import planner

    task = planner.Task("llama3-70b", ("h100",), 512, 4 * 2**20)
    best = planner.best_of(task, "h100").best
    few = Search(micro_batch_sizes=(1, 2), max_tp=8, max_pp=4)
    tried = list(layouts(task.config, 512, task.sequences, few))
    assert len(tried) > 50
    for layout in tried:
        if planner.memory_of(task, layout).ok:
            assert step_time(task.config, layout, "h100", simulate=True).seconds >= (
                best.time.seconds * (1 - 1e-9)
            )
