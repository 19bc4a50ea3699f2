"""Calculator equals ledger: what links.py says, byte for byte, in runs on real ranks."""

import pytest

from mini_dist import launch
from mini_dist.calculators import links

ROW_BYTES = 4 * 3


@pytest.fixture(scope="module", params=[1, 2, 3, 4, 5, 7])
def run(request):
    """Every collective once, on 61 rows of float32: a length that nothing divides."""

    def everything(group):
        import torch

        from mini_dist import collectives as c

        rank, size = group.rank(), group.size()
        x = torch.arange(61.0 * 3).reshape(61, 3) + rank
        sizes = c.split_sizes(61, size)
        mine = x[: sizes[rank]]
        c.star_broadcast(x, 0, group)
        c.tree_broadcast(x, 0, group)
        c.star_reduce(x, 0, group)
        c.tree_reduce(x, 0, group)
        c.gather(mine, 0, group, sizes)
        c.scatter(x, 0, group)
        c.ring_all_gather(mine, group, sizes)
        c.recursive_doubling_all_gather(mine, group, sizes)
        c.ring_reduce_scatter(x, group)
        c.recursive_halving_reduce_scatter(x, group)
        c.star_all_reduce(x, group)
        c.tree_all_reduce(x, group)
        c.ring_all_reduce(x, group)
        c.halving_doubling_all_reduce(x, group)
        c.hierarchical_all_reduce(x, group, 2 if size % 2 == 0 else 1)
        c.pairwise_all_to_all(x, group)

    return request.param, launch(everything, world_size=request.param)


# Cuts go along dim 0 where rows are what is scattered or gathered, through elements in all-reduce.
PREDICTED = {
    "star_broadcast": ("broadcast", "star", None),
    "tree_broadcast": ("broadcast", "tree", None),
    "star_reduce": ("reduce", "star", None),
    "tree_reduce": ("reduce", "tree", None),
    "gather": ("gather", "star", ROW_BYTES),
    "scatter": ("scatter", "star", ROW_BYTES),
    "ring_all_gather": ("all_gather", "ring", ROW_BYTES),
    "recursive_doubling_all_gather": ("all_gather", "doubling", ROW_BYTES),
    "ring_reduce_scatter": ("reduce_scatter", "ring", ROW_BYTES),
    "recursive_halving_reduce_scatter": ("reduce_scatter", "halving", ROW_BYTES),
    "star_all_reduce": ("all_reduce", "star", 4),
    "tree_all_reduce": ("all_reduce", "tree", 4),
    "ring_all_reduce": ("all_reduce", "ring", 4),
    "halving_doubling_all_reduce": ("all_reduce", "halving_doubling", 4),
    "hierarchical_all_reduce": ("all_reduce", "hierarchical", 4),
    "pairwise_all_to_all": ("all_to_all", "pairwise", ROW_BYTES),
}


@pytest.mark.parametrize("name", PREDICTED)
def test_a_run_of_the_collective_sends_the_predicted_bytes_from_every_rank(run, name):
    size, finished = run
    op, algorithm, itemsize = PREDICTED[name]
    more = {} if itemsize is None else {"itemsize": itemsize}
    if algorithm == "hierarchical":
        more["ranks_per_node"] = 2 if size % 2 == 0 else 1
    cost = links.COLLECTIVES[op][0](61 * ROW_BYTES, size, algorithm, **more)
    sent = []
    for rank in range(size):
        calls = finished.ledger.calls(op=name, rank=rank)
        assert len(calls) == 1
        sent.append(sum(leaf.sent for leaf in finished.ledger.leaves(rank=rank)
                        if calls[0] in list(leaf.within())))
    assert tuple(sent) == cost.sent
