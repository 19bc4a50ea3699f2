"""What goes to the host costs its way there."""

import pytest

from mini_dist.calculators import framework, hardware, model, peak_memory, step_time
from mini_dist.config import Layout

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
        assert step_time(config, layout, slow, AWAY).breakdown["optimizer"] > 1.1 * base
    shard = 8.03e9 / 8  # two bytes there, two back; 4 + 2 * 8 + 4 passed over
    by_hand = shard * (4 / (0.8 * 64e9) + 24 / (0.8 * 76.8e9))
    by_hand += shard * (12 + 4) / (0.72 * 3.35e12)  # clipped and set to zero on the device
    assert base == pytest.approx(by_hand, rel=0.01)


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
