"""The rank grid: which ranks form a group along which axis."""

import math
from itertools import product

import pytest
import torch
import torch.distributed as dist

from mini_dist import launch
from mini_dist.collectives.mesh import (
    AXES,
    Grid,
    Mesh,
    axis_groups,
    host_by_host,
    megatron_order,
    uplink_bytes,
)
from mini_dist.plan.config import Layout
from mini_dist.ranks.hosts import Hosts, hosts_of


def test_the_last_axis_joins_neighbours():
    assert axis_groups(dp=2, tp=2) == {"dp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]}


def test_the_sixteen_gpus_of_the_ptdp_paper():
    # Narayanan et al. 2021 (PTD-P), section 2, lists the groups of tp 2, pp 4, dp 2 on 16 GPUs in
    # Megatron's order, with the pipeline outermost.
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


def test_the_sixteen_gpus_written_out_line_by_line():
    assert str(Grid(pp=4, dp=2, tp=2)).splitlines() == [
        "16 ranks = pp 4 x dp 2 x tp 2",
        " pp 4:  0 4 8 12 | 1 5 9 13 | 2 6 10 14 | 3 7 11 15",
        " dp 2:  0 2 | 1 3 | 4 6 | 5 7 | 8 10 | 9 11 | 12 14 | 13 15",
        " tp 2:  0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11 | 12 13 | 14 15",
    ]


def test_the_usual_order_is_the_layouts():
    assert tuple(Layout(pp=2, dp=2).axes) == AXES


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-dp-pp", "TP-DP-PP"])
def test_megatrons_order_string_names_the_innermost_axis_first(order):
    """Megatron-core's initialize_model_parallel lists the same 16 GPUs in its docstring."""
    axes = megatron_order(order, tp=2, pp=4, dp=2)
    assert [axis for axis in axes if axis in ("pp", "dp", "tp")] == ["pp", "dp", "tp"]
    written_out = axis_groups(pp=4, dp=2, tp=2)
    assert {axis: axis_groups(**axes)[axis] for axis in written_out} == written_out


def test_another_order_puts_other_ranks_side_by_side():
    # With tp-pp-dp, the stages of a replica are close and its copies far apart.
    grid = Grid(**megatron_order("tp-pp-dp", tp=2, pp=4, dp=2))
    assert grid.groups("pp")[0] == [0, 2, 4, 6]
    assert grid.groups("dp")[0] == [0, 8]


def megatrons_groups(order, sizes, token):
    """Build groups as Megatron-core's RankGenerator does, independently, by strides and masks."""
    words = order.split("-")
    strides = {word: math.prod(sizes[w] for w in words[:i]) for i, word in enumerate(words)}
    inside = [word for word in words if word in token.split("-")]
    outside = [word for word in words if word not in inside]

    def numbers(names):  # the first name varies fastest
        places = product(*(range(sizes[name]) for name in reversed(names)))
        return [sum(i * strides[n] for n, i in zip(reversed(names), place)) for place in places]

    return [[group + rank for rank in numbers(inside)] for group in numbers(outside)]


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-dp-ep-pp"])
@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_expert_groups_are_megatrons(order, ep):
    """Megatron divides the ranks twice.

    The dense part has dp and cp; the experts have ep and a dp of their own, but no cp.
    """
    dense, pp = dict(tp=2, cp=2, dp=4, ep=1, pp=2), 2
    grid = Grid(**megatron_order(order, **dense | dict(ep=ep)))
    experts = dict(tp=2, cp=1, ep=ep, dp=8 // ep, pp=pp)
    for ours, theirs in (("dp", "dp"), ("cp", "cp"), ("tp", "tp"), ("pp", "pp")):
        assert grid.groups(ours) == megatrons_groups(order, dense, theirs)
    assert grid.groups("dp", "cp") == megatrons_groups(order, dense, "dp-cp")
    assert grid.groups("tp", "cp", "dp") == megatrons_groups(order, dense, "tp-cp-dp")
    assert grid.groups("ep") == megatrons_groups(order, experts, "ep")
    assert grid.groups("edp") == megatrons_groups(order, experts, "dp")
    assert grid.groups("tp", "ep") == megatrons_groups(order, experts, "tp-ep")
    assert grid.groups("ep", "pp") == megatrons_groups(order, experts, "ep-pp")


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-dp-ep-pp"])
@pytest.mark.parametrize("ep, etp", [(1, 1), (8, 1), (2, 2), (16, 2), (4, 4), (32, 1)])
def test_expert_groups_that_span_tp_are_megatrons(order, ep, etp):
    """In Megatron-core 0.16, experts have their own tp and divide all ranks of a stage again."""
    dense = dict(tp=4, cp=2, dp=4, ep=1, pp=2)
    grid = Grid(**megatron_order(order, **dense | dict(ep=ep)), etp=etp)
    experts = dict(tp=etp, cp=1, ep=ep, dp=32 // (ep * etp), pp=2)
    for ours, theirs in (("dp", "dp"), ("cp", "cp"), ("tp", "tp"), ("pp", "pp")):
        assert grid.groups(ours) == megatrons_groups(order, dense, theirs)
    for ours, theirs in (("ep", "ep"), ("edp", "dp"), ("etp", "tp"), ("pp", "pp")):
        assert sorted(grid.groups(ours)) == sorted(megatrons_groups(order, experts, theirs))
    assert grid.groups("ep", "etp") == megatrons_groups(order, experts, "tp-ep")
    if etp == 4:  # the default, since tp is 4
        plain = Grid(**megatron_order(order, **dense | dict(ep=ep)))
        assert plain.groups("ep") == grid.groups("ep")
        assert plain.groups("edp") == grid.groups("edp")


def test_ep_groups_neighbours_and_its_own_dp_joins_who_holds_the_same_experts():
    grid = Grid(pp=1, dp=2, cp=2, tp=2, ep=2)
    assert grid.groups("dp", "cp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert grid.groups("ep") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("edp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    across = Grid(pp=1, ep=2, dp=2, cp=2, tp=2)  # ep before dp: its ranks are furthest apart
    assert across.groups("ep") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_a_place_and_its_groups_say_the_same():
    grid = Grid(pp=2, dp=2, cp=2, tp=2, ep=4)
    for axes in (("pp",), ("dp", "cp"), ("ep",), ("edp",), ("ep", "tp"), ("cp", "pp")):
        for ranks in grid.groups(*axes):
            places = [grid.coordinates(rank) for rank in ranks]
            view = ["pp", "tp", "ep", "edp"] if {"ep", "edp"} & set(axes) else list(grid.axes)
            for axis in view:
                assert (len({place[axis] for place in places}) > 1) <= (axis in axes)
            assert len({tuple(place[a] for a in axes) for place in places}) == len(ranks)


@pytest.mark.parametrize("axes", [dict(pp=2, dp=2, cp=2, tp=2), dict(dp=4, cp=1)])
def test_groups_of_several_axes_divide_the_world(axes):
    grid = Grid(**axes)
    lists = grid.groups("dp", "cp")
    assert sorted(rank for ranks in lists for rank in ranks) == list(range(grid.size))
    assert {len(ranks) for ranks in lists} == {axes["dp"] * axes["cp"]}
    assert grid.groups("cp", "dp") == lists
    assert all(ranks == sorted(ranks) for ranks in lists)


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


def sum_over_products(group):
    mesh = Mesh(group, pp=1, dp=2, cp=2, tp=2, ep=2)
    sums = {}
    for axes in ("ep", "edp", ("dp", "cp"), ("ep", "tp"), ("dp", "pp")):
        x = torch.tensor([group.rank()])
        dist.all_reduce(x, group=mesh[axes])
        sums[axes] = x.item()
    again = mesh["cp", "dp"] is mesh["dp", "cp"] and mesh["dp", "pp"] is mesh["dp"]
    return sums, again, repr(mesh), mesh.index("dp", "cp")


def test_groups_of_experts_and_of_products_communicate_and_the_ledger_tells_them_apart():
    run = launch(sum_over_products, 8)
    grid = Grid(pp=1, dp=2, cp=2, tp=2, ep=2)
    for rank, (sums, again, _, index) in enumerate(run.results):
        for axes, total in sums.items():
            lists = grid.groups(*((axes,) if isinstance(axes, str) else axes))
            assert total == sum(next(ranks for ranks in lists if rank in ranks)), axes
        assert again  # the same ranks and purpose share one group
        assert index == grid.groups("dp", "cp")[rank % 2].index(rank)
    assert run.results[5][2] == "Mesh(rank 5: pp 0/1, dp 1/2, cp 0/2, tp 1/2, edp 1/2, ep 0/2)"
    # Here ep and cp have the same ranks, but they are still two axes.
    axes = {comm.axis for comm in run.ledger.comms}
    assert axes == {"ep", "edp", "dp*cp", "tp*ep", "dp"}


def ep_of_all(group):
    mesh = Mesh(group, dp=4, ep=4)
    for axis in ("dp", "ep"):
        dist.all_reduce(torch.ones(1), group=mesh[axis])


def test_ep_over_all_of_dp_is_an_axis_of_its_own_in_the_ledger():
    assert {comm.axis for comm in launch(ep_of_all, 4).ledger.comms} == {"dp", "ep"}


def a_mesh_of_a_subgroup(group):
    evens = dist.new_group([1, 3])
    if group.rank() in (1, 3):
        return dist.get_process_group_ranks(Mesh(evens, dp=1, tp=2)["tp"])


def test_a_mesh_of_a_subgroup_speaks_of_the_right_world_ranks():
    assert launch(a_mesh_of_a_subgroup, 4).results == [None, [1, 3], None, [1, 3]]


# -- on hosts -------------------------------------------------------------------------------------

THREE = Hosts(3, ranks=[2, 0, 1, 1, 0, 2], emulated=True)
IN_ORDER, SHUFFLED = [0, 0, 1, 1, 2, 2], list(THREE.ranks)


def test_crossing_counts_the_groups_that_leave_a_host():
    assert Grid(dp=3, tp=2).crossing(IN_ORDER) == {"dp": 2, "tp": 0}
    assert Grid(tp=2, dp=3).crossing(IN_ORDER) == {"tp": 3, "dp": 2}
    assert Grid(dp=3, tp=2).crossing(SHUFFLED) == {"dp": 2, "tp": 2}  # 2 and 3 share a host
    assert Grid(dp=3, tp=2).crossing([0] * 6) == {"dp": 0, "tp": 0}
    # ep joins neighboring dp ranks; edp joins the ranks with the same index in their ep groups.
    experts = Grid(dp=6, ep=2)
    assert experts.crossing(IN_ORDER) == {"dp": 1, "edp": 2, "ep": 0}
    assert Grid(dp=6, ep=3).crossing(IN_ORDER) == {"dp": 1, "edp": 3, "ep": 2}


def test_the_busiest_uplink_is_that_of_rings_along_each_axis():
    grid = Grid(dp=3, tp=2)  # dp: 0 2 4 | 1 3 5; both ranks of each host send out
    assert uplink_bytes(grid, {"dp": 10}, IN_ORDER) == 20
    assert uplink_bytes(grid, {"tp": 1}, IN_ORDER) == 0
    assert uplink_bytes(grid, {"dp": 10, "tp": 1}, IN_ORDER) == 20
    # tp: 0 1 | 2 3 | 4 5 on hosts 2 0 | 1 1 | 0 2: both ranks of hosts 0 and 2 send out
    assert uplink_bytes(grid, {"tp": 1}, SHUFFLED) == 2
    assert uplink_bytes(grid, {"tp": 1}, [0, 1, 1, 1, 1, 1]) == 1
    # ep: 0 1 2 | 3 4 5 on hosts 0 0 1 | 1 2 2: host 1 sends 2 to 0 and 3 to 4. edp: all send out
    assert uplink_bytes(Grid(dp=6, ep=3), {"ep": 1}, IN_ORDER) == 2
    assert uplink_bytes(Grid(dp=6, ep=3), {"edp": 5, "ep": 1}, IN_ORDER) == 12


def meshes_on_hosts(group):
    by_hosts = host_by_host(group)
    mesh = Mesh(group, by_hosts=True, pp=3, tp=2)
    everyone = dist.get_process_group_ranks(by_hosts)
    axes = {axis: dist.get_process_group_ranks(mesh[axis]) for axis in ("pp", "tp")}
    place = {axis: mesh.index(axis) for axis in axes}
    as_coordinates = place == mesh.grid.coordinates(mesh.group.rank())
    x = torch.tensor([group.rank()])
    dist.all_reduce(x, group=mesh["pp"])
    crossing = mesh.grid.crossing(hosts_of(mesh.group))
    return everyone, axes, as_coordinates, x.item(), crossing, by_hosts is group


def test_host_by_host_neighbours_of_the_mesh_share_a_host_and_places_are_in_that_order():
    """Hosts 0, 1 and 2 have ranks 1 and 4, 2 and 3, 0 and 5.

    The pipelines are 1 2 0 and 4 3 5. If groups were sorted, rank 0 would be a first stage.
    """
    for rank, found in enumerate(launch(meshes_on_hosts, 6, hosts=THREE).results):
        everyone, axes, as_coordinates, total, crossing, unchanged = found
        assert everyone == [1, 4, 2, 3, 0, 5] and not unchanged
        assert axes["tp"] in ([1, 4], [2, 3], [0, 5]) and rank in axes["tp"]
        assert axes["pp"] == ([1, 2, 0] if rank < 3 else [4, 3, 5])
        assert as_coordinates and total == sum(axes["pp"])
        assert crossing == {"pp": 2, "tp": 0}
    assert launch(meshes_on_hosts, 6).results[0][-1]  # one host: the same group object


def wrong_sizes(group):
    with pytest.raises(ValueError, match=r"dp=2 \* tp=3 is 6, but the group has 4 ranks"):
        Mesh(group, dp=2, tp=3)
    with pytest.raises(ValueError, match="dp=-1"):
        Mesh(group, dp=-1, tp=-4)
    with pytest.raises(KeyError, match="no axis 'pp' in this mesh; it has dp, tp"):
        Mesh(group, dp=2, tp=2)["pp"]
    with pytest.raises(KeyError, match="no axis 'ep' in this mesh; it has dp, tp"):
        Mesh(group, dp=2, tp=2)["ep"]
    with pytest.raises(ValueError, match=r"ep=3 does not divide dp\*cp=4: give one of 1, 2, 4"):
        Mesh(group, dp=4, ep=3)


def test_sizes_that_do_not_fit_are_refused_by_name():
    launch(wrong_sizes, 4)


def test_a_grid_refuses_what_makes_no_groups():
    spanning = Grid(dp=2, tp=2, ep=4, etp=1)
    with pytest.raises(
        KeyError, match="ep, edp and etp cut the ranks of dp.cp.tp anew, so tp cannot"
    ):
        spanning.groups("tp", "ep")
    with pytest.raises(ValueError, match="ep=4 does not divide dp.cp.tp/etp=2: give one of 1, 2"):
        Grid(dp=2, tp=2, ep=4, etp=2)
    with pytest.raises(ValueError, match="etp=3 does not divide tp=4: give one of 1, 2, 4"):
        Grid(dp=2, tp=4, ep=1, etp=3)
    with pytest.raises(ValueError, match="etp=1 needs ep beside it and tp as the last axis"):
        Grid(tp=2, dp=2, ep=2, etp=1)
    with pytest.raises(KeyError, match="dp and ep: ep and edp cut the ranks of dp.cp anew, so dp"):
        Grid(dp=4, ep=2).groups("dp", "ep")
    with pytest.raises(ValueError, match="ep=0: an axis has at least 1 rank"):
        Grid(dp=4, ep=0)
    with pytest.raises(ValueError, match="pp=4, but order='tp-dp' does not say where pp goes"):
        megatron_order("tp-dp", tp=2, dp=2, pp=4)
    with pytest.raises(ValueError, match="'zp' stands there 1 times; give each of pp, dp, cp, tp"):
        megatron_order("tp-zp-dp", tp=2)
    with pytest.raises(ValueError, match="'tp' stands there 2 times"):
        megatron_order("tp-tp", tp=2)
