"""Offloading to the host costs time on the link."""

import pytest

from mini_dist.plan.calculators import (
    file_memory,
    framework,
    hardware,
    host_memory,
    intensity,
    largest_model,
    model,
    num_parameters,
    peak_memory,
    plan,
    step_time,
    traffic,
)
from mini_dist.plan.calculators.offload import CPU_ADAM, PUBLISHED, TIERS, cpu_adam_seconds
from mini_dist.plan.config import Layout

H100 = hardware("h100")
AWAY = framework("fsdp").replace(offload_optimizer=True)


def test_an_optimizer_on_the_host_saves_memory_and_costs_time():
    config, layout = model("llama3-8b"), Layout(dp=8, zero=3)
    here, away = (step_time(config, layout, H100, how) for how in ("fsdp", AWAY))
    assert peak_memory(config, layout, AWAY).total < peak_memory(config, layout, "fsdp").total
    assert away.breakdown["optimizer"] > 20 * here.breakdown["optimizer"]
    other = away.seconds - away.breakdown["optimizer"]
    assert other == pytest.approx(here.seconds - here.breakdown["optimizer"])


def test_it_waits_for_the_link_and_for_the_host_s_memory():
    config, layout = model("llama3-8b"), Layout(dp=8, zero=3)
    base = step_time(config, layout, H100, AWAY).breakdown["optimizer"]
    for field in ("host_bandwidth", "host_memory_bandwidth"):
        slow = H100.replace(**{field: getattr(H100, field) / 2})
        assert step_time(config, layout, slow, AWAY).breakdown["optimizer"] > 1.05 * base
    shard = 8.03e9 / 8  # 2 bytes there, 2 back; the host touches 4 + 2 * 8 + 4
    by_hand = shard * (4 / (0.8 * 64e9) + 24 / (0.43 * 76.8e9))
    by_hand += shard * (12 + 4) / (0.72 * 3.35e12)  # clipping and zeroing on the device
    assert base == pytest.approx(by_hand, rel=0.01)


def test_cpu_adam_takes_as_long_as_published():
    """One constant was chosen on the larger two; the smallest is predicted 16 % too slow."""
    ratios = [cpu_adam_seconds("dgx-2", numel) / seconds for numel, seconds in CPU_ADAM]
    assert ratios == pytest.approx([1.16, 0.99, 0.99], abs=0.01)


def test_inputs_of_recomputed_layers_are_waited_for_on_a_slow_link_only():
    how = framework("fsdp").replace(offload_activations=True)
    config, layout = model("llama3-8b"), Layout(dp=8, zero=3, recompute="full")
    slow = H100.replace(host_bandwidth=1e9)
    assert step_time(config, layout, H100, how).seconds == pytest.approx(
        step_time(config, layout, H100, "fsdp").seconds
    )
    assert step_time(config, layout, slow, how).breakdown["waiting for offloads"] > 0
    with pytest.raises(ValueError, match="host_bandwidth=0 of 'h100' is not above 0"):
        H100.replace(host_bandwidth=0)


ALL = dict(offload_optimizer=True, offload_gradients=True, offload_parameters=True)


def test_what_is_borrowed_is_not_on_the_device_and_is_somewhere():
    config, layout = model("llama3-8b"), Layout(dp=8, zero=3, recompute="full")
    shard = num_parameters(config) / 8
    how = framework("megatron-core").replace(**ALL)
    names = {line.name for line in peak_memory(config, layout, how)}
    assert not names & {"parameters", "gradients", "optimizer"}
    assert {"gradients on their way", "unsharded parameters"} <= names
    assert host_memory(config, layout, how).total == pytest.approx((12 + 4 + 2) * shard)
    assert file_memory(config, layout, how).total == 0
    files = how.replace(offload_to_files=True)
    assert file_memory(config, layout, files).total == pytest.approx((12 + 4 + 2) * shard)
    assert host_memory(config, layout, files).total < 0.1 * (12 + 4 + 2) * shard


def test_traffic_is_that_of_the_papers():
    config, layout = model("llama3-8b"), Layout(dp=8, zero=3, num_micro_batches=3)
    shard = num_parameters(config) / 8
    offload = framework("megatron-core").replace(offload_optimizer=True)
    assert traffic(config, layout, offload).total == pytest.approx((2 + 2) * shard)
    everything = traffic(config, layout, offload.replace(**ALL))
    assert everything["gradients to the host"] == pytest.approx(3 * 2 * shard)
    assert everything["parameters back"] == pytest.approx(2 * 3 * 2 * shard)


def test_gradients_in_files_are_written_and_read_once_a_micro_batch():
    config, layout = model("llama3-8b"), Layout(dp=8, zero=3, num_micro_batches=3)
    shard = num_parameters(config) / 8
    how = framework("megatron-core").replace(offload_optimizer=True, offload_to_files=True)
    with_them = how.replace(offload_gradients=True)
    moved = [traffic(config, layout, each) for each in (how, with_them)]
    assert moved[1]["gradients through files"] == pytest.approx(3 * 2 * 4 * shard)
    assert "gradients through files" not in {line.name for line in moved[0]}
    times = [
        step_time(config, layout, H100, each.replace(offload_overlaps=overlaps))
        for each in (how, with_them)
        for overlaps in (False, True)
    ]
    longer = times[2].breakdown["optimizer"] - times[0].breakdown["optimizer"]
    assert longer == pytest.approx(3 * 2 * 4 * shard / H100.file_bandwidth)
    hidden = times[3].breakdown["optimizer"] - times[1].breakdown["optimizer"]
    assert 0 < hidden < longer


def test_intensity_grows_with_the_tokens_and_not_with_the_model():
    how = framework("megatron-core").replace(**ALL)
    layout = Layout(recompute="full")
    one = intensity(model("llama3-8b"), layout, how)
    many = intensity(model("llama3-8b"), layout.replace(micro_batch_size=4), how)
    large = intensity(model("llama3-70b"), layout, how)
    assert many == pytest.approx(4 * one) and large == pytest.approx(one, rel=0.25)


def test_lanes_hide_what_the_batch_can_hide():
    config, layout = model("llama3-8b"), Layout(dp=8, zero=3)
    how = framework("megatron-core").replace(offload_optimizer=True)
    overlaps = how.replace(offload_overlaps=True)
    late = overlaps.replace(offload_delayed=True)
    plain, lanes, delayed = (
        step_time(config, layout, H100, each).breakdown["optimizer"]
        for each in (how, overlaps, late)
    )
    assert plain > lanes > delayed
    files = overlaps.replace(offload_to_files=True)
    assert step_time(config, layout, H100, files).breakdown["optimizer"] > lanes
    many = layout.replace(num_micro_batches=64)
    share = [
        step_time(config, each, H100, overlaps).breakdown["optimizer"]
        / step_time(config, each, H100, overlaps).seconds
        for each in (layout, many)
    ]
    assert share[1] < share[0] / 5


def test_parameters_are_waited_for_where_their_way_is_longer_than_a_layer():
    config, layout = model("llama3-8b"), Layout(micro_batch_size=1, recompute="full")
    how = framework("megatron-core").replace(**ALL, offload_overlaps=True)
    slow = H100.replace(host_bandwidth=1e9)
    waits = step_time(config, layout, slow, how).breakdown["waiting for offloads"]
    layer = (num_parameters(config) - 2 * 128256 * 4096) / 32
    moved = 2 * 32 * 2 * layer / (0.8 * 1e9)  # sent twice, in 16 bits
    assert waits < moved < step_time(config, layout, slow, how).seconds
    fast = H100.replace(host_bandwidth=1e13, file_bandwidth=1e13)
    lines = {line.name for line in step_time(config, layout, fast, how).breakdown}
    assert "waiting for offloads" not in lines


@pytest.mark.parametrize("machine, devices, tier, billions, source", PUBLISHED)
def test_what_was_trained_fits_or_nearly(machine, devices, tier, billions, source):
    found = largest_model(machine, devices, tier).parameters / 1e9
    assert 0.95 * billions < found
    if tier == "host: all":  # 40 billion train efficiently; they fill under half of the host
        assert found == pytest.approx(2.34 * billions, rel=0.01)
        assert 16 * billions * 1e9 < 0.5 * 16 * hardware(machine).host_memory_bytes
    else:
        assert found < 1.6 * billions


def test_one_device_alone_has_the_whole_node_s_host_and_steps_as_fast_as_it_was_shown():
    found = largest_model("dgx-2", 1, "host: states", micro_batch_size=4)
    whole = 16 * hardware("dgx-2").host_memory_bandwidth
    assert found.machine.host_memory_bandwidth == whole
    how = found.how.replace(offload_overlaps=True)
    time = step_time(found.config, found.layout, found.machine, how)
    assert time.breakdown["optimizer"] < 0.5 * time.seconds
    many = step_time(found.config, found.layout.replace(num_micro_batches=16), found.machine, how)
    published = 40e12  # FLOP/s for 10 billion parameters on a V100 ([Offload] abstract)
    assert published < many.mfu * 125e12 < 1.5 * published


def test_each_tier_holds_more_than_the_one_before():
    sizes = [largest_model("dgx-2", 1, tier).parameters for tier in TIERS]
    assert sizes == sorted(sizes) and sizes[-1] > 50 * sizes[0]
    with pytest.raises(ValueError, match="tier='disk' is not known: give 'device'"):
        largest_model("dgx-2", 1, "disk")
    with pytest.raises(ValueError, match="not even one layer fits"):
        largest_model("dgx-2", 1, "device", width=2**16)


def test_a_plan_borrows_only_when_nothing_else_fits():
    fits = plan("llama3-8b", "h100", 8, 2**20)
    assert not fits.how.offload_optimizer and "hosts" not in fits.explain()
    borrows = plan("llama3-8b", "h100", 1, 2**19)
    assert borrows.how.offload_optimizer and not borrows.how.offload_parameters
    assert "the optimizer's states are on the hosts" in borrows.explain()
    large = plan("llama3-405b", "h100", 8, 2**20)
    assert large.how.offload_to_files and "are in files" in large.explain()


def test_states_come_first():
    with pytest.raises(ValueError, match="offload_optimizer=False: the optimizer's states"):
        framework("fsdp").replace(offload_parameters=True)


def test_ep_leaves_a_rank_as_many_states_on_its_host_as_zero_alone():
    """ZeRO cannot shard again what ep has spread: 8 ranks hold each expert's states once."""
    mixtral, zero = model("mixtral-8x7b"), Layout(dp=8, zero=1)
    how = framework("megatron-core").replace(offload_optimizer=True)
    alone = host_memory(mixtral, zero, how).total
    for layout in (
        zero.replace(ep=4),
        zero.replace(ep=8),
        zero.replace(dp=4, tp=2, ep=8, etp=1, sequence_parallel=True),
    ):
        assert host_memory(mixtral, layout, how).total == pytest.approx(alone, rel=2e-3)
