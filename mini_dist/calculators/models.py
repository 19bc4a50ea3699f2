"""Real models as a ModelConfig: by name, or from a Hugging Face config.json."""

from __future__ import annotations

import difflib
import json
import warnings
from pathlib import Path

from ..config import ModelConfig
from ..fields import checks_kinds


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


def model(name: str | ModelConfig) -> ModelConfig:
    """The preset of that name; ValueError names the nearest ones when there is none.

    A ModelConfig is what it is, so that a calculator takes either.
    """
    if isinstance(name, ModelConfig):
        return name
    if isinstance(name, str) and name in MODELS:
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
    "gemma2": {**_LLAMA, "norms_a_layer": 4, "tied_embedding": True},  # gated by gelu
    "gemma3_text": {**_LLAMA, "norms_a_layer": 4, "tied_embedding": True, "qk_norm": True},
    "olmo2": {**_LLAMA, "qk_norm": True, "qk_norm_whole": True},
    "qwen2_moe": {**_LLAMA, "qkv_bias": True, "num_shared_experts": 1, "shared_gate": True},
    "llama4_text": {**_LLAMA, "num_shared_experts": 1},
    "gpt_oss": {**_LLAMA, "bias": True, "router_bias": True, "attention_sinks": True},
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
    "d_shared": ("shared_expert_intermediate_size",),
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
    "interleave_moe_layer_step": (1, None),
}
_HAVE_ATTENTION_BIASES = ("gpt_neox", "gpt_oss")
# Families in which every n-th layer sees all tokens, where config.json does not list the layers.
_EVERY_NTH_SEES_ALL = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "llama4_text": 4}
_MOE = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "llama4_text", "gpt_oss"),
    *("deepseek_v2", "deepseek_v3"),
)


@checks_kinds
def from_hugging_face(source: str | Path | dict, seq_len: int | None = None) -> ModelConfig:
    """A ModelConfig from a config.json (path, folder or dict), for sequences of `seq_len` tokens.

    A config.json says how far positions reach, not how long a training sequence is: without
    seq_len the reach is taken, with a warning.

    Raises ValueError: the family is not one we know the weights of, a needed key is missing, or a
    setting would change the count in a way ModelConfig cannot say.
    """
    settings = source if isinstance(source, dict) else _read(Path(source))
    family = settings.get("model_type")
    if isinstance(settings.get("text_config"), dict):
        raise ValueError(
            f"model_type={family!r} has more parts than its language model, and ModelConfig says "
            "only that one: give config['text_config'] alone."
        )
    if family not in _FAMILIES:
        raise ValueError(
            f"model_type={family!r} is not a family whose weights are known here: "
            f"give one of {', '.join(sorted(_FAMILIES))}, or a ModelConfig by hand."
        )
    is_moe = family in _MOE
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
        if key == "attention_bias" and family in _HAVE_ATTENTION_BIASES:
            allowed = (True, None)
        if settings.get(key) not in allowed:
            raise ValueError(
                f"{key}={settings[key]!r} changes the weights in a way ModelConfig "
                f"cannot say: only {allowed[0]!r} is read."
            )
    if is_mla:
        fields.pop("num_kv_heads", None)  # latent attention has one key a head
    if family == "llama4_text":
        fields["d_ffn"], fields["d_expert"] = settings["intermediate_size_mlp"], fields["d_ffn"]
    fields["seq_len"] = _sequence(fields, seq_len)
    fields["windowed_layers"], fields["window"] = _windows(settings, fields["num_layers"])
    return ModelConfig(**fields)


def _windows(settings: dict, num_layers: int) -> tuple[int, int]:
    """How many layers see a window of the last tokens only, and how many tokens that is.

    Which layers these are: `layer_types`, else the rules of transformers' configuration classes.
    """
    family = settings["model_type"]
    chunked = family == "llama4_text"  # sees back to the beginning of its chunk
    window = settings.get("attention_chunk_size" if chunked else "sliding_window") or 0
    if family.startswith("qwen") and not settings.get("use_sliding_window"):
        window = 0
    if settings.get("layer_types"):
        layers = sum(each != "full_attention" for each in settings["layer_types"])
    elif family in ("qwen2", "qwen3"):
        layers = max(0, num_layers - settings.get("max_window_layers", 28))
    elif family == "qwen2_moe":
        layers = -(-min(num_layers, settings.get("max_window_layers", 28)) // 2)
    elif family in _EVERY_NTH_SEES_ALL:
        nth = settings.get("sliding_window_pattern") or _EVERY_NTH_SEES_ALL[family]
        layers = num_layers - num_layers // nth
    else:
        layers = num_layers
    return (layers, window) if layers and window else (0, 0)


def _sequence(fields: dict, seq_len: int | None) -> int:
    reach = fields["seq_len"]
    if fields["positions"] == "learned":  # they are weights
        if seq_len not in (None, reach):
            raise ValueError(f"seq_len={seq_len} is not the {reach} positions that are learned.")
        return reach
    if seq_len is None:
        warnings.warn(
            f"seq_len={reach} is how far the positions of config.json reach, which need not be "
            "the training sequence: give seq_len=... to say that.",
            stacklevel=4,
        )
    return seq_len or reach


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
