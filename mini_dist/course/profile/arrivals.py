"""Which rank comes last to the collectives, and how fast they are once all have come."""

from __future__ import annotations

from collections import defaultdict

from mini_dist.plan.fields import checks_kinds
from mini_dist.plan.tables import Table
from mini_dist.ranks.ledger import Comm, Ledger

from .spans import arrivals


def meetings(ledger: Ledger) -> list[list[Comm]]:
    """The collectives of a run, each as the ranks saw it, in the order in which they began."""
    found: dict[tuple, list[Comm]] = defaultdict(list)
    for comm, late in arrivals(ledger):
        if comm.op not in ("send", "recv", "recv_anysource") and len(comm.group) > 1:
            found[comm.group, comm.op, late].append(comm)
    return sorted(found.values(), key=lambda comms: min(comm.start for comm in comms))


@checks_kinds
def stragglers(ledger: Ledger, op: str = "") -> Table:
    """For each rank: to how many of its collectives it came last, and how long all others together
    have waited for it there, in ms. op: only those that have this in their name."""
    meets, last, cost = (defaultdict(float) for _ in range(3))
    for comms in meetings(ledger):
        if op not in comms[0].op:
            continue
        late = max(comms, key=lambda comm: comm.start)
        for comm in comms:
            meets[comm.rank] += 1
            cost[late.rank] += max(0.0, min(late.start, comm.end) - comm.start)
        last[late.rank] += 1
    rows = [
        (rank, int(meets[rank]), int(last[rank]), f"{last[rank] / meets[rank]:.0%}",
         f"{1e3 * cost[rank]:.1f}")
        for rank in sorted(meets)
    ]  # fmt: skip
    head = ["rank", "collectives", "came last", "of them", "others waited for it, ms"]
    return Table(head, rows)


# What the links carry, over what a caller sees: of n ranks. (nccl-tests, doc/PERFORMANCE.md)
BUS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
}


def kind_of(op: str) -> str | None:
    """ring_all_reduce and all_gather_single by the name that nccl-tests has for them."""
    return next((kind for kind in BUS if kind in op), None)


def size_of(comm: Comm, kind: str) -> int:
    """Return bytes as nccl-tests print them: for an all-gather, of the gathered whole."""
    return comm.nbytes * (len(comm.group) if kind == "all_gather" else 1)


def bandwidths(ledger: Ledger) -> Table:
    """Show collectives as nccl-tests print them: algorithm bandwidth is size / time; bus bandwidth
    is this times what the algorithm must send, so that it can be compared with a link's.

    Time is from the moment when the last rank has come until the last one is done, so that a
    straggler does not make a link look slow; the median over the collectives of one size.
    """
    taken: dict[tuple, list[float]] = defaultdict(list)
    for comms in meetings(ledger):
        if kind := kind_of(comms[0].op):
            began, ended = max(c.start for c in comms), max(c.end for c in comms)
            largest = max(size_of(comm, kind) for comm in comms)
            taken[comms[0].op, kind, len(comms[0].group), largest].append(ended - began)
    rows = []
    for (op, kind, n, size), seconds in sorted(taken.items(), key=lambda item: item[0]):
        middle = sorted(seconds)[len(seconds) // 2]
        rate = size / middle / 1e9 if middle > 0 else 0.0
        us, bus = f"{1e6 * middle:.0f}", rate * BUS[kind](n)
        rows.append((op, size, len(seconds), us, f"{rate:.3f}", f"{bus:.3f}"))
    return Table(["collective", "bytes", "count", "us", "algbw GB/s", "busbw GB/s"], rows)
