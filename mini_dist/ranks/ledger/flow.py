"""How many bytes each rank sends to each other in a native collective, at least.

gloo and NCCL show only the name and the tensor of a collective. The ledger counts the minimum
that any algorithm has to move, in the pattern of one that reaches it: a ring for the symmetric
collectives, a chain for broadcast and reduce, direct messages for the rest. gloo may really
send more; `wire_bytes` shows that.
"""

from __future__ import annotations

ITEM_BYTES = {"float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "float16": 2}
ITEM_BYTES |= {"bfloat16": 2, "int16": 2}  # all others: 1


def flow(op: str, nbytes: int, dtype: str, detail, me: int, size: int) -> tuple[dict, dict]:
    """Return the bytes sent to and received from each peer (group rank -> bytes, none to itself).

    nbytes: the whole tensor for all_reduce, broadcast, reduce and reduce_scatter (its input);
    one rank's part for all_gather (its input), gather, scatter, send, recv. detail: the peer, the
    root, or (splits sent, splits received).
    """
    after, before = (me + 1) % size, (me - 1) % size
    if op == "send":
        return {detail: nbytes}, {}
    if op == "recv":
        return {}, {detail: nbytes}
    if size == 1 or op == "barrier":
        return {}, {}
    if op == "all_gather":
        return {after: (size - 1) * nbytes}, {before: (size - 1) * nbytes}
    if op in ("reduce_scatter", "all_reduce"):
        part = split(nbytes, ITEM_BYTES.get(dtype, 1), size)
        # Scattering, a rank sends every part but its own; gathering, every part but the next one's.
        gathering = op == "all_reduce"
        sent = {rank: nbytes - part[rank] for rank in range(size)}
        if gathering:
            sent = {rank: sent[rank] + nbytes - part[(rank + 1) % size] for rank in range(size)}
        return {after: sent[me]}, {before: sent[before]}
    if op == "broadcast":
        place = (me - detail) % size
        return {after: nbytes} if place < size - 1 else {}, {before: nbytes} if place else {}
    if op == "reduce":
        place = (me - detail) % size
        return {before: nbytes} if place else {}, {after: nbytes} if place < size - 1 else {}
    if op in ("gather", "scatter"):
        others = {rank: nbytes for rank in range(size) if rank != detail}
        outer, inner = (others, {}) if me == detail else ({}, {detail: nbytes})
        return (outer, inner) if op == "scatter" else (inner, outer)
    if op == "all_to_all":
        return tuple({r: n for r, n in enumerate(splits) if r != me and n} for splits in detail)
    if op == "recv_anysource":
        return {}, {}
    raise ValueError(f"no volume is known for the collective {op!r}")


def split(nbytes: int, item: int, size: int) -> list[int]:
    """Return the bytes of `size` parts that differ by at most one element."""
    items = nbytes // item
    return [(items // size + (rank < items % size)) * item for rank in range(size)]
