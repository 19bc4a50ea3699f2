"""Collectives in flight give the ring's result while the rank computes."""

import pytest
import torch

from mini_dist import launch
from mini_dist.collectives import (
    begin_all_gather_,
    begin_reduce_scatter,
    ring_all_gather,
    ring_reduce_scatter,
)


def both_ways(group):
    rank, size = group.rank(), group.size()
    x = torch.randn(size * 5, 2)
    summed = begin_reduce_scatter(x.clone(), group)
    whole = torch.full_like(x, torch.nan)
    mine = whole.chunk(size)[rank]
    mine.copy_(x[:5])
    gathered = begin_all_gather_(whole, group)  # starts while the first is in flight
    part = summed.wait()
    assert part.data_ptr() != x.data_ptr()
    return part, gathered.wait(), ring_reduce_scatter(x, group), ring_all_gather(x[:5], group)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_results_and_bytes_are_the_rings_to_the_last_bit(size):
    run = launch(both_ways, size)
    for part, whole, ring_part, ring_whole in run.results:
        assert torch.equal(part, ring_part)
        assert torch.equal(whole, ring_whole)
    for ours, ring in (
        ("begin_all_gather_", "ring_all_gather"),
        ("begin_reduce_scatter", "ring_reduce_scatter"),
    ):
        for rank in range(size):
            sent = run.ledger.total_bytes(op=ours, rank=rank)
            assert sent == run.ledger.total_bytes(op=ring, rank=rank) == (size - 1) * 5 * 2 * 4


def wider(group):
    x = torch.full((2 * group.size(),), 1.0 if group.rank() == 0 else 2.0**-9, dtype=torch.bfloat16)
    return begin_reduce_scatter(x, group, torch.float32).wait(), x


def test_sums_may_be_wider_than_what_travels():
    """In bfloat16, 1 + 1/512 rounds to 1."""
    run = launch(wider, 3)
    for total, x in run.results:
        assert total.tolist() == [1 + 2 * 2.0**-9] * 2
        assert x.unique().numel() == 1  # the argument is unchanged
    assert run.ledger.total_bytes() == 3 * 2 * 2 * 2


def begin_and_compute(group):
    handle = begin_all_gather_(torch.ones(2 * group.size()), group)
    group.recorder.phases.set("computing")
    handle.wait()


def test_a_collective_lasts_from_its_beginning_to_its_last_message():
    run = launch(begin_and_compute, 2)
    for rank in range(2):
        (call,) = run.ledger.calls(op="begin_all_gather_", rank=rank)
        computing = next(time for time, phase in run.ledger.phases[rank] if phase == "computing")
        assert call.start < computing < call.end


def uneven(group):
    with pytest.raises(ValueError, match="5 rows cannot be cut in 2 equal parts: pad them"):
        begin_all_gather_(torch.ones(5), group)


def test_what_cannot_be_cut_is_refused():
    launch(uneven, 2)
