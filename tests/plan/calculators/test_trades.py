"""Measure two trade-offs of lesson 22: pipeline or ZeRO-3, and ZeRO-2 inside a pipeline."""

import pytest

from mini_dist import ModelConfig, launch
from mini_dist.plan.calculators import crossing_tokens, num_parameters, step_volume
from mini_dist.plan.config import Layout


def one_step(config, layout, group):
    """Return the loss of one step of `layout` on noise that is the same on all ranks."""
    import torch

    from mini_dist import parallelize

    made = parallelize(config, layout, group, lambda p: torch.optim.AdamW(p, lr=1e-3))
    noise = torch.Generator().manual_seed(0)
    size = layout.global_batch_size, config.seq_len + 1
    rows = torch.randint(0, config.vocab_size, size, generator=noise)
    share = layout.global_batch_size // layout.dp
    mine = rows[made.mesh.index("dp") * share :][:share]
    return made.step(mine[:, :-1], mine[:, 1:]).loss.item()


def sent(run, axis):
    """Return the bytes that all ranks send along `axis` in the step."""
    phases = ("forward", "backward", "step")
    return sum(run.ledger.total_bytes(axis=axis, phase=phase) for phase in phases)


SMALL = ModelConfig(num_layers=4, d_model=32, num_heads=4, seq_len=32)
NUMBERS = 100  # bytes of losses and norms, which the formulas leave out


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_pipeline_sends_less_than_zero_3_up_to_the_crossing(ranks):
    """Test 16 sequences below and above it; the bytes match both formulas."""
    crossing = crossing_tokens(SMALL, "course") / SMALL.seq_len  # in sequences
    bytes_, losses = {}, {}
    for sequences in (int(crossing) // 4 * 4 - 16, int(crossing) // 4 * 4 + 16):
        each = sequences // ranks
        layouts = {
            "dp": Layout(dp=ranks, zero=3, micro_batch_size=each),
            "pp": Layout(pp=ranks, micro_batch_size=each, num_micro_batches=ranks),
        }
        for axis, layout in layouts.items():
            run = launch(one_step, ranks, (SMALL, layout))
            said = [step_volume(SMALL, layout, "course", pp_rank=k) for k in range(layout.pp)]
            formula = layout.dp * sum(volume[axis] for volume in said)
            assert formula <= sent(run, axis) < formula + NUMBERS
            bytes_[axis, sequences < crossing], losses[axis] = sent(run, axis), run.results[0]
        assert losses["dp"] == pytest.approx(losses["pp"], abs=1e-5)
    assert bytes_["pp", True] < bytes_["dp", True] and bytes_["pp", False] > bytes_["dp", False]
    assert abs(bytes_["dp", True] - bytes_["dp", False]) < NUMBERS  # regardless of the tokens


def test_the_crossing_of_a_large_model_is_3_p_over_2_d_tokens():
    """It holds if embedding and head are small and gradients travel as wide as activations."""
    config = ModelConfig(num_layers=64, d_model=512, vocab_size=256)
    rough = 3 * num_parameters(config) / (2 * config.d_model)
    assert crossing_tokens(config, "course") == pytest.approx(rough, rel=0.01)


GRID = ModelConfig(num_layers=4, d_model=64, num_heads=4, seq_len=32)


@pytest.mark.parametrize("m", [2, 4])
def test_zero_2_in_a_pipeline_sends_m_plus_1_halves_of_zero_1_s_bytes_and_learns_the_same(m):
    losses, ratio = [], {}
    for zero in (1, 2):
        layout = Layout(pp=2, dp=2, tp=2, sequence_parallel=True, zero=zero, num_micro_batches=m)
        run = launch(one_step, 8, (GRID, layout))
        said = [step_volume(GRID, layout, "course", pp_rank=k)["dp"] for k in range(2)]
        formula = 4 * sum(said)  # each stage has 2 x 2 ranks
        assert formula <= sent(run, "dp") < formula + NUMBERS
        losses.append(run.results[0])
        ratio[zero] = sent(run, "dp")
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert ratio[2] / ratio[1] == pytest.approx((m + 1) / 2, rel=1e-3)
