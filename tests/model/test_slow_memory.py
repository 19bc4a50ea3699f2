"""Attention in three loop orders: the same result, and the traffic of the formulas."""

import pytest
import torch
import torch.nn.functional as F

from mini_dist.model.slow_memory import SlowMemory, keys_outside, tiled_attention, whole_scores


def memory_of(N, H, dtype=torch.float64, size=1.0):
    generator = torch.Generator().manual_seed(N + H)
    q, k, v = size * torch.randn(3, N, H, dtype=torch.float64, generator=generator).to(dtype)
    column = q.new_zeros(N, 1)
    return SlowMemory(
        **dict(q=q, k=k, v=v, out=torch.zeros_like(q), scores=q.new_zeros(N, N)),
        **dict(total=column, largest=column.clone().fill_(-torch.inf)),
    )


ORDERS = {
    "whole_scores": lambda memory, tile: whole_scores(memory),
    "keys_outside": keys_outside,
    "tiled_attention": tiled_attention,
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("N, H, tile", [(12, 4, 4), (13, 4, 5), (7, 3, 16), (5, 2, 1)])
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_every_order_gives_attention(order, N, H, tile, size):
    memory = memory_of(N, H, size=size)
    ORDERS[order](memory, tile)
    q, k, v = (memory[name][None] for name in "qkv")
    expected = F.scaled_dot_product_attention(q, k, v)[0]
    torch.testing.assert_close(memory["out"], expected, rtol=1e-12, atol=1e-12 * size)


@pytest.mark.parametrize("N, H, tile", [(12, 4, 4), (32, 8, 8), (32, 8, 32)])
def test_the_traffic_is_what_the_loops_say(N, H, tile):
    """In elements, with T tiles: 4 N H + 4 N^2, 2 N H + T N (3 H + 4), 2 N H + T 2 N H."""
    T = N // tile
    moved = {}
    for name, order in ORDERS.items():
        memory = memory_of(N, H, torch.float32)
        order(memory, tile)
        moved[name] = memory.moved / 4
    assert moved == {
        "whole_scores": 4 * N * H + 4 * N * N,
        "keys_outside": 2 * N * H + T * N * (3 * H + 4),
        "tiled_attention": 2 * N * H + T * 2 * N * H,
    }


def test_loaded_rows_are_copies():
    memory = memory_of(6, 2)
    before = memory["q"].clone()
    memory.load("q", 1, 3).zero_()
    assert torch.equal(memory["q"], before)


@pytest.mark.parametrize(
    "use, message",
    [
        (lambda m: m.load("queries"), "'queries' is not in memory: there are q, k"),
        (lambda m: m.load("q", 4, 7), "q has rows 0 to 5: there are no rows 4 to 6"),
        (lambda m: m.store("out", torch.zeros(3, 2)), r"shape \[3, 2\] and torch.float64"),
        (lambda m: m.store("out", torch.zeros(2, 2).double(), 5), "no rows 5 to 6"),
    ],
)
def test_what_is_not_there_is_refused(use, message):
    with pytest.raises(ValueError, match=message):
        use(memory_of(6, 2))


def test_traffic_is_counted_by_name_and_direction():
    memory = memory_of(6, 2)
    memory.load("q", 1, 3)
    memory.load("q")
    memory.store("out", torch.ones(2, 2).double(), 4)
    assert (memory.loaded, memory.stored) == ({"q": 8 * 2 * 8}, {"out": 2 * 2 * 8})
    assert memory.moved == 8 * 20 and memory["out"].sum() == 4
