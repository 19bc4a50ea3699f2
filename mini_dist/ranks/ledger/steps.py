"""The schedule of a run, found in its records: which messages had to wait for which.

Two messages are in the same step if nothing that either rank did had to come before; a message is
in a later step than all that its two ranks had finished when they turned to it. It does not depend
on how fast the run was: a ring of n ranks has n-1 steps on any machine.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass

from . import Comm, Ledger


@dataclass
class Message:
    """One send and its receive, as the two ranks recorded them."""

    send: Comm
    recv: Comm

    @property
    def source(self) -> int:
        return self.send.rank

    @property
    def target(self) -> int:
        return self.recv.rank

    @property
    def nbytes(self) -> int:
        return self.send.sent


def messages(ledger: Ledger) -> list[Message]:
    """Match every send with its receive: the first of its size that names the sender, or else the
    first of its size from any source. Between two ranks messages stay in the order in which they
    were begun, but two groups of the same ranks do not wait for each other, so the size counts."""
    waiting = defaultdict(deque)
    in_order = sorted(ledger.leaves(), key=lambda comm: comm.start)
    for comm in in_order:
        if comm.op in ("recv", "recv_anysource"):
            source = next(iter(comm.received_from), None)
            waiting[comm.group, source, comm.rank, comm.nbytes].append(comm)
    found = []
    for comm in in_order:
        if comm.op == "send":
            (target,) = comm.sent_to
            queues = [waiting[comm.group, who, target, comm.nbytes] for who in (comm.rank, None)]
            if receives := queues[0] or queues[1]:
                found.append(Message(comm, receives.popleft()))
    return found


def to_play(ledger: Ledger, player: str) -> list[Message]:
    """The messages of a run in which nothing else was sent. Raises ValueError, which names the
    function that plays them, where torch's own collectives are in it: what they send is not seen.
    """
    for comm in ledger.leaves():
        if comm.op not in ("send", "recv"):
            raise ValueError(
                f"{comm.op} is not made of messages that the ledger sees; {player} can follow "
                "send, recv and the collectives of mini_dist"
            )
    return messages(ledger)


def steps(ledger: Ledger) -> list[list[Message]]:
    """The messages of a run, step by step, in rank order of their senders within a step."""
    done: list[list[tuple[float, int]]] = [[] for _ in ledger.span]  # a rank's (end, step)
    found: list[list[Message]] = []
    # Neither side can finish a message that the other has not turned to yet, so this order is safe.
    for message in sorted(messages(ledger), key=lambda m: max(m.send.start, m.recv.start)):
        ends = (message.send, message.recv)
        before = [step for c in ends for end, step in done[c.rank] if end <= c.start]
        step = 1 + max(before, default=-1)
        for comm in ends:
            done[comm.rank].append((comm.end, step))
        found.extend([] for _ in range(step + 1 - len(found)))
        found[step].append(message)
    return [sorted(step, key=lambda m: (m.source, m.target)) for step in found]


def count_rounds(ledger: Ledger) -> int:
    """Rounds in which every rank sends at most one message and receives at most one.

    A step in which one rank has k messages to send, or to receive, takes k of them.
    """
    total = 0
    for step in steps(ledger):
        sends, receives = (Counter(m.source for m in step), Counter(m.target for m in step))
        total += max(*sends.values(), *receives.values())
    return total
