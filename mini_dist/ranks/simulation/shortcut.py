"""In a large world, a collective of ours is one record: the messages inside it are not made.

A ring over 12,288 ranks is 24,574 messages in a rank's ledger for each bucket. So where only one
rank of each kind is run, `recorded` (ledger/recording.py) hands every collective of
`mini_dist.collectives` to `Shortcut`. It notes a collective of the machine's own library, with the
least bytes that any algorithm moves (ledger/flow.py), and returns tensors of the right shapes.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch

from .native import native_op


class Shortcut:
    """Calls the collectives of one simulated rank."""

    def __init__(self, recorder) -> None:
        self.recorder = recorder
        self.parameters: dict = {}  # function -> its signature

    def __call__(self, function, args, kwargs, group):
        """What the collective `function` returns, or NotImplemented if NCCL has no such one."""
        op = native_op(function.__name__)
        if op is None or op in ("gather", "scatter"):
            return NotImplemented
        if function not in self.parameters:
            self.parameters[function] = inspect.signature(function)
        bound = self.parameters[function].bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        x = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if function.__name__.startswith("begin_"):
            return self.begin(op, x, group, given.get("dtype"))
        return getattr(self, op)(x, group, given)

    def note(self, op: str, x, group, detail=None) -> list:
        tensors = [] if x is None else [x]
        return self.recorder.begin(op, self.name_of(group), tensors, detail, carrier="NCCL")

    def name_of(self, group) -> str:
        """The group's name. Some members of a group (messages.Members) get one of their own."""
        if not hasattr(group, "whole"):
            return group.name
        whole = self.name_of(group.whole)
        ranks = [self.recorder.groups[whole][rank] for rank in group.ranks]
        name = f"{whole}, members {group.ranks}"
        self.recorder.groups[name] = ranks
        return name

    def done(self, op, x, group, detail=None) -> None:
        if group.size() > 1:
            self.recorder.waits(self.note(op, x, group, detail))

    # -- one method for each operation ----------------------------------------------------------

    def all_reduce(self, x, group, given):
        self.done("all_reduce", x, group)
        out = given.get("out")
        return like(x) if out is None else out

    def broadcast(self, x, group, given):
        self.done("broadcast", x, group, given["root"])
        return like(x)

    def reduce(self, x, group, given):
        self.done("reduce", x, group, given["root"])
        return like(x) if group.rank() == given["root"] else None

    def all_gather(self, x, group, given):
        self.done("all_gather", x, group)
        dim, sizes = given.get("dim", 0), given.get("sizes")
        return rows_along(x, dim, sum(sizes) if sizes else group.size() * x.shape[dim])

    def reduce_scatter(self, x, group, given):
        self.done("reduce_scatter", x, group)
        dim, n, rank = given.get("dim", 0), group.size(), group.rank()
        return rows_along(x, dim, x.shape[dim] // n + (rank < x.shape[dim] % n))

    def all_to_all(self, x, group, given):
        n, row = group.size(), x[:1].nbytes if len(x) else 0
        sends = given.get("input_splits") or [len(x) // n] * n
        comes = given.get("output_splits") or [len(x) // n] * n
        detail = tuple([row * count for count in splits] for splits in (sends, comes))
        self.done("all_to_all", x, group, detail)
        shape = (sum(comes), *x.shape[1:])
        return x.new_zeros(shape) if x.is_cpu else x.new_empty(shape)

    def barrier(self, x, group, given):
        self.done("barrier", None, group)

    def begin(self, op, whole, group, dtype):
        """A collective that is waited for later."""
        n = group.size()
        if n == 1:
            row = None
        elif op == "all_gather":
            row = self.note(op, whole[: len(whole) // n], group)
        else:
            row = self.note(op, whole, group)
        result = whole
        if op == "reduce_scatter":
            result = whole.new_empty(len(whole) // n, dtype=dtype or whole.dtype)
        return Begun(self.recorder, row, result)


@dataclass
class Begun:
    """A collective in flight, as collectives.in_flight.InFlight."""

    recorder: object
    row: list | None
    result: torch.Tensor

    def wait(self) -> torch.Tensor:
        if self.row is not None:
            self.recorder.waits(self.row)
        return self.result


def rows_along(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Return a tensor like x with this length along `dim`, which is outermost in memory.

    Our rings return such tensors. An operator that needs another order copies it, and that copy
    is a kernel. (Our algorithms for small messages sometimes return another order.)
    """
    shape = [length, *x.movedim(dim, 0).shape[1:]]
    rows = x.new_zeros(shape) if x.is_cpu else x.new_empty(shape)
    return rows.movedim(0, dim)


def like(x: torch.Tensor) -> torch.Tensor:
    """A new tensor as x; on the host, where values exist, a copy."""
    return x.clone() if x.is_cpu else torch.empty_like(x, requires_grad=False)
