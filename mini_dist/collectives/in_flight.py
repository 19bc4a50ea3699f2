"""Collectives that are begun now and waited for later: computing goes on while they are under way.

    arriving = begin_all_gather_(whole, group)     # whole [n L]: this rank's part is in its place
    ...                                            # compute something else
    arriving.wait()                                # now all parts are

No thread does this. All messages are handed to the backend at once, each straight to the rank it
is for, and the backend moves them by itself. The bytes are those of the ring, (n-1)/n of the whole
a rank; what the ring saves is memory: a reduce-scatter here receives n-1 terms before it adds them.

All ranks must begin their collectives in the same order: between two ranks messages have no names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .messages import collective, empty, start, wait


@dataclass
class InFlight:
    """A collective that was begun. `wait()` returns its result; call it once."""

    handles: list
    result: Callable[[], torch.Tensor]

    def wait(self) -> torch.Tensor:
        wait(self.handles)
        return self.result()


@collective
def begin_all_gather_(whole: torch.Tensor, group) -> InFlight:
    """Begin to fill `whole` with the other ranks' parts, which arrive where they belong.

    whole: [n L] on every rank, of which part r, [L], is rank r's own. Until `wait` has returned,
    nobody may touch it. Raises ValueError if n does not divide its length.
    """
    parts, rank, others = cut(whole, group)
    receives = [(parts[other], other) for other in others]
    sends = [(parts[rank], other) for other in reversed(others)]
    return InFlight(start(group, receives, sends), lambda: whole)


@collective
def begin_reduce_scatter(whole: torch.Tensor, group, dtype: torch.dtype | None = None) -> InFlight:
    """Begin to send every rank its part of `whole`; `wait` returns the sum of all for this rank.

    whole: [n L] on every rank -> [L], added up in the ring's order and in `dtype`, which may be
    wider than what travels. Raises ValueError if n does not divide its length.
    """
    parts, rank, others = cut(whole, group)
    receives = [(empty(parts[rank]), other) for other in reversed(others)]
    sends = [(parts[other], other) for other in reversed(others)]
    terms = [*(term for term, _ in receives), parts[rank]]  # the next rank's first, as in the ring

    def total() -> torch.Tensor:
        result = terms[0].to(dtype or whole.dtype, copy=not receives)
        for term in terms[1:]:
            result += term
        return result

    return InFlight(start(group, receives, sends), total)


def cut(whole: torch.Tensor, group) -> tuple[list[torch.Tensor], int, list[int]]:
    """The parts of `whole`, this rank, and the others, nearest before it first: so that in one
    moment no rank is sent to by all."""
    rank, size = group.rank(), group.size()
    if len(whole) % size:
        raise ValueError(f"{len(whole)} rows cannot be cut in {size} equal parts: pad them")
    return list(whole.chunk(size)), rank, [(rank - k) % size for k in range(1, size)]
