"""All ranks compute one norm and one scale for the whole model, whichever part they hold."""

import pytest
import torch
from torch import nn

from mini_dist import launch
from mini_dist.collectives.mesh import Mesh
from mini_dist.strategies.grad_norm import clip_, grad_norm


def everything():
    """Return a model's gradients: one replicated, one sharded over two ranks, one over all."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(12, generator=generator) for _ in range(3)]


def parameter(grad):
    held = nn.Parameter(torch.zeros_like(grad))
    held.grad = grad.clone()
    return held


def norm_and_clip(max_norm, group):
    mesh = Mesh(group, dp=2, tp=2)
    replicated, over_tp, over_all = everything()
    mine = [
        parameter(replicated),
        parameter(over_tp.chunk(2)[mesh.index("tp")]),
        parameter(over_all.chunk(4)[group.rank()]),
    ]
    unused = nn.Parameter(torch.zeros(3))
    norm = grad_norm([mine[0], unused], {mesh["tp"]: [mine[1]], group: [mine[2]]})
    clip_([*mine, unused], norm, max_norm)
    return norm, [held.grad for held in mine], unused.grad


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_is_that_of_the_whole_model_on_every_rank(max_norm):
    whole = [parameter(grad) for grad in everything()]
    expected = torch.nn.utils.clip_grad_norm_(whole, max_norm)
    for rank, (norm, grads, unused) in enumerate(launch(norm_and_clip, 4, (max_norm,)).results):
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(grads[0], whole[0].grad)
        torch.testing.assert_close(grads[1], whole[1].grad.chunk(2)[rank % 2])
        torch.testing.assert_close(grads[2], whole[2].grad.chunk(4)[rank])
        assert unused is None


def test_squares_of_bfloat16_are_summed_in_float32():
    held = parameter(torch.full((10_000,), 0.1, dtype=torch.bfloat16))
    exact = held.grad.double().norm()
    torch.testing.assert_close(grad_norm([held]).double(), exact, rtol=1e-5, atol=0)


def test_a_limit_that_clips_everything_is_refused():
    with pytest.raises(ValueError, match="max_norm=0 would clip everything"):
        clip_([], torch.tensor(1.0), 0)
