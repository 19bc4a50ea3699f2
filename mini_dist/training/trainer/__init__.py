"""A small trainer: a recipe in, metrics out; the same in a cell, as a script and under torchrun.

    recipe = Recipe(ModelConfig(), Layout(dp=2, tp=2), steps=50, checkpoints="runs/first")
    history = train_on_ranks(recipe).results[0]       # a list of Metrics, the same on all ranks

    python -m mini_dist.training.trainer recipe.json           # the recipe as JSON, on this machine
    torchrun --nproc-per-node 4 -m mini_dist.training.trainer recipe.json

A checkpoint is written every `save_every` steps, and a run begins at the newest complete checkpoint
in its directory. So to continue after a crash, start again; `train_on_ranks(restarts=3)` does so.
The checkpoint contains the recipe: a run with another recipe does not continue from it unless it is
told what has `changed` (`--changed learning_rate` on the command line).

Read in this order:
    recipe.py      everything that determines a run
    loop.py        train: the training loop, on each rank
    resuming.py    checkpoints of a run: the newest that fits, and its recipe
    metering.py    the result of a step: loss, speed, bytes
    monitor.py     watching a long run: one line per step, alerts, the remaining time
    on_ranks.py    launches the ranks of the recipe, and restarts them after a crash
    __main__.py    the command line
"""

from .metering import Metrics
from .on_ranks import train_on_ranks
from .recipe import Recipe

__all__ = ["Metrics", "Recipe", "train", "train_on_ranks"]


def __getattr__(name: str):
    if name == "train":  # the only one that needs torch, which takes a second to load
        from .loop import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
