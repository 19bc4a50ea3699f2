"""A small trainer: a recipe in, metrics out; the same in a cell, as a script and under torchrun.

    recipe = Recipe(ModelConfig(), Layout(dp=2, tp=2), steps=50, checkpoints="runs/first")
    history = train_on_ranks(recipe).results[0]       # a list of Metrics, the same on all ranks

    python -m mini_dist.trainer recipe.json           # the recipe as JSON, on this machine
    torchrun --nproc-per-node 4 -m mini_dist.trainer recipe.json

A checkpoint is written every `save_every` steps, and a run begins at the newest whole one that its
directory has: so to go on after a crash is to start again, and `train_on_ranks(restarts=3)` does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from .config import Layout, ModelConfig
from .launch import RankError, Run, launch

PRECISIONS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Recipe:
    """All that decides a training run; plain data, so that a file can hold it.

    text: a file to learn from; None for the one inside every Python. learning_rate rises linearly
    for `warmup` steps and stays. machine: a name that calculators.hardware knows, for the MFU.
    Raises ValueError in one sentence for a value that cannot be.
    """

    model: ModelConfig
    layout: Layout = Layout()
    steps: int = 100
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    warmup: int = 0
    max_norm: float | None = 1.0
    precision: str = "float32"
    text: str | None = None
    seed: int = 0
    checkpoints: str | None = None
    save_every: int = 50
    machine: str | None = None

    def __post_init__(self):
        if self.precision not in PRECISIONS:
            known = ", ".join(map(repr, PRECISIONS))
            raise ValueError(f"precision={self.precision!r} is not known: give one of {known}")
        for field, least in (("steps", 1), ("save_every", 1), ("warmup", 0)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{field}={value!r} is no number of steps: give {least} or more")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate!r} learns nothing: give above 0")
        self.layout.check(self.model)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> Recipe:
        """Read what `to_json` wrote; fields left out have their defaults. Raises ValueError."""
        fields = json.loads(text)
        known = [field.name for field in dataclasses.fields(Recipe)]
        if unknown := sorted(set(fields) - set(known)):
            raise ValueError(f"{unknown[0]!r} is no field of a recipe: it has {', '.join(known)}")
        fields["model"] = ModelConfig(**fields.get("model", {}))
        fields["layout"] = Layout(**fields.get("layout", {}))
        return Recipe(**fields)

    def learning_rate_at(self, step: int) -> float:
        return self.learning_rate * min(1.0, (step + 1) / (self.warmup or 1))


@dataclass(frozen=True)
class Metrics:
    """What came of one step. bytes_sent: by this rank, over each axis of the mesh."""

    step: int
    loss: float
    norm: float | None
    skipped: bool
    seconds: float
    tokens_per_second: float  # of the whole job
    mfu: float | None  # None where the machine's peak is not known
    bytes_sent: dict[str, int]
    held_bytes: int | None  # by this rank after the step; None without launch(memory=True)


def train(recipe: Recipe, group) -> list[Metrics]:
    """Train on the ranks of `group`, from the newest checkpoint if there is one.

    Returns the metrics of the steps that this call made. Raises ValueError for a layout that does
    not fit the group or the model.
    """
    import torch
    from tqdm import tqdm

    from .checkpoint import Training
    from .data import Batches, load_text
    from .parallelize import parallelize
    from .precision import FULL, LossScaler, Precision

    precision = {
        "float32": FULL,
        "bfloat16": Precision(torch.bfloat16),
        "float16": Precision(torch.float16, LossScaler()),
    }[recipe.precision]

    def make_optimizer(tensors):
        return torch.optim.AdamW(tensors, recipe.learning_rate, weight_decay=recipe.weight_decay)

    layout, config = recipe.layout, recipe.model
    model = parallelize(
        config, layout, group, make_optimizer, seed=recipe.seed, precision=precision
    )
    batches = Batches(
        load_text(recipe.text),
        batch_size=layout.global_batch_size,
        seq_len=config.seq_len,
        seed=recipe.seed,
        rank=model.mesh.index("dp"),
        size=layout.dp,
    )
    training, first = None, 0
    if recipe.checkpoints:
        training = Training(
            model.replicas, model.optimizer.optimizers, group, names=model.names_in_whole()
        )
        if saved := training.resume(recipe.checkpoints):
            first = saved.step
            if precision.scaler:
                precision.scaler.scale, precision.scaler.good_steps = saved.extra["scaler"]

    history: list[Metrics] = []
    watched = group.rank() == 0 and sys.stderr.isatty()  # in a cell, prints come at the end
    for step in tqdm(range(first, recipe.steps), initial=first, disable=not watched):
        model.optimizer.set_learning_rate(recipe.learning_rate_at(step))
        meter = Meter(recipe, group)
        done = model.step(*batches.batch(step), max_norm=recipe.max_norm)
        history.append(meter.read(step, done))
        is_last = step + 1 == recipe.steps
        if training and (is_last or (step + 1) % recipe.save_every == 0):
            scaler = precision.scaler
            extra = {"scaler": [scaler.scale, scaler.good_steps]} if scaler else None
            training.save(recipe.checkpoints, step + 1, extra)
    return history


class Meter:
    """Reads clock, ledger and memory around a step."""

    def __init__(self, recipe: Recipe, group):
        self.recipe, self.recorder = recipe, getattr(group, "recorder", None)
        self.size = group.size()
        self.noted = len(self.recorder.comms) if self.recorder else 0
        self.began = time.perf_counter()

    def read(self, step: int, done) -> Metrics:
        seconds = time.perf_counter() - self.began
        tokens = self.recipe.layout.global_batch_size * self.recipe.model.seq_len
        held = self.recorder.memory.export().live() if self.recorder.memory else None
        return Metrics(
            step,
            done.loss.item(),
            None if done.norm is None else done.norm.item(),
            done.skipped,
            seconds,
            tokens / seconds,
            self.mfu(seconds),
            self.bytes_sent(),
            sum(held.values()) if held else None,
        )

    def mfu(self, seconds: float) -> float | None:
        if self.recipe.machine is None:
            return None
        from .calculators import hardware
        from .calculators.flops import model_flops

        peak = hardware(self.recipe.machine).device.peak_flops * self.size
        return model_flops(self.recipe.model, self.recipe.layout.global_batch_size) / seconds / peak

    def bytes_sent(self) -> dict[str, int]:
        """Every message of our strategies is a send: one row each in the rank's ledger."""
        sent: dict[str, int] = {}
        for op, group, _, nbytes, *_ in self.recorder.comms[self.noted :]:
            if op == "send":
                axis = self.recorder.axes.get(group, "world")
                sent[axis] = sent.get(axis, 0) + nbytes
        return sent


def train_on_ranks(recipe: Recipe, *, restarts: int = 0, timeout: float = 600, **options) -> Run:
    """`launch` the recipe on the ranks that its layout asks for.

    restarts: after a failure begin again, from the newest checkpoint, so many times. options: of
    `launch`. Raises what `launch` raises when no restart is left, and ValueError for restarts
    without checkpoints.
    """
    if restarts and not recipe.checkpoints:
        raise ValueError(
            f"restarts={restarts} would begin at step 0 each time: give the recipe checkpoints"
        )
    while True:
        try:
            return launch(train, recipe.layout.world_size, (recipe,), timeout=timeout, **options)
        except RankError as error:
            if not restarts:
                raise
            restarts -= 1
            print(f"{str(error).splitlines()[0]}\nstarting again from the newest checkpoint")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mini_dist.trainer", description=__doc__)
    parser.add_argument("recipe", type=Path, help="a JSON file, as Recipe.to_json writes it")
    parser.add_argument("--restarts", type=int, default=0, help="begin again after a failure")
    given = parser.parse_args(arguments)
    try:
        recipe = Recipe.from_json(given.recipe.read_text())
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    history = train_on_ranks(recipe, restarts=given.restarts, timeout=float("inf")).results[0]
    if os.environ.get("RANK", "0") != "0":  # one of torchrun's ranks is enough to say it
        return 0
    for metrics in history[:: max(1, len(history) // 10)]:
        print(
            f"step {metrics.step:>6}   loss {metrics.loss:.4f}   "
            f"{metrics.tokens_per_second:,.0f} tokens/s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
