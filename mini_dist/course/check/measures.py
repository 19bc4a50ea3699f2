"""Measure what several exercises need: equality up to rounding, and tensors that still exist."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # (torch gives it no public name)
from torch.utils._pytree import tree_leaves

from mini_dist.ranks.launch import Run

from .engine import too_few_bytes


def close(found, expected: Tensor, largest: float) -> bool:
    """Compare up to the rounding of `expected`'s dtype in sums of terms as large as `largest`.

    So dividing before adding is also right, and sending 16 bits instead of 32 is not.
    """
    if not isinstance(found, Tensor):
        return False
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    room = 4 * torch.finfo(expected.dtype).eps * largest
    return (found - expected).abs().le(room).all().item()


def all_close(found, expected, largest: float) -> bool:
    """Compare tensors by `close`, and None with None."""
    return len(found) == len(expected) and all(
        a is None if b is None else close(a, b, largest) for a, b in zip(found, expected)
    )


def mistake_of_dtype(
    run: Run, dtype: torch.dtype, wanted: int, what: str = "gradients", beside: str = ""
) -> str:
    """Return the hint if something was sent in a dtype other than these two; else "". beside: the
    name of a second dtype. wanted: bytes."""
    name, sent = str(dtype).removeprefix("torch."), run.ledger.total_bytes()
    others = {comm.dtype for comm in run.ledger.leaves() if comm.sent} - {name, beside}
    if not others:
        return ""
    if sent < wanted:
        return too_few_bytes(sent, wanted)
    return (
        f"The {what} are {name} and travel as {' and '.join(sorted(others))}: {sent:,} bytes were "
        f"sent where {wanted:,} do. Send them in their own dtype."
    )


def plain(value):
    """Convert torch and numpy values to Python lists and numbers, inside lists and tuples as
    well."""
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value.tolist() if hasattr(value, "tolist") else value


class Alive(TorchDispatchMode):
    """Note the memory of each tensor that is made inside `with`, and report what still exists,
    whatever holds it: a name, a list, a graph, a clone. A resized tensor counts with its new
    size."""

    def __init__(self):
        super().__init__()
        self.made: dict[int, weakref.ref] = {}  # storages

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {s._cdata for s in storages((args, kwargs))}  # a view makes nothing
        for storage in storages(result):
            if storage._cdata not in given:
                self.made[storage._cdata] = weakref.ref(storage)
        return result

    def storages(self) -> dict[int, int]:
        """Return the bytes of each storage that still exists, and forget the others."""
        found = [(place, ref, referred_to(ref)) for place, ref in [*self.made.items()]]
        alive = [each for each in found if each[2] is not None]
        self.made = {place: ref for place, ref, _ in alive}
        return {place: storage.nbytes() for place, _, storage in alive}

    def nbytes(self) -> int:
        return sum(self.storages().values())


def referred_to(reference: weakref.ref):
    """Return the storage behind a weak reference, or None if it is gone."""
    storage = reference()
    if storage is not None:
        storage._fix_weakref()  # torch requires it, and torch 2.8 warns without it
    return storage


def storages(value) -> list:
    """Return the storages of all tensors in `value`. A sparse tensor has none of its own."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return [t.untyped_storage() for t in tensors if t.layout == torch.strided]
