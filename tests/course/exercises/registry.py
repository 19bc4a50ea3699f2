"""Answers that a learner might write: right ones, and wrong ones with the hint they must get."""

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


@dataclass
class Right:
    """Right answers that look unlike the library's: right_merge = Right("merge")."""

    name: str
    answers: list[Callable] = field(default_factory=list)

    def __call__(self, fn: Callable) -> Callable:
        self.answers.append(fn)
        return fn


@dataclass
class Fresh:
    """Answers to many exercises by somebody who had not read the checks.

    `wrong` stores (exercise, function, piece of the hint), `right` stores (exercise, function)."""

    wrong_answers: list[tuple[str, Callable, str]] = field(default_factory=list)
    right_answers: list[tuple[str, Callable]] = field(default_factory=list)

    def wrong(self, name: str, says: str = ""):
        def keep(fn):
            self.wrong_answers.append((name, fn, says))
            return fn

        return keep

    def right(self, name: str):
        def keep(fn):
            self.right_answers.append((name, fn))
            return fn

        return keep
