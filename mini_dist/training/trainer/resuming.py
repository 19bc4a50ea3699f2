"""Checkpoints of a run: it continues from the newest complete one if the recipe is the same."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable

from torch import Tensor

from mini_dist.strategies.precision import LossScaler

from ..checkpoint import Training
from .recipe import Recipe


class NoCheckpoints:
    """For a recipe without a directory."""

    def resume(self, changed: Iterable[str]) -> int:
        return 0

    def save(self, steps: int) -> None: ...


class RunCheckpoints:
    """The checkpoints in the directory that the recipe names.

    text: the bytes to learn from. scaler: of the losses, with float16; its scale is saved as well.
    """

    def __init__(self, recipe: Recipe, text: Tensor, model, scaler: LossScaler | None, group):
        self.directory, self.scaler = recipe.checkpoints, scaler
        self.decides = decides(recipe, text)
        self.training = Training(
            model.parts, model.optimizer.optimizers, group, names=model.names_in_whole()
        )

    def resume(self, changed: Iterable[str]) -> int:
        """Load the newest complete checkpoint; return its number of completed steps, or 0.

        Raises ValueError if its recipe differs in anything not named in `changed`.
        """
        changed = [changed] if isinstance(changed, str) else list(changed)
        known = ["all", "model", *self.decides]
        if unknown := set(changed) - set(known):
            raise ValueError(
                f"changed={sorted(unknown)} decides nothing: give some of {', '.join(known)}"
            )
        saved = self.training.resume(
            self.directory,
            check=lambda extra: check_same(self.directory, extra, self.decides, changed),
        )
        if saved is None:
            return 0
        if self.scaler and "scaler" in saved.extra:
            self.scaler.scale, self.scaler.good_steps = saved.extra["scaler"]
        return saved.step

    def save(self, steps: int) -> None:
        """Save after this many completed steps."""
        extra = {"recipe": self.decides}
        if self.scaler:
            extra["scaler"] = [self.scaler.scale, self.scaler.good_steps]
        self.training.save(self.directory, steps, extra)


# What may differ when a run continues: these change how long, where and how fast, not what.
MAY_CHANGE = ("steps", "save_every", "checkpoints", "machine")


def decides(recipe: Recipe, text: Tensor) -> dict:
    """Return everything that a step's loss depends on, by name.

    `text` counts by its contents, not its path. Of the layout only the batch counts: the rest
    determines how a step is computed, not what.
    """
    fields = {k: v for k, v in dataclasses.asdict(recipe).items() if k not in MAY_CHANGE}
    model, _layout = fields.pop("model"), fields.pop("layout")
    return {
        **{f"model.{name}": value for name, value in model.items()},
        **fields,
        "batch": recipe.layout.global_batch_size,
        "text": hashlib.sha256(text.numpy()).hexdigest()[:16],
    }


def check_same(directory: str, extra: dict, decides: dict, changed: Iterable[str]) -> None:
    """Raise ValueError if a checkpoint's recipe differs in anything not named in `changed`."""
    if "all" in changed:
        return
    saved = extra.get("recipe")
    if not isinstance(saved, dict):
        raise ValueError(
            f"{directory} does not say by which recipe it was trained: an older version or another "
            "program has written it. Give changed=['all'] to go on from it all the same"
        )
    differ = {
        name: f"{name}={saved.get(name)!r}, now {decides.get(name)!r}"
        for name in {**decides, **saved}
        if saved.get(name) != decides.get(name)
        and not {name, name.partition(".")[0]} & set(changed)
    }
    if differ:
        raise ValueError(
            f"{directory} is of another recipe: {'; '.join(differ.values())}. Give another "
            f"directory as checkpoints, or changed={list(differ)} to go on all the same"
        )
