"""Ways to cut the depth: Megatron's chunks, uneven stages, some layers recomputed."""

import pytest

from mini_dist.model.gpt import GPT
from mini_dist.model.recompute import recompute_blocks
from mini_dist.plan.calculators import (
    hardware,
    megatron_arguments,
    model,
    peak_memory,
    plan,
    rank_memory,
    split_layers,
    step_time,
    step_volume,
    torchtitan_config,
)
from mini_dist.plan.calculators.layouts import Search, layouts, short
from mini_dist.plan.calculators.stage_time import stages_of_pipeline
from mini_dist.plan.calculators.timed_step import timed_step
from mini_dist.plan.config import Layout, ModelConfig

LLAMA_405B = model("llama3-405b")


def chunks_tried(num_layers, pp):
    config = ModelConfig(num_layers=num_layers)
    search = Search((1,), ("none",), (1,), max_tp=1, max_pp=pp)
    found = layouts(config, 2 * pp, 2 * 4 * pp, search)
    return {layout.num_chunks for layout in found if layout.pp == pp}


def test_all_chunk_counts_that_come_out_even_are_tried():
    assert chunks_tried(96, 8) == {1, 2, 3, 4, 6, 12}  # Narayanan et al. 2021 used 3
    assert chunks_tried(105, 35) == {1, 3}
    assert chunks_tried(126, 16) == {1, 2, 4, 8}  # Llama 3: 126 + embedding + head = 128
    assert chunks_tried(60, 4) == {1, 3, 5, 15}


def test_with_embedding_and_head_as_layers_the_first_and_last_stage_are_lighter():
    assert split_layers(126, 16) == [7, *[8] * 14, 7]
    assert split_layers(126, 128) == [0, *[1] * 126, 0]


def test_stages_of_nothing_but_embedding_and_head_are_priced():
    """Qi et al. 2023, section 6: counting them makes a V with two chunks per rank even."""
    config = model("llama3-8b").replace(num_layers=30)
    layout = Layout(pp=16, num_micro_batches=32, schedule="zb_v", num_chunks=2)
    for simulate in (False, True):
        assert step_time(config, layout, simulate=simulate).seconds > 0
    ends = rank_memory(config, layout, pp_rank=0)
    assert ends["activations"] == 0 and ends["loss and logits"]
    assert peak_memory(config, layout).total >= ends.total
    with pytest.raises(ValueError, match="32 leaves stages of num_layers=30 without a layer"):
        peak_memory(config, layout, "course")
    with pytest.raises(ValueError, match="a stage needs at least one layer"):
        layout.check(config.replace(num_layers=29))


def test_llama_3_405b_is_planned_near_the_way_it_was_trained():
    """Llama 3 herd 2024, table 4: tp 8, pp 16, dp 128, 41 % MFU. The fastest plan must fit."""
    found = plan("llama3-405b", "h100", 16384, 16 * 2**20)
    best = found.best
    assert best.layout.axes == {"pp": 16, "dp": 128, "cp": 1, "tp": 8}
    assert best.time.mfu > 0.35
    assert best.device_bytes <= hardware("h100").device.memory_bytes
    assert any("published run" not in said for said in found.cautions())


def test_what_nearly_fits_and_is_clearly_faster_is_named():
    """Memory predictions are off by some percent, so a hard limit may discard the best plan."""
    found = plan("llama3-405b", "h100", 16384, 16 * 2**20)
    limit = hardware("h100").device.memory_bytes
    assert limit < found.nearly.device_bytes <= limit / 0.95
    assert found.nearly.layout in {drop.layout for drop in found.dropped}
    assert found.nearly.layout.recompute == "none"  # like the real run
    assert 1.05 * found.nearly.time.seconds < found.best.time.seconds
    assert f"{short(found.nearly.layout)} would be" in str(found) and "it may fit" in str(found)


def test_what_nearly_fits_and_gains_little_is_not():
    roomy = hardware("h100").replace(device={"memory_bytes": 2**40})
    assert plan("llama3-8b", roomy, 8, 2**20).nearly is None  # everything fits
    found = plan("gpt3-175b", "a100-80", 384, 1536 * 2048)
    assert found.nearly is None and "it may fit" not in str(found)  # it would gain 0.4 %


def test_some_layers_recomputed_lie_between_none_and_all():
    layouts = [
        Layout(pp=4, num_micro_batches=8, tp=8, sequence_parallel=True),
        *(
            Layout(
                pp=4,
                num_micro_batches=8,
                tp=8,
                sequence_parallel=True,
                recompute="full",
                recompute_every=every,
            )
            for every in (4, 2, 1)
        ),
    ]
    config = model("llama3-70b")
    times = [step_time(config, layout, "h100") for layout in layouts]
    seconds, hfu = [time.seconds for time in times], [time.hfu / time.mfu for time in times]
    memory = [peak_memory(config, layout).total for layout in layouts]
    volume = [step_volume(config, layout)["tp"] for layout in layouts]
    assert seconds == sorted(set(seconds)) and memory == sorted(set(memory), reverse=True)
    assert volume == sorted(set(volume)) and hfu == sorted(set(hfu)) and hfu[-1] < 4 / 3
    again = [time.breakdown["recomputed"] for time in times[1:]]
    assert again[0] == pytest.approx(again[2] / 4) and again[1] == pytest.approx(again[2] / 2)
    kept = [rank_memory(config, layout)["activations"] for layout in layouts]
    assert kept[2] == pytest.approx((kept[0] + kept[3]) / 2)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_as_many_layers_are_counted_as_the_library_recomputes(every):
    for layers in (1, 2, 5):
        gpt = recompute_blocks(GPT(ModelConfig(num_layers=layers, d_model=64)), "full", every)
        again = sum("forward" in vars(block) for block in gpt.blocks.children())
        assert Layout(recompute="full", recompute_every=every).num_recomputed(layers) == again


def test_what_is_recomputed_is_said():
    layout = Layout(pp=2, num_micro_batches=2, recompute="full", recompute_every=2)
    assert short(layout).endswith("recompute full, 1 layer in 2")
    words = megatron_arguments(model("llama3-8b"), layout)
    said = dict(zip(words, words[1:]))
    assert said["--recompute-method"] == "block" and said["--recompute-num-layers"] == "8"
    with pytest.raises(ValueError, match="recompute_every=2 is not what torchtitan"):
        torchtitan_config(model("llama3-8b"), layout)
    with pytest.raises(ValueError, match="recompute_every=2 needs something to recompute"):
        Layout(recompute_every=2)


def test_a_simulated_pipeline_has_each_stage_s_own_length():
    """Qi et al. 2023, section 6: the V turns on its last rank; the first has embedding and head."""
    config = model("llama3-8b").replace(num_layers=30)
    layout = Layout(pp=16, num_micro_batches=32, schedule="zb_v", num_chunks=2)
    first, second, *_ = stages_of_pipeline(timed_step(config, layout, "h100", "megatron-core"))
    assert first.chunks[0] == (0, 0, 0) and first.chunks[1][0] > 0  # embedding; the head
    assert second.chunks[0] == second.chunks[1] and len(second.chunks) == 2
    assert first.total == pytest.approx(sum(f + b for f, b, _ in first.chunks))
