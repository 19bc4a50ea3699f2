"""The ledger of a run: what each rank sent to which rank, when, in which phase of training.

    run = launch(step, world_size=4)
    run.ledger.table()                                  # per collective, bytes per rank
    run.ledger.total_bytes(op="ring_all_reduce", rank=0)

There is one record per communication. A collective of ours is the parent of its sends and receives;
totals sum leaves only, so nothing is counted twice. The same instrument reads our strategies and
PyTorch's (see group.py), so both columns of a comparison are measured in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mini_dist.plan.tables import Table

from ..hosts import ranks_of
from .flow import flow


@dataclass
class Comm:
    """One communication as one rank saw it. Ranks are world ranks, times are seconds of one
    clock."""

    rank: int
    op: str  # send, recv, all_reduce, ... or the name of one of our collectives
    axis: str  # of the mesh; "world", or "ranks 0,2" for a group without a name
    group: tuple[int, ...]
    dtype: str
    nbytes: int  # of the tensor in the call
    start: float
    end: float  # for a message that was never waited for: its start
    phase: str  # setup, forward, backward or step
    parent: Comm | None
    sent_to: dict[int, int] = field(default_factory=dict)  # rank -> bytes
    received_from: dict[int, int] = field(default_factory=dict)
    is_leaf: bool = True
    own_thread: bool = True  # False: another thread of the rank called it
    carrier: str | None = None  # gloo or NCCL; None for a collective made of messages, a barrier

    @property
    def sent(self) -> int:
        return sum(self.sent_to.values())

    @property
    def received(self) -> int:
        return sum(self.received_from.values())

    @property
    def peers(self) -> tuple[int, ...]:
        return tuple(sorted({*self.sent_to, *self.received_from}))

    def within(self) -> Iterator[Comm]:
        """Yield this communication, then the collectives that contain it, innermost first."""
        comm = self
        while comm:
            yield comm
            comm = comm.parent


@dataclass
class Ledger:
    """Every communication of a run. `comms` is in rank order, then in order of start.

    phases: for each rank, when which phase began. wire_bytes: for each rank what the kernel
    counted on its sockets during the run, as (sent, received), including gloo's headers; None
    if nothing counts. span: for each rank when its function began and ended. hosts: the host of
    each rank, if there are several. uplinks: for each host what the kernel counted at its
    uplink, as (sent, received), including headers of TCP and Ethernet; None on emulated hosts.
    """

    comms: list[Comm]
    phases: list[list[tuple[float, str]]]
    wire_bytes: list[tuple[int, int] | None]
    span: list[tuple[float, float]]
    memory: Any = None
    programs: Any = None  # with launch(count=True): for each rank what it did, see counting.py
    hosts: list[int] | None = None
    uplinks: list[tuple[int, int]] | None = None

    def leaves(self, op=None, axis=None, phase=None, rank=None) -> Iterator[Comm]:
        """Yield the communications that moved bytes themselves.

        op: the communication's own name, or the name of a collective of ours that contains it.
        """
        for comm in self.comms:
            if (
                comm.is_leaf
                and (op is None or any(outer.op == op for outer in comm.within()))
                and axis in (None, comm.axis)
                and phase in (None, comm.phase)
                and rank in (None, comm.rank)
            ):
                yield comm

    def total_bytes(self, op=None, axis=None, phase=None, rank=None) -> int:
        """Return the bytes sent, summed over all ranks or by one `rank`."""
        return sum(comm.sent for comm in self.leaves(op, axis, phase, rank))

    def calls(self, op=None, axis=None, phase=None, rank=None) -> list[Comm]:
        """Return the outermost communications, as the program requested them."""
        return [
            comm
            for comm in self.comms
            if comm.parent is None
            and op in (None, comm.op)
            and axis in (None, comm.axis)
            and phase in (None, comm.phase)
            and rank in (None, comm.rank)
        ]

    def carriers(self) -> list[str]:
        """Return what carried the messages: gloo, NCCL, both, or nothing."""
        return sorted({comm.carrier for comm in self.comms if comm.carrier})

    def traffic(self, axis: str | None = None) -> list[list[int]]:
        """Return the bytes from each rank (row) to each rank (column), on all axes or on one."""
        size = len(self.span)
        matrix = [[0] * size for _ in range(size)]
        for comm in self.leaves(axis=axis):
            for peer, nbytes in comm.sent_to.items():
                matrix[comm.rank][peer] += nbytes
        return matrix

    def out_of(self, op=None, axis=None, phase=None) -> list[int]:
        """Return the bytes that left each host for another, from the ledger's tensors alone."""
        if not self.hosts:
            return [0]
        out = [0] * (max(self.hosts) + 1)
        for comm in self.leaves(op, axis, phase):
            for peer, nbytes in comm.sent_to.items():
                if self.hosts[peer] != self.hosts[comm.rank]:
                    out[self.hosts[comm.rank]] += nbytes
        return out

    def by_link(self, op=None, axis=None, phase=None) -> dict[str, int]:
        """Return the bytes sent inside the hosts, and between hosts."""
        across = sum(self.out_of(op, axis, phase))
        return {"inside": self.total_bytes(op, axis, phase) - across, "across": across}

    def table(self) -> Table:
        """Show calls and bytes per collective, axis and phase, by each rank and in total."""
        size = len(self.span)
        rows: dict[tuple, list[list[int]]] = {}
        for comm in self.comms:
            if comm.is_leaf and not (comm.parent is None and comm.op.startswith("recv")):
                *_, outermost = comm.within()
                key = (outermost.op, outermost.axis, outermost.phase)
                sent, seen = rows.setdefault(key, ([0] * size, [set() for _ in range(size)]))
                sent[comm.rank] += comm.sent
                seen[comm.rank].add(id(outermost))
        lines = [
            (*key, max(len(calls) for calls in seen), *sent, sum(sent))
            for key, (sent, seen) in rows.items()
        ]
        totals = [sum(line[4 + rank] for line in lines) for rank in range(size + 1)]
        lines.append(("total", "", "", sum(line[3] for line in lines), *totals))
        head = ["op", "axis", "phase", "calls", *(f"rank {r}" for r in range(size)), "all ranks"]
        others = [carrier for carrier in self.carriers() if carrier != "gloo"]
        by = f", by {' and '.join(self.carriers())}" if others else ""
        return Table(head, lines, f"bytes sent{by}")

    def to_chrome_trace(self, path, spans=()) -> None:
        """Write the run for https://ui.perfetto.dev: one process per rank, one arrow per message.

        spans: for each rank what `profile.profiled` has seen, for the same timeline.
        """
        from .trace import chrome_trace

        Path(path).write_text(json.dumps(chrome_trace(self, spans)))

    @classmethod
    def from_ranks(cls, exports: Iterable[dict]) -> Ledger:
        """Combine what every rank's Recorder has exported."""
        exports = list(exports)
        comms = [comm for rank, export in enumerate(exports) for comm in read_rank(rank, export)]
        return cls(
            comms,
            [export["phases"] for export in exports],
            [export["wire_bytes"] for export in exports],
            [(export["started"], export["stopped"]) for export in exports],
            [export["memory"] for export in exports],
            [export["program"] for export in exports],
            exports[0]["hosts"],
            uplinks(exports),
        )


def uplinks(exports: list[dict]) -> list[tuple[int, int]] | None:
    """Return the counts at each host from the begin of its first rank to the end of its last
    one."""
    places = exports[0]["hosts"]
    if not places or not all(export["uplink"] for export in exports):
        return None
    of_host = [[exports[r]["uplink"] for r in ranks_of(h, places)] for h in range(max(places) + 1)]
    return [
        tuple(
            max(after[way] for _, after in counts) - min(before[way] for before, _ in counts)
            for way in (0, 1)
        )
        for counts in of_host
    ]


def nothing(time: float) -> dict:
    """Return the record of a rank that has died: as if it had recorded nothing."""
    empty = dict(comms=[], groups={}, axes={}, phases=[], wire_bytes=None, memory=None)
    return dict(empty, started=time, stopped=time, program=None, hosts=None, uplink=None)


def read_rank(rank: int, export: dict) -> list[Comm]:
    comms: list[Comm] = []
    groups = {name: tuple(members) for name, members in export["groups"].items()}
    for op, name, dtype, nbytes, detail, start, end, phase, parent, own, carrier in export["comms"]:
        members = groups[name]
        comm = Comm(
            rank=rank,
            op=op,
            axis=export["axes"].get(name) or f"ranks {','.join(map(str, members))}",
            group=members,
            dtype=dtype,
            nbytes=nbytes,
            start=start,
            end=end or start,
            phase=phase,
            parent=None if parent is None else comms[parent],
            is_leaf=detail != "collective",
            own_thread=own,
            carrier=carrier,
        )
        if comm.is_leaf:
            flows = flow(op, nbytes, dtype, detail, members.index(rank), len(members))
            comm.sent_to, comm.received_from = (
                {members[peer]: count for peer, count in peers.items()} for peers in flows
            )
            for outer in comm.within():
                if outer is not comm:
                    add(outer.sent_to, comm.sent_to)
                    add(outer.received_from, comm.received_from)
                    outer.end = max(outer.end, comm.end)  # perhaps it was only begun
        comms.append(comm)
    return comms


def add(total: dict[int, int], more: dict[int, int]) -> None:
    for peer, nbytes in more.items():
        total[peer] = total.get(peer, 0) + nbytes
