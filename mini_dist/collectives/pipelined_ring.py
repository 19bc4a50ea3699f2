"""The fast ring: the ring of ring.py, cut into pieces that follow each other round it.

In the readable ring a rank waits for a whole chunk, adds, and only then sends: the link idles
while it adds, and the adder idles while the link carries. Here
  1. every chunk is cut into pieces, and while one is being added another is on its way;
  2. receives are posted early: a piece finds its receiver waiting, not busy;
  3. a piece goes on at once from scattering to gathering, so ranks wait for no more than the piece
     that they send next;
  4. pieces are gathered where they belong, so nothing is allocated or copied on the way.
The bytes are the same, the order of every sum too; only the messages are more. It pays where a
link works while the processor adds. Where both are the same two cores it cannot win, and the
messages cost what the overlap gains: benchmarks/collectives.py has both. Legend: n ranks, N bytes.
"""

from __future__ import annotations

from collections import deque

import torch

from .messages import begin, collective, empty, reduction, start, wait

PIECE_BYTES = 1 << 20  # what a core's cache holds; smaller pieces cost more messages
LANES = 2  # pieces of a chunk under way at once


@collective
def pipelined_ring_all_reduce(
    x: torch.Tensor,
    group,
    op: str = "sum",
    piece_bytes: int = PIECE_BYTES,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reduce x over the group round a ring, in pieces of about `piece_bytes`.

    x: any shape -> the same, equal to the last bit to `ring_all_reduce`, with the same bytes.
    op: also "mean".
    out: where the result goes, contiguous; it may be x, of which every piece is read before its sum
    comes. A new tensor unless given.
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

    # A hop: one piece leaves for the rank after while another comes from the rank before.
    hops = [
        (step, first + lane)
        for first in range(0, num_pieces, LANES)
        for step in range(2 * (size - 1))
        for lane in range(LANES)
    ]
    flying = deque()
    for hop in range(len(hops) + LANES):
        if hop >= LANES:  # what came in this lane a step ago is what goes on now
            handles, parcel = flying.popleft()
            wait(handles)
            step, piece = hops[hop - LANES]
            if step < size - 1:  # still scattering, and complete after size-1 steps
                out = sums[rank][piece] if step == size - 2 else parcel
                parcel = add(parcel, terms[rank - 2 - step][piece], out=out)
                if step == size - 2 and op == "mean":
                    parcel /= size  # once, and not on every rank that gathers it
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
    """`size` chunks of x, flattened, each in `num_pieces`: [chunk][piece]."""
    return [list(chunk.tensor_split(num_pieces)) for chunk in x.view(-1).tensor_split(size)]
