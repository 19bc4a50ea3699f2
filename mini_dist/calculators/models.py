"""Real models as a ModelConfig: by name, or from a Hugging Face config.json."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

from ..config import ModelConfig


def _gpt(
    num_layers: int, d_model: int, num_heads: int, vocab_size: int = 50257, seq_len: int = 1024
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        seq_len=seq_len,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        positions="learned",
        tied_embedding=True,
        dropout=0.1,
    )


def _llama(
    num_layers: int,
    d_model: int,
    num_heads: int,
    num_kv_heads: int,
    d_ffn: int,
    vocab_size: int,
    seq_len: int,
    **more,
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        seq_len=seq_len,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        d_ffn=d_ffn,
        activation="swiglu",
        norm="rmsnorm",
        bias=False,
        **more,
    )


MODELS = {
    # Radford et al. 2019 (the released checkpoints) and Brown et al. 2020, table 2.1.
    "gpt2": _gpt(12, 768, 12),
    "gpt2-medium": _gpt(24, 1024, 16),
    "gpt2-large": _gpt(36, 1280, 20),
    "gpt2-xl": _gpt(48, 1600, 25),
    "gpt3-175b": _gpt(96, 12288, 96, seq_len=2048),
    # Touvron et al. 2023, and the released config.json files.
    "llama2-7b": _llama(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672, 32000, 4096),
    # Llama 3 herd (2024), table 3; trained at 8192 tokens.
    "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128256, 8192),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672, 128256, 8192),
    "llama3-405b": _llama(126, 16384, 128, 8, 53248, 128256, 8192),
    # Jiang et al. 2024, table 1.
    "mixtral-8x7b": _llama(32, 4096, 32, 8, 14336, 32000, 4096, num_experts=8, top_k=2),
    # DeepSeek-V3 technical report, section 4.2, without the multi-token-prediction module.
    # The router's balance offsets (58 * 256) are not trained by gradients and not counted.
    "deepseek-v3": ModelConfig(
        vocab_size=129280,
        seq_len=4096,
        d_model=7168,
        num_layers=61,
        num_heads=128,
        head_dim=128,
        d_ffn=18432,
        activation="swiglu",
        norm="rmsnorm",
        bias=False,
        num_experts=256,
        top_k=8,
        num_shared_experts=1,
        d_expert=2048,
        first_dense_layers=3,
        router="sigmoid",
        kv_lora_rank=512,
        q_lora_rank=1536,
        rope_head_dim=64,
        v_head_dim=128,
    ),
    # BigScience Workshop 2022, table 3.
    "bloom-176b": ModelConfig(
        vocab_size=250880,
        seq_len=2048,
        d_model=14336,
        num_layers=70,
        num_heads=112,
        positions="alibi",
        embedding_norm=True,
        tied_embedding=True,
    ),
}


def model(name: str) -> ModelConfig:
    """The preset of that name; ValueError names the nearest ones when there is none."""
    if name in MODELS:
        return MODELS[name]
    near = difflib.get_close_matches(str(name).lower(), MODELS, n=3, cutoff=0.3) or sorted(MODELS)
    raise ValueError(
        f"model={name!r} is not known: did you mean {', '.join(near)}? "
        "A config.json is read by from_hugging_face(path)."
    )


# How each family of Hugging Face models is built, beyond what its config.json says.
_LLAMA = {"activation": "swiglu", "norm": "rmsnorm", "positions": "rotary", "bias": False}
_FAMILIES = {
    "gpt2": {"positions": "learned", "tied_embedding": True},
    "gpt_neox": {"positions": "rotary", "tied_embedding": False},
    "bloom": {"positions": "alibi", "embedding_norm": True, "tied_embedding": True},
    "starcoder2": {"positions": "rotary", "tied_embedding": True},
    "llama": _LLAMA,
    "granite": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "phi3": _LLAMA,
    "qwen2": {**_LLAMA, "qkv_bias": True},
    "qwen3": {**_LLAMA, "qk_norm": True},
    "qwen3_moe": {**_LLAMA, "qk_norm": True},
    "deepseek_v2": _LLAMA,
    "deepseek_v3": {**_LLAMA, "router": "sigmoid"},
}
# Our field: the names it has in config.json files.
_NAMES = {
    "vocab_size": ("vocab_size",),
    "d_model": ("hidden_size", "n_embd", "n_embed"),
    "num_layers": ("num_hidden_layers", "n_layer"),
    "num_heads": ("num_attention_heads", "n_head"),
    "seq_len": ("max_position_embeddings", "n_positions", "n_ctx", "seq_length"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "d_ffn": ("intermediate_size", "n_inner"),
    "tied_embedding": ("tie_word_embeddings",),
}
_MOE_NAMES = {
    "num_experts": ("n_routed_experts", "num_local_experts", "num_experts"),
    "top_k": ("num_experts_per_tok",),
    "num_shared_experts": ("n_shared_experts",),
    "d_expert": ("moe_intermediate_size",),
    "first_dense_layers": ("first_k_dense_replace",),
}
_MLA_NAMES = {
    "kv_lora_rank": ("kv_lora_rank",),
    "q_lora_rank": ("q_lora_rank",),
    "head_dim": ("qk_nope_head_dim",),
    "rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
}
_REQUIRED = ("vocab_size", "d_model", "num_layers", "num_heads", "seq_len")
# Settings that change the number of weights in a way ModelConfig does not describe.
_UNSUPPORTED = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_bias": (True, None),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
    "moe_layer_freq": (1, None),
}


def from_hugging_face(source: str | Path | dict) -> ModelConfig:
    """A ModelConfig from a config.json (path, folder or dict).

    Raises ValueError: the family is not one we know the weights of, a needed key is missing, or a
    setting would change the count in a way ModelConfig cannot say.
    """
    settings = source if isinstance(source, dict) else _read(Path(source))
    family = settings.get("model_type")
    if family not in _FAMILIES:
        raise ValueError(
            f"model_type={family!r} is not a family whose weights are known here: "
            f"give one of {', '.join(sorted(_FAMILIES))}, or a ModelConfig by hand."
        )
    is_moe = family in ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")
    is_mla = family in ("deepseek_v2", "deepseek_v3")
    names = {**_NAMES, **(_MOE_NAMES if is_moe else {}), **(_MLA_NAMES if is_mla else {})}
    required = (
        _REQUIRED
        + (("num_experts", "top_k") if is_moe else ())
        + (("kv_lora_rank", "head_dim", "rope_head_dim", "v_head_dim") if is_mla else ())
    )

    fields = {"tied_embedding": False, **_FAMILIES[family]}
    for field, keys in names.items():
        found = [settings[key] for key in keys if settings.get(key) is not None]
        if found:
            fields[field] = found[0]
        elif field in required:
            raise ValueError(f"config.json lacks {' or '.join(keys)}: {field} must be given.")
    for key, allowed in _UNSUPPORTED.items():
        if settings.get(key) not in allowed:
            raise ValueError(
                f"{key}={settings[key]!r} changes the weights in a way ModelConfig "
                f"cannot say: only {allowed[0]!r} is read."
            )
    if is_mla:
        fields.pop("num_kv_heads", None)  # latent attention has one key a head
    return ModelConfig(**fields)


def _read(path: Path) -> dict:
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ValueError(f"{path} does not exist: give the path of a config.json.")
    try:
        settings = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds {type(settings).__name__}: a config.json is an object.")
    return settings
