"""Answers that were once wrong: bubbles, utilizations, the fullest rank, impossible runs."""

import pytest

from mini_dist.plan.calculators import (
    hardware,
    model,
    moments,
    peak_memory,
    pipeline_in_flight,
    plan,
    rank_memory,
    step_flops,
    step_time,
)
from mini_dist.plan.calculators.bubble import simulated
from mini_dist.plan.calculators.frameworks import FRAMEWORKS
from mini_dist.plan.calculators.memory import AT_MOST_IN_FLIGHT
from mini_dist.plan.calculators.stage_time import StageTime
from mini_dist.plan.config import RECOMPUTE, Layout
from mini_dist.plan.schedule import SPLIT, SYNCHRONOUS, V_SHAPED, Times, build, simulate
from mini_dist.strategies.data_parallel import wrappers
from mini_dist.strategies.pipeline import plan as plan_of_pipeline

LLAMA = model("llama3-8b")
SCHEDULES = (("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)) + (
    ("zb_h1", 1),
    ("zb_h2", 1),
    ("zb_v", 2),
    ("dualpipe_v", 2),
)


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
@pytest.mark.parametrize("hop", [0.0, 0.3, 20.0])
@pytest.mark.parametrize("m", [4, 15, 17, 40])
def test_a_long_step_that_is_simulated_in_part_lasts_as_long_as_the_whole(name, chunks, hop, m):
    """Even if a further micro-batch does not add the slowest stage's work: naive, far hops."""
    layout = Layout(pp=4, num_micro_batches=m, schedule=name, num_chunks=chunks)
    options = {"chunks": chunks} if name == "interleaved" else {}
    try:
        schedule = build(name, 4, m, **options)
    except ValueError:
        return  # the next test covers it
    works = [(1.0, 2.0, 0.9), (1.1, 2.2, 1.0), (1.0, 2.0, 0.9), (1.3, 2.5, 0.9)]
    stages = [StageTime({}, *work) for work in works]
    each = [works[rank] for rank in map(schedule.rank_of.__getitem__, range(4 * chunks))]
    times = Times(
        forward=[f / chunks for f, _, _ in each],
        backward=[(b - w) / chunks for _, b, w in each],
        weight=[w / chunks for _, _, w in each],
        comm=hop,
    )
    whole = simulate(schedule, times).makespan
    assert simulated(layout, stages, [hop] * 3) == pytest.approx(
        whole, rel=0.03 if hop > 1 else 1e-9
    )


@pytest.mark.parametrize(
    ("schedule", "m", "works"), [("interleaved", 33, "32 or 36"), ("dualpipe_v", 7, "8 or more")]
)
def test_what_a_schedule_cannot_run_has_no_price(schedule, m, works):
    layout = Layout(pp=4, num_micro_batches=m, schedule=schedule, num_chunks=2)
    for priced in (lambda: step_time(LLAMA, layout), lambda: peak_memory(LLAMA, layout)):
        with pytest.raises(ValueError, match=f"{works} would work"):
            priced()


@pytest.mark.parametrize("simulate", [False, True])
def test_what_it_can_run_has_one(simulate):
    layout = Layout(pp=4, num_micro_batches=15, schedule="interleaved", num_chunks=2)
    assert step_time(LLAMA, layout, simulate=simulate).seconds > 0


def nearly_at_its_peak(name):
    device = hardware(name).device
    return hardware(name).replace(device={"sustained_flops": 0.99 * device.peak_flops})


EVERY_KIND_OF_STEP = [
    (how, recompute, size, micro_batches)
    for how in FRAMEWORKS
    for recompute in RECOMPUTE
    for size, micro_batches in ((1, 1), (1, 8), (4, 1), (16, 8))
]


@pytest.mark.parametrize(("how", "recompute", "size", "micro_batches"), EVERY_KIND_OF_STEP)
@pytest.mark.parametrize("name", ["h100", "a100-80", "b200"])
def test_nobody_uses_more_than_the_whole_device(name, how, recompute, size, micro_batches):
    machine = nearly_at_its_peak(name)
    layout = Layout(recompute=recompute, micro_batch_size=size, num_micro_batches=micro_batches)
    for seq_len in (2048, 8192):
        time = step_time(LLAMA.replace(seq_len=seq_len), layout, machine, how)
        assert time.mfu <= time.hfu <= 1
    # Here scores are most of the work, so count only those that attention really computes.
    long, flash = LLAMA.replace(seq_len=131_072), FRAMEWORKS[how].flash_attention
    computed = recompute if recompute == "full" or not flash else "none"
    flops = step_flops(long, layout.global_batch_size, computed, causal=flash).total
    assert flops <= step_time(long, layout, machine, how).seconds * machine.device.peak_flops


FLASH = [name for name, how in FRAMEWORKS.items() if how.flash_attention]


@pytest.mark.parametrize("how", [name for name in FLASH if FRAMEWORKS[name].selective == "scores"])
@pytest.mark.parametrize("micro_batches", [1, 8])
@pytest.mark.parametrize("name", ["h100", "a100-80", "b200"])
def test_selective_repeats_nothing_that_flash_attention_does_not_compute_twice_anyway(
    name, how, micro_batches
):
    long, machine = LLAMA.replace(seq_len=131_072), nearly_at_its_peak(name)
    selective, none = (
        step_time(long, Layout(recompute=recompute, num_micro_batches=micro_batches), machine, how)
        for recompute in ("selective", "none")
    )
    assert selective.hfu == selective.mfu == none.hfu


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
@pytest.mark.parametrize("m", [4, 8, 12, 64])
@pytest.mark.parametrize("simulate", [False, True])
def test_faster_matrices_make_no_step_slower(name, chunks, m, simulate):
    if name == "dualpipe_v" and m < 16 or name == "interleaved" and m == 12:
        return
    layout = Layout(pp=8, num_micro_batches=m, schedule=name, num_chunks=chunks)
    rates = [hardware("h100").device.gemm_rate * factor for factor in (1, 1.3, 1.7, 3)]
    machines = [hardware("h100").replace(device={"sustained_flops": rate}) for rate in rates]
    config = LLAMA.replace(num_layers=48)
    took = [step_time(config, layout, machine, simulate=simulate).seconds for machine in machines]
    assert took == sorted(took, reverse=True)


@pytest.mark.parametrize("how", FRAMEWORKS)
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ["gpt2", "deepseek-v3"])
def test_the_peak_is_that_of_the_fullest_rank(how, schedule, chunks, recompute, name):
    if name == "deepseek-v3" and FRAMEWORKS[how].own_runs:
        return  # this library has no latent attention
    for layers in (18, 23, 33):
        config = model(name).replace(num_layers=layers, seq_len=512)
        layout = Layout(
            pp=6, num_micro_batches=12, schedule=schedule, num_chunks=chunks, recompute=recompute
        )
        every = [rank_memory(config, layout, how, rank).total for rank in range(6)]
        assert peak_memory(config, layout, how).total == max(every)


def test_a_plan_says_where_it_is_nearly_full_and_where_it_extrapolates():
    assert any("too full" in said for said in plan("llama3-8b", "h100", 8, 4 * 2**20).cautions())
    wide = plan("llama3-8b", "h100", 512, 4 * 2**20)
    assert any("How 64 nodes share the network" in said for said in wide.cautions())
    assert wide.cautions()[0] in str(wide)
    measured = plan("llama3-8b", "h100-hf", 512, 4 * 2**20)
    assert not any("not measured" in said for said in measured.cautions())
    new = plan("llama3-8b", "b200", 16, 2**20)
    assert any("No published run without sharded" in said for said in new.cautions())
    sharded = plan("llama3-405b", "h100", 1024, 4 * 2**20)
    assert sharded.best.layout.zero == 3 and sharded.best.layout.dp == 512
    assert any("over 512 ranks. No published run" in said for said in sharded.cautions())
    assert plan("gpt2", "a100-80", 1, 64 * 1024).cautions() == []


def test_schedules_have_one_registry_and_constants_of_runs_are_the_library_s():
    assert set(AT_MOST_IN_FLIGHT) == set(SPLIT) < set(SYNCHRONOUS) and set(V_SHAPED) < set(SPLIT)
    for constant in ("BUCKET_BYTES", "IN_PLACE_BYTES"):
        assert getattr(moments, constant) is getattr(wrappers, constant)
    assert pipeline_in_flight.EARLY is plan_of_pipeline.EARLY
