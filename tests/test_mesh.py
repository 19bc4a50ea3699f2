"""The rank grid: who shares which axis with whom."""

import pytest
import torch
import torch.distributed as dist

from mini_dist import launch
from mini_dist.mesh import Mesh, axis_groups


def test_the_last_axis_joins_neighbours():
    assert axis_groups(dp=2, tp=2) == {"dp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]}


def test_the_sixteen_gpus_of_the_ptdp_paper():
    # Narayanan et al. 2021 (PTD-P), section 2: tp 2, pp 4, dp 2 on 16 GPUs, written out there as
    # Megatron prints it, with pipeline outermost.
    groups = axis_groups(pp=4, dp=2, tp=2)
    assert groups["tp"] == [[2 * i, 2 * i + 1] for i in range(8)]
    assert groups["dp"] == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert groups["pp"] == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


@pytest.mark.parametrize("axes", [dict(pp=2, dp=1, cp=3, tp=2), dict(dp=4), dict(tp=1, dp=5)])
def test_each_axis_divides_the_world_into_equal_groups(axes):
    for axis, lists in axis_groups(**axes).items():
        world = sorted(rank for ranks in lists for rank in ranks)
        assert world == list(range(len(world)))
        assert {len(ranks) for ranks in lists} == {axes[axis]}


def sum_along_each_axis(axes, group):
    mesh = Mesh(group, **axes)
    sums = {}
    for axis in axes:
        x = torch.tensor([group.rank()])
        dist.all_reduce(x, group=mesh[axis])
        sums[axis] = x.item()
    return sums, {axis: mesh.index(axis) for axis in axes}, repr(mesh)


def test_groups_communicate_along_their_axis_only_and_the_ledger_names_it():
    axes = dict(pp=2, dp=1, tp=3)
    run = launch(sum_along_each_axis, 6, (axes,))
    for axis, lists in axis_groups(**axes).items():
        for ranks in lists:
            for index, rank in enumerate(ranks):
                sums, indices, _ = run.results[rank]
                assert sums[axis] == sum(ranks)
                assert indices[axis] == index
    assert run.results[4][2] == "Mesh(rank 4: pp 1/2, dp 0/1, tp 1/3)"
    assert {comm.axis for comm in run.ledger.comms} == {"pp", "dp", "tp"}
    tp = list(run.ledger.leaves(axis="tp"))
    assert {comm.group for comm in tp} == {(0, 1, 2), (3, 4, 5)}


def compare_with_device_mesh(axes, group):
    from torch.distributed.device_mesh import init_device_mesh

    ours = Mesh(group, **axes)
    theirs = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    return [
        dist.get_process_group_ranks(ours[axis])
        == dist.get_process_group_ranks(theirs.get_group(axis))
        for axis in axes
    ]


def test_torchs_device_mesh_makes_the_same_groups():
    run = launch(compare_with_device_mesh, 4, (dict(dp=2, tp=2),))
    assert run.results == [[True, True]] * 4


def a_mesh_of_a_subgroup(group):
    evens = dist.new_group([1, 3])
    if group.rank() in (1, 3):
        return dist.get_process_group_ranks(Mesh(evens, dp=1, tp=2)["tp"])


def test_a_mesh_of_a_subgroup_speaks_of_the_right_world_ranks():
    assert launch(a_mesh_of_a_subgroup, 4).results == [None, [1, 3], None, [1, 3]]


def wrong_sizes(group):
    with pytest.raises(ValueError, match=r"dp=2 \* tp=3 is 6, but the group has 4 ranks"):
        Mesh(group, dp=2, tp=3)
    with pytest.raises(ValueError, match="dp=-1"):
        Mesh(group, dp=-1, tp=-4)
    with pytest.raises(KeyError, match="no axis 'pp' in this mesh; it has dp, tp"):
        Mesh(group, dp=2, tp=2)["pp"]


def test_sizes_that_do_not_fit_are_refused_by_name():
    launch(wrong_sizes, 4)
