"""Real models as a ModelConfig: by name, or from a Hugging Face config.json."""

from __future__ import annotations

import difflib
import json
import warnings
from pathlib import Path

from ..config import ModelConfig
from ..fields import checks_kinds
from .families import (
    DEFAULTS,
    FAMILIES,
    FIELDS,
    LLAMA_4_FIELDS,
    MAY_BE_NULL,
    NONE,
    SECOND_NAMES,
    VERSION,
    WINDOW_SIZES,
    WINDOWS,
)
from .presets import MODELS


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


@checks_kinds
def from_hugging_face(source: str | Path | dict, seq_len: int | None = None) -> ModelConfig:
    """A ModelConfig from a config.json (path, folder or dict), for sequences of `seq_len` tokens.

    A key that is left out has its family's default in transformers, and a warning names the sizes
    that were filled in this way. A config.json says how far positions reach, not how long a
    training sequence is: without seq_len the reach is taken, with a warning.

    Raises ValueError: the family is not one we know the weights of, a key is missing that has no
    default, or a setting would change the count in a way ModelConfig cannot say.
    """
    settings = source if isinstance(source, dict) else _read(Path(source))
    family = _family(settings)
    names = FIELDS | (LLAMA_4_FIELDS if family == "llama4_text" else {})
    keys = _filled(settings, family, names, seq_len)

    fields = dict(FAMILIES[family])
    for key, value in keys.items():
        if key in names:
            if value is not None:
                fields[names[key]] = _size_or_flag(key, value)
        elif key not in WINDOWS and not _is_usual(key, value, DEFAULTS[family][key], keys):
            raise ValueError(
                f"{key}={value!r} changes the weights in a way ModelConfig "
                f"cannot say: only {DEFAULTS[family][key]!r} is read."
            )
    fields["seq_len"] = _sequence(fields, seq_len)
    dense = fields.pop("first_dense_layers", 0)
    config = ModelConfig(**fields)
    layers, window = _windows(keys, family, config.num_layers)
    dense = min(dense, config.num_layers)  # transformers takes more for all
    return config.replace(first_dense_layers=dense, windowed_layers=layers, window=window)


def _family(settings: dict) -> str:
    """The model_type, if its weights are known; ValueError says what to give instead."""
    family, text = settings.get("model_type"), settings.get("text_config")
    if isinstance(text, dict):
        inner, more = text.get("model_type"), {}
        if inner is None and f"{family}_text" in FAMILIES:
            inner = more["model_type"] = f"{family}_text"
        tied = "tie_word_embeddings"
        if tied in settings and tied not in text:
            more[tied] = settings[tied]
        if inner in FAMILIES:
            raise ValueError(
                f"model_type={family!r} has more parts than its language model, and ModelConfig "
                "describes the language model only: give config['text_config']"
                f"{f' | {more}' if more else ' alone'}."
            )
        family = inner
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(
            f"model_type={family!r} is not a family whose weights are known here: "
            f"give one of {', '.join(sorted(FAMILIES))}, or a ModelConfig by hand."
        )
    return family


def _filled(settings: dict, family: str, names: dict[str, str], seq_len: int | None) -> dict:
    """All keys of the family: what config.json says, and the defaults of what it leaves out."""
    settings, defaults, taken = _under_first_names(settings, family), DEFAULTS[family], []
    keys = {}
    for key, default in defaults.items():
        is_reach = names.get(key) == "seq_len"
        if key in settings:
            keys[key] = settings[key]
            is_null = settings[key] is None and default is not None
            if is_null and key in names and key not in MAY_BE_NULL:
                raise ValueError(f"{key}=None decides the shape of the weights: give its value.")
        elif default != NONE:
            keys[key] = default
            learned = FAMILIES[family]["positions"] == "learned"
            if key in names and type(default) is int and (learned or not is_reach):
                taken.append(f"{key}={default}")
        elif is_reach and seq_len is not None:
            keys[key] = seq_len
        else:
            give = "seq_len=..." if is_reach else key
            where = " (it stands beside text_config)" if key == "tie_word_embeddings" else ""
            raise ValueError(
                f"config.json lacks {key}, for which {family} has no default: give {give}{where}."
            )
    if taken:
        warnings.warn(
            f"config.json leaves out sizes, so we take {', '.join(taken)}: the defaults of "
            f"{family} in transformers {VERSION}.",
            stacklevel=4,
        )
    return keys


def _under_first_names(settings: dict, family: str) -> dict:
    """The settings, with those under a second name under the first."""
    found = dict(settings)
    for second, first in SECOND_NAMES.get(family, {}).items():
        if settings.get(second) is None:
            continue
        if settings.get(first) not in (None, settings[second]):
            raise ValueError(
                f"{first}={settings[first]!r} and {second}={settings[second]!r} are two names of "
                "one size: give one of them."
            )
        found[first] = settings[second]
    return found


def _size_or_flag(key: str, value: object) -> int | bool:
    """The value, if it has the type that the key needs; ValueError names it."""
    is_flag = key in ("tie_word_embeddings", "qkv_bias")
    if type(value) is not (bool if is_flag else int):
        needed = "neither true nor false" if is_flag else "no whole number"
        raise ValueError(f"{key}={value!r} is {needed}: give one.")
    return value


def _is_usual(key: str, value: object, default: object, keys: dict) -> bool:
    """Whether a key that ModelConfig has no field for has the value that changes nothing."""
    if key == "moe_layers" and value is not None:
        return value == list(range(keys["num_hidden_layers"]))
    if key == "interleave_moe_layer_step" and keys["moe_layers"] is not None:
        return True  # transformers reads moe_layers then
    return value is None or value == default


def _windows(keys: dict, family: str, num_layers: int) -> tuple[int, int]:
    """How many layers see a window of the last tokens only, and how many tokens that is.

    Which layers these are: `layer_types`, else the rules of transformers' configuration classes.
    """
    for key in WINDOW_SIZES:
        value = keys.get(key)
        if value is not None and (type(value) is not int or value < 0):
            raise ValueError(f"{key}={value!r} is no number of layers or tokens: give 0 or more.")
    for key in ("layer_types", "no_rope_layers"):
        if not isinstance(keys.get(key) or [], list):
            raise ValueError(f"{key}={keys[key]!r} is no list: give one entry for each layer.")
    chunked = family == "llama4_text"  # sees back to the beginning of its chunk
    window = keys.get("attention_chunk_size" if chunked else "sliding_window") or 0
    if not window or not keys.get("use_sliding_window", True):
        return 0, 0
    if keys.get("layer_types"):
        layers = sum(each != "full_attention" for each in keys["layer_types"])
    elif chunked and keys["no_rope_layers"]:
        layers = sum(map(bool, keys["no_rope_layers"]))
    elif family == "qwen2_moe":
        layers = -(-min(num_layers, keys["max_window_layers"] or 0) // 2)
    elif "max_window_layers" in keys:
        layers = max(0, num_layers - (keys["max_window_layers"] or 0))
    elif "layer_types" in keys:  # every n-th layer sees all tokens
        nth = "no_rope_layer_interval" if chunked else "sliding_window_pattern"
        layers = num_layers - num_layers // (keys.get(nth) or 2)
    else:
        layers = num_layers
    return (layers, window) if layers else (0, 0)


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
