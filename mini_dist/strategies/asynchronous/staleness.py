"""How stale each update was, read from the messages of a run: also of a server that is not ours."""

from __future__ import annotations

from mini_dist.ranks.ledger import Ledger

from .ideas import Applied


def updates(ledger: Ledger) -> list[Applied]:
    """The updates of the server, rank 0, in order, as the ledger of its messages has them.

    A message of floating-point numbers from a worker is a push, one to it the answer to a pull.
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
