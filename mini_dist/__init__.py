"""mini_dist: distributed training in a notebook, every strategy from the primitives.

    from mini_dist import launch, all_reduce, check, draw

`dir(mini_dist)` lists the names that most programs need. Everything else is imported from its room:
`mini_dist.strategies.zero`, `mini_dist.plan.calculators`, `mini_dist.training.checkpoint`. The
eight rooms import downwards only (pyproject.toml holds the order):

    course        what a learner, a teacher and a lab use
    serving       answer many requests at once
    training      a whole run on all axes
    strategies    one folder per strategy: a page to read and an engine for real models
    collectives   what ranks say to each other
    model         a GPT in plain torch that knows nothing of ranks
    ranks         run a function on n processes and record what they send
    plan          sizes, memory, seconds and layouts, without torch

Names are loaded when they are first used, so a program that needs no torch never loads it.
"""

import importlib

from .ranks.launch import RankError, RankTimeout, launch  # This needs no torch.

__version__ = "0.1.0"

_MODULES = {
    "calculators": "plan.calculators",
    "check": "course.check",
    "collectives": "collectives",
    "draw": "course.draw",
    "schedule": "plan.schedule",
    "widgets": "course.widgets",
}
_NAMES = {
    "plan.config": "Layout ModelConfig",
    "model.gpt": "GPT",
    "model.loss": "token_loss",
    "model.sampling": "generate",
    "model.data": "Batches decode encode load_text",
    "collectives.mesh": "Grid Mesh",
    "collectives": "all_gather all_reduce all_to_all barrier broadcast exchange gather recv reduce "
    "reduce_scatter scatter send",
    "strategies.train": "split train_step",
    "training.full_state": "full_state_dict",
    "plan.tables": "Table",
    "ranks.ledger.hosts": "seconds_on",
    "ranks.hosts": "Hosts hosts_of",
    "training.all_axes": "parallelize",
    "course.learner": "language progress",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = ["RankError", "RankTimeout", "launch", *_MODULES, *_HOMES]


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f".{_MODULES[name]}", __name__)
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
