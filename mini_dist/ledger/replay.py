"""Replay the messages of a run over links of your choice: the same messages, another machine.

    flights = replay(run.ledger, links.Link(latency=5e-6, bandwidth=50e9))
    seconds = max(flight.end for flight in flights)
    rounds(run.ledger)                  # the longest chain of messages that wait for each other

What is kept of the run is who sent how much to whom, and what each rank had waited for before it
began a message. What is replaced is time: a rank sends one message at a time and receives one at a
time, each message takes what its link says, and everything else (adding, copying, the operating
system) takes none. So the result says what these links would need, on any machine alike.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from . import Comm, Ledger


class Flight(NamedTuple):
    """A message in replayed time; ranks are world ranks, times seconds."""

    source: int
    target: int
    nbytes: float
    start: float
    end: float


def replay(ledger: Ledger, link, op: str | None = None, scale: float = 1.0) -> list[Flight]:
    """Every message of `ledger` as it would fly over `link`, in order of start.

    link: anything with `seconds(nbytes)`, or a function (source, target) -> such a link.
    op: only what is inside this collective of ours. scale: bytes of the replay / bytes of the run,
    so that a small run stands for a large one. Raises ValueError where torch's own collectives
    are in the ledger: what they send inside is not seen.
    """
    link_of = (lambda source, target: link) if hasattr(link, "seconds") else link
    done = defaultdict(list)  # rank -> (when it had waited for a message in the run, in the replay)
    sender_free, receiver_free = defaultdict(float), defaultdict(float)
    flights = []
    for sent, got in sorted(messages(ledger, op), key=lambda pair: max(c.start for c in pair)):
        source, target, nbytes = sent.rank, got.rank, scale * sent.sent
        start = max(
            sender_free[source],
            receiver_free[target],
            *(then for ended, then in done[source] if ended <= sent.start),
            *(then for ended, then in done[target] if ended <= got.start),
        )
        end = start + link_of(source, target).seconds(nbytes)
        sender_free[source] = receiver_free[target] = end
        done[source].append((sent.end, end))
        done[target].append((got.end, end))
        flights.append(Flight(source, target, nbytes, start, end))
    return sorted(flights, key=lambda flight: flight.start)


def rounds(ledger: Ledger, op: str | None = None) -> int:
    """How many messages follow each other at least, when each takes one round."""
    return round(max((flight.end for flight in replay(ledger, OneRound, op)), default=0))


class OneRound:
    """A link on which every message takes 1, whatever its size."""

    @staticmethod
    def seconds(nbytes: float) -> float:
        return 1.0


def messages(ledger: Ledger, op: str | None) -> list[tuple[Comm, Comm]]:
    """The sends of a run, each with the receive that it met: the k-th of a pair with the k-th."""
    sends, receives = defaultdict(list), defaultdict(list)
    for comm in ledger.leaves(op=op):
        if comm.op == "send":
            sends[(comm.rank, *comm.sent_to)].append(comm)
        elif comm.op == "recv":
            receives[(*comm.received_from, comm.rank)].append(comm)
        else:
            raise ValueError(
                f"{comm.op} is not made of messages that the ledger sees; replay can follow "
                "send, recv and the collectives of mini_dist"
            )
    return [pair for route in sends for pair in zip(sends[route], receives[route], strict=True)]
