"""fp8 rounds like torch's own types, and each kind of scale holds what it can."""

import pytest
import torch

from mini_dist.strategies.fp8 import (
    E4M3,
    E5M2,
    DelayedScale,
    as_fp8,
    fp8_matmul,
    per_block,
    per_tensor,
    scale_for,
    unscaled,
)

FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2])


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@FORMATS
def test_every_number_of_the_format_is_left_as_it_is(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()]
    assert torch.equal(as_fp8(codes, 1.0, dtype), codes)
    assert len(codes.unique()) == {E4M3: 253, E5M2: 247}[dtype]


@FORMATS
def test_rounding_is_to_the_nearest(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()]
    x = numbers(500)
    nearest = (x[:, None] - codes).abs().amin(-1)
    assert torch.equal((as_fp8(x, 1.0, dtype) - x).abs(), nearest)


@FORMATS
def test_what_does_not_fit_becomes_the_largest(dtype):
    most = torch.finfo(dtype).max
    assert as_fp8(torch.tensor([1e6, -1e6]), 1.0, dtype).tolist() == [most, -most]


@FORMATS
def test_a_scale_is_a_power_of_two_that_just_fits(dtype):
    largest = torch.tensor([1e-6, 0.3, 1.0, 448.0, 1e5])
    scale = scale_for(largest, dtype)
    assert torch.equal(torch.log2(scale).round(), torch.log2(scale))
    assert (scale * largest <= torch.finfo(dtype).max).all()
    assert (2 * scale * largest > torch.finfo(dtype).max).all()


def test_zeros_stay_zeros():
    x = torch.zeros(2, 128)
    assert torch.equal(per_tensor(x), x) and torch.equal(per_block(x), x)


def test_small_numbers_need_a_scale():
    x = 1e-4 * numbers(4, 128)
    assert not unscaled(x).any()
    assert ((per_tensor(x) - x).norm() / x.norm()).item() < 0.04


def test_a_scale_does_not_change_the_digits():
    x = numbers(64, 128).clamp(-3, 3)
    for factor in (2.0**-20, 2.0**20):
        assert torch.equal(per_tensor(factor * x), factor * per_tensor(x))


def test_one_large_number_spoils_its_own_block_only():
    x = numbers(2, 256)
    x[0, 0] = 1e6
    assert not per_tensor(x)[1].any() or (per_tensor(x)[1] - x[1]).abs().max() > 0.5
    error = (per_block(x) - x).abs()
    assert error[0, 128:].max() < 0.2 and error[1].max() < 0.2 and error[0, 1:128].max() > 0.5


def test_blocks_of_a_whole_row_are_scales_of_a_row():
    x = numbers(3, 128)
    rows = torch.stack([per_tensor(row) for row in x])
    assert torch.equal(per_block(x), rows)


def test_rows_must_be_whole_blocks():
    with pytest.raises(ValueError, match="rows of 100 numbers are no whole blocks of 128"):
        per_block(numbers(2, 100))


def test_a_delayed_scale_is_that_of_earlier_steps():
    scale = DelayedScale(history=2)
    first, x = numbers(50), numbers(50, seed=1)
    assert torch.equal(scale(first), per_tensor(first))  # there is no history yet
    assert torch.equal(scale(100 * x), as_fp8(100 * x, scale_for(first.abs().amax(), E4M3)))
    assert torch.equal(scale(x), as_fp8(x, scale_for((100 * x).abs().amax(), E4M3)))
    scale(x)
    assert torch.equal(scale(x), per_tensor(x))  # the history has no large values now


def test_a_product_of_rounded_inputs():
    x, w = numbers(5, 128), numbers(7, 128, seed=1)
    assert torch.equal(fp8_matmul(x, w, per_block), per_block(x) @ per_block(w).T)
    assert torch.equal(fp8_matmul(x, w), per_tensor(x) @ per_tensor(w).T)
