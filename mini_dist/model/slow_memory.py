"""Attention on a device whose large memory is slow: every byte that moves is counted.

A GPU computes on a few hundred kilobytes of fast memory beside its arithmetic units. Tensors lie in
gigabytes of slower memory (HBM), and a kernel copies tiles of them in and out. `SlowMemory` makes
these copies explicit. Below are three orders of loops for one head's attention: same result, other
traffic.

    memory = SlowMemory(q=q, k=k, v=v, out=torch.zeros_like(q))        # each [rows, H]
    tiled_attention(memory, tile=32)
    memory["out"], memory.moved                                        # [rows, H], bytes

Letters: N rows of q, k and v, H head dim, M numbers that fit into the fast memory. (The papers
call H d.)
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from mini_dist.plan.fields import checks_kinds


class SlowMemory:
    """Hold whole tensors, and count the bytes of rows that are copied out of them and into them.

    loaded, stored: name of a tensor -> bytes. Raises ValueError for a name or rows that are not
    there.
    """

    def __init__(self, **tensors: Tensor) -> None:
        self._tensors = tensors
        self.loaded, self.stored = Counter(), Counter()

    @property
    def moved(self) -> int:
        """All bytes, in both directions."""
        return self.loaded.total() + self.stored.total()

    def __getitem__(self, name: str) -> Tensor:
        """Return a whole tensor without counting: for the program around the kernel."""
        return self._whole(name)

    def num_rows(self, name: str) -> int:
        return len(self._whole(name))

    @checks_kinds
    def load(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Copy rows first to last - 1 (default: all) into fast memory: a new tensor."""
        rows = self._rows(name, first, self.num_rows(name) if last is None else last).clone()
        self.loaded[name] += rows.nbytes
        return rows

    @checks_kinds
    def store(self, name: str, rows: Tensor, first: int = 0) -> None:
        """Copy rows back, to `first` and the rows after it."""
        place = self._rows(name, first, first + len(rows))
        if (rows.shape, rows.dtype) != (place.shape, place.dtype):
            raise ValueError(
                f"rows of {name} have shape {list(place.shape)} and {place.dtype}, not "
                f"{list(rows.shape)} and {rows.dtype}."
            )
        place.copy_(rows)
        self.stored[name] += rows.nbytes

    def _rows(self, name: str, first: int, last: int) -> Tensor:
        if not 0 <= first < last <= self.num_rows(name):
            raise ValueError(
                f"{name} has rows 0 to {self.num_rows(name) - 1}: there are no rows "
                f"{first} to {last - 1}."
            )
        return self._whole(name)[first:last]

    def _whole(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ValueError(f"{name!r} is not in memory: there are {', '.join(self._tensors)}.")
        return self._tensors[name]


def whole_scores(memory: SlowMemory) -> None:
    """Attend with three kernels, as plain PyTorch does: scores, softmax, weighted values.

    The memory needs `scores`, [N, N]. (Dao et al. 2022, algorithm 0.)
    """
    q, k = memory.load("q"), memory.load("k")
    memory.store("scores", q @ k.T / q.shape[-1] ** 0.5)
    memory.store("scores", torch.softmax(memory.load("scores"), -1))
    memory.store("out", memory.load("scores") @ memory.load("v"))


def keys_outside(memory: SlowMemory, tile: int) -> None:
    """Attend tile by tile, with the loop over keys and values outside.

    Every tile of keys visits all queries, so each visit loads what the query has so far and stores
    it again. The memory needs `total` and `largest`, each [N, 1]: the sum of the exponentials and
    the largest score. `out` and `total` start at 0, `largest` at -inf. (FlashAttention, Dao et al.
    2022, algorithm 1, with tiles of equal heights.)
    """
    for j in range(0, memory.num_rows("k"), tile):
        until = min(j + tile, memory.num_rows("k"))
        k, v = memory.load("k", j, until), memory.load("v", j, until)
        for i in range(0, memory.num_rows("q"), tile):
            rows = i, min(i + tile, memory.num_rows("q"))
            q, out = memory.load("q", *rows), memory.load("out", *rows)
            total, before = memory.load("total", *rows), memory.load("largest", *rows)
            scores = q @ k.T / q.shape[-1] ** 0.5
            largest = torch.maximum(before, scores.amax(-1, keepdim=True))
            weights, shrink = (scores - largest).exp(), (before - largest).exp()
            new_total = shrink * total + weights.sum(-1, keepdim=True)
            memory.store("out", (shrink * total * out + weights @ v) / new_total, i)
            memory.store("total", new_total, i)
            memory.store("largest", largest, i)


def tiled_attention(memory: SlowMemory, tile: int) -> None:
    """Attend tile by tile, with the loop over queries outside.

    A tile of queries is loaded once, sees all keys and values, and its output is stored once.
    (FlashAttention-2, Dao 2023, algorithm 1.)
    """
    for i in range(0, memory.num_rows("q"), tile):
        q = memory.load("q", i, min(i + tile, memory.num_rows("q")))
        out, total = torch.zeros_like(q), q.new_zeros(len(q), 1)
        largest = q.new_full((len(q), 1), -torch.inf)
        for j in range(0, memory.num_rows("k"), tile):
            until = min(j + tile, memory.num_rows("k"))
            scores = q @ memory.load("k", j, until).T / q.shape[-1] ** 0.5
            before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
            weights, shrink = (scores - largest).exp(), (before - largest).exp()
            total = shrink * total + weights.sum(-1, keepdim=True)
            out = shrink * out + weights @ memory.load("v", j, until)
        memory.store("out", out / total, i)
