"""The families of Hugging Face models that we can count, and the defaults of their config.json.

`save_pretrained` leaves out keys that equal the default of their class, above all in a nested
text_config. So a key that is missing has a value, and here it is. Source of DEFAULTS: the
configuration classes of transformers 5.23.0 (November 2026; 5.24.0 has the same ones).
elsewhere/in_transformers.py builds models from all of these keys, and keeps the counts for tests.
"""

from __future__ import annotations

VERSION = "5.23.0"

_LLAMA = {"activation": "swiglu", "norm": "rmsnorm", "positions": "rotary", "bias": False}
_GEMMA = {**_LLAMA, "norms_a_layer": 4}  # gated by gelu
_QWEN2 = {**_LLAMA, "qkv_bias": True}
_QWEN3 = {**_LLAMA, "qk_norm": True}
# model_type -> the fields of ModelConfig that no key of config.json says.
FAMILIES: dict[str, dict] = {
    "gpt2": {"positions": "learned"},
    "gpt_neox": {"positions": "rotary"},
    "bloom": {"positions": "alibi", "embedding_norm": True},
    "starcoder2": {"positions": "rotary"},
    "llama": _LLAMA,
    "granite": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "phi3": _LLAMA,
    "qwen2": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_moe": {**_LLAMA, "num_shared_experts": 1, "shared_gate": True},
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen3_vl_moe_text": _QWEN3,
    "gemma2": _GEMMA,
    "gemma3_text": {**_GEMMA, "qk_norm": True},
    "olmo2": {**_QWEN3, "qk_norm_whole": True},
    "llama4_text": {**_LLAMA, "num_shared_experts": 1},
    "gpt_oss": {**_LLAMA, "bias": True, "router_bias": True, "attention_sinks": True},
    "deepseek_v2": _LLAMA,
    "deepseek_v3": {**_LLAMA, "router": "sigmoid"},
}

NONE = "no default"  # The key decides a shape, and no class says what a config without it means.


def _sizes(vocab: int, hidden: int, ffn: int | None, layers: int, heads: int, reach: int) -> dict:
    """The sizes that nearly all families have, under the names that nearly all of them use."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": reach,
    }


_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "layer_types": None}
_DEEPSEEK = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128} | {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "moe_layer_freq": 1,  # read by DeepSeek's own code next to its checkpoints, not by transformers
}
# The keys of each family that decide the weights, or which layers see a window, with the value of
# a key that is left out. None is derived from other keys.
DEFAULTS: dict[str, dict] = {
    "gpt2": {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "tie_word_embeddings": True,
        "add_cross_attention": False,
    },
    "gpt_neox": _sizes(50432, 6144, 24576, 44, 64, 2048)
    | {"tie_word_embeddings": False, "attention_bias": True},
    "bloom": {
        "vocab_size": 250880,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 8,
        "seq_length": NONE,  # ALiBi has no reach, and only BLOOM's own files say a length
        "tie_word_embeddings": True,
    },
    "starcoder2": _sizes(49152, 3072, 12288, 30, 24, 4096)
    | {"num_key_value_heads": 2, "head_dim": None, "tie_word_embeddings": True, "use_bias": True}
    | {"sliding_window": None},
    "llama": _sizes(32000, 4096, 11008, 32, 32, 2048)
    | {"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False}
    | {"attention_bias": False, "mlp_bias": False},
    "granite": _sizes(32000, 4096, 11008, 32, 32, 2048)
    | {"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False}
    | {"attention_bias": False, "mlp_bias": False},
    "mistral": _sizes(32000, 4096, 14336, 32, 32, 131072)
    | {"num_key_value_heads": 8, "head_dim": None, "tie_word_embeddings": False}
    | {"sliding_window": 4096},
    "mixtral": _sizes(32000, 4096, 14336, 32, 32, 131072)
    | {"num_key_value_heads": 8, "head_dim": None, "tie_word_embeddings": False}
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "phi3": _sizes(32064, 3072, 8192, 32, 32, 4096)
    | {"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False}
    | {"sliding_window": None},
    "qwen2": _sizes(151936, 4096, 22016, 32, 32, 32768)
    | {"num_key_value_heads": 32, "head_dim": None, "tie_word_embeddings": False}
    | {**_QWEN_WINDOWS, "max_window_layers": 28},
    "qwen2_vl_text": _sizes(152064, 8192, 29568, 80, 64, 32768)
    | {"num_key_value_heads": 8, "tie_word_embeddings": NONE}  # (next to text_config, not in it)
    | {**_QWEN_WINDOWS, "max_window_layers": 80},
    "qwen2_5_vl_text": _sizes(152064, 8192, 29568, 80, 64, 32768)
    | {"num_key_value_heads": 8, "tie_word_embeddings": NONE}
    | {**_QWEN_WINDOWS, "max_window_layers": 80},
    "qwen2_moe": _sizes(151936, 2048, 5632, 24, 16, 32768)
    | {"num_key_value_heads": 16, "head_dim": None, "tie_word_embeddings": False, "qkv_bias": True}
    | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, **_SPARSE}
    | {"shared_expert_intermediate_size": 5632}
    | {**_QWEN_WINDOWS, "max_window_layers": 28},
    "qwen3": _sizes(151936, 4096, 22016, 32, 32, 32768)
    | {"num_key_value_heads": 32, "head_dim": 128, "tie_word_embeddings": False}
    | {"attention_bias": False, **_QWEN_WINDOWS, "max_window_layers": 28},
    "qwen3_vl_text": _sizes(151936, 4096, 22016, 32, 32, 128000)
    | {"num_key_value_heads": 32, "head_dim": 128, "tie_word_embeddings": NONE}
    | {"attention_bias": False},
    "qwen3_moe": _sizes(151936, 2048, 6144, 24, 32, 32768)
    | {"num_key_value_heads": 4, "head_dim": None, "tie_word_embeddings": False}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, **_SPARSE}
    | {"attention_bias": False, "use_sliding_window": False, "sliding_window": 4096},
    "qwen3_vl_moe_text": _sizes(151936, 2048, 5632, 24, 16, 128000)
    | {"num_key_value_heads": 16, "head_dim": None, "tie_word_embeddings": NONE}
    | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, **_SPARSE}
    | {"attention_bias": False},
    "gemma2": _sizes(256000, 2304, 9216, 26, 8, 8192)
    | {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
    | {"attention_bias": False, "sliding_window": 4096, "layer_types": None},
    "gemma3_text": _sizes(262208, 2304, 9216, 26, 8, 131072)
    | {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
    | {"attention_bias": False, "sliding_window": 4096, "layer_types": None}
    | {"sliding_window_pattern": 6, "use_bidirectional_attention": False},
    "olmo2": _sizes(50304, 4096, 11008, 32, 32, 2048)
    | {
        "num_key_value_heads": None,
        "head_dim": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
    },
    "llama4_text": _sizes(202048, 5120, 8192, 48, 40, 131072)
    | {"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
    | {"num_local_experts": 16, "num_experts_per_tok": 1, "intermediate_size_mlp": 16384}
    | {"attention_bias": False, "interleave_moe_layer_step": 1, "moe_layers": None}
    | {"attention_chunk_size": 8192, "layer_types": None}
    | {"no_rope_layers": None, "no_rope_layer_interval": 4},
    "gpt_oss": _sizes(201088, 2880, 2880, 36, 64, 131072)
    | {"num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": False}
    | {"num_local_experts": 128, "num_experts_per_tok": 4, "attention_bias": True}
    | {"sliding_window": 128, "layer_types": None},
    "deepseek_v2": _sizes(102400, 4096, 11008, 32, 32, 2048)
    | {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407}
    | {"num_experts_per_tok": NONE, "first_k_dense_replace": 0, "mlp_bias": False, **_DEEPSEEK},
    "deepseek_v3": _sizes(129280, 7168, 18432, 61, 128, 4096)
    | {"n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048}
    | {"num_experts_per_tok": 8, "first_k_dense_replace": 3, **_DEEPSEEK},
}
# Second names that a family's class reads: {name: the name in DEFAULTS}.
SECOND_NAMES: dict[str, dict[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "bloom": {
        "n_embed": "hidden_size",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "mixtral": {"num_experts": "num_local_experts"},
    "gpt_oss": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "qwen3_vl_moe_text": {"num_local_experts": "num_experts"},
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts"},
}
# The field of ModelConfig that a key says. Llama 4 has names of its own for two of them, below.
FIELDS = {
    "vocab_size": "vocab_size",
    **dict.fromkeys(("hidden_size", "n_embd"), "d_model"),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), "num_layers"),
    **dict.fromkeys(("num_attention_heads", "n_head"), "num_heads"),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "seq_length"), "seq_len"),
    "num_key_value_heads": "num_kv_heads",
    **dict.fromkeys(("head_dim", "qk_nope_head_dim"), "head_dim"),
    **dict.fromkeys(("intermediate_size", "n_inner"), "d_ffn"),
    "tie_word_embeddings": "tied_embedding",
    "qkv_bias": "qkv_bias",
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), "num_experts"),
    "num_experts_per_tok": "top_k",
    "n_shared_experts": "num_shared_experts",
    "moe_intermediate_size": "d_expert",
    "shared_expert_intermediate_size": "d_shared",
    "first_k_dense_replace": "first_dense_layers",
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "qk_rope_head_dim": "rope_head_dim",
    "v_head_dim": "v_head_dim",
}
LLAMA_4_FIELDS = {"intermediate_size": "d_expert", "intermediate_size_mlp": "d_ffn"}
# Keys that say which layers see a window; they do not change the weights.
WINDOW_SIZES = (
    *("sliding_window", "attention_chunk_size", "max_window_layers", "sliding_window_pattern"),
    "no_rope_layer_interval",
)
WINDOWS = (*WINDOW_SIZES, "use_sliding_window", "layer_types", "no_rope_layers")
# A JSON null here means: as many as there are heads, no compression, no window. Elsewhere a null is
# accepted only if it is the default.
MAY_BE_NULL = ("num_key_value_heads", "q_lora_rank", *WINDOWS)
