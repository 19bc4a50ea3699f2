"""The explorer of lesson 20 and its figures show what was computed."""

import pytest

from mini_dist import draw
from mini_dist.course.lab import ParameterError
from mini_dist.course.widgets import largest_fits
from mini_dist.plan.calculators import largest_model
from mini_dist.plan.calculators.offload import TIERS
from mini_dist.strategies.offload import Allocator
from mini_dist.strategies.offload.emulated import Took


def test_it_says_what_the_calculator_says():
    explorer = largest_fits(gpu="h100", devices=8, micro_batch_size=4, seq_len=2048)
    for tier in TIERS:
        found = largest_model("h100", 8, tier, micro_batch_size=4, seq_len=2048)
        assert f"{tier} {found.parameters / 1e9:.3g} billion" in explorer.html
        assert f"{found.config.num_layers} x {found.config.d_model}" in explorer.html


def test_a_faster_link_needs_fewer_flops_a_byte():
    assert "6,524 FLOPs for a byte" in largest_fits().html
    assert "652 FLOPs for a byte" in largest_fits(link_times=10.0).html
    with pytest.raises(ParameterError):
        largest_fits(devices=3)


def test_lanes_and_memory_are_drawn():
    picture = draw.lanes({"a": [Took("device", 0.0, 0.002, 0, "F0"), Took("host", 0.0, 0.003, 8)]})
    assert repr(picture) == "a: 3.0 ms" or "a: 3.0 ms" in repr(picture)
    allocator = Allocator(2**30)
    allocator.allocate("a", 3 * 2**20)
    picture = draw.memory_map(allocator)
    assert f"1 segments, {3 * 2**20:,} bytes in use, {17 * 2**20:,} free" in repr(picture)
    assert picture.svg().count("<path") > 2
