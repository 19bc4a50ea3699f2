"""mini_dist: distributed training in a notebook, every strategy from the primitives.

    from mini_dist import launch, all_reduce, check, draw

What most programs need is here: `dir(mini_dist)` lists it. Each strategy has a module of its own,
and each algorithm of a collective (`collectives.ring_all_reduce`). Names are imported when they are
first used, so that what needs no torch never loads it.
"""

import importlib

from mini_dist.ranks.launch import RankError, RankTimeout, launch  # (needs no torch)

_MODULES = ("calculators", "check", "collectives", "draw", "schedule", "widgets")
_NAMES = {
    "config": "Layout ModelConfig",
    "model": "GPT",
    "loss": "token_loss",
    "sampling": "generate",
    "data": "Batches decode encode load_text",
    "mesh": "Grid Mesh",
    "collectives": "all_gather all_reduce all_to_all barrier broadcast exchange gather recv reduce "
    "reduce_scatter scatter send",
    "train": "split train_step",
    "full_state": "full_state_dict",
    "ledger.table": "Table",
    "ledger.hosts": "seconds_on",
    "ranks.hosts": "Hosts hosts_of",
    "all_axes": "parallelize",
    "learner": "progress",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = ["RankError", "RankTimeout", "launch", *_MODULES, *_HOMES]


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
