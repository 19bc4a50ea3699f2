"""Loss scaling follows torch's rule, and without it 16 bits lose small gradients."""

import pytest
import torch
from torch import nn

from mini_dist.strategies.precision import LossScaler, Precision
from mini_dist.strategies.train import update
from mini_dist.strategies.trainable import Trainable


def test_the_scale_goes_the_way_of_torchs_GradScaler():
    """Both scalers get equal gradients, some overflowing, and give equal scales and steps."""
    overflows = [False, False, True, True, False, False, False, True, False, False, False, False]
    scaler = LossScaler(scale=2.0**8, growth_interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    ours, reference = nn.Linear(2, 1), nn.Linear(2, 1)
    reference.load_state_dict(ours.state_dict())
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    their_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for overflow in overflows:
        x = torch.full((1, 2), float("inf") if overflow else 0.5)
        optimizer.zero_grad()
        (scaler.scale * ours(x).sum()).backward()
        norm, skipped = update(Trainable(ours), optimizer, scaler=scaler)
        assert skipped == overflow == (not norm.isfinite())

        their_optimizer.zero_grad()
        theirs.scale(reference(x).sum()).backward()
        theirs.step(their_optimizer)
        theirs.update()
        assert scaler.scale == theirs.get_scale()
        assert all(map(torch.equal, ours.parameters(), reference.parameters()))
    assert scaler.scale == 2.0**7


def test_a_small_gradient_vanishes_in_float16_and_survives_scaling():
    weight = nn.Parameter(torch.ones(1))
    small = 1e-8  # below half of the smallest float16, 6e-8
    for scale, survives in ((1.0, False), (2.0**16, True)):
        weight.grad = None
        with torch.autocast("cpu", torch.float16):
            out = weight[None] @ torch.ones(1, 1)  # a matrix product in float16
        (scale * small * out.float()).sum().backward()
        assert (weight.grad.item() != 0) == survives
        if survives:
            assert weight.grad.item() / scale == pytest.approx(small, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_taken_in_16_bits_and_parameters_stay_in_32(dtype):
    layer = nn.Linear(4, 4)
    precision = Precision(dtype, LossScaler() if dtype == torch.float16 else None)
    with precision.autocast("cpu"):
        out = layer(torch.ones(1, 4))
    assert out.dtype == dtype
    out.sum().backward()
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Precision(torch.float16), "give a LossScaler"),
        (lambda: Precision(torch.float64), "no 16-bit float"),
        (lambda: LossScaler(scale=0), "scale=0 is too small"),
        (lambda: LossScaler(factor=1.0), "factor=1.0 is too small"),
        (lambda: LossScaler(growth_interval=0), "growth_interval=0 is too small"),
    ],
)
def test_what_cannot_work_is_refused(make, why):
    with pytest.raises(ValueError, match=why):
        make()
