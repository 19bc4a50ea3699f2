"""Check that bugs and messages of torch 2.8 are fixed here. (weekly.yml runs this on 2.8.)"""

import warnings

import pytest
import torch
import torch.distributed as dist

from mini_dist import launch
from mini_dist.ranks.older_torch import InPlace, new_group


def averages(group):
    """Reduce-scatter a mean in each way that torch has; return the results and the right mean."""
    warnings.simplefilter("ignore")  # torch 2.13 warns about the old names
    import torch.distributed._functional_collectives as functional

    size, rank = group.size(), group.rank()
    whole = torch.arange(2.0 * size) + 10 * rank
    mean = (torch.arange(2.0 * size) + 10 * (size - 1) / 2).chunk(size)[rank]
    single, of_list, later = (torch.empty(2) for _ in range(3))
    average = dict(op=dist.ReduceOp.AVG, group=group)
    dist.reduce_scatter_tensor(single, whole.clone(), **average)
    dist.reduce_scatter(of_list, [*whole.clone().chunk(size)], **average)
    work = dist.reduce_scatter_tensor(later, whole.clone(), async_op=True, **average)
    work.wait()
    work.wait()  # must not divide twice
    found = {
        "single": single,
        "list": of_list,
        "async": later,
        "functional": functional.reduce_scatter_tensor(whole.clone(), "avg", 0, group) + 0,
        "coalesced": functional.reduce_scatter_tensor_coalesced([whole], "avg", [0], group)[0] + 0,
    }
    return {name: each.tolist() for name, each in found.items()}, mean.tolist()


def test_a_reduce_scatter_that_is_asked_for_the_mean_returns_the_mean():
    run = launch(averages, 2)
    for found, mean in run.results:
        assert found == dict.fromkeys(found, mean)


def test_ranks_say_nothing_as_they_connect_not_even_in_groups_of_their_own(capfd):
    def job(group):
        made = new_group([1, 0])
        return made.rank(), dist.get_process_group_ranks(made), dist.get_process_group_ranks(group)

    assert launch(job, 2).results == [(1, [1, 0], [0, 1]), (0, [1, 0], [0, 1])]
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [5, 3, 4]])
def test_a_rank_in_its_place_sorts_by_the_place_and_is_an_int_otherwise(order):
    placed = [InPlace(rank) for rank in order]
    for place, rank in enumerate(placed):
        rank.place = place
    assert sorted({*placed}) == order
    assert [rank < 3 for rank in placed] == [rank < 3 for rank in order]
    assert {rank: rank for rank in placed}.keys() == {*order}
