"""How many weights transformers builds from a config.json, on the meta device, key by key."""

from __future__ import annotations

import dataclasses
import json
import logging
import random

from mini_dist.plan.calculators.families import FAMILIES

from .kept import kept

LAYERS = 4  # Every case has this many layers, so that building takes milliseconds.
COMBINATIONS = 25  # random ones of each family
# Text models inside a larger model: the class of the whole, and the module that is not text.
INSIDE = {
    "qwen2_vl_text": ("Qwen2VL", "visual"),
    "qwen2_5_vl_text": ("Qwen2_5_VL", "visual"),
    "qwen3_vl_text": ("Qwen3VL", "visual"),
    "qwen3_vl_moe_text": ("Qwen3VLMoe", "visual"),
}
# What a config has to say, because no class of the text model has a default for it.
BESIDE = {
    **dict.fromkeys(INSIDE, {"tie_word_embeddings": True}),
    "deepseek_v2": {"num_experts_per_tok": 6},
}


@kept("transformers", how="pip install transformers")
def counts() -> dict[str, dict]:
    """What transformers builds for each family, from a config.json that leaves out most keys.

    "cases" has one line for each config that makes a difference: its keys besides model_type, the
    number of weights, how many layers see a window only, and how many tokens that window has.
    "ignored" has the keys that make none, each compared with the second case, which only has
    LAYERS layers.
    """
    logging.disable(logging.WARNING)
    everyones = {}
    for family in FAMILIES:
        everyones |= {key: value for key, value in keys_of(family).items() if value is not None}
    return {family: one_family(family, everyones) for family in FAMILIES}


def one_family(family: str, everyones: dict[str, object]) -> dict[str, list]:
    own = keys_of(family)
    beside = BESIDE.get(family, {})
    base = beside | {"n_layer" if "n_layer" in own else "num_hidden_layers": LAYERS}
    usual = built({"model_type": family, **base})
    rows, ignored, matter = [row(base, usual)], [], {}
    rows.insert(0, row(beside, built({"model_type": family, **beside})))
    for key, values in values_of(own, everyones).items():
        for value in values:
            found = attempt(family, base | {key: value})
            if found == usual:
                ignored.append(json.dumps({key: value}))
            elif found:
                rows.append(row(base | {key: value}, found))
                matter.setdefault(key, []).append(value)
    if "use_sliding_window" in own:
        for more in ({"max_window_layers": 1}, {"max_window_layers": 3, "sliding_window": 9}):
            changes = base | {"use_sliding_window": True} | more
            rows.append(row(changes, attempt(family, changes)))
    dice = random.Random(family)
    for _ in range(COMBINATIONS):
        keys = dice.sample([key for key in matter if key in own], 3)
        changes = {key: dice.choice(matter[key]) for key in keys}
        if found := attempt(family, base | changes):
            rows.append(row(base | changes, found))
    return {"cases": list(dict.fromkeys(rows)), "ignored": ignored}


def row(changes: dict, found: tuple[int, int, int]) -> str:
    return " ".join([json.dumps(changes), *map(str, found)])


def attempt(family: str, changes: dict) -> tuple[int, int, int] | None:
    """What is built, or None where transformers refuses, which it does in many ways."""
    try:
        return built({"model_type": family, **changes})
    except Exception:
        return None


def keys_of(family: str) -> dict[str, object]:
    """The numbers, flags and lists of a family's configuration class, with their defaults."""
    from transformers import CONFIG_MAPPING

    found = {}
    for field in dataclasses.fields(CONFIG_MAPPING[family]):
        default = None if field.default is dataclasses.MISSING else field.default
        is_text = isinstance(default, (str, float)) or field.name.endswith("_token_id")
        if not is_text and not field.name.startswith(("output_", "return_", "rope_")):
            found[field.name] = default
    return found


def values_of(own: dict[str, object], everyones: dict[str, object]) -> dict[str, list]:
    """Values to try for each key of any family; of a key that is another family's, fewer."""
    tried = {key: others(default) for key, default in own.items()}
    for key, value in everyones.items():
        if key not in own:
            tried[key] = [True, False] if isinstance(value, bool) else [value, 2 * value]
    if "layer_types" in own:
        kinds = ["chunked_attention" if "attention_chunk_size" in own else "sliding_attention"]
        tried["layer_types"] = [kinds * 3 + ["full_attention"]]
    if "no_rope_layers" in own:
        tried["no_rope_layers"] = [[1, 0, 0, 1]]
    if "sliding_window" in own:
        tried["sliding_window_pattern"] = [3]
    return tried


def others(default: object) -> list:
    """Values for a key that are not its default."""
    if isinstance(default, bool):
        return [not default, None]
    if isinstance(default, int):
        return [2 * default, max(1, default // 2), None]
    if isinstance(default, list):
        return [[], [1]]
    return [True, False, 2, 48, [1]]


def built(settings: dict) -> tuple[int, int, int]:
    """(weights, layers with a window, the window) of the model that transformers builds."""
    import torch
    import transformers

    family = settings["model_type"]
    with torch.device("meta"):
        if family in INSIDE:
            name, other = INSIDE[family]
            tied = {key: settings[key] for key in ("tie_word_embeddings",) if key in settings}
            whole = getattr(transformers, f"{name}Config")(text_config=settings, **tied)
            config = whole.text_config
            model = getattr(transformers, f"{name}ForConditionalGeneration")(whole)
            delattr(model.model, other)
        else:
            config = transformers.AutoConfig.for_model(**settings)
            model = transformers.AutoModelForCausalLM.from_config(config)
    weights = sum(parameter.numel() for parameter in model.parameters())  # a tied one counts once
    return weights, *windows(config)


def windows(config) -> tuple[int, int]:
    key = "attention_chunk_size" if config.model_type == "llama4_text" else "sliding_window"
    window = getattr(config, key, None) or 0
    if key not in keys_of(config.model_type):  # it was set as any unknown key is, and is not read
        window = 0
    types = getattr(config, "layer_types", None)
    layers = sum(each != "full_attention" for each in types) if types else config.num_hidden_layers
    return (layers, window) if layers and window else (0, 0)
