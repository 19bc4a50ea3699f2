"""How stale each update was, read from a run's messages, even if the server is not ours."""

from __future__ import annotations

from mini_dist.ranks.ledger import Ledger

from .ideas import Applied


def updates(ledger: Ledger) -> list[Applied]:
    """Reconstruct the updates of the server, rank 0, in order, from the ledger of its messages.

    Floating-point numbers from a worker are a push; those to a worker are the answer to a pull.
    """
    pulled: dict[int, int] = {}
    applied: list[Applied] = []
    for comm in ledger.leaves(rank=0):
        if "float" in comm.dtype:
            (worker,) = comm.peers
            if comm.op == "send":
                pulled[worker] = len(applied)
            else:
                applied.append(Applied(worker, len(applied) - pulled.get(worker, 0)))
    return applied
