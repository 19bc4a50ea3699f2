"""The explorer of lesson 07: figure 1 of the ZeRO paper, computed by the calculators."""

import pytest

from mini_dist.course.draw.svg import Line
from mini_dist.course.lab import ParameterError
from mini_dist.course.widgets import zero, zero_figure
from mini_dist.plan.calculators import hardware, model_states


def test_it_opens_with_the_papers_figure():
    explorer = zero_figure()
    assert repr(explorer.picture) == (
        "7.5 billion parameters on 64 ranks: "
        "data parallel 120 GB, ZeRO-1 31.4 GB, ZeRO-2 16.6 GB, ZeRO-3 1.88 GB"
    )
    assert "16.64" in explorer.html and "Rajbhandari et al. 2020" in explorer.html


@pytest.mark.parametrize("optimizer", zero.OPTIMIZERS)
@pytest.mark.parametrize("ranks", [1, 3, 64])
def test_the_largest_model_just_fits(optimizer, ranks):
    memory, each = hardware("h100").device.memory_bytes, zero.OPTIMIZERS[optimizer]
    for stage, said in enumerate(zero.largest(memory, ranks, each)):
        billions = float(said.removesuffix(" billion").replace(",", ""))
        for change, fits in ((-0.06, True), (0.06, False)):
            states = model_states(max(billions + change, 0) * 1e9, ranks, stage, *each)
            assert (states.total <= memory) == fits


def test_the_gpu_is_shown_where_it_is_a_limit_and_not_far_out_of_sight():
    def limits(**start):
        (panel,) = zero_figure(**start).picture.panels
        return [mark.points[0][0] for mark in panel.marks if isinstance(mark, Line)]

    assert limits(billions=0.5, gpu="h200") == []
    assert limits() == [hardware("a100-80").device.memory_bytes / 1e9]
    with pytest.raises(ParameterError, match="ranks=0 is out of range"):
        zero_figure(ranks=0)
