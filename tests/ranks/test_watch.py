"""Test watch: recognizable numbers show what every message of a collective carries."""

import sys

import cloudpickle
import pytest
import torch

from mini_dist.collectives import gather, ring_all_gather, ring_all_reduce, star_broadcast
from mini_dist.ranks.watch import read, term, watch

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_term_is_a_number_of_its_own(size):
    terms = [term(chunk, rank, size) for chunk in range(size) for rank in range(size)]
    assert len(set(terms)) == size * size
    assert read(sum(terms), size) == {chunk: list(range(size)) for chunk in range(size)}
    assert torch.tensor(sum(terms)).dtype == torch.int64  # and it fits


def test_a_term_that_is_in_a_sum_twice_is_read_twice():
    assert read(2 * term(1, 3, 4) + term(1, 0, 4), 4) == {1: [0, 3, 3]}


def test_a_ring_carries_one_term_more_in_each_round_until_sums_are_complete():
    seen = watch(ring_all_reduce)
    for sends in seen.carried:
        ranks = [list(read(number, 4).values()) for (number,) in sends]
        assert [len(found[0]) for found in ranks] == [1, 2, 3, 4, 4, 4]


def test_results_and_inputs_are_the_ranks_own():
    seen = watch(ring_all_gather, 3, parts=True)
    assert seen.inputs == [[term(rank, rank, 3)] for rank in range(3)]
    assert seen.results == [[term(rank, rank, 3) for rank in range(3)]] * 3


def test_what_a_rank_sends_is_kept_as_it_was_when_it_was_sent():
    def changes_after_sending(x, group):
        total = star_broadcast(x, 0, group)
        total += 1
        return star_broadcast(total, 0, group)

    first, second = watch(changes_after_sending, 2).carried[0]
    assert second == [number + 1 for number in first]


def test_a_rank_may_return_nothing():
    assert watch(gather, 2, (0,)).results[1] is None


def test_more_ranks_than_a_number_has_room_for_are_refused():
    with pytest.raises(ValueError, match="world_size=5: give 1 to 4"):
        watch(ring_all_reduce, 5)
