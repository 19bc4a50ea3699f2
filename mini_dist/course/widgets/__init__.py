"""Explorers: thin views over the library, which computes what they show.

An explorer that needs torch is imported when it is first used: a page of the site has no torch.
"""

import importlib

from .explorer import Explorer
from .goodput import goodput_of_a_month
from .grid import rank_grid
from .largest_fits import largest_fits
from .memory import memory_waterfall
from .model_needs import memory_and_time
from .planner import layout_planner
from .published_runs import compare_with_published
from .requests_fit import requests_fit
from .scaling import scaling_curve
from .zero import zero_figure

__all__ = [
    "Explorer",
    "collective_stepper",
    "compare_with_published",
    "expert_routing",
    "goodput_of_a_month",
    "largest_fits",
    "layout_planner",
    "memory_and_time",
    "memory_waterfall",
    "rank_grid",
    "requests_fit",
    "scaling_curve",
    "zero_figure",
]

_WITH_TORCH = {"collective_stepper": "stepper", "expert_routing": "routing"}


def __getattr__(name: str):
    if name in _WITH_TORCH:
        return getattr(importlib.import_module(f".{_WITH_TORCH[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
