"""Any part of a tensor is a few blocks, and two parts overlap where their blocks overlap."""

import itertools
import math
import random

import pytest
import torch

from mini_dist.training.checkpoint.pieces import Piece, Place, blocks, copy_common, piece

SHAPES = [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (2, 1, 3, 2), (0, 3), (3, 0)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_are_the_range_in_order_and_few(shape):
    numbers = torch.arange(math.prod(shape)).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(numbers.numel() + 1), 2):
        found = list(blocks(shape, start, stop))
        parts = [
            numbers[tuple(slice(b, b + n) for b, n in zip(begin, size))].flatten()
            for begin, size in found
        ]
        assert torch.cat([torch.arange(0), *parts]).tolist() == list(range(start, stop))
        assert len(found) <= max(1, 2 * len(shape) - 1)


def test_blocks_of_the_docstring():
    assert list(blocks((3, 4), 2, 11)) == [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 3))]


def random_place(shape, draw):
    """Draw a box of the tensor and a range of the box."""
    box = [sorted(draw.choices(range(n + 1), k=2)) for n in shape]
    offset, size = [a for a, _ in box], [b - a for a, b in box]
    start, stop = sorted(draw.choices(range(math.prod(size) + 1), k=2))
    return Place("w", shape, offset, size, start, stop)


def cut_out(whole, place):
    box = whole[tuple(slice(a, a + n) for a, n in zip(place.offset, place.size))]
    return box.flatten()[place.start : place.stop]


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (4, 1, 3)], ids=str)
def test_two_pieces_copy_exactly_the_elements_that_both_have(shape):
    draw = random.Random(0)
    whole = torch.arange(math.prod(shape)).view(shape)
    for _ in range(300):
        source, target = random_place(shape, draw), random_place(shape, draw)
        filled = torch.full((target.numel,), -1)
        copy_common(Piece(target, filled), Piece(source, cut_out(whole, source).clone()))
        theirs = set(cut_out(whole, source).tolist())
        wanted = [n if n in theirs else -1 for n in cut_out(whole, target).tolist()]
        assert filled.tolist() == wanted, (source, target)


def test_a_piece_may_be_a_transposed_view():
    into = torch.zeros(4, 3).T  # [3, 4], not contiguous
    out_of = torch.arange(12).view(3, 4)
    copy_common(piece("w", into), piece("w", out_of))
    assert torch.equal(into, out_of.float())


def test_a_place_tells_its_part():
    assert str(Place("w", (4, 8), (0, 0), (4, 8), 0, 32)) == "w"
    assert str(Place("w", (4, 8), (2, 0), (2, 8), 0, 16)) == "w[2:4, 0:8]"
    assert str(Place("w", (4, 8), (2, 0), (2, 8), 3, 9)) == "w[2:4, 0:8][3:9]"
    assert str(Place("w", (4, 8), (0, 0), (4, 8), 3, 9)) == "w[3:9]"


@pytest.mark.parametrize(
    "offset, size, start, stop",
    [((0, 5), (4, 4), 0, 16), ((-1, 0), (2, 2), 0, 4), ((0, 0), (2, 2), 0, 5)],
)
def test_what_is_no_part_of_the_tensor_is_refused(offset, size, start, stop):
    with pytest.raises(ValueError, match="is no part of a tensor of shape"):
        Place("w", (4, 8), offset, size, start, stop)


def test_a_tensor_that_is_not_as_large_as_its_place_is_refused():
    with pytest.raises(ValueError, match="w has 32 elements, not the 31"):
        Piece(Place("w", (4, 8), (0, 0), (4, 8), 0, 32), torch.zeros(31))
