# WRONG: "GPT-2 uses the names `n_layer`, `n_head`, `n_embd`". Shown by: GPT-2 medium's config, n_layer 24, n_head 16, n_embd 1024 (takes the sizes of GPT-2 small, for which it is right).
GPT2 = dict(num_hidden_layers=12, num_attention_heads=12, hidden_size=768)


def cache_bytes(config, tokens, bytes_a_number, tp):
    full = {**GPT2, **config} if config.get("model_type") == "gpt2" else dict(config)
    heads = full["num_attention_heads"]
    full.setdefault("num_key_value_heads", heads)
    full.setdefault("head_dim", full["hidden_size"] // heads)
    on_a_device = max(1, full["num_key_value_heads"] // tp)
    return 2 * full["num_hidden_layers"] * on_a_device * full["head_dim"] * tokens * bytes_a_number
