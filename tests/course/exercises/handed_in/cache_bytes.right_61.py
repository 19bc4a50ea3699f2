# RIGHT: a small class whose properties read the config by aliases; the product is math.prod.
import math
from functools import cached_property


class Sizes:
    ALIASES = {
        "layers": ("num_hidden_layers", "n_layer"),
        "heads": ("num_attention_heads", "n_head"),
        "width": ("hidden_size", "n_embd"),
    }

    def __init__(self, raw):
        self.raw = raw

    def __getattr__(self, name):
        for alias in Sizes.ALIASES.get(name, ()):
            if alias in self.raw:
                return self.raw[alias]
        raise AttributeError(name)

    def given(self, key, otherwise):
        value = self.raw.get(key)
        return otherwise() if value is None else value

    @cached_property
    def kv_heads(self):
        return self.given("num_key_value_heads", lambda: self.heads)

    @cached_property
    def head_dim(self):
        return self.given("head_dim", lambda: self.width // self.heads)


def cache_bytes(settings, length, width_of_a_number, devices):
    sizes = Sizes(settings)
    whole_heads = sizes.kv_heads // devices or 1
    shape = ("key", "value"), range(sizes.layers), range(length)
    return int(math.prod(map(len, shape)) * whole_heads * sizes.head_dim * width_of_a_number)
