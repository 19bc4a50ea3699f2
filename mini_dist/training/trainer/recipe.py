"""A recipe: everything that determines a training run, as plain data."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from mini_dist.plan.config import Layout, ModelConfig
from mini_dist.plan.fields import checks_kinds

PRECISIONS = ("float32", "bfloat16", "float16")


@checks_kinds
@dataclass(frozen=True)
class Recipe:
    """Everything that determines a training run, as plain data that a file can hold.

    text: a file to learn from; None for the course's own (load_text). learning_rate rises linearly
    for `warmup` steps and stays constant. checkpoints: a directory for them; one is saved after
    every `save_every` steps. machine: a name in calculators.hardware, for the MFU.
    Raises ValueError in one sentence for an invalid value.
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
        for field, kind in (("model", ModelConfig), ("layout", Layout)):
            if not isinstance(getattr(self, field), kind):
                raise ValueError(f"{field}={getattr(self, field)!r} is not a {kind.__name__}")
        for field in ("text", "checkpoints", "machine"):
            if getattr(self, field) == "":
                raise ValueError(f"{field}='' names nothing: leave it out, or give a name")
        if self.precision not in PRECISIONS:
            known = ", ".join(map(repr, PRECISIONS))
            raise ValueError(f"precision={self.precision!r} is not known: give one of {known}")
        for field, least in (("steps", 1), ("save_every", 1), ("warmup", 0)):
            if (value := getattr(self, field)) < least:
                raise ValueError(f"{field}={value!r} is no number of steps: give {least} or more")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate!r} learns nothing: give above 0")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay={self.weight_decay!r} is negative: give 0 or more")
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(
                f"max_norm={self.max_norm!r} would stop all learning: give more than 0, or None "
                "for no clipping"
            )
        self.layout.check(self.model)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> Recipe:
        """Read the output of `to_json`; missing fields get their defaults. Raises ValueError."""
        fields = _checked("recipe", json.loads(text), Recipe)
        for name, kind in (("model", ModelConfig), ("layout", Layout)):
            fields[name] = kind(**_checked(name, fields.get(name, {}), kind))
        return Recipe(**fields)

    def learning_rate_at(self, step: int) -> float:
        return self.learning_rate * min(1.0, (step + 1) / (self.warmup or 1))


def _checked(name: str, value: object, kind: type) -> dict:
    """Return the value if it is a JSON object with fields of `kind` only; else raise ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{name}={value!r} is no JSON object: give one, such as {{}}")
    known = [field.name for field in dataclasses.fields(kind)]
    if unknown := sorted(set(value) - set(known)):
        raise ValueError(f"{unknown[0]!r} is no field of a {name}: it has {', '.join(known)}")
    return value
