"""Which part of which tensor: how ranks with any sharding refer to one whole model.

tp and ep hold a box of a tensor, ZeRO a range of the flattened tensor, and both together a range of
a box. Each of these is a few blocks (boxes that are contiguous in the flattened tensor), and the
overlap of two pieces is the overlap of their blocks. Resharding needs nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

Block = tuple[tuple[int, ...], tuple[int, ...]]  # its begin and size, along each dim


@dataclass(frozen=True)
class Place:
    """A part of a named tensor of the whole model: a range of a box in it.

    shape: of the whole tensor. offset, size: the box, along each dim. start, stop: the range, in
    elements of the flattened box.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int
    stop: int

    def __post_init__(self):
        for field in ("shape", "offset", "size"):  # (JSON has lists)
            object.__setattr__(self, field, tuple(getattr(self, field)))
        dims = list(zip(self.offset, self.size, self.shape, strict=True))
        in_tensor = all(0 <= offset <= offset + size <= whole for offset, size, whole in dims)
        if not in_tensor or not 0 <= self.start <= self.stop <= math.prod(self.size):
            raise ValueError(f"{self} is no part of a tensor of shape {list(self.shape)}")

    def __str__(self) -> str:
        """Return the name alone for a whole tensor, else with its part: w[0:4, 0:8] or
        w[0:4][3:9]."""
        text = self.name
        if self.size != self.shape:
            box = (f"{begin}:{begin + size}" for begin, size in zip(self.offset, self.size))
            text += f"[{', '.join(box)}]"
        if self.numel != math.prod(self.size):
            text += f"[{self.start}:{self.stop}]"
        return text

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def where(self) -> tuple:
        """Return the fields such that Place(name, shape, *where) is this place."""
        return self.offset, self.size, self.start, self.stop

    def blocks(self) -> Iterator[Block]:
        """Yield the boxes of the whole tensor that form this part, in order: at most 2 d - 1."""
        for begin, size in blocks(self.size, self.start, self.stop):
            yield tuple(a + b for a, b in zip(self.offset, begin)), size


@dataclass(frozen=True, eq=False)
class Piece:
    """A rank's part of a tensor: its place, and a tensor with as many elements, of any shape.

    A piece is a view: loading into it changes the model.
    """

    place: Place
    tensor: Tensor

    def __post_init__(self):
        if self.tensor.numel() != self.place.numel:
            raise ValueError(
                f"{self.place} has {self.place.numel} elements, not the {self.tensor.numel()} "
                f"of a tensor of shape {list(self.tensor.shape)}"
            )

    def blocks(self) -> Iterator[tuple[Block, Tensor]]:
        """Yield the blocks of its place, each with the matching view of the tensor."""
        at = 0
        for begin, size in self.place.blocks():
            numel = math.prod(size)
            if numel == self.tensor.numel():  # also if it cannot be flattened without a copy
                yield (begin, size), self.tensor.view(size)
            else:
                yield (begin, size), self.tensor.view(-1)[at : at + numel].view(size)
            at += numel


def piece(name: str, tensor: Tensor, shape=None, offset=None) -> Piece:
    """Return a piece for a whole tensor, or for a box at `offset` of a tensor with this `shape`."""
    shape = tuple(tensor.shape if shape is None else shape)
    offset = tuple((0,) * len(shape) if offset is None else offset)
    return Piece(Place(name, shape, offset, tuple(tensor.shape), 0, tensor.numel()), tensor)


def blocks(size: tuple[int, ...], start: int, stop: int) -> Iterator[Block]:
    """Yield a range of a flattened box as boxes: the end of a row, whole rows, a row's beginning.

    blocks((3, 4), 2, 11): row 0 from 2 on, row 1 whole, row 2 up to 3.
    """
    if start == stop:
        return
    if (start, stop) == (0, math.prod(size)):
        yield (0,) * len(size), size
    elif len(size) == 1:
        yield (start,), (stop - start,)
    else:
        row = math.prod(size[1:])
        first, last = -(-start // row), stop // row  # the whole rows
        if first > last:  # it begins and ends inside one row
            yield from in_row(last, size, start, stop)
            return
        if start < first * row:
            yield from in_row(first - 1, size, start, first * row)
        if first < last:
            yield (first, *(0,) * (len(size) - 1)), (last - first, *size[1:])
        if last * row < stop:
            yield from in_row(last, size, last * row, stop)


def in_row(number: int, size: tuple[int, ...], start: int, stop: int) -> Iterator[Block]:
    row = math.prod(size[1:])
    for begin, part in blocks(size[1:], start - number * row, stop - number * row):
        yield (number, *begin), (1, *part)


def common(one: Block, other: Block) -> Block | None:
    """Return the block that two blocks share, or None."""
    begin = tuple(map(max, one[0], other[0]))
    end = [min(a + n, b + m) for a, n, b, m in zip(*one, *other)]
    size = tuple(e - b for e, b in zip(end, begin))
    return None if any(n <= 0 for n in size) else (begin, size)


def inside(block: Block, of: Block) -> tuple[slice, ...]:
    """Return the position of `block` in a tensor that is the block `of`."""
    return tuple(slice(b - o, b - o + n) for b, n, o in zip(*block, of[0]))


def meet(one: Place, other: Place) -> bool:
    return any(common(a, b) for a in one.blocks() for b in other.blocks())


def copy_common(target: Piece, source: Piece) -> None:
    """Copy the overlap from `source` to `target`, cast to its dtype."""
    for block, into in target.blocks():
        for other, out_of in source.blocks():
            if shared := common(block, other):
                into[inside(shared, block)].copy_(out_of[inside(shared, other)])
