"""Compare FLOPs, and the years that GPT-3 takes, with published formulas and numbers."""

import math

import pytest

from mini_dist.plan.calculators import (
    HARDWARE,
    forward_flops,
    hardware,
    model,
    model_flops,
    num_parameters,
    step_flops,
    training_time,
)
from mini_dist.plan.calculators.collective_time import collective_seconds
from mini_dist.plan.calculators.published import gpt, megatron_2021
from mini_dist.plan.config import ModelConfig


@pytest.mark.parametrize(
    ("heads", "h", "layers"), [(24, 2304, 24), (96, 12288, 96), (128, 20480, 105)]
)
def test_hardware_and_model_flops_are_the_megatron_formulas(heads, h, layers):
    """Narayanan et al. 2021 equation 3 (full recompute) and Korthikanti et al. 2022 equation 7."""
    config, B, s, V = gpt(heads, h, layers), 7, 2048, 51200
    # 96 goes with V / 16 but 72 with V / 12, because logits are not recomputed.
    hardware_flops = 96 * B * s * layers * h**2 * (1 + s / (6 * h) + V / (16 * layers * h))
    flops = 72 * B * s * layers * h**2 * (1 + s / (6 * h) + V / (12 * layers * h))
    assert step_flops(config, B, "full").total == pytest.approx(hardware_flops, rel=1e-12)
    assert model_flops(config, B) == pytest.approx(flops, rel=1e-12)


def test_selective_recompute_repeats_only_the_scores():
    config = gpt(64, 6144, 48)
    again = step_flops(config, 4, "selective")["recomputed"]
    assert again == 4 * 48 * 4 * 2048**2 * 6144
    # The paper's ratio of hardware to model FLOPs is 1 + s / 6h (equation 10, approximate).
    assert step_flops(config, 4, "selective").total / model_flops(config, 4) == pytest.approx(
        1 + 2048 / (6 * 6144) / 3, rel=0.02
    )


def test_causal_counts_half_of_the_scores_and_nothing_else():
    whole, half = (forward_flops(model("llama3-8b"), causal) for causal in (False, True))
    assert half["attention scores"] * 2 == whole["attention scores"]
    assert half.total == whole.total - half["attention scores"]


def test_six_p_t_is_right_up_to_scores_and_embedding():
    """6 P T counts the embedding lookup as work and leaves out the scores."""
    config = model("gpt3-175b")
    matrices = model_flops(config, 1) - 3 * forward_flops(config)["attention scores"]
    assert matrices / (6 * 174.6e9 * 2048) == pytest.approx(1, abs=0.001)


def test_experts_cost_what_a_token_visits_not_what_is_held():
    dense = ModelConfig(bias=False, d_ffn=512)
    moe = ModelConfig(bias=False, d_ffn=512, num_experts=8, top_k=2)
    ffn, experts = forward_flops(dense)["ffn"], forward_flops(moe)["experts"]
    assert experts == 2 * ffn


def test_gpt3_takes_32_years_on_one_a100_at_its_peak():
    """6 * 175e9 * 300e9 FLOPs at 312 TFLOP/s: the 32 years assume the full datasheet rate."""
    years = {u: training_time(175e9, 300e9, utilisation=u)["years"] for u in (1.0, 0.45)}
    assert years[1.0] == pytest.approx(31.99, abs=0.01)
    assert years[0.45] == pytest.approx(71.1, abs=0.1)


def test_training_time_scales_and_costs():
    machine = hardware("a100-80").replace(dollars_per_hour=2.0)
    one = training_time(1e9, 1e12, machine=machine)
    many = training_time(1e9, 1e12, num_devices=8, machine=machine)
    assert many["days"] == pytest.approx(one["days"] / 8)
    assert many["cost"] == pytest.approx(one["cost"]) == pytest.approx(one["days"] * 48)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"utilisation": 45}, "utilisation=45 is not a share"),
        ({"tokens": -1}, "tokens=-1 is too"),
        ({"machine": "h1000"}, "hardware='h1000' is not known: did you mean h100"),
        ({"num_devices": 0}, "num_devices=0 is too small"),
    ],
)
def test_impossible_training_is_refused(arguments, says):
    with pytest.raises(ValueError) as error:
        training_time(**{"model": 1e9, "tokens": 1e9, **arguments})
    assert says in str(error.value)


def test_published_table_1_has_our_parameters():
    """Narayanan et al. 2021: the table prints billions, and equation 2 omits the last norm."""
    printed = [1.7, 3.6, 7.5, 18.4, 39.1, 76.1, 145.6, 310.1, 529.6, 1008.0]
    for run, billions in zip(megatron_2021(), printed):
        h, layers = run.config.d_model, run.config.num_layers
        equation_2 = 12 * layers * h**2 + 13 * layers * h + (51200 + 2048) * h
        assert num_parameters(run.config) == equation_2 + 2 * h
        assert abs(equation_2 / 1e9 - billions) < 0.06


@pytest.mark.parametrize("name", HARDWARE)
def test_a_measured_ceiling_is_below_the_datasheet_s(name):
    device = hardware(name).device
    assert 0 < device.gemm_rate < device.gemm_ceiling < device.peak_flops
    assert device.source


def test_no_peak_counts_the_zeros_of_sparse_matrices():
    """8-bit math has twice the rate; a factor of 4 or 1 would mix up dense and sparse peaks."""
    devices = [machine.device for machine in HARDWARE.values() if machine.device.peak_flops_fp8]
    assert len(devices) > 8
    for device in devices:
        assert device.peak_flops_fp8 == pytest.approx(2 * device.peak_flops, rel=0.02)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("rtx4090", "rtx-4090"), ("gb200-nvl72", "gb200"), ("ascend910b", "ascend-910b")],
)
def test_an_unknown_machine_names_its_neighbours(name, nearest):
    with pytest.raises(ValueError, match=f"did you mean {nearest}"):
        hardware(name)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"network_bandwidth": -1.0}, "network_bandwidth=-1.0 of 'h100' is not above 0"),
        ({"node_latency": -1e-6}, "node_latency=-1e-06 of 'h100' is negative"),
        ({"devices_per_node": 0}, "devices_per_node=0"),
        ({"by_nodes": ((1, 4e11, 2e11),)}, "by_nodes of 'h100' has rows of [1] nodes"),
        ({"device": {"memory_bytes": 0}}, "memory_bytes=0 of device 'H100 SXM' is not above 0"),
    ],
)
def test_impossible_hardware_is_refused(change, says):
    with pytest.raises(ValueError) as error:
        hardware("h100").replace(**change)
    assert says in str(error.value)


HF = hardware("h100-hf")


@pytest.mark.parametrize("nodes", [2, 4, 8, 16, 32, 64])
def test_the_timed_collectives_come_out_as_they_were_timed(nodes):
    """256 MB over several nodes is within a tenth, but an all-reduce may be faster."""
    rates = {count: rates for count, *rates in HF.by_nodes}
    size = nodes * HF.devices_per_node
    for op, times, rate in (
        ("all_gather", 1, rates[nodes][1]),
        ("reduce_scatter", 1, rates[nodes][1]),
        ("all_reduce", 2, rates[nodes][0]),
    ):
        timed = times * (size - 1) / size * 256e6 / rate
        ours = collective_seconds(HF, op, 256e6, size)
        assert ours < 1.1 * timed and (op == "all_reduce" or ours > 0.9 * timed), op


def test_a_longer_ring_gets_less_of_the_network_and_a_step_of_it_loses_the_same():
    steps = [HF.step_seconds(nodes) for nodes in (2, 3, 4, 8, 16, 32, 64, 128)]
    assert steps[-1] == steps[-2]  # nothing was measured beyond 64
    assert min(steps) > 0.6 * max(steps)
    got = [
        256e6 / collective_seconds(HF, "all_gather", 256e6, 8 * n) for n in (2, 4, 8, 16, 32, 64)
    ]
    assert got == sorted(got, reverse=True) and got[-1] < got[0] / 10


def test_between_measured_numbers_of_nodes_a_straight_line_in_their_logarithm():
    two, three, four = (HF.tree_bandwidth(nodes) for nodes in (2, 3, 4))
    share = math.log2(3 / 2)
    assert three == pytest.approx(two + (four - two) * share)


def test_over_nodes_an_all_reduce_takes_the_tree_where_a_ring_has_too_many_steps():
    """A small all-reduce takes two rings of 511 steps, or six tree levels up and down."""
    machine, tiny = hardware("h100"), 1024
    ring = collective_seconds(machine, "reduce_scatter", tiny, 512)
    assert collective_seconds(machine, "all_reduce", tiny, 512) < ring / 3
    big = 2**30
    alone = collective_seconds(machine, "reduce_scatter", big, 16)
    assert 1.7 * alone < collective_seconds(machine, "all_reduce", big, 16) < 2.2 * alone


def test_a_ring_takes_the_protocol_of_short_steps_or_that_of_the_whole_link():
    """For 8 bytes over 8 devices, an all-gather was timed at 22 us and an all-reduce at 25."""
    machine = hardware("b200")
    for op, timed in (("all_gather", 22e-6), ("all_reduce", 25e-6)):
        assert collective_seconds(machine, op, 8, 8) == pytest.approx(timed, rel=0.02)
    alone = 7 / 8 * 2**30 / machine.node_link("all_gather").bandwidth
    assert alone < collective_seconds(machine, "all_gather", 2**30, 8) < 1.05 * alone
    took = [collective_seconds(machine, "all_gather", 2**k, 64) for k in range(3, 31)]
    assert took == sorted(took)
