"""A world of which one rank of each kind was run: its ledger, and how it is played.

Wherever a rank meets others, it meets ranks of certain kinds. The first rank of each kind stands
for all of them: they do the same at the same virtual time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mini_dist.plan.tables import Table

from ..ledger import Comm, Ledger, read_rank
from .kinds import Kinds
from .player import Player


def spread_over_the_group(comm: Comm, rank: int) -> None:
    """Count the mean of what the group's ranks send. The chain of a broadcast ends at some rank,
    which sends nothing, and it may be of one kind with the others."""
    n, place = len(comm.group), comm.group.index(rank)
    mean = comm.nbytes * (n - 1) // n
    comm.sent_to = {comm.group[(place + 1) % n]: mean}
    comm.received_from = {comm.group[place - 1]: mean}


@dataclass
class LedgerByKind(Ledger):
    """The ledger of one rank of each kind. `rank` of a Comm, and the index in each list, is the
    number of the kind; groups and peers are ranks of the world. Totals are of the whole world.
    """

    kinds: Kinds = None

    @classmethod
    def of(cls, kinds: Kinds, exports: list[dict]) -> LedgerByKind:
        comms = []
        for number, (rank, export) in enumerate(zip(kinds.firsts(), exports)):
            for comm in read_rank(rank, export):
                comm.rank = number
                if comm.op in ("broadcast", "reduce"):
                    spread_over_the_group(comm, rank)
                if comm.axis.startswith("ranks "):  # other ranks of this kind have other groups
                    comm.axis = f"a group of {len(comm.group)}"
                comms.append(comm)
        return cls(
            comms,
            [export["phases"] for export in exports],
            [None] * len(exports),
            [(export["started"], export["stopped"]) for export in exports],
            [export["memory"] for export in exports],
            [export["program"] for export in exports],
            kinds=kinds,
        )

    @property
    def row_names(self) -> list[str]:
        both = zip(self.kinds.firsts(), self.kinds.sizes())
        return [f"rank {rank} ({size} alike)" for rank, size in both]

    def leaves(self, op=None, axis=None, phase=None, rank=None) -> Iterator[Comm]:
        """Of each kind's first rank. rank: of the world."""
        return super().leaves(op, axis, phase, None if rank is None else self.kinds.of(rank))

    def total_bytes(self, op=None, axis=None, phase=None, rank=None) -> int:
        sizes = self.kinds.sizes() if rank is None else [1] * len(self.span)
        return sum(c.sent * sizes[c.rank] for c in self.leaves(op, axis, phase, rank))

    def traffic(self, axis=None):
        raise ValueError(
            "this run has one rank of each kind, not every pair of ranks: launch it with "
            'ranks="all" for a matrix of the traffic'
        )

    def table(self) -> Table:
        """As Ledger.table, with a column for each kind of rank."""
        sizes = self.kinds.sizes()
        by_kind = super().table()
        rows = [
            (*row[:-1], sum(n * sent for n, sent in zip(sizes, row[4:-1]))) for row in by_kind.rows
        ]
        head = [*by_kind.head[:4], *self.row_names, by_kind.head[-1]]
        return Table(head, rows, by_kind.title)


class PlayerByKind(Player):
    """Plays one rank of each kind; "rank" in here is the number of a kind."""

    def __init__(self, ledger: LedgerByKind, machine) -> None:
        super().__init__(ledger, machine)
        self.kinds, self.firsts = ledger.kinds, ledger.kinds.firsts()
        self.met: dict[tuple, tuple] = {}  # group -> the kinds of its ranks

    def world_rank(self, rank: int) -> int:
        return self.firsts[rank]

    def kinds_in(self, group: tuple[int, ...]) -> tuple[int, ...]:
        if group not in self.met:
            self.met[group] = tuple(sorted({self.kinds.of(rank) for rank in group}))
        return self.met[group]

    def sides_of(self, rank: int, comm: Comm, tag: int) -> tuple[tuple, tuple | None, int]:
        kinds = self.kinds_in(comm.group)
        if comm.op not in ("send", "recv"):
            return (comm.axis, kinds), None, len(kinds)
        (peer,) = comm.peers
        other = self.kinds.of(peer)
        ends = (rank, other) if comm.op == "send" else (other, rank)
        return (comm.axis, kinds, ends, tag), ends, 2

    def link_of(self, comm: Comm, source: int, target: int) -> tuple[object, float]:
        (peer,) = comm.peers
        me = self.firsts[comm.rank]
        seconds = self.machine.message_seconds(comm.nbytes, me, peer)
        return self.machine.link(me, peer), seconds
