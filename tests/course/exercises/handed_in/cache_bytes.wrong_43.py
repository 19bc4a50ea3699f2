# WRONG: "If `head_dim` is missing, it is `hidden_size / num_attention_heads`" (so if it is there, it counts). Shown by: Mistral Nemo, hidden_size 5120, 32 heads, 8 kv heads, head_dim 128, model_type "mistral" (takes 160).
OWN_HEAD_DIM = ("gemma", "gemma2", "gemma3", "qwen3")


def cache_bytes(config, tokens, bytes_a_number, tp):
    if "n_layer" in config:
        layers, heads, width = config["n_layer"], config["n_head"], config["n_embd"]
        kv_heads = heads
    else:
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        width = config["hidden_size"]
        kv_heads = config.get("num_key_value_heads", heads)
    head_dim = width // heads
    if config.get("model_type", "").startswith(OWN_HEAD_DIM):
        head_dim = config.get("head_dim", head_dim)
    return 2 * layers * max(1, kv_heads // tp) * head_dim * bytes_a_number * tokens
