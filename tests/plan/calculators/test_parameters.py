"""Parameter counts match the released models and torch's own count exactly."""

import pytest

from mini_dist.plan.calculators import (
    MODELS,
    from_hugging_face,
    model,
    num_active_parameters,
    num_parameters,
    parameter_counts,
    parameters_of_rank,
    split_layers,
)
from mini_dist.plan.config import Layout, ModelConfig


def vision_of_gemma_3(D):
    """Count SigLIP at 896 pixels (27 layers of 1152, linear biases) and the projector to D."""
    W, F = 1152, 4304
    linears = 4 * (W * W + W) + (W * F + F) + (F * W + W)
    tower = (14 * 14 * 3 * W + W) + (896 // 14) ** 2 * W + 27 * (linears + 4 * W) + 2 * W
    return tower + W * D + W


def vision_of_llama_4(D):
    """Count 34 layers of 1408 at 336 pixels, an adapter over 4 patches, and the projector."""
    W, F, A = 1408, 5632, 4096
    linears = 4 * (W * W + W) + (W * F + F) + (F * W + W)
    tower = 14 * 14 * 3 * W + W + ((336 // 14) ** 2 + 1) * W + 34 * (linears + 4 * W) + 4 * W
    return tower + 4 * W * A + A * A + A * D


def one_more_token_of_glm():
    """Count layer 92: experts, norms and projection of both inputs, own embedding and head."""
    D, F, V, queries, keys = 5120, 1536, 151552, 96 * 128, 8 * 128
    attention = 2 * D * queries + 2 * D * keys + queries + 2 * keys + 2 * 128
    layer = attention + (160 + 1) * 3 * D * F + 160 * D + 160 + 2 * D
    return layer + 2 * D * D + 3 * D + 2 * V * D


# From the released checkpoints: their model cards, or the sums over their weight files.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "bloom-176b": 176_247_271_424,
    # 671,026,419,200 with the router's 58 * 256 balance offsets, which no gradient trains
    "deepseek-v3": 671_026_419_200 - 58 * 256,
    # Half of the bf16 bytes in model.safetensors.index.json.
    "qwen2.5-7b": 15_231_233_024 // 2,
    "qwen2.5-72b": 145_412_407_296 // 2,
    "qwen3-8b": 16_381_470_720 // 2,
    "qwen3-32b": 65_524_246_528 // 2,
    "qwen3-30b-a3b": 61_064_245_248 // 2,
    "qwen3-235b-a22b": 470_187_269_120 // 2,
    # Sums over the weight files; each four-bit value counts as one number.
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    # Sums without what our presets leave out: the router's offsets, the module that predicts one
    # more token, and the vision part.
    "kimi-k2": 1_026_408_232_448 - 60 * 384,
    "glm-4.5": 358_337_791_296 - one_more_token_of_glm() - 89 * 160,
    "llama4-scout": 108_641_793_536 - vision_of_llama_4(5120),
    "gemma3-4b": 4_300_079_472 - vision_of_gemma_3(2560),
    "gemma3-12b": 12_187_325_040 - vision_of_gemma_3(3840),
    "gemma3-27b": 27_432_406_640 - vision_of_gemma_3(5376),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_exactly_the_published_number_of_parameters(name):
    assert num_parameters(model(name)) == PUBLISHED[name]


def test_gpt3_has_the_parameters_of_its_shape():
    """No weights were released, so count 12 L D^2, biases, 50257 tokens and 2048 positions."""
    L, D = 96, 12288
    layer = 12 * D * D + 9 * D + 4 * D  # matrices; biases 3 + 1 + 4 + 1; two norms
    assert num_parameters(model("gpt3-175b")) == L * layer + 2 * D + (50257 + 2048) * D


def test_active_parameters_leave_out_the_experts_a_token_does_not_visit():
    config = model("mixtral-8x7b")
    one_expert = 3 * config.d_model * config.d_expert
    assert num_parameters(config) - num_active_parameters(config) == 32 * 6 * one_expert
    assert round(num_active_parameters(model("deepseek-v3")) / 1e9, 1) == 37.6  # "37B activated"
    assert num_active_parameters(model("gpt2")) == num_parameters(model("gpt2"))


@pytest.mark.parametrize(
    ("name", "ends", "printed", "digits"),
    [  # ends: how many of embedding and head the report leaves out
        ("gpt-oss-20b", 1, 3.61, 2),
        ("gpt-oss-120b", 1, 5.13, 2),
        ("qwen3-235b-a22b", 0, 22, None),
        ("glm-4.5", 2, 32, None),
        ("llama4-scout", 0, 17, None),
    ],
)
def test_active_parameters_are_those_of_the_report(name, ends, printed, digits):
    config = model(name)
    active = num_active_parameters(config) - ends * config.vocab_size * config.d_model
    assert round(active / 1e9, digits) == printed


@pytest.mark.parametrize(("size", "printed"), [(4, 3209), (12, 10_759), (27, 25_600)])
def test_gemma_3_has_the_parameters_of_its_report_besides_the_embedding(size, printed):
    """Gemma 3 technical report, table 1, in millions."""
    counts = parameter_counts(model(f"gemma3-{size}b"))
    assert round((counts.total - counts["embedding"]) / 1e6) == printed


CUTS = [
    ModelConfig(),
    ModelConfig(bias=False, activation="swiglu", norm="rmsnorm", num_kv_heads=2),
    ModelConfig(tied_embedding=True, positions="learned"),
    ModelConfig(bias=True, qkv_bias=False, num_layers=3),
    ModelConfig(num_experts=4, top_k=2, d_expert=64, num_shared_experts=2, first_dense_layers=1),
]


@pytest.mark.parametrize("config", CUTS)
def test_the_inventory_has_as_many_numbers_as_the_course_s_gpt(config):
    torch_model = pytest.importorskip("mini_dist.model.gpt")
    assert num_parameters(config) == torch_model.GPT(config, device="meta").num_parameters()


@pytest.mark.parametrize("config", CUTS[:4])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_ranks_shards_add_up_to_the_model(config, tp):
    """Cut weights count once, whole weights once per tp rank, and a tied head once more."""
    layout = Layout(pp=2, tp=tp)
    held = tp * sum(parameters_of_rank(config, layout, rank).total for rank in range(2))
    whole = sum(w.numel for w in _whole(config))
    copies = config.vocab_size * config.d_model if config.tied_embedding else 0
    assert held == num_parameters(config) + (tp - 1) * whole + copies


def _whole(config):
    """Return weights that every tp rank holds: norms, biases of row-cut matrices, positions."""
    from mini_dist.plan.calculators.parameters import layer_weights, outer_weights

    layers = layer_weights(config) * config.num_layers
    everything = outer_weights(config, "first") + layers + outer_weights(config, "last")
    whole = [weight for weight in everything if weight.cut == "none"]
    assert {weight.name for weight in whole} <= {
        "position_embedding",
        "attention_norm",
        "ffn_norm",
        "final_norm",
        "out_bias",
        "down_bias",
    }
    return whole


def test_experts_are_spread_by_ep_and_cut_by_tp():
    config = ModelConfig(num_experts=8, top_k=2, d_expert=128)
    one, spread = (parameters_of_rank(config, Layout(dp=4, ep=ep, tp=1)) for ep in (1, 4))
    assert spread.dense == one.dense
    assert spread.experts * 4 == one.experts > 0


def test_experts_that_span_tp_are_cut_by_etp_only():
    config = ModelConfig(num_experts=8, top_k=2, d_expert=128, num_shared_experts=1, bias=False)
    spanning = Layout(dp=2, tp=4, ep=4, etp=2, sequence_parallel=True)
    one, cut = parameters_of_rank(config, Layout()), parameters_of_rank(config, spanning)
    assert cut.experts == one.experts / 8 and spanning.edp == 1
    assert cut.dense == parameters_of_rank(config, Layout(tp=4)).dense


def test_kv_heads_fewer_than_tp_ranks_are_held_whole():
    config = ModelConfig(num_kv_heads=2, bias=False)
    two, eight = (parameters_of_rank(config, Layout(tp=tp)).total for tp in (2, 8))
    kv = 2 * config.d_model * config.head_dim * config.num_layers  # one k and one v head per layer
    whole = sum(weight.numel for weight in _whole(config))
    assert eight - kv - whole == (two - kv - whole) / 4


def test_bloom_s_70_layers_over_12_stages_leave_room_for_the_embedding():
    assert split_layers(70, 12) == [5, *[6] * 10, 5]
    assert split_layers(7, 2) == [4, 3] and split_layers(8, 4) == [2, 2, 2, 2]
    assert all(sum(split_layers(n, p)) == n for n in range(1, 40) for p in range(1, n + 1))


def test_counts_come_with_their_formulas():
    counts = parameter_counts(model("deepseek-v3"))
    assert counts["router"] == 58 * 7168 * 256
    assert counts["experts"] == 58 * 256 * 3 * 7168 * 2048
    assert all(line.formula and line.source for line in counts)
    assert "experts" in str(counts)


LLAMA3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
QWEN2_7B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
QWEN3_MOE_30B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "n_inner": None,
}


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        (LLAMA3_8B, PUBLISHED["llama3-8b"]),
        (QWEN2_7B, 7_615_616_512),
        (QWEN3_MOE_30B, 30_532_122_624),
        (DEEPSEEK_V3, PUBLISHED["deepseek-v3"]),
        (GPT2, PUBLISHED["gpt2"]),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_a_hugging_face_config_gives_the_released_model(settings, count):
    seq_len = settings.get("n_positions", 4096)
    assert num_parameters(from_hugging_face(settings, seq_len)) == count


def test_a_hugging_face_config_is_read_from_a_file_or_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(__import__("json").dumps(LLAMA3_8B))
    read = from_hugging_face(LLAMA3_8B, 8192)
    assert from_hugging_face(tmp_path, 8192) == from_hugging_face(tmp_path / "config.json", 8192)
    assert from_hugging_face(str(tmp_path), 8192) == read


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "mamba"}, "model_type='mamba' is not a family"),
        ({"hidden_size": None}, "hidden_size=None decides the shape of the weights"),
        ({"attention_bias": True}, "attention_bias=True changes the weights"),
        ({"num_attention_heads": 7}, "num_heads=7 does not divide d_model=4096"),
    ],
)
def test_a_hugging_face_config_that_cannot_be_read_says_why(changes, says):
    with pytest.raises(ValueError) as error:
        from_hugging_face({**LLAMA3_8B, **changes}, 4096)
    assert says in str(error.value)


def test_files_that_are_no_config_say_so(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        from_hugging_face(tmp_path / "nothing.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        from_hugging_face(tmp_path)


def test_an_unknown_model_names_its_neighbours():
    with pytest.raises(ValueError, match="'llama3-7b' is not known: did you mean .*llama3-8b"):
        model("llama3-7b")
    with pytest.raises(ValueError, match="did you mean llama4-scout"):
        model("llama4-maverick")
    assert set(PUBLISHED) < set(MODELS)
