"""Figures drawn from what ran. Nothing in here computes a result.

Every function returns a Picture, which a notebook shows as PNG and `.save(path)` writes.
"""

from .blocks import blocks
from .borrowed import lanes, memory_map
from .emulated import devices, overlap, replayed
from .ledgers import bars, curve, scatter, staleness, timeline, traffic
from .messages import collective, flights, link_fit
from .picture import Picture, canvas
from .ranks import rank_grid, scores
from .schedules import gantt, held

__all__ = [
    "Picture",
    "bars",
    "blocks",
    "canvas",
    "collective",
    "curve",
    "devices",
    "flights",
    "gantt",
    "held",
    "lanes",
    "link_fit",
    "memory_map",
    "overlap",
    "rank_grid",
    "replayed",
    "scatter",
    "scores",
    "staleness",
    "timeline",
    "traffic",
]
