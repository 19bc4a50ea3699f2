"""Draw figures of runs and schedules. Nothing here computes a result.

Every function returns a Drawing that shows itself in a notebook; `.save(path)` writes it as SVG.
Each name is imported when it is first used, because a web page has no torch.
"""

import importlib

_HOMES = {
    "Drawing": "svg",
    "Panel": "svg",
    "bars": "ledgers",
    "blocks": "block_maps",
    "collective": "messages",
    "curve": "ledgers",
    "devices": "emulated",
    "flights": "messages",
    "gantt": "schedules",
    "held": "schedules",
    "lanes": "borrowed",
    "link_fit": "messages",
    "memory_map": "borrowed",
    "overlap": "emulated",
    "rank_grid": "ranks",
    "replayed": "emulated",
    "scatter": "ledgers",
    "scores": "ranks",
    "staleness": "ledgers",
    "timeline": "ledgers",
    "traffic": "ledgers",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
