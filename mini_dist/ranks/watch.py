"""Watch a collective at work: run it on numbers that tell where they come from.

    run = watch(ring_all_reduce)     # on 4 ranks
    draw.collective(run)             # every message, with what it carries

Each rank's x has one number per chunk, and chunk c of rank r is the term "c of r", a bit of its
own. So every number in a later message or result shows which terms it contains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mini_dist.plan.fields import checks_kinds

from .launch import Run, launch

BITS = 3  # per term: two equal terms show as a 2, instead of looking like another term


def term(chunk: int, rank: int, size: int) -> int:
    return 1 << BITS * (chunk * size + rank)


def read(number: int, size: int) -> dict[int, list[int]]:
    """Decode a number into its terms: chunk -> the ranks whose term it contains, with repeats."""
    found: dict[int, list[int]] = {}
    for chunk in range(size):
        for rank in range(size):
            times = number >> BITS * (chunk * size + rank) & (1 << BITS) - 1
            if times:
                found.setdefault(chunk, []).extend([rank] * times)
    return found


@dataclass
class Watched:
    """The observations: the run, and each rank's input, its sends in order, and its result."""

    run: Run
    inputs: list[list[int]]
    carried: list[list[list[int]]]  # [rank][its k-th send]: the numbers in it
    results: list[list[int] | None]

    @property
    def size(self) -> int:
        return self.run.world_size


@checks_kinds
def watch(fn: Callable, world_size: int = 4, args: tuple = (), parts: bool = False) -> Watched:
    """Run fn(x, *args, group) on ranks, where x has one number per chunk: [world_size] int64.

    parts: x has one number instead: rank r's is chunk r of a whole, as for an all-gather.
    Raises ValueError for more than 4 ranks, whose terms do not fit into an int64.
    """
    if not 1 <= world_size <= 4:
        raise ValueError(f"world_size={world_size}: give 1 to 4, more terms do not fit in a number")
    run = launch(watched, world_size, (fn, args, parts), quiet=True)
    inputs, carried, results = (list(column) for column in zip(*run.results))
    return Watched(run, inputs, carried, results)


def watched(fn: Callable, args: tuple, parts: bool, group):
    rank, size = group.rank(), group.size()
    chunks = [rank] if parts else range(size)
    x = torch.tensor([term(chunk, rank, size) for chunk in chunks])
    watching = WatchedGroup(group)
    inputs, result = x.tolist(), fn(x, *args, watching)
    return inputs, watching.sent, None if result is None else result.flatten().tolist()


class WatchedGroup:
    """A group that stores what each send carries."""

    def __init__(self, group):
        self.inner, self.sent = group, []
        self.recorder, self.name = getattr(group, "recorder", None), group.name

    def rank(self) -> int:
        return self.inner.rank()

    def size(self) -> int:
        return self.inner.size()

    def send(self, tensors, to, tag):
        self.sent.append(tensors[0].flatten().tolist())
        return self.inner.send(tensors, to, tag)

    def recv(self, tensors, source, tag):
        return self.inner.recv(tensors, source, tag)
