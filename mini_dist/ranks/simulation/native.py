"""A collective of ours as one operation of the machine's own library.

On the machines that we simulate, NCCL carries a collective, and it chooses the algorithm. So a call
of `all_reduce`, or of `ring_all_reduce`, takes the time that the planner gives to an all-reduce of
these bytes in this group. Messages that a program sends by itself, as a learner's ring does, stay
messages.
"""

from __future__ import annotations

import re

from ..ledger import Comm
from ..ledger.counting import Begin, Kernel, Wait

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

    program: (thread, event) in order. comms: the rank's communications, which `Begin` and `Wait`
    name by index. The kernels inside a collective are dropped, because its time includes them.
    """
    index = {id(comm): number for number, comm in enumerate(comms)}
    outer = [whole(comm) for comm in comms]
    waits_left: dict[int, int] = {}  # id of a collective -> its messages that are not over yet
    for comm in outer:
        if comm is not None:
            waits_left[id(comm)] = waits_left.get(id(comm), 0) + 1
    begun, inside, found = set(), {}, []  # inside: thread -> the collective that it is in
    for thread, event in program:
        kind = type(event)
        if kind is Kernel and thread in inside:
            continue
        comm = outer[event.comm] if kind in (Begin, Wait) else None
        if comm is None:
            found.append((thread, event))
        elif kind is Begin and id(comm) not in begun:
            begun.add(id(comm))
            found.append((thread, Begin(index[id(comm)], 0)))
            if not comm.op.startswith("begin_"):
                inside[thread] = comm
        elif kind is Wait:
            waits_left[id(comm)] -= 1
            found.append((thread, Wait(index[id(comm)])))
            if waits_left[id(comm)] == 0 and inside.get(thread) is comm:
                del inside[thread]
    return found


def whole(comm: Comm) -> Comm | None:
    """The outermost collective that this message is part of and that NCCL has, too."""
    found = None
    for each in comm.within():
        if each is not comm and native_op(each.op):
            found = each
    return found if comm.is_leaf else None
