"""ModelConfig and Layout: derived sizes, and a one-sentence error for every wrong size."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from mini_dist.plan.config import Layout, ModelConfig


def test_the_default_is_a_small_gpt_on_bytes():
    config = ModelConfig()
    assert config.vocab_size == 256
    assert (config.num_kv_heads, config.head_dim, config.d_ffn) == (8, 32, 1024)


def test_fields_left_out_follow_the_others():
    config = ModelConfig(d_model=512, num_heads=4, activation="swiglu")
    assert config.num_kv_heads == 4 and config.head_dim == 128 and config.v_head_dim == 128
    assert config.d_ffn == 1408  # 8/3 * 512 = 1365.3, rounded up to a multiple of 64
    assert config.d_expert == config.d_ffn
    assert config.qkv_bias is True and ModelConfig(bias=False).qkv_bias is False


def test_replace_derives_again_what_was_derived_and_keeps_what_was_given():
    given = ModelConfig(d_ffn=100).replace(d_model=512)
    assert given.head_dim == 64 and given.d_ffn == 100
    assert ModelConfig().replace(d_model=512).d_ffn == 2048
    assert dataclasses.replace(ModelConfig(), d_model=512).d_ffn == 1024  # why replace() exists


def test_configs_are_values():
    assert ModelConfig() == ModelConfig(num_kv_heads=8) and hash(Layout()) == hash(Layout(pp=1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelConfig().d_model = 3


def test_numpy_integers_become_plain_ones():
    assert type(ModelConfig(d_model=np.int64(64), num_heads=np.int32(2)).d_model) is int


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"d_model": 0}, "d_model=0 is too small: give 1 or more"),
        ({"d_model": 2.5}, "d_model=2.5 is not a whole number"),
        ({"num_layers": True}, "num_layers=True is not a whole number"),
        ({"num_layers": "4"}, "num_layers='4' is not a whole number"),
        ({"num_heads": 7}, "num_heads=7 does not divide d_model=256: give 8 heads"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 does not divide num_heads=8"),
        ({"head_dim": 33}, "head_dim=33 is odd"),
        ({"activation": "relu"}, "activation='relu' is not known: give one of 'gelu', 'swiglu'"),
        ({"norm": None}, "norm=None is not a string"),
        ({"bias": 1}, "bias=1 is not True or False"),
        ({"dropout": 1.0}, "dropout=1.0 is not a probability below 1"),
        ({"dropout": float("nan")}, "dropout=nan is not"),
        ({"top_k": 2}, "top_k=2 needs experts"),
        ({"num_experts": 4}, "top_k=0 is not between 1 and num_experts=4"),
        ({"num_experts": 4, "top_k": 5}, "top_k=5 is not between"),
        ({"num_experts": 4, "top_k": 1, "first_dense_layers": 5}, "first_dense_layers=5 is more"),
        ({"q_lora_rank": 8}, "q_lora_rank=8 belongs to latent attention"),
        ({"kv_lora_rank": 8, "rope_head_dim": 3}, "rope_head_dim=3 is odd"),
        ({"kv_lora_rank": 8, "rope_head_dim": 4, "num_kv_heads": 2}, "has no meaning with latent"),
    ],
)
def test_a_wrong_model_is_refused_in_one_sentence(changes, says):
    with pytest.raises(ValueError) as error:
        ModelConfig(**changes)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_layers_with_experts():
    config = ModelConfig(num_experts=4, top_k=2, first_dense_layers=1)
    assert [config.is_moe_layer(layer) for layer in range(4)] == [False, True, True, True]
    assert config.num_moe_layers == 3 and ModelConfig().num_moe_layers == 0


def test_a_layout_counts_ranks_sequences_and_stages():
    layout = Layout(
        pp=2,
        dp=3,
        cp=2,
        tp=4,
        micro_batch_size=5,
        num_micro_batches=4,
        schedule="interleaved",
        num_chunks=2,
    )
    assert layout.world_size == 48
    assert layout.global_batch_size == 3 * 5 * 4  # cp ranks share a sequence
    assert layout.num_stages == 4
    assert list(layout.axes) == ["pp", "dp", "cp", "tp"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tp": 0}, "tp=0 is too small"),
        ({"zero": 4}, "zero=4 is not known: give one of 0, 1, 2, 3"),
        ({"zero": True}, "zero=True is not a whole number"),
        ({"ep": 3, "dp": 4}, "ep=3 does not divide dp*cp=4: 2 would"),
        (
            {"ep": 8, "dp": 2, "tp": 4},
            "ep=8 does not divide dp*cp=2: 2 would, or etp=1 with sequence_parallel=True.",
        ),
        (
            {"ep": 4, "dp": 2, "tp": 4, "etp": 3, "sequence_parallel": True},
            "etp=3 does not divide tp=4: 2 would",
        ),
        (
            {"ep": 8, "dp": 2, "tp": 4, "etp": 2, "sequence_parallel": True},
            "ep=8 does not divide dp*cp*tp/etp=4: 4 would",
        ),
        ({"tp": 4, "etp": 2}, "etp=2 below tp=4 needs tp ranks with different tokens"),
        ({"tp": 4, "etp": 0}, "etp=0 is too small"),
        ({"recompute": "all"}, "recompute='all' is not known"),
        ({"schedule": "2f2b"}, "schedule='2f2b' is not known"),
        ({"num_chunks": 2, "pp": 2}, "num_chunks=2 needs schedule='interleaved'"),
        ({"num_chunks": 2, "schedule": "interleaved"}, "num_chunks=2 needs a pipeline"),
        ({"schedule": "zb_v", "pp": 2}, "num_chunks=1 does not fit schedule='zb_v'"),
    ],
)
def test_a_wrong_layout_is_refused_in_one_sentence(changes, says):
    with pytest.raises(ValueError) as error:
        Layout(**changes)
    assert says in str(error.value)


def test_experts_are_cut_as_tp_cuts_unless_etp_is_given():
    assert Layout(tp=4) == Layout(tp=4, etp=4) and Layout(dp=4, tp=4, ep=2).edp == 2
    assert Layout(tp=2, dp=2).replace(tp=4).etp == 4
    whole = Layout(tp=4, dp=2, ep=8, etp=1, sequence_parallel=True)
    assert whole.edp == 1 and whole.replace(tp=2, dp=4).etp == 1


@pytest.mark.parametrize(
    ("layout", "config", "says"),
    [
        ({"tp": 3}, {}, "tp=3 does not divide num_heads=8"),
        ({"tp": 8}, {"d_ffn": 100}, "tp=8 does not divide d_ffn=100"),
        ({"cp": 3}, {}, "cp=3 does not divide seq_len=128"),
        ({"tp": 4, "sequence_parallel": True}, {"seq_len": 6}, "cp*tp=4 does not divide seq_len=6"),
        ({"dp": 2, "ep": 2}, {}, "ep=2 needs a model with experts"),
        ({"dp": 4, "ep": 4}, {"num_experts": 6, "top_k": 1}, "ep=4 does not divide num_experts=6"),
        (
            {"tp": 2, "etp": 1, "sequence_parallel": True},
            {},
            "etp=1 needs a model with experts: leave it out",
        ),
        (
            {"tp": 4, "etp": 2, "sequence_parallel": True},
            {"num_experts": 4, "top_k": 1, "d_expert": 9},
            "etp=2 does not divide d_expert=9",
        ),
        ({"pp": 5}, {}, "pp*num_chunks=5 is more than num_layers=4"),
    ],
)
def test_a_layout_that_cannot_cut_the_model_is_refused(layout, config, says):
    with pytest.raises(ValueError) as error:
        Layout(**layout).check(ModelConfig(**config))
    assert says in str(error.value)


def test_kv_heads_may_be_fewer_than_tp_ranks():
    """They are then copied, but a tp that would cut them unevenly is refused."""
    Layout(tp=8).check(ModelConfig(num_kv_heads=2))
    with pytest.raises(ValueError, match="num_kv_heads"):
        Layout(tp=4).check(ModelConfig(num_heads=24, num_kv_heads=6, head_dim=8, d_ffn=1024))


def test_config_and_calculators_import_no_torch():
    code = (
        "import sys, mini_dist.plan.config, mini_dist.plan.calculators.published;"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
