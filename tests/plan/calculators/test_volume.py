"""What each axis sends matches the papers' formulas and the collectives' costs."""

import pytest

from mini_dist.plan.calculators import costs, model, num_parameters, step_volume
from mini_dist.plan.calculators.frameworks import FRAMEWORKS
from mini_dist.plan.config import Layout, ModelConfig

CONFIG = model("llama3-8b")
P = num_parameters(CONFIG)
BF16 = FRAMEWORKS["megatron-core"].replace(reduce_bytes=2)  # as ZeRO counts: 2 bytes everywhere


OUTSIDE = 2 * 128256 * 4096 + 4096  # embedding, head and last norm: ZeRO-3 gathers them once


@pytest.mark.parametrize(("zero", "elements"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_zero_stages_send_2_2_2_and_3_times_the_parameters(zero, elements):
    """ZeRO, section 7: with one micro-batch, stage 3 sends half as much again."""
    sent = step_volume(CONFIG, Layout(dp=8, zero=zero), BF16)["dp"]
    assert sent == pytest.approx(2 * (elements * P - (zero == 3) * OUTSIDE) * 7 / 8)


def test_zero_2_and_3_pay_for_every_micro_batch():
    many = Layout(dp=8, num_micro_batches=4)
    one = {z: step_volume(CONFIG, Layout(dp=8, zero=z), BF16)["dp"] for z in (1, 2, 3)}
    four = {z: step_volume(CONFIG, many.replace(zero=z), BF16)["dp"] for z in (1, 2, 3)}
    assert four[1] == one[1] and four[3] == 4 * one[3]
    assert four[2] - one[2] == pytest.approx(3 * 2 * P * 7 / 8)


@pytest.mark.parametrize(
    ("sequence_parallel", "keeps_gathered", "passes"),
    [(False, False, 8), (True, True, 8), (True, False, 10)],
)
def test_tp_sends_8_b_s_h_a_layer_and_10_if_backward_gathers_again(
    sequence_parallel, keeps_gathered, passes
):
    """Narayanan et al. 2021 section 2.3: 8 b s h (t - 1) / t elements per layer and micro-batch.

    Korthikanti et al. 2022 section 4.2.2: "an extra all-gather" for each of the two regions.
    """
    layout = Layout(tp=8, sequence_parallel=sequence_parallel, micro_batch_size=2)
    how = FRAMEWORKS["megatron-core"].replace(keeps_gathered=keeps_gathered)
    b_s_h = 2 * 8192 * 4096
    outer = 2 + 2 + (passes == 10)  # the embedding's all-reduce and the head's
    elements = step_volume(CONFIG, layout, how)["tp"] / 2
    assert elements == pytest.approx((32 * passes + outer) * b_s_h * 7 / 8)


def test_pp_sends_one_activation_each_way_over_each_border():
    message = 2 * 8192 * 4096
    volumes = [
        step_volume(CONFIG, Layout(pp=4, num_micro_batches=8), pp_rank=rank)["pp"]
        for rank in range(4)
    ]
    assert volumes == [8 * message, 16 * message, 16 * message, 8 * message]
    interleaved = Layout(pp=4, num_micro_batches=8, schedule="interleaved", num_chunks=2)
    total = sum(step_volume(CONFIG, interleaved, pp_rank=rank)["pp"] for rank in range(4))
    assert total == 8 * message * 2 * 7  # 8 stages have 7 borders
    v = interleaved.replace(schedule="zb_v")
    total = sum(step_volume(CONFIG, v, pp_rank=rank)["pp"] for rank in range(4))
    assert total == 8 * message * 2 * 6  # the border in the middle lies inside a rank


def test_cp_and_ep_send_what_their_algorithms_send():
    ring = step_volume(CONFIG, Layout(cp=4))["cp"]
    kv = 2 * 2 * 8192 // 4 * 8 * 128
    assert ring == 32 * 3 * 3 * kv
    moe = ModelConfig(num_experts=8, top_k=2, d_expert=64)
    exchanged = step_volume(moe, Layout(dp=4, ep=4))["ep"]
    one = costs.all_to_all(2 * 2 * 128 * 256, 4).bytes_per_rank
    assert exchanged == 4 * 4 * one  # 4 layers, dispatch and combine, forward and backward


def test_axes_of_size_1_send_nothing():
    assert step_volume(CONFIG, Layout()).lines == ()
    assert [line.name for line in step_volume(CONFIG, Layout(tp=2, dp=2))] == ["dp", "tp"]
