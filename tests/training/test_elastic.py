"""Test elastic runs: what ranks are told, where they resume, copies of shards, batch shares."""

import itertools
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from mini_dist import RankError, launch
from mini_dist.collectives import all_reduce, recv, send
from mini_dist.strategies.zero import ZeRO1
from mini_dist.training.checkpoint import Piece, Training, piece
from mini_dist.training.elastic import (
    Elastic,
    FixedTimeout,
    PhiAccrual,
    RanksChanged,
    ShardCopies,
    catch_up,
    check_members,
    furthest,
    invite,
    judged,
    numbers,
    patience,
    regroup,
    rows_of,
    shares,
)
from mini_dist.training.elastic.taking_over import Offered, take_over

ROOT = Path(__file__).resolve().parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for connections in Linux's /proc")
pytestmark = linux


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -- what ranks are told --------------------------------------------------------------------------


def told_and_again(end, group):
    """End rank 1; return what the other ranks are told, and their next group's sum."""
    me = numbers(group)[group.rank()]
    try:
        while True:
            all_reduce(torch.ones(3), group)
            if me == 1:
                end()
    except RanksChanged as news:
        group = regroup(group)
        total = all_reduce(torch.tensor([me]), group).item()
        return news.lost, group.rank(), numbers(group), total


def raises() -> None:
    raise ValueError("my disk is full")


@pytest.mark.parametrize(
    "end, how",
    [(die, "was killed by SIGKILL"), (raises, "raised ValueError: my disk is full")],
)
def test_all_who_are_left_hear_who_is_gone_and_make_a_group(end, how):
    run = launch(told_and_again, 4, (end,), elastic=True)
    assert run.results[1] is None and [lost.rank for lost in run.lost] == [1]
    for place, number in enumerate((0, 2, 3)):
        (lost,), rank, members, total = run.results[number]
        assert (lost.rank, lost.how, bool(lost.host)) == (1, how, True)
        assert "communication was" in lost.doing or "waiting in" in lost.doing
        assert (rank, members, total) == (place, (0, 2, 3), 5)


def waits_for_the_living(group):
    """Rank 2 dies while rank 1 waits for rank 0, which computes and has no connection to watch."""
    rank = group.rank()
    try:
        if rank == 0:
            while True:
                check_members(group)
        if rank == 1:
            recv(torch.empty(1), 0, group)
        die()
    except RanksChanged as news:
        return [lost.rank for lost in news.lost]


def sends_to_the_living(group):
    """As above, but rank 1 is about to send, and rank 0 never receives."""
    rank = group.rank()
    try:
        if rank == 0:
            while True:
                check_members(group)
        if rank == 1:
            send(torch.ones(10_000), 0, group)
        die()
    except RanksChanged as news:
        return [lost.rank for lost in news.lost]


@pytest.mark.parametrize("waits", [waits_for_the_living, sends_to_the_living])
def test_who_waits_for_one_that_lives_is_woken_too(waits):
    assert launch(waits, 3, elastic=True).results == [[2], [2], None]


def stops(group):
    try:
        while True:
            all_reduce(torch.ones(1), group)
            if group.rank() == 2:
                os.kill(os.getpid(), signal.SIGSTOP)
    except RanksChanged as news:
        return news.lost[0].rank, news.lost[0].how.split(" for ")[0]


def stops_at_once(group):
    if group.rank() == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    return stops(group)


def test_a_rank_that_stops_in_its_first_line_has_sent_a_heartbeat_and_is_missed():
    for _ in range(2):  # the second time, all modules are loaded and rank 2 stops sooner
        run = launch(stops_at_once, 3, elastic=Elastic(beat=0.5, silence=1.5))
        assert run.results == [(2, "was silent")] * 2 + [None]


def test_who_is_silent_is_dead_and_is_killed_for_it():
    run = launch(stops, 3, elastic=Elastic(silence=5.0))
    assert run.results == [(2, "was silent")] * 2 + [None]
    assert "was killed for it" in run.lost[0].how


def stops_later(group):
    time.sleep(1.0)  # so that a detector hears some heartbeats
    return stops(group)


def test_a_detector_of_its_own_hears_the_beats_of_each_rank_and_decides():
    made = []

    class Phi(PhiAccrual):
        def __init__(self):  # phi 100 is a silence of 21 standard deviations
            super().__init__(100, first=0.5, least=0.25)
            made.append(self)

    run = launch(stops_later, 3, elastic=Elastic(silence=Phi))
    assert run.results == [(2, "was silent")] * 2 + [None]
    assert len(made) == 3 and all(each.silences for each in made)
    assert float(run.lost[0].how.split()[3]) >= min(each.timeout() for each in made) - 0.1 > 5


def waits_alone(path, group):
    if group.rank() == 1:
        die()
    try:
        all_reduce(torch.ones(1), group)
    except RanksChanged:
        regroup(group)
    while not path.exists():
        time.sleep(0.01)


def test_who_watches_is_told_while_the_run_lasts(tmp_path):
    told = []

    def watch(sentence):
        told.append(sentence)
        if "group" in sentence:
            (tmp_path / "told").touch()

    launch(waits_alone, 2, (tmp_path / "told",), elastic=Elastic(watch=watch))
    assert told == ["rank 1 was killed by SIGKILL", "the group is now [0]"]


def grows(group):
    me, seen = numbers(group)[group.rank()], []
    while len(seen) < 2 and seen != [3]:
        try:
            if me == 0 and len(seen) == 0 and group.size() == 2:
                invite(group)
            while True:
                count = int(all_reduce(torch.ones(1), group))
                if count == 3:
                    seen.append(3)
                    break
        except RanksChanged as news:
            seen.append(news.joining)
            group = regroup(group)
    return seen, numbers(group)


def test_an_invited_rank_joins_behind_the_others():
    run = launch(grows, 2, elastic=True)
    assert run.results == [([[2], 3], (0, 1, 2))] * 2 + [([3], (0, 1, 2))]
    to = {peer for comm in run.ledger.leaves(rank=2) for peer in comm.peers}
    assert to <= {0, 1} and run.ledger.total_bytes(rank=2) > 0


def loses_two(group):
    if group.rank():
        die()
    try:
        while True:
            all_reduce(torch.ones(1), group)
    except RanksChanged:
        return regroup(group).size()


def test_with_fewer_than_wanted_the_run_fails():
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        launch(loses_two, 3, elastic=Elastic(min_ranks=2))


def test_a_run_that_is_not_elastic_says_so():
    with pytest.raises(RankError, match=r"launch\(..., elastic=True\)"):
        launch(lambda group: regroup(group), 1)


@pytest.mark.parametrize(
    "values",
    [{"min_ranks": 0}, {"replace": -1}, {"beat": 0}, {"silence": 0.05}, {"replace": True}]
    + [{"silence": "5"}, {"watch": "print"}],
)
def test_values_that_cannot_be_are_refused(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        Elastic(**values)


# -- where to resume ------------------------------------------------------------------------------


def small(seed):
    torch.manual_seed(seed)
    module = nn.Linear(3, 2)
    return module, torch.optim.AdamW(module.parameters(), lr=0.1)


def step_of(module, optimizer):
    optimizer.zero_grad()
    module(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()


def one_is_behind(group):
    """Rank 1 has done two steps, rank 0 one, and rank 2 is new."""
    rank = group.rank()
    module, optimizer = small(rank)
    for _ in range((1, 2, 0)[rank]):
        step_of(module, optimizer)
    step = catch_up(Training(module, optimizer, group), (1, 2, 0)[rank], group)
    step_of(module, optimizer)  # with rank 1's states, this is rank 1's next step
    return step, module.weight.detach()


def test_all_take_parameters_and_states_of_who_has_come_furthest():
    module, optimizer = small(1)
    for _ in range(3):
        step_of(module, optimizer)
    for step, weight in launch(one_is_behind, 3).results:
        assert step == 2 and torch.equal(weight, module.weight)


def test_of_several_the_first_is_the_furthest():
    found = launch(lambda group: furthest((4, 7, 7)[group.rank()], group), 3).results
    assert found == [(1, 7)] * 3


def broken_off(group):
    """No rank has one part of the state, so nothing is taken over."""
    module, optimizer = small(group.rank())
    step_of(module, optimizer)
    before = [p.clone() for p in [*module.parameters(), optimizer.state[module.weight]["exp_avg"]]]
    offered = Offered([piece("weight", torch.zeros(2, 3))] if group.rank() == 0 else [], group)
    try:
        take_over(Training(module, optimizer, group), offered)
    except LookupError as error:
        after = [*module.parameters(), optimizer.state[module.weight]["exp_avg"]]
        return str(error), all(map(torch.equal, before, after))


def test_what_is_not_there_as_a_whole_is_not_taken_at_all():
    for said, unchanged in launch(broken_off, 2).results:
        assert said.startswith("no rank that is there has all of bias") and unchanged


# -- copies of shards -----------------------------------------------------------------------------


def adamw(tensors):
    return torch.optim.AdamW(tensors, lr=0.1)


def with_copies(victims, group):
    """Take 3 ZeRO-1 steps, copying after the second; kill victims; return what the rest restore."""
    copies, me = ShardCopies(), numbers(group)[group.rank()]
    model = ZeRO1(small(0)[0], group, adamw, units=[])
    for step in range(3):
        model.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        model.finish()
        model.optimizer.step()
        model.refresh_parameters()
        if step == 1:
            copies.keep(Training(model, (), group), 2, group)
            kept = [p.detach().clone() for p in model.module.parameters()]
    try:
        all_reduce(torch.ones(1), group)
        if me in victims:
            die()
        while True:
            all_reduce(torch.ones(1), group)
    except RanksChanged:
        while group.size() > 4 - len(victims):
            group = regroup(group)
            try:
                all_reduce(torch.ones(1), group)
            except RanksChanged:
                continue
    model = ZeRO1(small(5)[0], group, adamw, units=[])
    try:
        step = copies.restore(Training(model, (), group), group)
    except LookupError as error:
        return str(error)
    return step, all(map(torch.equal, kept, model.module.parameters()))


def test_a_neighbour_gives_back_what_the_dead_one_held():
    run = launch(with_copies, 4, ({2},), elastic=True)
    assert [run.results[rank] for rank in (0, 1, 3)] == [(2, True)] * 3


def test_two_neighbours_are_one_too_many():
    run = launch(with_copies, 4, ({1, 2},), elastic=True)
    assert all("more were lost than have left a copy" in run.results[rank] for rank in (0, 3))


# -- kills at random moments ----------------------------------------------------------------------


def test_killed_at_random_moments_no_run_hangs_and_no_sample_counts_twice(request):
    from benchmarks import elastic

    for number in range(50 if request.config.getoption("long") else 4):
        told, problem = elastic.case(number, seed=25)
        assert problem is None, told


# -- shares and detectors -------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [(1.0, 1.0, 2.0), (3.0, 2.0, 2.5), (1.0, 9.0, 1.0)])
@pytest.mark.parametrize("batch_size", [0, 1, 5, 8])
def test_no_other_shares_are_done_sooner(batch_size, seconds):
    def end(taken):
        return max(count * each for count, each in zip(taken, seconds))

    taken = shares(batch_size, seconds)
    every = itertools.product(range(batch_size + 1), repeat=len(seconds))
    assert sum(taken) == batch_size
    assert end(taken) == min(end(each) for each in every if sum(each) == batch_size)


def test_rows_are_the_batch_cut_in_order():
    batch, taken = list(range(9)), [4, 0, 5]
    assert [row for rank in range(3) for row in batch[rows_of(rank, taken)]] == batch


@pytest.mark.parametrize("seconds", [[], [1.0, 0.0], [1.0, -1.0]])
def test_times_that_cannot_be_are_refused(seconds):
    with pytest.raises(ValueError, match="above 0"):
        shares(4, seconds)


def test_patience_is_wrong_as_often_as_allowed_and_no_shorter_one_is():
    generator = torch.Generator().manual_seed(0)
    silences = torch.rand(200, generator=generator).tolist()
    for allowed in (0.0, 0.005, 0.1, 0.5):
        timeout = patience(silences, allowed)
        assert judged(FixedTimeout(timeout), silences).false_alarms <= allowed * 200
        shorter = max((each for each in silences if each < timeout), default=0.0)
        assert judged(FixedTimeout(shorter), silences).false_alarms > allowed * 200
    with pytest.raises(ValueError, match="at least one"):
        patience([], 0.1)
    assert patience(range(100), 0.29) == 70  # 29 alarms in 100, though 0.29 * 100 is below 29


def test_phi_counts_the_digits_of_what_is_improbable():
    detector = PhiAccrual(3, first=1.0, least=1e-6)
    for silence in (0.9, 1.1) * 50:
        detector.heard(silence)
    tails = {1.0: 0.5, 1.1: 0.158655, 1.2: 0.022750, 1.3: 0.001350}  # of the normal distribution
    for silence, tail in tails.items():
        assert 10 ** -detector.phi(silence) == pytest.approx(tail, rel=1e-3)
    assert detector.phi(detector.timeout()) == pytest.approx(3)
    assert detector.phi(50.0) == pytest.approx(300)


def test_phi_follows_the_machine_and_a_fixed_timeout_does_not():
    silences = [0.01, 0.012] * 100 + [0.04, 0.044] * 100
    learns, fixed = judged(PhiAccrual(8, 0.01), silences), judged(FixedTimeout(0.02), silences)
    assert fixed.false_alarms == 200 and learns.false_alarms < 10


def test_a_piece_travels_as_it_is():
    def pass_round(group):
        from mini_dist.training.elastic.copies import pass_on

        rank, size = group.rank(), group.size()
        mine = [
            piece("a", torch.full((2, 3), float(rank), dtype=torch.float64)),
            piece("b", torch.tensor(rank + 5)),
            piece("c", torch.full((3,), rank, dtype=torch.bfloat16)),
        ]
        came: list[Piece] = pass_on(mine, (rank + 1) % size, (rank - 1) % size, group)
        return [(p.place == q.place, p.tensor.dtype, p.tensor.tolist()) for p, q in zip(came, mine)]

    for rank, came in enumerate(launch(pass_round, 3).results):
        before = (rank - 1) % 3
        assert came == [
            (True, torch.float64, [float(before)] * 6),
            (True, torch.int64, [before + 5]),
            (True, torch.bfloat16, [before] * 3),
        ]
