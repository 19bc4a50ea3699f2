"""Test steps: the schedule of a run, derived from which message waited for which."""

import sys
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from mini_dist import launch
from mini_dist.collectives import (
    exchange,
    halving_doubling_all_reduce,
    pairwise_all_to_all,
    recv,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    send,
    star_all_reduce,
    stars_all_reduce,
    tree_all_reduce,
)
from mini_dist.plan.calculators import costs
from mini_dist.ranks.ledger.steps import count_rounds, messages, steps

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest


def on_numbers(fn, group):
    return fn(torch.arange(24.0), group)


def ledger_of(fn, size=4):
    return launch(on_numbers, size, (fn,), quiet=True).ledger


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(
    "fn, formula, algorithm",
    [
        (ring_reduce_scatter, costs.reduce_scatter, "ring"),
        (ring_all_gather, costs.all_gather, "ring"),
        (ring_all_reduce, costs.all_reduce, "ring"),
        (star_all_reduce, costs.all_reduce, "star"),
        (stars_all_reduce, costs.all_reduce, "stars"),
        (tree_all_reduce, costs.all_reduce, "tree"),
        (halving_doubling_all_reduce, costs.all_reduce, "halving_doubling"),
        (pairwise_all_to_all, costs.all_to_all, "pairwise"),
    ],
)
def test_the_rounds_of_a_run_are_those_of_the_formula(fn, formula, algorithm, size):
    assert count_rounds(ledger_of(fn, size)) == formula(96, size, algorithm).rounds


def ring_from_anyone(lengths, x, group):
    """Three hops to the next rank, received from any source unless the message is empty."""
    rank, size = group.rank(), group.size()
    for length in lengths:
        sent, arrived = torch.ones(length), torch.empty(length)
        if length:
            handle = group.recv_anysource([arrived], 0)
        else:
            handle = group.recv([arrived], (rank - 1) % size, 0)
        group.send([sent], (rank + 1) % size, 0).wait()
        handle.wait()


@pytest.mark.parametrize("lengths", [(24, 24, 24), (1, 0, 1), (0, 1, 0)])
def test_a_message_received_from_any_source_is_one_all_the_same(lengths):
    ledger = ledger_of(partial(ring_from_anyone, lengths))
    assert count_rounds(ledger) == 3
    hops = [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert [[(m.source, m.target) for m in step] for step in steps(ledger)] == [hops] * 3


def in_two_groups(x, group):
    """Rank 0 first posts a receive in a second group, but the first group's message comes first."""
    other = dist.new_group([0, 1])
    if group.rank() == 0:
        one, many = torch.empty(1), torch.empty(1000)
        handles = other.recv([one], 1, 0), group.recv([many], 1, 0)
        return [handle.wait() for handle in handles]
    group.send([torch.ones(1000)], 0, 0).wait()
    other.send([torch.ones(1)], 0, 0).wait()


def test_groups_of_the_same_ranks_do_not_take_each_other_s_messages():
    found = messages(ledger_of(in_two_groups, 2))
    assert [(m.send.nbytes, m.recv.nbytes) for m in found] == [(4000, 4000), (4, 4)]


def test_in_each_step_of_a_ring_everyone_sends_to_the_next():
    for step in steps(ledger_of(ring_all_reduce)):
        assert [(m.source, m.target) for m in step] == [(0, 1), (1, 2), (2, 3), (3, 0)]
        assert [m.nbytes for m in step] == [24] * 4


def line(x, group):
    rank, size = group.rank(), group.size()
    if rank > 0:
        x = x + recv(x, rank - 1, group)
    if rank < size - 1:
        send(x, rank + 1, group)
    return x


def test_messages_that_wait_for_each_other_are_in_steps_of_their_own():
    found = [[(m.source, m.target) for m in step] for step in steps(ledger_of(line))]
    assert found == [[(0, 1)], [(1, 2)], [(2, 3)]]


def two_pairs(x, group):
    return exchange(x, group.rank() ^ 1, group.rank() ^ 1, group)


def test_messages_that_know_nothing_of_each_other_share_a_step():
    (step,) = steps(ledger_of(two_pairs))
    assert [(m.source, m.target) for m in step] == [(0, 1), (1, 0), (2, 3), (3, 2)]


def half_duplex(x, group):
    """Even ranks send first, so this needs two rounds where exchange needs one."""
    rank, size = group.rank(), group.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    if rank % 2 == 0:
        send(x, after, group)
        return recv(x, before, group)
    came = recv(x, before, group)
    send(x, after, group)
    return came


def test_sending_and_receiving_in_turn_takes_twice_the_rounds():
    assert count_rounds(ledger_of(half_duplex)) == 2


def test_a_send_is_matched_with_its_own_receive():
    ledger = ledger_of(ring_all_reduce, 3)
    found = messages(ledger)
    assert len(found) == 3 * 2 * 2
    for m in found:
        assert m.send.sent_to == {m.target: m.nbytes}
        assert m.recv.received_from == {m.source: m.nbytes}
        assert m.send.start <= m.recv.end and m.recv.start <= m.send.end


def test_native_collectives_have_no_messages_to_see():
    def native(x, group):
        torch.distributed.all_reduce(x, group=group)

    assert steps(ledger_of(native)) == [] and count_rounds(ledger_of(native)) == 0
