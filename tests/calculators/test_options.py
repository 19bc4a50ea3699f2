"""Options of frameworks that change a step's time: fp8, messages of tp behind its matrices."""

import pytest

from mini_dist.calculators import framework, hardware, model, step_time
from mini_dist.calculators.kernels import gemm_seconds
from mini_dist.config import Layout

H100 = hardware("h100")
FP8 = framework("megatron-core").replace(fp8=True)


def seconds(name, how, machine="h100", **cut):
    return step_time(model(name), Layout(**cut), machine, how).breakdown


def test_a_large_gemm_goes_at_the_measured_ratio():
    shape = (16384, 16384, 16384)
    ratio = gemm_seconds(H100.device, *shape) / gemm_seconds(H100.device, *shape, fp8=True)
    assert ratio == pytest.approx(1402.6 / 794.5, rel=0.01)


def test_a_step_gains_less_than_its_matrices():
    """Casting, attention, head and messages stay as they are."""
    cut = {"dp": 8, "tp": 8, "sequence_parallel": True, "zero": 1}
    bf16, fp8 = (seconds("llama3-70b", how, **cut) for how in ("megatron-core", FP8))
    assert 1.3 < bf16["matrices"] / fp8["matrices"] < 1402.6 / 794.5
    assert 1 < bf16.total / fp8.total < bf16["matrices"] / fp8["matrices"]
    for same in ("attention", "head and loss", "tp collectives"):
        assert bf16[same] == fp8[same]


def test_a_device_without_fp8_says_so():
    with pytest.raises(ValueError, match="'A100 SXM 80GB' has no peak_flops_fp8"):
        seconds("llama3-8b", FP8, "a100-80")


def test_messages_of_tp_behind_the_matrices_leave_their_first_piece_and_some_of_the_device():
    cut = {"tp": 8, "sequence_parallel": True}
    async_tp = framework("megatron-core").replace(overlaps_tensor=True)
    waits, hides = (
        seconds("llama3-70b", how, **cut)["tp collectives"] for how in ("megatron-core", async_tp)
    )
    assert waits / 8 < hides < waits / 8 + 0.2 * waits
    slow = H100.replace(node_bandwidth=H100.node_bandwidth / 100)  # nothing to hide behind
    long, longer = (
        seconds("llama3-70b", how, slow, **cut)["tp collectives"]
        for how in (async_tp, "megatron-core")
    )
    assert 0.9 * longer < long < longer
    whole = seconds("llama3-70b", async_tp, tp=8)["tp collectives"]
    assert whole == seconds("llama3-70b", "megatron-core", tp=8)["tp collectives"]
