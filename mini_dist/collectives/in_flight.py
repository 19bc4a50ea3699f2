"""Collectives that begin now and are waited for later: computing continues while they are in
flight.

    arriving = begin_all_gather_(whole, group)     # whole [n L]: only this rank's part is filled
    ...                                            # compute something else
    arriving.wait()                                # now all parts are filled

This uses no thread. All messages are given to the backend at once, each directly to its receiver,
and the backend moves them. It sends as many bytes as a ring, (n-1)/n of the whole per rank. A
ring would save memory: the reduce-scatter here receives n-1 terms before it adds them.

All ranks must begin their collectives in the same order, because messages between two ranks carry
no tag and are matched by order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .messages import collective, empty, start, wait


@dataclass
class InFlight:
    """A collective in flight. `wait()` returns its result; call it once."""

    handles: list
    result: Callable[[], torch.Tensor]

    def wait(self) -> torch.Tensor:
        wait(self.handles)
        return self.result()


@collective
def begin_all_gather_(whole: torch.Tensor, group) -> InFlight:
    """Begin to fill `whole` with the other ranks' parts, which arrive in place.

    whole: [n L] on every rank; part r, [L], is rank r's own. Do not touch it before `wait` has
    returned. Raises ValueError if n does not divide its length.
    """
    parts, rank, others = cut(whole, group)
    receives = [(parts[other], other) for other in others]
    sends = [(parts[rank], other) for other in reversed(others)]
    return InFlight(start(group, receives, sends), lambda: whole)


@collective
def begin_reduce_scatter(whole: torch.Tensor, group, dtype: torch.dtype | None = None) -> InFlight:
    """Begin to send every rank its part of `whole`; `wait` returns the sum of all for this rank.

    whole: [n L] on every rank -> [L], summed in the ring's order and in `dtype`, which may be
    wider than the messages' dtype. Raises ValueError if n does not divide its length.
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
    """Return the parts of `whole`, this rank, and the other ranks, nearest predecessor first, so
    that at no time all ranks send to the same rank."""
    rank, size = group.rank(), group.size()
    if len(whole) % size:
        raise ValueError(f"{len(whole)} rows cannot be cut in {size} equal parts: pad them")
    return list(whole.chunk(size)), rank, [(rank - k) % size for k in range(1, size)]
