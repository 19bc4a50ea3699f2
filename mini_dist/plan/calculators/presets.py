"""Real models by name, each with the publication that its sizes come from.

seq_len is the length of a training sequence, not how far positions reach: what the model's report
gives for its main stage, else 8192, which is assumed (gpt-oss and Llama 4).
"""

from __future__ import annotations

from ..config import ModelConfig


def _gpt(num_layers: int, d_model: int, num_heads: int, seq_len: int = 1024) -> ModelConfig:
    return ModelConfig(
        vocab_size=50257,
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
        **{"bias": False, **more},
    )


def _gpt_oss(num_layers: int, num_experts: int) -> ModelConfig:
    return _llama(
        num_layers,
        2880,
        64,
        8,
        2880,
        201088,
        8192,
        head_dim=64,
        bias=True,
        router_bias=True,
        attention_sinks=True,
        num_experts=num_experts,
        top_k=4,
        windowed_layers=num_layers // 2,
        window=128,
    )


def _gemma3(
    num_layers: int, d_model: int, num_heads: int, num_kv_heads: int, d_ffn: int, head_dim: int
) -> ModelConfig:
    return _llama(
        num_layers,
        d_model,
        num_heads,
        num_kv_heads,
        d_ffn,
        262208,
        32768,
        head_dim=head_dim,
        qk_norm=True,
        norms_a_layer=4,
        tied_embedding=True,
        windowed_layers=num_layers - num_layers // 6,
        window=1024,
    )


QWEN3 = {"head_dim": 128, "qk_norm": True}
QWEN3_MOE = {**QWEN3, "num_experts": 128, "top_k": 8}
# DeepSeek-V3 technical report, section 4.2, without the multi-token-prediction module.
# The router's balance offsets (58 * 256) are not trained by gradients and not counted.
DEEPSEEK_V3 = ModelConfig(
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
    "deepseek-v3": DEEPSEEK_V3,
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
    # Sizes from here on are those of config.json beside the named checkpoints on Hugging Face, read
    # in copies in November 2026. test_parameters.py checks that they give exactly the number of
    # parameters in the released files. If a checkpoint also sees pictures, the preset is its
    # language model.
    # Qwen2.5-7B and -72B (September 2024).
    "qwen2.5-7b": _llama(28, 3584, 28, 4, 18944, 152064, 4096, qkv_bias=True),
    "qwen2.5-72b": _llama(80, 8192, 64, 8, 29568, 152064, 4096, qkv_bias=True),
    # Qwen3-8B, -32B, -30B-A3B and -235B-A22B (April 2025).
    "qwen3-8b": _llama(36, 4096, 32, 8, 12288, 151936, 4096, **QWEN3),
    "qwen3-32b": _llama(64, 5120, 64, 8, 25600, 151936, 4096, **QWEN3),
    "qwen3-30b-a3b": _llama(48, 2048, 32, 4, 6144, 151936, 4096, d_expert=768, **QWEN3_MOE),
    "qwen3-235b-a22b": _llama(94, 4096, 64, 4, 12288, 151936, 4096, d_expert=1536, **QWEN3_MOE),
    # gpt-oss-20b and -120b (August 2025). Every second layer sees the last 128 tokens.
    "gpt-oss-20b": _gpt_oss(24, num_experts=32),
    "gpt-oss-120b": _gpt_oss(36, num_experts=128),
    # GLM-4.5 (July 2025), without the multi-token-prediction module and the router's offsets.
    "glm-4.5": _llama(
        92,
        5120,
        96,
        8,
        12288,
        151552,
        4096,
        head_dim=128,
        qkv_bias=True,
        qk_norm=True,
        num_experts=160,
        top_k=8,
        num_shared_experts=1,
        d_expert=1536,
        first_dense_layers=3,
        router="sigmoid",
    ),
    # Kimi-K2-Instruct (July 2025): DeepSeek-V3 with half the heads and half again the experts.
    "kimi-k2": DEEPSEEK_V3.replace(
        vocab_size=163840, num_heads=64, num_experts=384, first_dense_layers=1
    ),
    # Llama-4-Scout-17B-16E (April 2025). Three of four layers see chunks of 8192 tokens. (Maverick
    # has experts in every second layer only, which ModelConfig cannot say.)
    "llama4-scout": _llama(
        48,
        5120,
        40,
        8,
        16384,
        202048,
        8192,
        num_experts=16,
        top_k=1,
        num_shared_experts=1,
        d_expert=8192,
        windowed_layers=36,
        window=8192,
    ),
    # gemma-3-4b-pt, -12b-pt and -27b-pt (March 2025). Five of six layers see 1024 tokens.
    "gemma3-4b": _gemma3(34, 2560, 8, 4, 10240, head_dim=256),
    "gemma3-12b": _gemma3(48, 3840, 16, 8, 15360, head_dim=256),
    "gemma3-27b": _gemma3(62, 5376, 32, 16, 21504, head_dim=128),
}
