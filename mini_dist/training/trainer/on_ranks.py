"""Run a recipe on the ranks of its layout, and restart it after a crash."""

from __future__ import annotations

from collections.abc import Iterable

from mini_dist.plan.fields import checks_kinds
from mini_dist.ranks.launch import RankError, Run, launch

from .recipe import Recipe


def run_recipe(recipe: Recipe, changed: Iterable[str], log: str | None, group) -> list:
    """Run `train`, imported on the ranks: the process that starts them does not need torch."""
    from .loop import train

    return train(recipe, group, changed=changed, log=log)


@checks_kinds(infinite=("timeout",))
def train_on_ranks(
    recipe: Recipe,
    *,
    restarts: int = 0,
    changed: Iterable[str] = (),
    log: str | None = None,
    timeout: float = 600,
    **options,
) -> Run:
    """Launch the recipe on the ranks of its layout.

    restarts: how often to restart from the newest checkpoint after a failure. changed, log:
    see `train`. options: of `launch`. Raises what `launch` raises when no restart is left, and
    ValueError for restarts without checkpoints.
    """
    if restarts and not recipe.checkpoints:
        raise ValueError(
            f"restarts={restarts} would begin at step 0 each time: give the recipe checkpoints"
        )
    job = run_recipe, recipe.layout.world_size, (recipe, changed, log)
    while True:
        try:
            return launch(*job, timeout=timeout, **options)
        except RankError as error:
            if not restarts:
                raise
            restarts -= 1
            print(f"{str(error).splitlines()[0]}\nstarting again from the newest checkpoint")
