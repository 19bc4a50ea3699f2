"""Explorers: thin views over calculators/ and schedule/. Everything they show is computed there."""

from .explorer import Explorer
from .grid import rank_grid
from .memory import memory_waterfall
from .model_needs import memory_and_time
from .planner import layout_planner
from .published_runs import compare_with_published
from .requests_fit import requests_fit
from .routing import expert_routing
from .scaling import scaling_curve
from .stepper import collective_stepper
from .zero import zero_figure

__all__ = [
    "Explorer",
    "collective_stepper",
    "compare_with_published",
    "expert_routing",
    "layout_planner",
    "memory_and_time",
    "memory_waterfall",
    "rank_grid",
    "requests_fit",
    "scaling_curve",
    "zero_figure",
]
