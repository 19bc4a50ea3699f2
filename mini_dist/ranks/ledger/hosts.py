"""Play the messages of a run between hosts: the messages stay the same, the cables are new.

    run = launch(fn, 8)                                       # on any machine
    seconds_on(run.ledger, Hosts(2, uplink="200 Mbit/s"))     # between two hosts, in virtual time

A cable is shared: concurrent messages over an uplink divide its speed evenly, as TCP connections
do. As in gloo, a message starts when both sides have begun it, and each side first waits for
everything that it had waited for in the run. Messages inside a host take no time, and neither does
computing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict

from ..hosts import Hosts
from . import Ledger
from .flights import Flight
from .steps import to_play

ROUNDING = 1e-9  # of a message's bytes; a smaller rest has arrived


def play_on_hosts(ledger: Ledger, hosts: Hosts, scale: float = 1.0) -> list[Flight]:
    """Play every message between these hosts; return the flights in order of arrival.

    scale: bytes that are played / bytes of the run, so that a small run stands for a large one.
    Raises ValueError if torch's own collectives are in the ledger: their messages are not visible.
    """
    places, played = hosts.places(len(ledger.span)), to_play(ledger, "play_on_hosts")
    waits = Waits(played)
    now, left, started, flights = 0.0, {}, {}, []  # left: message -> bytes in flight
    while len(flights) < len(played):
        for number in waits.ready():
            message, started[number] = played[number], now
            left[number] = scale * message.nbytes
        at_once = [n for n in left if places[played[n].source] == places[played[n].target]]
        if not at_once:
            speeds = share({n: (places[played[n].source], places[played[n].target]) for n in left})
            speeds = {n: part * hosts.payload_bandwidth for n, part in speeds.items()}
            ends = {n: max(now + left[n] / speeds[n], started[n] + hosts.latency) for n in left}
            moment = min(ends.values())
            for n in left:
                left[n] = max(0.0, left[n] - (moment - now) * speeds[n])
            at_once, now = [n for n in left if ends[n] <= moment * (1 + ROUNDING)], moment
        for number in at_once:
            del left[number]
            source, target, nbytes = played[number].source, played[number].target, 0
            nbytes = scale * played[number].nbytes
            flights.append(Flight(source, target, nbytes, started[number], now))
            waits.done(number)
    return flights


def seconds_on(ledger: Ledger, hosts: Hosts, scale: float = 1.0) -> float:
    """Return the time of a run's messages between these hosts, first to last, in virtual
    seconds."""
    return max((flight.end for flight in play_on_hosts(ledger, hosts, scale)), default=0.0)


def share(routes: dict[int, tuple[int, int]]) -> dict[int, float]:
    """Return message -> its bandwidth: the smaller of its shares of the uplink that it leaves by
    and of the one that it arrives by. routes: message -> (host, host)."""
    leaving = Counter(source for source, _ in routes.values())
    arriving = Counter(target for _, target in routes.values())
    return {n: 1 / max(leaving[s], arriving[t]) for n, (s, t) in routes.items()}


class Waits:
    """Which messages may start: both sides have waited for all that they waited for in the run."""

    def __init__(self, played: list):
        ended = defaultdict(list)  # rank -> (when its waiting for a message ended, the message)
        for number, message in enumerate(played):
            for comm in (message.send, message.recv):
                ended[comm.rank].append((comm.end, number))
        self.order = {rank: sorted(ends) for rank, ends in ended.items()}
        self.over = dict.fromkeys(ended, 0)  # rank -> of how many (the first ones) it has the end
        self.finished: set[int] = set()
        self.before = {
            number: [
                (comm.rank, bisect_right(self.order[comm.rank], (comm.start, -1)))
                for comm in (message.send, message.recv)
            ]
            for number, message in enumerate(played)
        }

    def ready(self) -> list[int]:
        """Return the messages that may start now; each is returned once."""
        may = [n for n, ends in self.before.items() if all(self.over[r] >= k for r, k in ends)]
        for number in may:
            del self.before[number]
        return may

    def done(self, number: int) -> None:
        self.finished.add(number)
        for rank, order in self.order.items():
            over = self.over[rank]
            while over < len(order) and order[over][1] in self.finished:
                over += 1
            self.over[rank] = over
