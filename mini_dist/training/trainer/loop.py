"""The training loop, as it runs on each rank."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial

import torch
from tqdm import tqdm

from mini_dist.collectives import device_of
from mini_dist.model.data import Batches, load_text
from mini_dist.model.vocabulary import check_tokens
from mini_dist.plan.fields import checks_kinds
from mini_dist.strategies.precision import FULL, LossScaler, Precision

from ..all_axes import parallelize
from .metering import Meter, Metrics
from .monitor import Monitor
from .recipe import Recipe
from .resuming import NoCheckpoints, RunCheckpoints


@checks_kinds
def train(
    recipe: Recipe, group, *, changed: Iterable[str] = (), log: str | None = None
) -> list[Metrics]:
    """Train on the ranks of `group`, from the newest checkpoint if there is one.

    changed: what may differ from the recipe of that checkpoint, such as "learning_rate", "batch",
        "model.dropout", "model" for all of it, "all". These may always differ: steps,
        save_every, checkpoints, machine, and the layout if a step still has as many sequences.
    log: a file to which rank 0 appends one line of JSON per step (see monitor.py).
    Returns the metrics of this call's steps. Raises ValueError for a layout that does
    not fit the group or the model, for a text with bytes outside the vocabulary, and for a
    checkpoint of another recipe.
    """
    # The model, sharded by the layout, and this rank's part of the data.
    adamw = partial(torch.optim.AdamW, lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    precision = precision_of(recipe)
    model = parallelize(
        recipe.model, recipe.layout, group, adamw, seed=recipe.seed, precision=precision
    )
    text = load_text(recipe.text)
    check_tokens(text, recipe.model.vocab_size, "the text's byte")
    batches = Batches(
        text,
        batch_size=recipe.layout.global_batch_size,
        seq_len=recipe.model.seq_len,
        seed=recipe.seed,
        rank=model.mesh.index("dp"),
        size=recipe.layout.dp,
        device=device_of(group),
    )

    # Continue after the newest checkpoint, if there is one.
    if recipe.checkpoints:
        checkpoints = RunCheckpoints(recipe, text, model, precision.scaler, group)
    else:
        checkpoints = NoCheckpoints()
    first = checkpoints.resume(changed)

    history: list[Metrics] = []
    monitor = Monitor(log, recipe.steps) if log and group.rank() == 0 else None
    for step in progress(first, recipe.steps, group):
        model.optimizer.set_learning_rate(recipe.learning_rate_at(step))
        meter = Meter(recipe, group)
        done = model.step(*batches.batch(step), max_norm=recipe.max_norm)
        history.append(meter.read(step, done))
        if monitor:
            monitor.write(history[-1])
        if (step + 1) % recipe.save_every == 0 or step + 1 == recipe.steps:
            checkpoints.save(step + 1)
    if monitor:
        monitor.close()
    return history


def precision_of(recipe: Recipe) -> Precision:
    if recipe.precision == "float16":
        return Precision(torch.float16, LossScaler())
    return Precision(torch.bfloat16) if recipe.precision == "bfloat16" else FULL


def progress(first: int, steps: int, group) -> Iterable[int]:
    """Yield the step numbers, with a progress bar in a terminal; in a cell, prints come at the
    end."""
    watched = group.rank() == 0 and sys.stderr.isatty()
    return tqdm(range(first, steps), initial=first, disable=not watched)
