"""Messages between two ranks: the only place where collectives touch torch.distributed.

Peers are ranks of the group. A message has no envelope: the receiver must know shape and dtype.
Messages from one rank to another arrive in the order in which they were sent.
"""

from __future__ import annotations

import functools

import torch

from mini_dist.ranks.ledger.recording import recorded


def send(x: torch.Tensor, to: int, group) -> None:
    """Send x; return when x may be changed again. The receiver has then begun to receive it."""
    wait(start(group, sends=[(x.contiguous(), to)]))


def recv(like: torch.Tensor, source: int, group) -> torch.Tensor:
    """Receive a new tensor with the shape and dtype of `like`; the values of `like` are not
    read."""
    incoming = empty(like)
    wait(start(group, receives=[(incoming, source)]))
    return incoming


def recv_any(like: torch.Tensor, group) -> tuple[torch.Tensor, int]:
    """Receive from whichever rank sends first: return a new tensor like `like`, and that rank."""
    incoming = empty(like)
    handle = group.recv_anysource([incoming], 0)
    handle.wait()
    return incoming, handle._source_rank()


def exchange(x, to: int, source: int, group, *, like=None, out=None) -> torch.Tensor:
    """Send x while receiving another tensor, shaped like `like` (default x), into `out` if given.

    If all ranks sent first, all would wait forever, because a message also needs a receiver.
    """
    incoming = empty(x if like is None else like) if out is None else out
    wait(start(group, receives=[(incoming, source)], sends=[(x.contiguous(), to)]))
    return incoming


def start(group, receives=(), sends=()) -> list:
    """Begin messages, given as (tensor, peer); return their handles: receives, then sends.

    Keep the handles until you wait for them: a message whose handle is dropped may be lost.
    Receives come first, because the data flows once the receive is posted: with sends first,
    two ranks that exchanged over a slow cable waited for one direction, then the other.
    """
    on_gpu = any(tensor.is_cuda for tensor, _ in (*receives, *sends))
    if not (on_gpu and runs_in_order(group)):
        works = [group.recv([tensor], source, 0) for tensor, source in receives]
        return works + [group.send([tensor], to, 0) for tensor, to in sends]
    # NCCL runs its calls one after the other, so a receive would block the send after it;
    # between start and end of coalescing they are one call.
    device = (*receives, *sends)[0][0].device
    group._start_coalescing(device)
    for tensor, source in receives:
        group.recv([tensor], source, 0)
    for tensor, to in sends:
        group.send([tensor], to, 0)
    return [group._end_coalescing(device)] * (len(receives) + len(sends))


def wait(handles: list) -> None:
    for handle in handles:
        handle.wait()


def device_of(group) -> torch.device:
    """Return the device of this group's messages, even if torch.distributed made the group."""
    group = getattr(group, "whole", group)  # for Members
    if hasattr(group, "device"):
        return group.device
    kinds = {device.type for device in getattr(group, "_device_types", [])}
    if len(kinds) == 1 and torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        if kinds == {device.type}:
            return torch.device(device.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def device_for_numbers(group) -> torch.device:
    """Return the device for numbers that a rank reads right after they arrive, such as lengths: the
    host, unless the group carries GPU tensors only (torch's own, with NCCL alone)."""
    in_front = getattr(group, "whole", group)  # for Members
    return torch.device("cpu") if hasattr(in_front, "carriers") else device_of(group)


def runs_in_order(group) -> bool:
    """Return whether the group runs messages of GPU tensors one after the other, as NCCL does."""
    group = getattr(group, "whole", group)  # for Members
    if hasattr(group, "carriers"):
        return "NCCL" in group.carriers.values()
    return device_of(group).type != "cpu"


def empty(like: torch.Tensor) -> torch.Tensor:
    """Return a new contiguous tensor: messages need one."""
    return torch.empty_like(like, memory_format=torch.contiguous_format, requires_grad=False)


def collective(function):
    """Mark a function as a collective: one entry in the ledger, the parent of its messages.

    Autograd does not look inside: a collective is not differentiable (ops.py has those that are).
    """

    @functools.wraps(function)
    def outside_autograd(*args, **kwargs):
        if not torch.is_grad_enabled():  # the check is cheaper than entering once more
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return recorded(outside_autograd, alike=True)


def split_sizes(length: int, parts: int) -> list[int]:
    """Return lengths that differ by at most one, the longer ones first, as torch.tensor_split
    cuts."""
    return [length // parts + (part < length % parts) for part in range(parts)]


def check_rows(x: torch.Tensor) -> None:
    if x.dim() == 0:
        raise ValueError("a tensor of no dimension has no rows to share out: pass x.reshape(1)")


class Members:
    """Some ranks of a group, in the given order, as a group without set-up or cost."""

    def __init__(self, group, ranks):
        self.whole, self.ranks = group, list(ranks)
        self.recorder, self.name = getattr(group, "recorder", None), group.name

    def rank(self) -> int:
        return self.ranks.index(self.whole.rank())

    def size(self) -> int:
        return len(self.ranks)

    def send(self, tensors, to, tag):
        return self.whole.send(tensors, self.ranks[to], tag)

    def recv(self, tensors, source, tag):
        return self.whole.recv(tensors, self.ranks[source], tag)

    def _start_coalescing(self, device):
        self.whole._start_coalescing(device)

    def _end_coalescing(self, device):
        return self.whole._end_coalescing(device)


REDUCTIONS = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def reduction(op: str, x: torch.Tensor):
    """Return the function of two tensors that `op` names; each call rounds once, to their dtype."""
    if op not in REDUCTIONS:
        known = ", ".join(f'"{name}"' for name in REDUCTIONS)
        also = ' ("mean" is known to reduce, reduce_scatter, all_reduce and the pipelined ring)' * (
            op == "mean"
        )
        raise ValueError(f"op={op!r} is none of {known}{also}")
    if op == "sum" and x.dtype == torch.bool:
        raise ValueError('op="sum" of torch.bool: count with x.int(), or use op="max" for "any"')
    return REDUCTIONS[op]


def begin(op: str, x: torch.Tensor) -> str:
    """Return the operation on the way: a mean is a sum until the end."""
    if op != "mean":
        return op
    if not (x.is_floating_point() or x.is_complex()):
        raise ValueError(
            f'op="mean" of {x.dtype} would have to round: take op="sum" and divide as you need, '
            f"or pass x.float()"
        )
    return "sum"
