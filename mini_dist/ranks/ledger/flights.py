"""Play the messages of a run over links of your choice: the same messages, another network.

    flights = play_messages(run.ledger, links.Link(latency=5e-6, bandwidth=50e9))
    seconds = max(flight.end for flight in flights)

The played messages keep their sizes, senders and receivers, and what each rank had waited for
before it began a message. Only the times are replaced: a rank sends one message at a time and
receives one at a time, each message takes the link's time, and everything else (adding, copying,
the operating system) takes none. So the result is the time on these links, and the same on any
machine. `mini_dist.course.replay` plays a whole program, including its kernels.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from . import Ledger
from .steps import to_play


class Flight(NamedTuple):
    """A message in played time; ranks are world ranks, times seconds."""

    source: int
    target: int
    nbytes: float
    start: float
    end: float


def play_messages(ledger: Ledger, link, scale: float = 1.0) -> list[Flight]:
    """Play every message of `ledger` over `link`; return the flights in order of start.

    link: anything with `seconds(nbytes)`, or a function (source, target) -> such a link.
    scale: bytes that are played / bytes of the run, so that a small run stands for a large one.
    Raises ValueError if torch's own collectives are in the ledger: their messages are not visible.
    """
    played = to_play(ledger, "play_messages")
    link_of = (lambda source, target: link) if hasattr(link, "seconds") else link
    done = defaultdict(list)  # rank -> (when it had waited for a message in the run, as played)
    sender_free, receiver_free = defaultdict(float), defaultdict(float)
    flights = []
    # Neither side can finish a message before the other begins it, so this order is safe.
    for message in sorted(played, key=lambda m: max(m.send.start, m.recv.start)):
        source, target, nbytes = message.source, message.target, scale * message.nbytes
        ends = (message.send, message.recv)
        ready = [then for comm in ends for ended, then in done[comm.rank] if ended <= comm.start]
        start = max(*ready, sender_free[source], receiver_free[target], 0.0)
        end = start + link_of(source, target).seconds(nbytes)
        sender_free[source] = receiver_free[target] = end
        for comm in ends:
            done[comm.rank].append((comm.end, end))
        flights.append(Flight(source, target, nbytes, start, end))
    return sorted(flights, key=lambda flight: flight.start)
