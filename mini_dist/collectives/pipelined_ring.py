"""The fast ring: the ring of ring.py, cut into pieces that follow each other round it.

In the readable ring a rank waits for a whole chunk, adds, and only then sends: the link idles
while it adds, and it idles while the link carries. Here
  1. every chunk is cut into pieces, and while one is being added the others are on their way;
  2. each piece goes on to its next step at once, also from scattering to gathering, so a rank
     waits for nobody but the piece that it needs next;
  3. gathered pieces are received where they belong, so nothing is copied or concatenated.
The bytes are the same, the order of every sum too; only the messages are more. Legend: n ranks,
N bytes.
"""

from __future__ import annotations

from collections import deque

import torch

from .messages import collective, empty, reduction, start, wait

PIECE_BYTES = 1 << 20  # smaller pieces overlap more and cost more messages


@collective
def pipelined_ring_all_reduce(
    x: torch.Tensor, group, op: str = "sum", piece_bytes: int = PIECE_BYTES
) -> torch.Tensor:
    """Reduce x over the group round a ring, in pieces of about `piece_bytes`.

    x: any shape -> the same, equal to the last bit to `ring_all_reduce`, with the same bytes.
    """
    rank, size, add = group.rank(), group.size(), reduction(op, x)
    if size == 1:
        return x.clone()
    after, before = (rank + 1) % size, (rank - 1) % size
    x = x.contiguous()
    result = empty(x)
    lanes = max(1, round(x.nbytes / size / piece_bytes))
    terms, sums = cut(x, size, lanes), cut(result, size, lanes)
    buffers = [empty(piece) for piece in terms[0]]  # one a lane: it is read before it is reused

    # A hop is one piece going one step: one leaves for the rank after, one comes from before.
    hops = [(step, lane) for step in range(2 * (size - 1)) for lane in range(lanes)]
    flying = deque()
    for hop in range(len(hops) + lanes):
        if hop >= lanes:  # what this lane sends next has been on its way for one step
            wait(flying.popleft())
            step, lane = hops[hop - lanes]
            if step < size - 1:  # still scattering
                term = terms[rank - 2 - step][lane]
                add(buffers[lane][: len(term)], term, out=sums[rank - 2 - step][lane])
        if hop < len(hops):
            step, lane = hops[hop]
            leaving, coming = (rank - 1 - step) % size, (rank - 2 - step) % size
            piece = (sums if step else terms)[leaving][lane]
            place = sums[coming][lane]
            if step < size - 1:
                place = buffers[lane][: len(place)]
            flying.append(start(group, receives=[(place, before)], sends=[(piece, after)]))
    return result


def cut(x: torch.Tensor, size: int, lanes: int) -> list[list[torch.Tensor]]:
    """`size` chunks of x, flattened, in `lanes` pieces each: [chunk][lane]."""
    return [list(chunk.tensor_split(lanes)) for chunk in x.view(-1).tensor_split(size)]
