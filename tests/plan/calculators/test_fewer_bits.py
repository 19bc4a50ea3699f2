"""Compressed gradients in the calculators: the library's bytes; they pay on slow links."""

import pytest
import torch

from mini_dist import launch
from mini_dist.plan.calculators import Compression, hardware, pays_below, step_time
from mini_dist.plan.calculators.collective_time import TWO_HOPS, collective_seconds
from mini_dist.plan.calculators.compression import INT8, TOUCHED, shapes_of_matrices
from mini_dist.plan.calculators.frameworks import framework
from mini_dist.plan.calculators.links import Link
from mini_dist.plan.calculators.models import model
from mini_dist.plan.calculators.parameters import num_parameters
from mini_dist.plan.calculators.replica_traffic import of_layer
from mini_dist.plan.calculators.timed_step import compressed_units, timed_step
from mini_dist.plan.config import Layout
from mini_dist.strategies.compression import (
    PowerSGD,
    Quantized,
    half_mean,
    majority,
    one_bit_mean,
    power_mean,
    quantized_mean,
    random_k_mean,
    sign_mean,
    top_k_mean,
)

N, A, B, RANK = 4096, 64, 64, 3


def call(name, group):
    x, generator = torch.ones(N), torch.Generator().manual_seed(0)
    {
        "half": lambda: half_mean(x, group),
        "int8": lambda: quantized_mean(x, None, group),
        "sign": lambda: sign_mean(x, group),
        "vote": lambda: majority(x, group),
        "one_bit": lambda: one_bit_mean(x, 0.0, group),
        "top_k": lambda: top_k_mean(x, 41, group),
        "random_k": lambda: random_k_mean(x, 41, generator, group),
        "power": lambda: power_mean(x.view(A, B), torch.ones(B, RANK), group),
    }[name]()


@pytest.mark.parametrize("name", TOUCHED)
def test_the_bytes_are_those_that_the_library_sends(name):
    measured = launch(call, 4, (name,)).ledger.total_bytes()
    said = 4 * Compression(name, share=0.01, rank=RANK).sent(N, 4, [(A, B)])
    assert measured == pytest.approx(said, rel=1e-12)


def test_over_equal_links_each_collective_goes_round_its_ring():
    link = Link(latency=1e-3, bandwidth=1e6)
    half, top = (Compression(name, share=0.01) for name in ("half", "top_k"))
    assert half.ring_seconds(N, 4, link) == pytest.approx(6 * (1e-3 + 2 * N / 4 / 1e6))
    assert top.ring_seconds(N, 4, link) == pytest.approx(3 * (1e-3 + 8 * 41 / 1e6))
    assert Compression("int8").ring_seconds(N, 1, link) == 0


def test_power_leaves_small_matrices_and_vectors_as_they_are():
    """Compare with the engine, which does the same."""
    shapes = [(40, 24), (4, 4), (24, 32)]
    numel = sum(a * b for a, b in shapes) + 40
    bucket = PowerSGD(2).of_bucket([torch.empty(s) for s in (*shapes, (40,))]).__self__
    assert list(bucket.sides.values()) == [(40, 24), (24, 32)]
    sent = launch(reduce_bucket, 4, (shapes, numel)).ledger.total_bytes()
    assert sent == 4 * Compression("power", rank=2).sent(numel, 4, shapes)


def reduce_bucket(shapes, numel, group):
    reduce = PowerSGD(2).of_bucket([torch.empty(s) for s in (*shapes, (40,))])
    reduce(torch.ones(numel), group)


def test_the_matrices_of_a_model_are_all_but_its_vectors():
    config = model("gpt2")
    vectors = num_parameters(config) - sum(a * b for a, b in shapes_of_matrices(config))
    assert 0 < vectors < 0.002 * num_parameters(config)


def line(step, name):
    return sum(each.value for each in step.breakdown if each.name == name)


ETHERNET = hardware("a100-80").replace(network_bandwidth=1.25e9 / 8, network_latency=5e-5)
LAYOUT = Layout(dp=64, micro_batch_size=4, num_micro_batches=1)


def test_without_compression_nothing_changes_and_with_it_two_lines_do():
    plain, half = (step_time("gpt2-xl", LAYOUT, "h100", compression=c) for c in (None, "half"))
    assert line(plain, "compressing") == 0 < line(half, "compressing")
    assert line(half, "gradients over dp") < line(plain, "gradients over dp")
    others = [
        [(each.name, each.value) for each in step.breakdown if each.name not in CHANGED]
        for step in (plain, half)
    ]
    assert others[0] == others[1]


CHANGED = ("gradients over dp", "compressing")


def test_it_pays_on_a_slow_link_and_costs_on_a_fast_one():
    for name in ("half", "random_k", "power"):
        slow, fast = (
            step_time("gpt2-xl", LAYOUT, machine, compression=name).seconds
            / step_time("gpt2-xl", LAYOUT, machine).seconds
            for machine in (ETHERNET, "h100")
        )
        assert slow < 0.8 and fast > 1, name


def test_what_all_ranks_gather_grows_with_them_and_in_the_end_costs_more_than_it_saves():
    few, many = (Compression("top_k", share=0.01).sent(N, n) for n in (8, 512))
    dense = 2 * 511 / 512 * 4 * N
    assert many == pytest.approx(few * 511 / 7) and many > dense > few
    assert Compression("vote").sent(N, 512) < 2 * N / 8


def test_zero_sends_its_units_in_int8():
    layout, machine = Layout(dp=64, zero=3), ETHERNET.replace(devices_per_node=1)
    plain, int8 = (step_time("llama2-7b", layout, machine, compression=c) for c in (None, "int8"))
    assert line(int8, "zero traffic") < 0.5 * line(plain, "zero traffic")
    assert line(int8, "compressing") > 0
    for zero in (1, 2):
        layout = Layout(dp=64, zero=zero)
        assert step_time("gpt2-xl", layout, ETHERNET, compression="int8").seconds > 0


def test_zero_gathers_8_bits_and_scatters_4_as_the_library_sends_them():
    """Lesson 19's formula for `Quantized(8, 4)`: (n-1)/n (bits/8 + 4/256) bytes per element."""
    compression = Compression("int8", gradient_bits=4)
    how = compressed_units(framework("fsdp"), Layout(dp=4, zero=3), compression)
    for op, each in (("gather", how.unit_gather_bytes), ("scatter", how.unit_scatter_bytes)):
        ledger = launch(one_unit, 4, (op,)).ledger
        assert ledger.total_bytes() == 4 * 3 / 4 * each * N, op
    unit = [
        of_layer(timed_step("gpt2", Layout(dp=64, zero=3), WITHOUT_LATENCY, each), moe=False)
        for each in (framework("fsdp"), how)
    ]
    assert unit[1].gather == pytest.approx((1 + 4 / 256) / 2 * unit[0].gather, rel=0.01)
    ratio = (1 / 2 + 4 / 256) / framework("fsdp").reduce_bytes
    assert unit[1].reduce == pytest.approx(ratio * unit[0].reduce, rel=0.01)


BY_HOSTS = Compression("int8", by_hosts=True)


def one_unit(op, group):
    messages, unit = Quantized(8, 4), torch.ones(N)
    if op == "gather":
        messages.begin_all_gather_(unit, group).wait()
    else:
        messages.begin_reduce_scatter(unit, group).wait()


WITHOUT_LATENCY = ETHERNET.replace(devices_per_node=1, network_latency=0.0)


def test_codes_that_go_straight_to_their_rank_do_not_share_the_ports_of_a_node():
    """With eight devices per node, one int8 hop is no faster than a float32 ring.

    This is why ZeRO++ adds up inside a node first.
    """
    eight, alone = (
        ETHERNET.replace(devices_per_node=n, network_bandwidth=1.25e9 / 8) for n in (8, 1)
    )
    ratios = [
        line(step_time("gpt2-xl", Layout(dp=64, zero=1), machine, compression="int8"), CHANGED[0])
        / line(step_time("gpt2-xl", Layout(dp=64, zero=1), machine), CHANGED[0])
        for machine in (eight, alone)
    ]
    assert ratios[0] > 2 * ratios[1]


def test_in_two_hops_a_node_s_sums_leave_by_all_of_its_ports():
    """Compare with a hand calculation on nodes of four."""
    slow = hardware("a100-80").replace(network_latency=0.0, network_bandwidth=1e6)
    machine, numel = slow.replace(devices_per_node=4), 1e9
    port = machine.network_link().bandwidth
    one, two = (collective_seconds(machine, op, numel, 64) for op in ("all_to_all", TWO_HOPS))
    assert one == pytest.approx(60 / 64 * numel / port, rel=1e-3)
    assert two == pytest.approx(15 / 16 * numel / 4 / port, rel=0.02)  # plus the inner hop
    alone = slow.replace(devices_per_node=1)
    for other, size in ((alone, 64), (machine, 4)):
        one, two = (collective_seconds(other, op, numel, size) for op in ("all_to_all", TWO_HOPS))
        assert two == pytest.approx(one, rel=1e-9)


def test_two_hops_take_the_trap_of_nodes_out_of_a_step_and_change_nothing_without_nodes():
    straight, two_hops = Compression("int8"), BY_HOSTS
    for zero in (1, 2, 3):
        for per_node, gains in ((8, True), (1, False)):
            machine, layout = ETHERNET.replace(devices_per_node=per_node), Layout(dp=64, zero=zero)
            one, two = (
                step_time("gpt2-xl", layout, machine, compression=each).seconds
                for each in (straight, two_hops)
            )
            assert two < 0.8 * one if gains else two == pytest.approx(one)


def test_the_bandwidth_at_which_it_pays_by_hand():
    assert pays_below(saved_bytes=3e6, extra_seconds=0.003) == 1e9
    assert pays_below(3e6, 0.0) == float("inf")
    assert INT8 == 1 + 4 / 256


@pytest.mark.parametrize(
    "wrong, says",
    [
        (lambda: Compression("zip"), "compression='zip' is not known"),
        (lambda: Compression("top_k", share=0), "share=0"),
        (lambda: Compression("power", rank=0), "rank=0"),
        (lambda: Compression("int8", gradient_bits=2), "gradient_bits=2 with 'int8'"),
        (lambda: Compression("half", gradient_bits=4), "gradient_bits=4 with 'half'"),
        (lambda: Compression("half", by_hosts=True), "by_hosts=True with 'half'"),
        (lambda: step_time("gpt2", Layout(dp=8), compression=BY_HOSTS), "by_hosts=True is of what"),
        (lambda: step_time("gpt2", Layout(dp=8, zero=1), compression="sign"), "zero=1 scatters"),
        (lambda: step_time("gpt2", Layout(dp=8, tp=2), compression="power"), "give tp=1, pp=1"),
    ],
)
def test_what_cannot_be_gets_one_sentence(wrong, says):
    with pytest.raises(ValueError, match=says):
        wrong()
