"""mini_dist: distributed training in a notebook, every strategy from the primitives.

Names are imported when they are first used, so that what needs no torch never loads it.
"""

import importlib

from .launch import RankError, RankTimeout, launch  # (needs no torch; the folder has its name)

__all__ = ["RankError", "RankTimeout", "launch"]

_HOMES = {
    "ModelConfig": "config",
    "Layout": "config",
    "GPT": "model",
}


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*__all__, *_HOMES])
