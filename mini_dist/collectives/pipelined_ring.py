"""The fast ring: the ring of ring.py, cut into pieces that follow each other around the ring.

In the readable version a rank waits for a whole chunk, adds, and only then sends: the link idles
while it adds, and the adder idles while the link sends. Here
  1. every chunk is cut into pieces, and while one piece is added, another is in flight;
  2. receives are posted early, so a piece never waits for a busy receiver;
  3. a piece continues at once from scattering to gathering, so ranks wait only for the piece
     that they send next;
  4. pieces are gathered in place, so nothing is allocated or copied on the way.
The bytes and the order of every sum are the same; only the number of messages grows. It pays if a
link works while the processor adds. If both use the same two cores it cannot win, and the
messages cost what the overlap gains: benchmarks/collectives.py has both. Legend: n ranks, N bytes.
"""

from __future__ import annotations

from collections import deque

import torch

from .messages import begin, collective, empty, reduction, start, wait

PIECE_BYTES = 1 << 20  # fits a core's cache; smaller pieces cost more messages
LANES = 2  # pieces of a chunk in flight at once


@collective
def pipelined_ring_all_reduce(
    x: torch.Tensor,
    group,
    op: str = "sum",
    piece_bytes: int = PIECE_BYTES,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reduce x over the group around a ring, in pieces of about `piece_bytes`.

    x: any shape -> the same, bitwise equal to `ring_all_reduce`, with the same bytes.
    op: also "mean".
    out: where the result goes, contiguous; it may be x, because every piece is read before its sum
    arrives. A new tensor by default.
    """
    rank, size, add = group.rank(), group.size(), reduction(begin(op, x), x)
    result = empty(x) if out is None else out
    if size == 1:
        return result.copy_(x)
    after, before = (rank + 1) % size, (rank - 1) % size
    x = x.contiguous()
    num_pieces = LANES * max(1, round(x.nbytes / size / piece_bytes / LANES))
    terms, sums = cut(x, size, num_pieces), cut(result, size, num_pieces)
    buffers = [empty(terms[0][0]) for _ in range(2 * LANES)]  # received into, then sent from

    # A hop: one piece leaves for the next rank while another comes from the previous rank.
    hops = [
        (step, first + lane)
        for first in range(0, num_pieces, LANES)
        for step in range(2 * (size - 1))
        for lane in range(LANES)
    ]
    flying = deque()
    for hop in range(len(hops) + LANES):
        if hop >= LANES:  # what arrived in this lane one step ago is sent on now
            handles, parcel = flying.popleft()
            wait(handles)
            step, piece = hops[hop - LANES]
            if step < size - 1:  # still scattering; complete after size-1 steps
                out = sums[rank][piece] if step == size - 2 else parcel
                parcel = add(parcel, terms[rank - 2 - step][piece], out=out)
                if step == size - 2 and op == "mean":
                    parcel /= size  # once, not on every rank that gathers it
        if hop < len(hops):
            step, piece = hops[hop]
            if step == 0:
                parcel = terms[rank - 1][piece]
            place = sums[(rank - 2 - step) % size][piece]
            if step < size - 1:
                place = buffers[hop % len(buffers)][: len(place)]
            handles = start(group, receives=[(place, before)], sends=[(parcel, after)])
            flying.append((handles, place))
    return result


def cut(x: torch.Tensor, size: int, num_pieces: int) -> list[list[torch.Tensor]]:
    """Cut x, flattened, into `size` chunks of `num_pieces` pieces each: [chunk][piece]."""
    return [list(chunk.tensor_split(num_pieces)) for chunk in x.view(-1).tensor_split(size)]
