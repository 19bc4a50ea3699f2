"""Framework options that change a step: fp8, overlaps, and the meaning of selective."""

import math

import pytest

from mini_dist.plan.calculators import (
    framework,
    hardware,
    model,
    num_parameters,
    peak_memory,
    rank_memory,
    step_time,
)
from mini_dist.plan.calculators.kernels import gemm_seconds
from mini_dist.plan.calculators.parameters import every_second
from mini_dist.plan.calculators.published import gpt
from mini_dist.plan.config import Layout

H100 = hardware("h100")
OVER_DP = "gradients over dp"
FP8 = framework("megatron-core").replace(fp8=True)


def seconds(name, how, machine="h100", **cut):
    return step_time(model(name), Layout(**cut), machine, how).breakdown


def test_a_large_gemm_goes_at_the_measured_ratio():
    shape = (16384, 16384, 16384)
    ratio = gemm_seconds(H100.device, *shape) / gemm_seconds(H100.device, *shape, fp8=True)
    assert ratio == pytest.approx(1402.6 / 794.5, rel=0.01)


def test_a_step_gains_less_than_its_matrices():
    """Casting, attention and head do not change; gathered messages are half as long."""
    cut = {"dp": 8, "tp": 8, "sequence_parallel": True, "zero": 1}
    bf16, fp8 = (seconds("llama3-70b", how, **cut) for how in ("megatron-core", FP8))
    assert 1.3 < bf16["matrices"] / fp8["matrices"] < 1402.6 / 794.5
    assert 1 < bf16.total / fp8.total < bf16["matrices"] / fp8["matrices"]
    for same in ("attention", "head and loss"):
        assert bf16[same] == fp8[same]
    assert 0.5 * bf16["tp collectives"] < fp8["tp collectives"] < bf16["tp collectives"]
    whole = {**cut, "sequence_parallel": False}
    plain = framework("megatron-2021")
    bf16, fp8 = (seconds("llama3-70b", how, **whole) for how in (plain, plain.replace(fp8=True)))
    assert bf16["tp collectives"] == fp8["tp collectives"]  # sums are not in fp8


def test_a_device_without_fp8_says_so():
    with pytest.raises(ValueError, match="'A100 SXM 80GB' has no peak_flops_fp8"):
        seconds("llama3-8b", FP8, "a100-80")


PLAIN = framework("megatron-core").replace(overlaps_tensor_backward=False)


def test_messages_of_tp_behind_the_matrices_leave_their_first_piece_and_some_of_the_device():
    cut = {"tp": 8, "sequence_parallel": True}
    kept = PLAIN.replace(keeps_gathered=True)
    async_tp = kept.replace(overlaps_tensor=True)
    waits, hides = (seconds("llama3-70b", how, **cut)["tp collectives"] for how in (kept, async_tp))
    assert waits / 8 < hides < waits / 8 + 0.2 * waits
    slow = H100.replace(node_bandwidth=H100.node_bandwidth / 100)  # too slow to hide
    long, longer = (
        seconds("llama3-70b", how, slow, **cut)["tp collectives"] for how in (async_tp, kept)
    )
    assert 0.9 * longer < long < longer
    whole = seconds("llama3-70b", async_tp, tp=8)["tp collectives"]
    assert whole == seconds("llama3-70b", kept, tp=8)["tp collectives"]


def test_a_column_s_backward_hides_one_reduce_of_two_and_the_second_gather():
    """Of a layer's 4 gathers and 4 reduces, two reduces overlap with weight gradients.

    An input that was not saved is gathered twice more, overlapping with input gradients.
    """
    cut = {"tp": 8, "sequence_parallel": True}

    def waits(**changes):
        how = PLAIN.replace(**changes)
        return seconds("llama3-70b", how, **cut)["tp collectives"]

    kept, lean = waits(keeps_gathered=True), waits()
    assert lean == pytest.approx(1.25 * kept, rel=1e-6)  # a gather takes as long as a reduce
    behind = waits(keeps_gathered=True, overlaps_tensor_backward=True)
    assert 0.75 * kept < behind < 0.75 * kept + 0.25 * 0.2 * kept
    again = waits(overlaps_tensor_backward=True)
    assert behind < again < behind + 0.25 * 0.2 * kept


@pytest.mark.parametrize("how", ["megatron-core", "fsdp", "nanotron"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("nodes", [1, 2, 16])
@pytest.mark.parametrize("network", [1e8, 5e10])
def test_parameters_gathered_behind_the_next_forward_make_no_step_longer(how, zero, nodes, network):
    """ZeRO-1 and 2 gather updated parameters; the other stages have nothing to hide."""
    layout = Layout(dp=8 * nodes, zero=zero)
    machine = H100.replace(network_bandwidth=network)
    waits, hides = (
        step_time(
            "llama3-8b", layout, machine, framework(how).replace(overlaps_parameters=overlaps)
        )
        for overlaps in (False, True)
    )
    if zero in (1, 2):  # shorter, by at most the forward that hides it
        forward = sum(
            line.value for line in waits.breakdown if line.name not in ("optimizer", OVER_DP)
        )
        assert 0 < waits.seconds - hides.seconds < forward
    else:
        assert waits.seconds == hides.seconds


def test_selective_by_operators_computes_every_second_matrix_again_and_keeps_the_others_outputs():
    config = model("llama3-8b")
    assert [weight.name for weight in every_second(config)] == ["k", "out", "up"]
    layout = Layout(dp=8, zero=3, recompute="selective")
    times = {r: step_time(config, layout.replace(recompute=r), "h100", "torchtitan")
             for r in ("none", "selective", "full")}  # fmt: skip
    assert times["none"].seconds < times["selective"].seconds < times["full"].seconds
    D, kv, F, tokens = 4096, 1024, 14336, 8192 * 8
    again = 2 * tokens * 32 * D * (kv + D + F)
    share = again / (times["selective"].seconds * 8 * H100.device.peak_flops)
    assert times["selective"].hfu - times["selective"].mfu == pytest.approx(share)
    kept = rank_memory(config, layout, "torchtitan")["activations"]
    # Saved: the layer's input, the outputs of q, v, gate, down and attention, and its statistics.
    assert kept == 32 * 8192 * (2 * (D + D + kv + F + D + D) + 4 * 32)


def test_every_kth_layer_is_recomputed_in_time_and_in_memory():
    config, how = model("llama3-8b"), "megatron-core"
    whole, half, none = (
        Layout(recompute="full"), Layout(recompute="full", recompute_every=2), Layout()
    )  # fmt: skip
    took = [step_time(config, layout, "h100", how).seconds for layout in (none, half, whole)]
    assert took[1] - took[0] == pytest.approx(took[2] - took[1])
    kept = [rank_memory(config, layout, how)["activations"] for layout in (whole, half, none)]
    assert kept[1] - kept[0] == pytest.approx(kept[2] - kept[1])


def test_parameters_that_stay_whole_in_a_pipeline_travel_once_a_step_and_fill_memory():
    config, stays = model("llama3-70b"), framework("torchtitan")
    reshards = stays.replace(whole_in_pipeline=False)
    layout = Layout(pp=8, dp=8, zero=3, num_micro_batches=32)
    once, often = (step_time(config, layout, "h100", how).breakdown for how in (stays, reshards))
    assert "zero traffic" not in [line.name for line in once]
    assert once["gradients over dp"] > 0 and often["zero traffic"] > once["gradients over dp"]
    more = layout.replace(num_micro_batches=64)
    assert (
        step_time(config, more, "h100", stays).breakdown["gradients over dp"]
        == (once["gradients over dp"])
    )
    held = rank_memory(config, layout, stays, 1)
    layers = 10 * (num_parameters(config) - 2 * 128256 * 8192 - 8192) / 80
    assert held["whole in a pipeline"] == pytest.approx((2 + 4) * layers)
    alone = layout.replace(pp=1)
    assert peak_memory(config, alone, stays).total == peak_memory(config, alone, reshards).total


def test_heads_that_the_fused_softmax_cannot_take_cost_launches_and_passes():
    """Megatron's kernel takes 4 heads at a time; 16 heads on tp 8 are only 2 per sequence."""
    config = gpt(16, 1024, 12, seq_len=1024)
    how = framework("megatron-2021")
    fused = how.replace(softmax_heads=1)
    one, two = (Layout(tp=8, micro_batch_size=b, recompute="full") for b in (1, 2))

    def lines(layout, how):
        return step_time(config, layout, "a100-80", how).breakdown

    assert lines(two, how) == lines(two, fused)
    # Forward, recomputation and backward each launch four kernels more, where host_seconds covers
    # a layer's 16. The device is idle anyway, so its own time does not count.
    more = 12 * 3 * 4 / 16 * how.host_seconds
    assert lines(one, how).total - lines(one, fused).total == pytest.approx(more, rel=1e-6)
    assert lines(one, how)["attention"] > lines(one, fused)["attention"] + 12 * 8 * 5e-6
    flash = how.replace(flash_attention=True)
    assert lines(one, flash) == lines(one, flash.replace(softmax_heads=1))


def test_flash_attention_2_is_slower_on_hopper_only():
    core = framework("megatron-core")
    for machine, slower in (("a100-80", 1.0), ("h100", 0.8 * 692 / (0.35 * 989))):
        new, old = (
            seconds("llama3-8b", how, machine)["attention"]
            for how in (core, core.replace(flash_2=True))
        )
        assert old / new == pytest.approx(slower, rel=0.01)


def test_a_bucket_takes_whole_tensors():
    """In two layers of 70B, each gradient matrix is larger than a bucket and goes alone."""
    config = model("llama3-70b").replace(num_layers=2)
    layout = Layout(dp=64)
    how = framework("nanotron").replace(overlaps_gradients=False)
    small, large = (
        step_time(config, layout, "h100-hf", how.replace(bucket=bucket)).breakdown[
            "gradients over dp"
        ]
        for bucket in (1e6, 25e6)
    )
    assert small == large
    assert step_time(config, layout, "h100-hf", how.replace(bucket=math.inf)).seconds > 0


def test_around_its_own_pass_an_optimizer_reads_and_writes_more():
    config, layout, how = model("llama3-8b"), Layout(dp=8, zero=1), framework("megatron-core")
    full, alone = (
        step_time(config, layout, "h100", each).breakdown["optimizer"]
        for each in (how, how.replace(around_step=0))
    )
    rate = H100.device.stream_bandwidth
    assert full - alone == pytest.approx(18 * num_parameters(config) / 8 / rate)


def test_what_waits_for_the_host_is_what_the_device_is_faster_by():
    config, layout = model("gpt2"), Layout()
    slow = framework("megatron-core").replace(host_seconds=0.01)
    breakdown = step_time(config, layout, "h100", slow).breakdown
    rest = ("waiting for the host", "head and loss", "optimizer")
    device = sum(line.value for line in breakdown if line.name not in rest)
    assert breakdown["waiting for the host"] == pytest.approx(12 * 3 * 0.01 - device)
    fast = slow.replace(host_seconds=0.0)
    assert "waiting for the host" not in [
        line.name for line in step_time(config, layout, "h100", fast).breakdown
    ]
