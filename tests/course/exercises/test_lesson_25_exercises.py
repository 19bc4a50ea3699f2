"""Lesson 25: timeouts that alarm too often, shares that make ranks wait, groups with dead ranks."""

import bisect
import heapq
import math
import sys

import cloudpickle
import pytest
import torch

from mini_dist import check
from mini_dist.collectives import all_gather, all_reduce, broadcast
from mini_dist.collectives.messages import Members, recv, send
from tests.course.exercises import solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

wrong_timeout, wrong_shares, wrong_group = Wrong(), Wrong(), Wrong()
right_timeout, right_shares, right_group = Right("patience"), Right("shares"), Right("rebuild")

# -- a timeout that is rarely wrong ---------------------------------------------------------------


@wrong_timeout("longer than necessary")
def the_longest(silences, allowed):
    return max(silences)


@wrong_timeout("longer than necessary")
def no_alarm_where_one_is_allowed(silences, allowed):
    return sorted(silences)[-1 - max(0, math.floor(allowed * len(silences)) - 1)]


@wrong_timeout("false alarms, and a share")
def one_alarm_too_many(silences, allowed):
    return sorted(silences)[max(0, len(silences) - 2 - math.floor(allowed * len(silences)))]


@wrong_timeout("false alarms, and a share")
def rounds_the_share_up(silences, allowed):
    return sorted(silences)[len(silences) - 1 - math.ceil(allowed * len(silences))]


@wrong_timeout("longer than necessary")
def as_long_is_an_alarm(silences, allowed):
    most = allowed * len(silences)
    for timeout in sorted(silences):
        if sum(each >= timeout for each in silences) <= most:
            return timeout
    return max(silences)


@wrong_timeout("longer than necessary")
def the_mean(silences, allowed):
    return sum(silences) / len(silences)


@wrong_timeout("longer than necessary")
def forgets_to_sort(silences, allowed):
    return silences[len(silences) - 1 - math.floor(allowed * len(silences))]


@wrong_timeout("a number of seconds")
def returns_alarms(silences, allowed):
    return [each for each in silences if each > 1]


@wrong_timeout("longer than necessary")
def between_two(silences, allowed):
    ordered = sorted(silences)
    at = len(ordered) - 1 - math.floor(allowed * len(ordered))
    return ordered[at] + 0.001


@right_timeout
def by_index(silences, allowed):
    return sorted(silences, reverse=True)[int(allowed * len(silences))]


@right_timeout
def drops_the_longest(silences, allowed):
    left = sorted(silences)
    for _ in range(math.floor(allowed * len(silences))):
        left.pop()
    return left[-1]


@right_timeout
def by_a_heap(silences, allowed):
    return heapq.nlargest(math.floor(allowed * len(silences)) + 1, silences)[-1]


@right_timeout
def by_bisection(silences, allowed):
    ordered = sorted(silences)
    fits = [
        t
        for t in ordered
        if len(ordered) - bisect.bisect_right(ordered, t) <= allowed * len(ordered)
    ]
    return fits[0]


@right_timeout
def by_torch(silences, allowed):
    ordered = torch.tensor(silences, dtype=torch.float64).sort(descending=True).values
    return ordered[int(allowed * len(silences))].item()


# -- new shares -----------------------------------------------------------------------------------


@wrong_shares("Equal shares")
def equal(batch_size, seconds):
    n = len(seconds)
    return [batch_size // n + (rank < batch_size % n) for rank in range(n)]


@wrong_shares("The slowest device has more samples")
def in_proportion_to_time(batch_size, seconds):
    shares = [int(batch_size * each / sum(seconds)) for each in seconds]
    shares[seconds.index(max(seconds))] += batch_size - sum(shares)
    return shares


@wrong_shares("rarely add up")
def rounds_each(batch_size, seconds):
    speeds = [1 / each for each in seconds]
    return [round(batch_size * speed / sum(speeds)) for speed in speeds]


@wrong_shares("rarely add up")
def forgets_the_rest(batch_size, seconds):
    speeds = [1 / each for each in seconds]
    return [int(batch_size * speed / sum(speeds)) for speed in speeds]


@wrong_shares("s is possible")
def in_proportion_the_largest_remainders_up(batch_size, seconds):
    wanted = [batch_size / each / sum(1 / other for other in seconds) for each in seconds]
    shares = [int(each + 1e-9) for each in wanted]
    for rank in sorted(range(len(seconds)), key=lambda d: shares[d] - wanted[d]):
        shares[rank] += sum(shares) < batch_size
    return shares


@wrong_shares("s is possible")
def the_rest_to_the_first(batch_size, seconds):
    shares = forgets_the_rest(batch_size, seconds)
    shares[0] += batch_size - sum(shares)
    return shares


@wrong_shares("s is possible")
def looks_at_who_is_free_now(batch_size, seconds):
    taken = [0] * len(seconds)
    for _ in range(batch_size):
        taken[min(range(len(seconds)), key=lambda d: taken[d] * seconds[d])] += 1
    return taken


@wrong_shares("whole numbers")
def fractions(batch_size, seconds):
    speeds = [1 / each for each in seconds]
    return [batch_size * speed / sum(speeds) for speed in speeds]


@right_shares
def deals_by_min(batch_size, seconds):
    taken = [0] * len(seconds)
    for _ in range(batch_size):
        taken[min(range(len(seconds)), key=lambda d: (taken[d] + 1) * seconds[d])] += 1
    return taken


@right_shares
def ties_to_the_last(batch_size, seconds):
    taken = torch.zeros(len(seconds), dtype=torch.long)
    for _ in range(batch_size):
        done = [(int(k) + 1) * each for k, each in zip(taken, seconds)]
        taken[max(d for d, end in enumerate(done) if end == min(done))] += 1
    return taken


@right_shares
def the_floor_first_and_then_the_rest(batch_size, seconds):
    taken = forgets_the_rest(batch_size, seconds)
    while sum(taken) < batch_size:
        taken[min(range(len(seconds)), key=lambda d: (taken[d] + 1) * seconds[d])] += 1
    return taken


@right_shares
def all_ends_sorted(batch_size, seconds):
    ends = sorted((k * s, d) for d, s in enumerate(seconds) for k in range(1, batch_size + 1))
    chosen = [device for _, device in ends[:batch_size]]
    return tuple(chosen.count(device) for device in range(len(seconds)))


@right_shares
def takes_away_from_too_many(batch_size, seconds):
    taken = [batch_size] * len(seconds)
    while sum(taken) > batch_size:
        taken[max(range(len(seconds)), key=lambda d: taken[d] * seconds[d])] -= 1
    return taken


# -- the group without the dead -------------------------------------------------------------------


def living(dead, group):
    return Members(group, [rank for rank in range(group.size()) if rank not in dead])


@wrong_group("everyone waits")
def asks_the_dead(state, step, dead, group):
    steps = all_gather(torch.tensor([step]), group)
    there = living(dead, group)
    return there, broadcast(state, int(steps.argmax()), there), int(steps.max())


@wrong_group("to the last bit")
def takes_the_first(state, step, dead, group):
    there = living(dead, group)
    steps = all_gather(torch.tensor([step]), there)
    return there, broadcast(state, 0, there), int(steps.max())


@wrong_group("to the last bit")
def takes_the_mean(state, step, dead, group):
    there = living(dead, group)
    steps = all_gather(torch.tensor([step]), there)
    return there, all_reduce(state, there, op="mean"), int(steps.max())


@wrong_group("all go on there. A rank that did this step")
def goes_back_to_the_fewest(state, step, dead, group):
    there = living(dead, group)
    steps = all_gather(torch.tensor([step]), there)
    return there, broadcast(state, int(steps.argmin()), there), int(steps.min())


@wrong_group("The most steps that anyone has done are")
def keeps_its_own_step(state, step, dead, group):
    there = living(dead, group)
    steps = all_gather(torch.tensor([step]), there)
    return there, broadcast(state, int(steps.argmax()), there), step


@wrong_group("in their order")
def turns_the_order_round(state, step, dead, group):
    alive = [rank for rank in range(group.size()) if rank not in dead]
    there = Members(group, alive[::-1])
    steps = all_gather(torch.tensor([step]), there)
    return there, broadcast(state, int(steps.argmax()), there), int(steps.max())


@wrong_group("bytes of state were sent")
def gathers_all_states(state, step, dead, group):
    there = living(dead, group)
    steps = all_gather(torch.tensor([step]), there)
    states = all_gather(state[None], there)
    return there, states[int(steps.argmax())].clone(), int(steps.max())


@right_group
def with_the_step_in_front_of_the_state(state, step, dead, group):
    there = living(dead, group)
    steps = all_gather(torch.tensor([step]), there)
    root = int(steps.argmax())
    packed = broadcast(torch.cat([torch.tensor([step], dtype=state.dtype), state]), root, there)
    return there, packed[1:], int(steps[root])  # In float32, 2**24 + 1 would be 2**24.


@right_group
def by_the_largest_step(state, step, dead, group):
    there = living(dead, group)
    most = int(all_reduce(torch.tensor(step), there, op="max"))
    mine = there.rank() if step == most else there.size()
    root = int(all_reduce(torch.tensor(mine), there, op="min"))
    return there, broadcast(state, root, there), most


@right_group
def the_last_of_those(state, step, dead, group):
    there = living(dead, group)
    steps = all_gather(torch.tensor([step]), there).tolist()
    root = max(rank for rank, each in enumerate(steps) if each == max(steps))
    return there, broadcast(state, root, there), torch.tensor(max(steps))


@right_group
def over_the_first_of_the_living(state, step, dead, group):
    there = living(dead, group)
    rank, size = there.rank(), there.size()
    if rank > 0:
        send(torch.tensor([step]), 0, there)
        root, most = recv(torch.empty(2, dtype=torch.long), 0, there).tolist()
    else:
        steps = [step] + [int(recv(torch.tensor([0]), r, there)) for r in range(1, size)]
        root, most = steps.index(max(steps)), max(steps)
        for other in range(1, size):
            send(torch.tensor([root, most]), other, there)
    return there, broadcast(state, root, there), most


@right_group
def only_to_those_who_are_behind(state, step, dead, group):
    there = living(dead, group)
    steps = all_gather(torch.tensor([step]), there).tolist()
    most, root = max(steps), steps.index(max(steps))
    behind = [rank for rank, each in enumerate(steps) if each < most]
    if there.rank() == root:
        for rank in behind:
            send(state, rank, there)
    elif there.rank() in behind:
        state = recv(state, root, there)
    return there, state.clone(), most


KEPT = [
    (name, fn, says)
    for name, wrong in (
        ("patience", wrong_timeout),
        ("shares", wrong_shares),
        ("rebuild", wrong_group),
    )
    for fn, says in wrong.answers
]


@pytest.mark.parametrize("name, fn, says", KEPT, ids=[fn.__name__ for _, fn, _ in KEPT])
def test_a_wrong_answer_is_refused_with_the_hint_that_helps(name, fn, says):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint, verdict


right_timeout(solutions.patience)
right_shares(solutions.shares)
right_group(solutions.rebuild)
UNLIKE = [(r.name, fn) for r in (right_timeout, right_shares, right_group) for fn in r.answers]


@pytest.mark.parametrize("name, fn", UNLIKE, ids=[f"{n}-{fn.__name__}" for n, fn in UNLIKE])
def test_a_right_answer_is_right_however_it_is_written(name, fn):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "right", verdict
