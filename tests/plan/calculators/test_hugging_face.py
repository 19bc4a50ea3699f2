"""config.json of families with more features than Llama gives the released parameter counts.

Counts are the sums over the released safetensors (Hugging Face's "Model size", to the last digit).
Llama 4's is computed by hand, because its files also contain the vision part.
"""

import pytest

from mini_dist.plan.calculators import (
    Layout,
    from_hugging_face,
    megatron_arguments,
    model,
    num_active_parameters,
    num_parameters,
    parameter_counts,
    step_flops,
    step_time,
)


def settings(model_type, layers, hidden, heads, kv_heads, ffn, vocab, **more):
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        **more,
    }


RELEASED = {
    "gemma-2-2b": (settings("gemma2", 26, 2304, 8, 4, 9216, 256000, head_dim=256), 2_614_341_888),
    "gemma-2-9b": (settings("gemma2", 42, 3584, 16, 8, 14336, 256000, head_dim=256), 9_241_705_984),
    "gemma-3-1b": (
        settings("gemma3_text", 26, 1152, 4, 1, 6912, 262144, head_dim=256),
        999_885_952,
    ),
    "OLMo-2-1124-7B": (
        settings("olmo2", 32, 4096, 32, 32, 11008, 100352, tie_word_embeddings=False),
        7_298_617_344,
    ),
    "OLMo-2-1124-13B": (
        settings("olmo2", 40, 5120, 40, 40, 13824, 100352, tie_word_embeddings=False),
        13_716_198_400,
    ),
    "Qwen1.5-MoE-A2.7B": (
        settings("qwen2_moe", 24, 2048, 16, 16, 5632, 151936, tie_word_embeddings=False)
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
        | {"num_experts": 60, "num_experts_per_tok": 4, "decoder_sparse_step": 1},
        14_315_784_192,
    ),
    "gpt-oss-20b": (
        settings("gpt_oss", 24, 2880, 64, 8, 2880, 201088, head_dim=64, attention_bias=True)
        | {"num_local_experts": 32, "num_experts_per_tok": 4, "tie_word_embeddings": False},
        20_914_757_184,
    ),
    "gpt-oss-120b": (
        settings("gpt_oss", 36, 2880, 64, 8, 2880, 201088, head_dim=64, attention_bias=True)
        | {"num_local_experts": 128, "num_experts_per_tok": 4, "tie_word_embeddings": False},
        116_829_156_672,
    ),
    "pythia-6.9b": (
        settings("gpt_neox", 32, 4096, 32, None, 16384, 50432, attention_bias=True),
        6_857_302_016,
    ),
}
SCOUT = settings("llama4_text", 48, 5120, 40, 8, 8192, 202048, head_dim=128) | {
    "intermediate_size_mlp": 16384,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
}


@pytest.mark.parametrize("name", RELEASED)
def test_parameters_are_those_of_the_released_files(name):
    config, count = RELEASED[name]
    config = from_hugging_face(config, 4096)
    assert num_parameters(config) == count
    assert sum(line.value for line in parameter_counts(config)) == count
    assert step_time(config, Layout(), "h100").seconds > 0


def test_active_parameters_leave_out_the_experts_a_token_does_not_visit():
    config = from_hugging_face(RELEASED["gpt-oss-20b"][0], 4096)
    embedding = config.vocab_size * config.d_model
    assert num_active_parameters(config) - embedding == pytest.approx(3.61e9, rel=1e-3)


def test_llama_4_scout_counts_its_language_model():
    D, F, V, H = 5120, 8192, 202048, 128
    attention = 2 * D * 40 * H + 2 * D * 8 * H
    layer = attention + 3 * D * F * (16 + 1) + 16 * D + 2 * D
    config = from_hugging_face(SCOUT, 4096)
    assert num_parameters(config) == 48 * layer + 2 * V * D + D
    assert config.d_ffn == 16384 and config.d_expert == config.d_shared == F


# text_config of the released gemma-3-12b-it and -4b-it, whose files leave out default values.
GEMMA_3_12B = {
    "model_type": "gemma3_text",
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "sliding_window": 1024,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}
GEMMA_3_4B = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "sliding_window": 1024,
}


def test_a_size_that_is_left_out_is_the_default_of_its_family_and_is_named():
    with pytest.warns(UserWarning, match=r"we take head_dim=256: the defaults of gemma3_text in "):
        config = from_hugging_face(GEMMA_3_12B, 4096)
    assert num_parameters(config) == 11_766_034_176 and config.head_dim == 256
    assert (config.windowed_layers, config.window) == (40, 1024)
    with pytest.warns(UserWarning, match="vocab_size=262208, num_attention_heads=8, num_key_value"):
        assert num_parameters(from_hugging_face(GEMMA_3_4B, 4096)) == 3_880_263_168


@pytest.mark.filterwarnings("ignore:config.json leaves out")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt-oss-20b", RELEASED["gpt-oss-20b"][0]),
        ("gpt-oss-120b", RELEASED["gpt-oss-120b"][0]),
        ("llama4-scout", SCOUT),
        ("gemma3-4b", GEMMA_3_4B),
        ("gemma3-12b", GEMMA_3_12B),
    ],
)
def test_a_preset_is_what_its_config_says(name, settings):
    assert from_hugging_face(settings, model(name).seq_len) == model(name)


def test_keys_that_a_family_does_not_have_are_not_read():
    """qwen2 always has q, k and v biases, so it does not read attention_bias."""
    qwen = settings("qwen2", 24, 896, 14, 2, 4864, 151936, tie_word_embeddings=True)
    right = num_parameters(from_hugging_face(qwen, 4096))
    assert right == 494_032_768  # the released Qwen2.5-0.5B
    for more in ({"attention_bias": True}, {"mlp_bias": True}, {"num_experts": 8}):
        assert num_parameters(from_hugging_face(qwen | more, 4096)) == right


def test_qwen2_moe_without_its_biases():
    config = RELEASED["Qwen1.5-MoE-A2.7B"][0] | {"qkv_bias": False}
    assert num_parameters(from_hugging_face(config, 4096)) == 14_315_636_736


def test_a_length_that_is_given_need_not_stand_in_the_file():
    config, count = RELEASED["gemma-2-2b"]
    del (config := dict(config))["max_position_embeddings"]
    assert num_parameters(from_hugging_face(config, 2048)) == count
    bloom = {"model_type": "bloom", "hidden_size": 1024, "n_layer": 24, "n_head": 16}
    bloom |= {"vocab_size": 250880}
    assert num_parameters(from_hugging_face(bloom, 2048)) == 559_214_592  # bloom-560m
    assert from_hugging_face(bloom | {"n_embed": 1024, "seq_length": 2048}, 512).seq_len == 512
    with pytest.raises(ValueError, match="lacks seq_length, for which bloom has no default: give"):
        from_hugging_face(bloom)


def test_a_model_of_more_parts_says_what_to_give_instead():
    """The fix that the error proposes works."""
    parts = [
        ({"model_type": "gemma3"}, {}),
        ({"model_type": "gemma3"}, GEMMA_3_4B),
        ({"model_type": "llama4"}, {"num_hidden_layers": 2}),
        ({"model_type": "qwen3_vl", "tie_word_embeddings": True}, {"model_type": "qwen3_vl_text"}),
        ({"model_type": "mistral3"}, {"model_type": "mistral", "num_hidden_layers": 2}),
    ]
    for config, text in parts:
        config = config | {"text_config": text}
        with pytest.raises(ValueError, match="describes the language model only: give") as error:
            from_hugging_face(config, 4096)
        proposed = str(error.value).partition(": give ")[2].removesuffix(".").removesuffix(" alone")
        with pytest.warns(UserWarning, match="leaves out sizes"):
            assert from_hugging_face(eval(proposed, {"config": config}), 4096)
    with pytest.raises(ValueError, match="lacks tie_word_embeddings, .* stands beside text_config"):
        from_hugging_face({"model_type": "qwen3_vl_text"}, 4096)
    unknown = {"model_type": "idefics", "text_config": {"model_type": "bert"}}
    with pytest.raises(ValueError, match="model_type='bert' is not a family whose weights are"):
        from_hugging_face(unknown, 4096)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (SCOUT | {"interleave_moe_layer_step": 2}, "interleave_moe_layer_step=2 changes"),
        (RELEASED["pythia-6.9b"][0] | {"attention_bias": False}, "attention_bias=False changes"),
        (RELEASED["Qwen1.5-MoE-A2.7B"][0] | {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        (SCOUT | {"moe_layers": [1, 3]}, "moe_layers=[1, 3] changes the weights"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention=True changes"),
        ({"model_type": "gpt2", "n_embd": 8, "hidden_size": 9}, "n_embd=8 and hidden_size=9 are"),
        ({"model_type": "mistral", "sliding_window": "4k"}, "sliding_window='4k' is no number of"),
        ({"model_type": "deepseek_v2"}, "lacks num_experts_per_tok, for which deepseek_v2 has no"),
        (GEMMA_3_12B | {"head_dim": None}, "head_dim=None decides the shape of the weights: give"),
    ],
)
def test_what_cannot_be_said_is_refused_with_what_is_missing(config, says):
    with pytest.raises(ValueError) as error:
        from_hugging_face(config, 4096)
    assert says in str(error.value)


def test_the_reach_of_positions_is_no_training_sequence():
    config, _ = RELEASED["gemma-2-2b"]
    with pytest.warns(UserWarning, match="seq_len=8192 is how far the positions .* reach"):
        assert from_hugging_face(config).seq_len == 8192
    assert from_hugging_face(config, 2048).seq_len == 2048
    learned = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12}
    learned |= {"vocab_size": 50257, "n_positions": 1024}
    assert from_hugging_face(learned).seq_len == 1024
    with pytest.raises(ValueError, match="seq_len=512 is not the 1024 positions that are learned"):
        from_hugging_face(learned, 512)


def test_shared_experts_of_their_own_size_are_multiplied_and_a_spec_is_not_exported():
    config = from_hugging_face(RELEASED["Qwen1.5-MoE-A2.7B"][0], 4096)
    wider = config.replace(d_shared=2 * config.d_shared)
    more = step_flops(wider, 1).total - step_flops(config, 1).total
    assert more == 3 * 2 * 4096 * 24 * 3 * 2048 * 5632
    with pytest.raises(ValueError, match="shared_gate=True is said to Megatron-LM by"):
        megatron_arguments(config, Layout())


def test_windows_are_not_exported_without_a_word():
    config, _ = RELEASED["gemma-3-1b"]
    windowed = from_hugging_face(config | {"sliding_window": 512}, 4096)
    plain = {"norms_a_layer": 2, "qk_norm": False}
    with pytest.raises(ValueError, match="windowed_layers=22 does not say which layers these are"):
        megatron_arguments(windowed.replace(**plain), Layout())
    assert megatron_arguments(windowed.replace(**plain, windowed_layers=0, window=0), Layout())
