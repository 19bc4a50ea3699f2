"""The command line: python -m mini_dist.training.trainer recipe.json"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from .. import trainer
from .on_ranks import train_on_ranks
from .recipe import Recipe


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mini_dist.training.trainer", description=trainer.__doc__
    )
    parser.add_argument("recipe", type=Path, help="a JSON file, as Recipe.to_json writes it")
    parser.add_argument("--restarts", type=int, default=0, help="begin again after a failure")
    parser.add_argument(
        "--changed",
        action="append",
        default=[],
        metavar="NAME",
        help="go on from a checkpoint of another recipe, which differs in this; may be repeated",
    )
    parser.add_argument("--log", metavar="FILE", help="append a line of JSON a step to this file")
    given = parser.parse_args(arguments)
    try:
        recipe = Recipe.from_json(given.recipe.read_text())
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    history = train_on_ranks(
        recipe,
        restarts=given.restarts,
        changed=given.changed,
        log=given.log,
        timeout=float("inf"),
    ).results[0]
    if os.environ.get("RANK", "0") != "0":  # only one of torchrun's ranks prints it
        return 0
    if not history:
        print(f"{recipe.checkpoints} is already at step {recipe.steps} or beyond: raise steps")
    for metrics in history[:: max(1, len(history) // 10)]:
        print(
            f"step {metrics.step:>6}   loss {metrics.loss:.4f}   "
            f"{metrics.tokens_per_second:,.0f} tokens/s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
