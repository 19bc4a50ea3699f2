"""The explorer of lesson 04 shows what calculators.costs gives for the machine it names."""

import pytest
import torch

from mini_dist import launch
from mini_dist.collectives import all_reduce as run_all_reduce
from mini_dist.course.lab import ParameterError
from mini_dist.course.widgets import links
from mini_dist.plan.calculators.costs import all_reduce
from mini_dist.plan.calculators.links import Hierarchy, Link

MEGABYTE = 2**20


def fills_its_nodes(machine, num_ranks):
    link = links.links_of(machine, num_ranks)
    return not isinstance(link, Hierarchy) or num_ranks % min(num_ranks, link.ranks_per_node) == 0


@pytest.mark.parametrize(
    ("machine", "num_ranks"),
    [
        (machine, num_ranks)
        for machine in links.MACHINES
        for num_ranks in (4, 6, 64)
        if machine != "laptop" and fills_its_nodes(machine, num_ranks)
    ],
)
def test_every_time_on_a_cluster_is_the_calculators(machine, num_ranks):
    link = links.links_of(machine, num_ranks)
    for algorithm, cost in links.race(MEGABYTE, num_ranks, link).items():
        assert cost == all_reduce(MEGABYTE, num_ranks, algorithm, link)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6])
def test_messages_are_as_many_as_the_algorithm_sends(num_ranks):
    algorithms = ("star", "tree", "ring", "halving_doubling")

    def reduce_by_each(group):
        for algorithm in algorithms:
            run_all_reduce(torch.ones(24), group, algorithm=algorithm)

    ledger = launch(reduce_by_each, num_ranks).ledger
    for algorithm in algorithms:
        inside = ledger.leaves(op=f"{algorithm}_all_reduce")
        sends = [comm for comm in inside if comm.op == "send"]
        assert len(sends) == links.num_messages(num_ranks, algorithm)


def test_on_shared_cores_messages_take_turns():
    link = links.Shared(Link(latency=1e-3, bandwidth=1e6))
    cost = links.cost(1000, 4, "ring", link)  # 24 messages; 2 * 3 * 1000 bytes, all ranks together
    assert cost.seconds == pytest.approx(24e-3 + 6e-3)


def test_on_a_torus_the_neighbours_link_is_whole_and_far_messages_share_theirs():
    torus = links.Torus(4, Link(0.0, 8.0))  # 4 x 4
    shares = {distance: torus.slowest(distance, 16, paired=True).bandwidth for distance in (1, 2)}
    assert shares == {1: 8.0, 2: 4.0}
    shares = {distance: torus.slowest(distance, 16, paired=True).bandwidth for distance in (4, 8)}
    assert shares == {4: 8.0, 8: 4.0}  # one row and two rows away


def test_who_wins_depends_on_the_machine_and_the_size():
    """Check the claims in the lesson's text."""

    def best(machine, num_ranks, num_bytes):
        return links.winners(links.race(num_bytes, num_ranks, links.links_of(machine, num_ranks)))

    assert best("H100, 8 a node", 8, MEGABYTE) == ["halving_doubling"]
    assert best("H100, 8 a node", 64, 64) == ["halving_doubling", "tree"]
    assert best("H100, 8 a node", 64, 256 * MEGABYTE) == ["hierarchical"]
    assert best("H100, 1 a node", 24, 256 * MEGABYTE) == ["ring"]  # not a power of 2: folding costs
    for num_bytes, winner in ((2 * MEGABYTE, "halving_doubling"), (4 * MEGABYTE, "ring")):
        assert best("TPU v5e, 2D torus", 256, num_bytes) == [winner]
    assert set(best("laptop", 4, 1024)) == {"star", "tree"}


def test_two_levels_are_offered_only_where_there_are_two():
    two = links.links_of("H100, 8 a node", 16)
    assert "hierarchical" in links.race(MEGABYTE, 16, two)
    assert "hierarchical" not in links.race(MEGABYTE, 8, two)
    assert "hierarchical" not in links.race(MEGABYTE, 16, links.links_of("H100, 1 a node", 16))


def test_a_tie_has_several_winners():
    costs = {a: all_reduce(MEGABYTE, 2, a, Link(1e-6, 1e9)) for a in ("ring", "halving_doubling")}
    assert links.winners(costs) == ["ring", "halving_doubling"]


def test_without_bytes_only_rounds_remain():
    link = Hierarchy(4, Link(1e-6, 1e9), Link(1e-5, 1e8))
    assert links.cost(MEGABYTE, 4, "ring", links.latency_only(link)).seconds == pytest.approx(6e-6)
    assert links.cost(MEGABYTE, 8, "ring", links.latency_only(link)).seconds == pytest.approx(14e-5)
    shared = links.latency_only(links.Shared(Link(1e-6, 1e9)))
    assert links.cost(MEGABYTE, 4, "ring", shared).seconds == pytest.approx(24e-6)


def test_the_page_shows_rounds_bytes_and_the_links_numbers():
    shown = links.explorer(machine="H100, 1 a node", num_ranks=4, num_bytes=4096)
    cost = all_reduce(4096, 4, "ring", links.links_of("H100, 1 a node", 4))
    row = next(row for row in shown.html.split("<tr>") if ">ring<" in row)
    for text in (str(cost.rounds), f"{cost.bytes_per_rank:,}", links.time_name(cost.seconds)):
        assert f">{text}<" in row
    assert "8 µs, 46 GB/s" in shown.html
    assert "halving_doubling = tree the fastest" in repr(shown.picture)


def test_a_measured_link_becomes_one_more_machine():
    mine = Link(latency=1e-3, bandwidth=1e9)
    shown = links.explorer(mine, machine=links.YOURS, num_ranks=4)
    assert "1e+03 µs, 1 GB/s" in shown.html and "the link that you measured" in shown.html
    with pytest.raises(ParameterError, match="yours"):
        links.explorer(machine=links.YOURS)


def test_ranks_that_do_not_fill_their_nodes_are_refused():
    with pytest.raises(ParameterError, match="12 ranks do not fill nodes of 8"):
        links.explorer(machine="H100, 8 a node", num_ranks=12)


@pytest.mark.parametrize("machine", links.MACHINES)
def test_every_machine_can_be_drawn_at_both_ends_of_its_controls(machine):
    for num_ranks, num_bytes in ((2, links.SIZES[0]), (256, links.MOST)):
        shown = links.explorer(machine=machine, num_ranks=num_ranks, num_bytes=num_bytes)
        assert shown.picture.html().count("<svg") == 2
