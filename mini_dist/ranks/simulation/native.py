"""A collective of ours as one operation of the machine's own library.

On the machines that we simulate, NCCL carries a collective, and it chooses the algorithm. So a call
of `all_reduce`, or of `ring_all_reduce`, takes the time that the planner gives to an all-reduce of
these bytes in this group. Messages that a program sends by itself, as a learner's ring does, stay
messages.
"""

from __future__ import annotations

import re

from ..ledger import Comm
from ..ledger.counting import Begin, Enter, Leave, Wait

OPS = "all_reduce all_gather reduce_scatter all_to_all broadcast reduce gather scatter barrier"
ALGORITHMS = (
    "star stars tree ring ring_by_hosts pipelined_ring doubling halving_doubling "
    "recursive_doubling recursive_halving hierarchical pipelined_hierarchical pairwise torus begin"
)
NAME = re.compile(rf"(?:(?:{'|'.join(ALGORITHMS.split())})_)?({'|'.join(OPS.split())})_?")


def native_op(name: str) -> str | None:
    """The operation of NCCL that does what the collective of this name does; None for others."""
    match = NAME.fullmatch(name)
    return match[1] if match else None


def as_native(program: list[tuple], comms: list[Comm]) -> list[tuple]:
    """The events of one rank, with each collective of ours as one event instead of its messages.

    program: (thread, event) in order. comms: the rank's communications, which events name by
    index. What a collective computes inside is dropped, because its time includes that.
    """
    index = {id(comm): number for number, comm in enumerate(comms)}
    whole = [outermost(comm) for comm in comms]
    sends = {id(whole[n]) for n, comm in enumerate(comms) if comm.is_leaf and whole[n] is not comm}
    inside: dict[int, Comm] = {}  # thread -> the collective that it is in
    found = []
    for thread, event in program:
        kind = type(event)
        comm = whole[event.comm] if kind in COMMUNICATION else None
        number = index.get(id(comm))
        if kind is Enter:
            if comm is comms[event.comm]:
                inside[thread] = comm
                if id(comm) in sends:
                    found.append((thread, Begin(number, 0)))
        elif kind is Leave:
            if comm is comms[event.comm]:
                del inside[thread]
                if id(comm) in sends and not comm.op.startswith("begin_"):
                    found.append((thread, Wait(number)))
        elif thread not in inside:
            # The messages of a collective in flight are waited for later.
            found.append((thread, Wait(number) if kind is Wait and id(comm) in sends else event))
    return found


COMMUNICATION = (Begin, Wait, Enter, Leave)


def outermost(comm: Comm) -> Comm:
    """The outermost collective that this one is part of and that NCCL has, too; else itself."""
    found = comm
    for each in comm.within():
        if each is not comm and native_op(each.op):
            found = each
    return found
