"""A registry of wrong answers: functions that a learner might write, and what they must be told."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Wrong:
    """The wrong answers to one exercise. `says`: a piece of the hint that names the mistake."""

    answers: list[tuple[Callable, str]] = field(default_factory=list)

    def __call__(self, says: str):
        def keep(fn):
            self.answers.append((fn, says))
            return fn

        return keep

    def names(self) -> list[str]:
        return [fn.__name__ for fn, _ in self.answers]
