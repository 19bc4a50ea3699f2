"""What the judge does in every exercise: find who did the work, and stress-test right answers."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mini_dist import RankTimeout, check, collectives
from mini_dist.collectives import (
    all_reduce,
    recv,
    ring_all_reduce,
    send,
    star_all_reduce,
    start,
    wait,
)
from mini_dist.collectives.messages import recv_any
from mini_dist.course.check import adversities
from mini_dist.course.check.engine import Exercise, Line, Measured, line, on_ranks
from mini_dist.course.check.watch import functions_of
from tests.course.exercises import solutions

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest


# --- an exercise as a teacher would write it ------------------------------------------------------


def total(x: Tensor, more: Iterable[Tensor], group) -> Tensor:
    """Return the sum over all ranks of x and of the tensors in `more`."""
    return all_reduce(sum(more, x), group, algorithm="ring")


@dataclass(frozen=True)
class Numbers:
    count: int

    def __str__(self) -> str:
        return f"{self.count} numbers"


def inputs(rank: int, case: Numbers):
    x = torch.arange(2 * case.count).double().view(case.count, 2) + rank
    return x, [2 * x, 3 * x]


def trial(fn, case: Numbers, group):
    return fn(*inputs(group.rank(), case), group)


class Total(Measured):
    def measure(self):
        self.expected = sum(6 * inputs(rank, self.case)[0] for rank in range(self.size))

    def lines(self) -> list[Line]:
        return [on_ranks("right sums on", (torch.equal(r, self.expected) for r in self.results))]

    def mistake(self) -> str:
        return "Wrong sums."


def exercise(**more) -> Exercise:
    cases = [(3, Numbers(7)), (1, Numbers(2))]
    return Exercise("total", total, trial, cases, Total, hints=["?"], skeleton="", **more)


def plain(x, more, group):
    return all_reduce(sum(list(more), x), group)


def test_a_right_answer_is_right_and_shows_the_lines_of_the_first_case():
    verdict = exercise().judge(plain)
    assert verdict.state == "right" and not verdict.hint
    assert [each.what for each in verdict.lines] == ["right sums on"]


def test_a_wrong_answer_is_told_which_cases_were_right():
    verdict = exercise().judge(lambda x, more, group: plain(x, more, group) * (group.size() > 1))
    assert verdict.hint == "Right with 3 ranks. With one rank, 2 numbers: Wrong sums."
    verdict = exercise().judge(lambda x, more, group: plain(x, more, group) + 1)
    assert verdict.hint == "Wrong sums."
    assert [each.ok for each in verdict.lines] == [False]


def test_what_raises_is_told_with_its_case():
    verdict = exercise().judge(lambda x, more, group: 1 / 0)
    assert verdict.state == "wrong" and not verdict.lines
    assert verdict.hint.startswith("With 3 ranks, 7 numbers: rank 0 of 3 raised ZeroDivisionError")


def test_a_wait_without_end_is_told_in_a_few_seconds():
    verdict = exercise().judge(lambda x, more, group: send(x, (group.rank() + 1) % 3, group))
    assert "everyone sends first and waits for a receiver" in verdict.hint


def sends_once_too_often(x, more, group):
    if group.rank() == group.size() - 1:
        send(x, 0, group)
    return x


def a_chain_the_wrong_way_round(x, more, group):
    if group.rank() < group.size() - 1:
        x = x + recv(x, group.rank() + 1, group)
    if group.rank() < group.size() - 1:
        send(x, group.rank() + 1, group)
    else:
        recv(x, 0, group)
    return x


@pytest.mark.parametrize(
    "fn, says",
    [
        (sends_once_too_often, "a message is sent that nobody receives: the others have returned"),
        (a_chain_the_wrong_way_round, "of messages, each send needs its receive"),
    ],
)
def test_the_advice_on_a_deadlock_is_about_what_waits(fn, says):
    assert says in exercise().judge(fn).hint


# --- adversities ----------------------------------------------------------------------------------


def of_the_world(x, more, group):
    return all_reduce(sum(list(more), x), dist.group.WORLD)


def needs_two_looks(x, more, group):
    first = sum(more)
    return all_reduce(x + (first if sum(1 for _ in more) else 0), group)


def minds_the_weather(x, more, group):
    waits = "send" in vars(group)  # true on the first rank, whose messages are slow
    return all_reduce(sum(list(more), x), group) + waits


def viewed(x, more, group):
    return all_reduce(sum(list(more), x.view(-1).view(x.shape)), group)


def adds_in_place(x, more, group):
    x += sum(list(more))
    return all_reduce(x, group)


SEEN = []


def remembers(x, more, group):
    SEEN.append(x)
    return all_reduce(sum(list(more), x), group) * len(SEEN)


KEPT = []


def leaves_a_message(x, more, group):
    result = all_reduce(sum(list(more), x), group)
    rank, size = group.rank(), group.size()
    if size > 1:
        kept = [group.send([x.contiguous()], (rank + 1) % size, 5)]
        group.recv([x.clone().contiguous()], (rank - 1) % size, 5).wait()
        threading.Event().wait(0.01)
        KEPT.append(kept)
    return result


SIZES = []


def minds_the_first_groups_size(x, more, group):
    SIZES.append(group.size())
    return plain(x, more, group) * (SIZES[0] == group.size())


GIVEN = []


def keeps_what_it_was_given(x, more, group):
    GIVEN[:] = [x]
    return plain(x, more, group)


def adds_in_bfloat16(x, more, group):
    return plain(x.bfloat16().double(), more, group)


def divides_by_the_norm(x, more, group):
    return plain(x, more, group) * (x.norm() / x.norm())


@pytest.mark.parametrize(
    "fn, says",
    [
        (minds_the_first_groups_size, "or the rank and size of the first group"),
        (keeps_what_it_was_given, "112 bytes of tensors of the call are still there"),
        (adds_in_bfloat16, "With numbers that need all digits of their dtype"),
        (divides_by_the_norm, "With zeros it returns another result"),
        (of_the_world, "Here it was ranks 1 to 3 of 4"),
        (minds_the_weather, "Right when all ranks come together"),
        (needs_two_looks, "Begin with more = list(more)"),
        (viewed, ".view does not"),
        (adds_in_place, "changes x: the caller still needs it"),
        (remembers, "something of the first is left over"),
        (leaves_a_message, "one send of it is still under way"),
    ],
)
def test_an_answer_that_is_right_in_fair_weather_only_is_refused(fn, says):
    verdict = exercise().judge(fn)
    assert verdict.state == "wrong" and says in verdict.hint, verdict


def test_an_answer_that_is_right_with_gradients_only_is_refused():
    def needs_gradients(fn, case, group):
        x, more = inputs(group.rank(), case)
        return fn(x.requires_grad_(), more, group).detach()

    def minds_gradients(x, more, group):
        return plain(x.detach(), more, group) * x.requires_grad

    of = Exercise("total", total, needs_gradients, [(3, Numbers(7))], Total, hints=[], skeleton="")
    verdict = of.judge(minds_gradients)
    assert verdict.state == "wrong" and "Under torch.no_grad()" in verdict.hint
    assert of.judge(lambda x, more, group: plain(x.detach(), more, group)).state == "right"


def test_what_the_exercise_is_there_to_change_may_be_changed():
    assert exercise(changes=("x",), again=False).judge(adds_in_place).state == "right"


# --- messages from any source ---------------------------------------------------------------------


def gather(x: Tensor, group) -> list[Tensor]:
    """Return every rank's x, in rank order, on rank 0."""
    if group.rank() > 0:
        send(x, 0, group)
        return []
    return [x, *(recv(x, source, group) for source in range(1, group.size()))]


def takes_them_as_they_come(x, group):
    """Each rank starts to send after the rank before it, so messages usually come in rank order."""
    rank = group.rank()
    if rank == 0:
        return [x, *(recv_any(x, group)[0] for _ in range(1, group.size()))]
    if rank > 1:
        recv(x, rank - 1, group)
    sending = start(group, sends=[(x, 0)])
    if rank + 1 < group.size():
        send(x, rank + 1, group)
    wait(sending)
    return []


def takes_them_one_by_one(x, group):
    """Only rank order is possible: each rank sends after the rank before it has sent."""
    rank, size = group.rank(), group.size()
    if rank == 0:
        send(x, 1, group)  # so that no rank sends the next call's message yet
        return [x, *(recv_any(x, group)[0] for _ in range(1, size))]
    recv(x, rank - 1, group)
    send(x, 0, group)
    if rank + 1 < size:
        send(x, rank + 1, group)
    return []


def asks_from_whom(x, group):
    """Sort by source; no rank sends for the next call before all messages of this call arrived."""
    others = range(1, group.size())
    if group.rank() > 0:
        send(x, 0, group)
        recv(x, 0, group)
        return []
    came = dict([(0, x), *(recv_any(x, group)[::-1] for _ in others)])
    for rank in others:
        send(x, rank, group)
    return [came[rank] for rank in range(group.size())]


class Gathered(Measured):
    def lines(self) -> list[Line]:
        numbers = [0.0, 1.0, 2.0, 3.0][: self.size]
        return [line("on rank 0", [x.item() for x in self.results[0]], numbers)]

    def mistake(self) -> str:
        return "Another order."


@pytest.mark.parametrize(
    "fn, state",
    [
        (takes_them_as_they_come, "wrong"),
        (takes_them_one_by_one, "right"),
        (asks_from_whom, "right"),
    ],
)
def test_whose_message_is_first_may_make_no_difference(fn, state):
    def trial(fn, case, group):
        return fn(torch.tensor(float(group.rank())), group)

    cases = [(4, "a number"), (3, "a number")]
    gathers = Exercise("gather", gather, trial, cases, Gathered, hints=["?"], skeleton="")
    verdict = gathers.judge(fn)
    assert verdict.state == state, verdict


# --- who did the work -----------------------------------------------------------------------------


def by_another_name(x, group):
    return getattr(collectives, "_".join(["ring", "all", "reduce"]))(x, group)


def in_a_thread(x, group):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(ring_all_reduce, x, group).result()


def in_its_own_thread(x, group):
    found = []
    thread = threading.Thread(target=lambda: found.append(ring_all_reduce(x, group)))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(
    "fn",
    [ring_all_reduce, by_another_name, in_a_thread, in_its_own_thread, partial(ring_all_reduce)],
)
def test_the_library_s_own_function_is_seen_by_whatever_name(fn):
    verdict = ring().judge(fn)
    assert verdict.state == "still the library's", verdict


def ring() -> Exercise:
    """Return an exercise whose solution is a collective, which has decorators."""
    return Exercise(
        "ring_all_reduce", ring_all_reduce, lambda fn, case, group: fn(inputs(0, case)[0], group),
        [(3, Numbers(7))], Nothing, hints=["?"], skeleton="",
    )  # fmt: skip


class Nothing(Measured):
    def lines(self):
        return []


def test_what_the_task_refuses_is_named_and_what_an_allowed_function_calls_is_not():
    assert inspect.unwrap(star_all_reduce) in functions_of(collectives)
    judge = exercise(refuses=[star_all_reduce, ring_all_reduce]).judge
    assert judge(plain).state == "right"  # all_reduce, which is allowed, calls one of them.
    verdict = judge(lambda x, more, group: star_all_reduce(sum(list(more), x), group))
    assert verdict.state == "wrong"
    assert verdict.hint.startswith("The work is done by the library's star_all_reduce")


def test_every_exercise_accepts_its_printed_solution_under_a_name_of_the_learner_s():
    def mine(*args, **kwargs):
        return solutions.sharded_step(*args, **kwargs)

    assert check.sharded_step.judge(mine).state == "right"


LOADING = 'rank 0 is running\n      File "<frozen importlib._bootstrap>", line 241'


@pytest.mark.parametrize(
    "said, load, idle, again",
    [
        (LOADING, 0, 99, True),
        ("No rank has started", 0, 99, True),
        ("rank 0 is running", 0, 0, False),
        ("rank 0 is running", 1000, 0, True),
        ("rank 0 is running", 1000, 11, False),
    ],
)
def test_a_busy_machine_is_no_mistake(monkeypatch, said, load, idle, again):
    """A run that timed out while ranks loaded modules or the CPU was busy gets one longer retry.

    A run that hangs gets no retry, nor does a run in which no rank began an operation for long."""
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0, 0))
    given = []

    def busy(function, size, args, timeout, device, quiet):
        given.append(timeout)
        if len(given) == 1:
            error = RankTimeout(f"not done after {timeout} s\n{said}")
            error.idle = idle
            raise error
        return "done"

    monkeypatch.setattr(adversities, "launch", busy)
    if again:
        assert adversities.once_started(print, 2, ()) == "done"
        assert given[1] > given[0]
    else:
        with pytest.raises(RankTimeout):
            adversities.once_started(print, 2, ())
