"""Ranks do not agree if their tensors have equally many elements but different shapes."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from mini_dist import collectives, launch
from mini_dist.ranks.diagnose import RankError
from mini_dist.ranks.flight import elements_line_up

SHAPES = (2, 4), (4, 2)
AGREE = "the ranks do not agree on an operation that they enter together:"


def of(rank, shapes=SHAPES):
    return torch.arange(8.0).reshape(shapes[rank])


def like(x, rows):
    return torch.empty(rows, *x.shape[1:])


def message(x, rank, group):
    if rank == 0:
        dist.send(x, 1, group=group)
    else:
        dist.recv(x, 0, group=group)


def gathered(x, rank, group):
    dist.gather(x, [torch.empty_like(x) for _ in range(2)] if rank == 0 else None, 0, group=group)


def scattered(x, rank, group):
    dist.scatter(x, [torch.empty_like(x) for _ in range(2)] if rank == 0 else None, 0, group=group)


# torch's own collectives; ours, below, send only flat parts.
THEIRS = {
    "all_reduce": lambda x, rank, group: dist.all_reduce(x, group=group),
    "broadcast": lambda x, rank, group: dist.broadcast(x, 0, group=group),
    "reduce": lambda x, rank, group: dist.reduce(x, 0, group=group),
    "all_gather": lambda x, rank, group: dist.all_gather(
        [torch.empty_like(x) for _ in range(2)], x, group=group
    ),
    "all_gather_single": lambda x, rank, group: group.all_gather_single(
        like(x, 2 * len(x)), x
    ).wait(),
    "gather": gathered,
    "scatter": scattered,
    "reduce_scatter": lambda x, rank, group: dist.reduce_scatter(
        torch.empty_like(x), [x, x], group=group
    ),
    "reduce_scatter_single": lambda x, rank, group: group.reduce_scatter_single(
        like(x, len(x) // 2), x
    ).wait(),
    "all_to_all_single": lambda x, rank, group: dist.all_to_all_single(
        torch.empty_like(x), x, group=group
    ),
    "send": message,
}
OURS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ring_all_reduce")
ROOTED = ("broadcast", "reduce", "gather", "scatter", "tree_reduce")


def call(name, shapes, group):
    rank = group.rank()
    x = of(rank, shapes)
    if not name.startswith("ours "):
        THEIRS[name](x, rank, group)
    elif name[5:] in ROOTED:
        getattr(collectives, name[5:])(x, 0, group)
    else:
        getattr(collectives, name[5:])(x, group)


@pytest.mark.parametrize("name", [*THEIRS, *(f"ours {name}" for name in (*OURS, *ROOTED))])
def test_as_many_elements_in_another_shape_do_not_agree(name):
    with pytest.raises(RankError) as error:
        launch(call, 2, (name, SHAPES), quiet=True)
    text = str(error.value)
    assert text.startswith(AGREE)
    assert "float32[2, 4]" in text and "float32[4, 2]" in text


@pytest.mark.parametrize("name", ["all_reduce", "send", "ours all_reduce"])
@pytest.mark.parametrize("shapes", [((2, 4), (8,)), ((2, 2, 2), (4, 2)), ((1, 8), (8, 1))], ids=str)
def test_what_is_flattened_agrees(name, shapes):
    launch(call, 2, (name, shapes))


@pytest.mark.parametrize(
    "one, other, agree",
    [
        ((2, 4), (2, 4), True),
        ((2, 4), (4, 2), False),
        ((8,), (4, 2), True),
        ((), (1,), True),
        ((2, 1, 4), (2, 4), True),
        ((2, 3, 4), (6, 4), True),
        ((2, 3, 4), (2, 12), True),
        ((2, 3, 4), (4, 6), False),
        ((2, 12), (6, 4), False),
        ((0, 5), (0, 7), False),
    ],
)
def test_a_shape_and_what_its_dims_merge_to(one, other, agree):
    assert elements_line_up(one, other) == elements_line_up(other, one) == agree


def uneven(group):
    """Rank 0 sends 1 and 2 rows, rank 1 sends 3 and 0."""
    splits = [[1, 2], [3, 0]][group.rank()]
    received = [[1, 3], [2, 0]][group.rank()]
    x, y = torch.ones(3, 2), torch.empty(sum(received), 2)
    dist.all_to_all_single(y, x, received, splits, group=group)
    collectives.all_to_all(x, group, splits, received)
    collectives.all_gather(torch.ones(1 + group.rank(), 2), group, [1, 2])
    collectives.gather(torch.ones(1 + group.rank(), 2), 0, group, [1, 2])


def test_ranks_may_have_different_numbers_of_rows_where_they_say_so():
    launch(uneven, 2)


def unlike(way, group):
    """Rank 0 sends three numbers to rank 1, which expects two."""
    sends, receives = [[1, 3], [2, 2]][group.rank()], [[1, 2], [2, 2]][group.rank()]
    if way == "single":
        y = torch.empty(sum(receives))
        dist.all_to_all_single(y, torch.ones(4), receives, sends, group=group)
    else:
        outputs = [torch.empty(n) for n in receives]
        dist.all_to_all(outputs, list(torch.ones(4).split(sends)), group=group)


@pytest.mark.parametrize("way", ["single", "list"])
def test_an_all_to_all_of_unlike_sizes_does_not_agree(way):
    with pytest.raises(RankError) as error:
        launch(unlike, 2, (way,), quiet=True)
    assert str(error.value).startswith(AGREE)
    assert "sends 4 12, receives 4 8 bytes" in str(error.value)


def in_parts(group):
    """Call collectives in parts of the group and in parts of parts, each with its own shape."""
    members = collectives.messages.Members
    mine = members(group, [0, 1] if group.rank() < 2 else [2, 3])
    for _ in range(1 + group.rank() // 2):
        collectives.all_reduce(torch.ones(2, 3) if group.rank() < 2 else torch.ones(3, 2), mine)
    alone = members(mine, [mine.rank()])
    collectives.all_reduce(torch.ones(2 + group.rank(), 5), alone)
    collectives.all_reduce(torch.ones(5, 5), group)


def test_ranks_that_call_among_themselves_are_compared_among_themselves():
    launch(in_parts, 4)


def handled(group):
    """Each rank makes a group of the same name; rank 1 calls its group with sizes for two ranks."""
    alone = dist.new_group([group.rank()], use_local_synchronization=True)
    if group.rank() == 1:
        with contextlib.suppress(Exception):
            dist.all_to_all_single(torch.empty(3), torch.empty(0), [3, 0], [0, 0], group=alone)
    return collectives.all_reduce(torch.ones(1), group).item()


def test_what_one_rank_does_wrong_alone_and_handles_ends_nothing():
    assert launch(handled, 2).results == [2, 2]
