# WRONG: "Each device holds `kv_heads // tp` whole heads". Shown by: num_key_value_heads=8, tp=3 (2 heads a device, not 3), or GPT-2's 12 heads with tp=8 (1, not 2).
def cache_bytes(config, tokens, bytes_a_number, tp):
    if "n_layer" in config:
        layers, heads, width = config["n_layer"], config["n_head"], config["n_embd"]
    else:
        layers = config["num_hidden_layers"]
        heads = config["num_attention_heads"]
        width = config["hidden_size"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim", width // heads)
    on_a_device = -(-kv_heads // tp)  # the fullest device; this is at least one anyway
    return 2 * layers * on_a_device * head_dim * tokens * bytes_a_number
