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
    "all_gather": "collectives",
    "all_reduce": "collectives",
    "all_to_all": "collectives",
    "barrier": "collectives",
    "broadcast": "collectives",
    "exchange": "collectives",
    "gather": "collectives",
    "halving_doubling_all_reduce": "collectives",
    "hierarchical_all_reduce": "collectives",
    "pairwise_all_to_all": "collectives",
    "pipelined_ring_all_reduce": "collectives",
    "recursive_doubling_all_gather": "collectives",
    "recursive_halving_reduce_scatter": "collectives",
    "recv": "collectives",
    "reduce": "collectives",
    "reduce_scatter": "collectives",
    "ring_all_gather": "collectives",
    "ring_all_reduce": "collectives",
    "ring_reduce_scatter": "collectives",
    "scatter": "collectives",
    "send": "collectives",
    "star_all_reduce": "collectives",
    "star_broadcast": "collectives",
    "star_reduce": "collectives",
    "stars_all_reduce": "collectives",
    "tree_all_reduce": "collectives",
    "tree_broadcast": "collectives",
    "tree_reduce": "collectives",
}


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*__all__, *_HOMES])
