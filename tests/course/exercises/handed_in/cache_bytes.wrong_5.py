# WRONG: caps tokens at the context length of the config (n_positions, max_position_embeddings). Breaks "for `tokens` tokens"
# (tokens of all users together). Shown by GPT-2 (1,024 positions) with more tokens.
def cache_bytes(config, tokens, bytes_a_number, tp):
    g = lambda a, b, d=None: config.get(a, config.get(b, d))
    tokens = min(tokens, g("max_position_embeddings", "n_positions", tokens))
    N = g("num_attention_heads", "n_head")
    H = config.get("head_dim", g("hidden_size", "n_embd") // N)
    K = config.get("num_key_value_heads", N)
    return 2 * g("num_hidden_layers", "n_layer") * max(1, K // tp) * H * bytes_a_number * tokens
