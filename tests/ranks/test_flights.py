"""Replay a run's messages over links of given speed and compare with calculators.costs."""

import pytest
import torch

from mini_dist import launch
from mini_dist.collectives import all_reduce, exchange, recv, send
from mini_dist.plan.calculators import costs, links
from mini_dist.ranks.ledger.flights import play_messages
from mini_dist.ranks.ledger.steps import count_rounds

FAR = links.Link(latency=5e-6, bandwidth=50e9)
NEAR = links.Link(latency=1e-6, bandwidth=300e9)
ALGORITHMS = ("star", "tree", "ring", "halving_doubling", "hierarchical")


def reduce_by(algorithm, numel, ranks_per_node, group):
    nodes = ranks_per_node if algorithm == "hierarchical" else None
    all_reduce(torch.ones(numel), group, algorithm=algorithm, nodes=nodes)


def seconds(ledger, link, **how):
    return max(flight.end for flight in play_messages(ledger, link, **how))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size, ranks_per_node", [(3, 1), (4, 2), (8, 4)])
def test_a_played_all_reduce_takes_the_rounds_and_seconds_of_the_formula(
    algorithm, size, ranks_per_node
):
    numel = 24 * 10
    in_node = ranks_per_node if algorithm == "hierarchical" else None
    run = launch(reduce_by, size, (algorithm, numel, ranks_per_node))
    cost = costs.all_reduce(4 * numel, size, algorithm, FAR, 4, in_node)
    assert count_rounds(run.ledger) == cost.rounds
    assert seconds(run.ledger, FAR) == pytest.approx(cost.seconds)

    # The link inside a node now differs from the link between nodes.
    two_levels = links.Hierarchy(ranks_per_node, NEAR, FAR)
    cost = costs.all_reduce(4 * numel, size, algorithm, two_levels, 4)

    def link_of(source, target):
        return NEAR if source // ranks_per_node == target // ranks_per_node else FAR

    assert seconds(run.ledger, link_of) == pytest.approx(cost.seconds)


def test_a_small_run_stands_for_a_large_one():
    run = launch(reduce_by, 4, ("ring", 4, None))
    large = costs.all_reduce(16 * 1000, 4, "ring", FAR, 4)
    assert seconds(run.ledger, FAR, scale=1000) == pytest.approx(large.seconds)


def test_messages_of_one_rank_wait_for_each_other_and_others_do_not():
    def two_pairs(group):  # 0 -> 1 twice, and 2 -> 3 once
        rank, x = group.rank(), torch.ones(1)
        for _ in range(2 if rank < 2 else 1):
            send(x, rank + 1, group) if rank % 2 == 0 else recv(x, rank - 1, group)

    flights = play_messages(launch(two_pairs, 4).ledger, links.Link(1.0, 4.0))
    assert [(f.source, f.target, f.start, f.end) for f in flights if f.source == 0] == [
        (0, 1, 0.0, 2.0),
        (0, 1, 2.0, 4.0),
    ]
    assert [(f.start, f.end, f.nbytes) for f in flights if f.source == 2] == [(0.0, 2.0, 4)]


def test_who_must_wait_for_what_it_passes_on_starts_after_it_has_come():
    def chain(group):
        rank, x = group.rank(), torch.ones(1)
        if rank > 0:
            x = recv(x, rank - 1, group)
        if rank < 2:
            send(x, rank + 1, group)

    assert seconds(launch(chain, 3).ledger, links.Link(1.0, 4.0)) == 4.0


def test_an_exchange_goes_both_ways_at_once():
    def swap(group):
        exchange(torch.ones(1), 1 - group.rank(), 1 - group.rank(), group)

    flights = play_messages(launch(swap, 2).ledger, links.Link(1.0, 4.0))
    assert [(f.start, f.end) for f in flights] == [(0.0, 2.0), (0.0, 2.0)]


def test_two_messages_to_one_rank_queue_though_it_posted_both_receives_at_once():
    def star(group):
        all_reduce(torch.ones(1), group, algorithm="star")

    inward = [
        f for f in play_messages(launch(star, 3).ledger, links.Link(1.0, 4.0)) if f.target == 0
    ]
    assert [(f.start, f.end) for f in inward] == [(0.0, 2.0), (2.0, 4.0)]


def test_a_run_without_messages_has_no_flights():
    assert play_messages(launch(lambda group: None, 2).ledger, FAR) == []


def test_torchs_own_collectives_are_refused_for_nobody_sees_their_messages():
    run = launch(lambda group: torch.distributed.all_reduce(torch.ones(1), group=group), 2)
    with pytest.raises(ValueError, match="all_reduce is not made of messages"):
        play_messages(run.ledger, FAR)
