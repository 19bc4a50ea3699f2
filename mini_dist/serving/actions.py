"""What a server does, as data: requests, and steps that are lists of actions.

Nothing else decides. The scheduler writes the lists, the engine runs them on a model, the simulator
gives them times, the figure draws them: all read the same data, as with schedule/.

    a RUN 0:16   a's tokens at positions 0..15 go through the model, which writes their keys and
                 values; if the last of them is the last known token, a next one is chosen
    a TAKE 3     a free block becomes the next one of a's table
    a SHARE 3    the same with a block that holds the right keys and values already
    a COPY 3>7   a has to write into block 3, which others read: a copy in block 7 replaces it
    a FORK b     b begins with a's tokens and a's blocks
    a OUT 3>0    the content of block 3 moves to slot 0 on the host; the block is free
    a IN 0>5     and back, into a free block, the next one of a's table
    a DROP       a loses its blocks, and will recompute their content
    a FREE       a has ended, or was canceled

In a step all blocks are moved first, then all tokens of RUN actions go through the model at once.
A sequence is one text that grows; a request with several samples becomes several sequences.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from mini_dist.plan.fields import checks_kinds, whole

_PATTERN = re.compile(
    r"(?P<sequence>\S+) (?:(?P<kind>RUN) (\d+):(\d+)|(TAKE|SHARE) (\d+)|(COPY|OUT|IN) (\d+)>(\d+)"
    r"|(FORK) (\S+)|(DROP|FREE))"
)


class ServingError(ValueError):
    """A request that cannot be served, or an action that cannot be done; one sentence says why."""


@checks_kinds(error=ServingError)
@dataclass(frozen=True)
class Request:
    """A prompt, and how to continue it.

    arrival: on the server's clock (steps, or seconds). samples: how many different
    continuations. temperature: 0 takes the likeliest token; otherwise the seed and the token's
    position decide, whatever else is served at the time. stop: a token that ends the text.
    Raises ServingError in one sentence.
    """

    name: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    arrival: float = 0.0
    samples: int = 1
    temperature: float = 0.0
    seed: int = 0
    stop: int | None = None

    def __post_init__(self):
        if not isinstance(self.name, str) or self.name.split() != [self.name]:
            raise ServingError(
                f"{self.name!r} is no name: give a text without spaces, such as 'a'."
            )
        try:
            object.__setattr__(self, "prompt", tuple(map(operator.index, self.prompt)))
        except TypeError:
            raise ServingError(
                f"request {self.name!r} has a prompt of other things than tokens: give ints."
            ) from None
        if not self.prompt:
            raise ServingError(f"request {self.name!r} is empty: give at least one token.")
        for field in ("max_new_tokens", "samples"):
            whole(f"request {self.name!r}: {field}", getattr(self, field), error=ServingError)
        if not math.isfinite(self.arrival):
            raise ServingError(f"request {self.name!r} has arrival={self.arrival}: give a number.")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ServingError(
                f"request {self.name!r} has temperature={self.temperature}: give 0 for the "
                "likeliest token, or more."
            )

    @property
    def positions(self) -> int:
        """Return the final number of cached tokens: the last token is never read."""
        return len(self.prompt) + self.max_new_tokens - 1

    @property
    def sequences(self) -> list[str]:
        """Return the names of its sequences."""
        if self.samples == 1:
            return [self.name]
        return [f"{self.name}.{i}" for i in range(self.samples)]


class ServerAction(NamedTuple):
    """One action for a sequence; prints as `a TAKE 3`."""

    sequence: str
    kind: str
    first: int | str = 0  # a position, a block, a slot on the host, or the name of a new sequence
    last: int = 0  # the position after the last; where a content goes to

    @staticmethod
    def parse(text: str) -> ServerAction:
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise ServingError(
                f"{text!r} is not an action: write who, what and where, as in `a TAKE 3`."
            )
        sequence, kind, *rest = [each for each in match.groups() if each is not None]
        if kind == "FORK":
            return ServerAction(sequence, kind, rest[0])
        return ServerAction(sequence, kind, *map(int, rest))

    def __str__(self) -> str:
        between = {"RUN": ":", "COPY": ">", "OUT": ">", "IN": ">"}
        if self.kind in between:
            return f"{self.sequence} {self.kind} {self.first}{between[self.kind]}{self.last}"
        where = f" {self.first}" if self.kind in ("TAKE", "SHARE", "FORK") else ""
        return f"{self.sequence} {self.kind}{where}"

    __repr__ = __str__


class ServerStep(NamedTuple):
    """The actions between two times: at most one batch through the model."""

    start: float
    end: float
    actions: tuple[ServerAction, ...]

    def __str__(self) -> str:
        return f"{self.start:g}: " + ", ".join(map(str, self.actions))


def num_tokens(actions: Iterable[ServerAction]) -> int:
    """Return how many tokens go through the model in a step."""
    return sum(action.last - action.first for action in actions if action.kind == "RUN")
