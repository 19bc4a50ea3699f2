"""Try every right answer again: a tour of further trials, all in one launch.

The first stop is a case that was right, made harder in several ways at once (ways.py). Then come
the other cases, each in a group of other ranks in another order and not contiguous; all cases with
other numbers, whose results must equal the library's; and the first case again. If a result
differs, single stops are made to find the reason.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import cloudpickle
import torch
import torch.distributed as dist

from mini_dist.collectives import all_reduce
from mini_dist.ranks.launch import RankError, RankTimeout, Run, launch
from mini_dist.ranks.older_torch import new_group
from mini_dist.ranks.rank import seed_everything

from . import ways
from .ways import Facts, Wrapped, groups_in, same, tensors_in

PART = (
    "Right as long as the group is the whole job. Here it was ranks 1 to {n} of {more}, which are "
    "0 to {last} in the group: send to ranks of the group that you were given, and ask it for "
    "group.rank() and group.size(), not torch.distributed."
)

LATE = (
    "Right when all ranks come together. Here the last one came later, and the messages of the "
    "first took their time: what is returned must not depend on who is first. Say from whom you "
    "receive, and wait for what you use."
)

ORDER = (
    "Right as long as ranks are numbered as in the job. Here ranks {members} of the job are 0, 1, "
    "... in the group: ask the group for group.rank(), and send to ranks of the group."
)

STATE = (
    "The first call is right, a second one is not (with another case, with another group, or the "
    "same again): something of the first is left over, such as hooks, a list that grows, a tensor "
    "that was changed, or the rank and size of the first group. A second call may also come before "
    "the backward of the first."
)

ALL_DIGITS = 1.0471975511965976  # pi / 3: numbers times this need all digits of their dtype


@dataclass
class Stop:
    """One more trial. members: the world's ranks in the order of the group. ways: how the function
    is called. factor: the numbers are multiplied by it, and the result is compared with the
    library's. wider: the same for float32 numbers in float64."""

    case: object
    members: list[int]
    ways: tuple[type[Wrapped], ...] = ()
    factor: float | None = None
    results: list | None = None
    wider: bool = False

    def visit(self, trial: Callable, fn: Callable, facts: Facts, group):
        if self.wider:
            return narrower_than_the_librarys(trial, fn, self.case, group, facts)
        if self.factor is not None:
            return unlike_the_librarys(trial, fn, self.case, group, facts, self.factor)
        for way in self.ways:
            fn = way(fn, facts)
        result = trial(fn, self.case, group)
        if isinstance(fn, ways.Left):
            result = cloudpickle.loads(cloudpickle.dumps(result))  # a copy: the tensors are freed
            return result, fn.left()
        return result

    def mistake(self, came: list, hint: str) -> str:
        """Return the hint if the result of some rank is not right; else ""."""
        of_members = [came[member] for member in self.members]
        if self.factor is not None or self.wider:
            return next(filter(None, of_members), "")
        left = []
        if ways.Left in self.ways:
            of_members, left = zip(*of_members)
        return next(filter(None, left), "") if same([*of_members], self.results) else hint


def unlike_the_librarys(trial: Callable, fn: Callable, case, group, facts: Facts, factor) -> str:
    """Return the hint if the tensors on this rank differ from the library's; else ""."""
    expected, found = (
        list(tensors_in(trial(ways.Scaled(each, facts, factor), case, group)))
        for each in (facts.solution, fn)
    )
    if not all(tensor.isfinite().all() for tensor in expected):
        return ""
    if len(found) == len(expected):  # a result of a wider dtype is right, too
        pairs = (
            (f.to(e.dtype) if f.is_floating_point() else f, e) for f, e in zip(found, expected)
        )
        if all(ways.near(f, e) for f, e in pairs):
            return ""
    numbers = "zeros" if factor == 0 else "numbers that need all digits of their dtype"
    return (
        f"Right with the numbers of {case}. With {numbers} it returns another result than the "
        "library's function: look for a division by zero, for what is taken as missing where it is "
        "zero, or for a dtype with fewer digits on the way."
    )


def narrower_than_the_librarys(trial: Callable, fn: Callable, case, group, facts: Facts) -> str:
    """Return the hint if what the library returns in float64 has fewer digits here; else ""."""
    try:
        expected = list(tensors_in(trial(ways.Wider(facts.solution, facts), case, group)))
    except (RuntimeError, TypeError, ValueError):  # this exercise has one dtype
        return ""
    try:
        found = list(tensors_in(trial(ways.Wider(fn, facts), case, group)))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ways.Complaint(f"{ways.Wider.HINT} Here it raises {error}") from error
    wide = [tensor.dtype is torch.float64 for tensor in expected]
    if len(found) != len(expected) or all(
        f.dtype is torch.float64 for f, is_wide in zip(found, wide) if is_wide
    ):
        return ""
    return ways.Wider.HINT


def on_tour(trial: Callable, fn: Callable, stops: list[Stop], facts: Facts, world) -> list:
    """Return this rank's result of each stop, None where it was not a member.

    A call on the whole job instead of the group waits for a rank that does not make it. The judge's
    own messages use a second group of the same ranks, because a receive from any source in the
    learner's group would take them.
    """
    groups, judges, came = {tuple(range(world.size())): world}, {}, []
    for key in dict.fromkeys(tuple(stop.members) for stop in stops):  # all ranks make every group
        groups[key] = groups.get(key) or new_group(key)
        judges[key] = new_group(key)
    for stop in stops:
        came.append(None)
        if world.rank() in stop.members:
            group = groups[tuple(stop.members)]
            as_many_groups(judges[tuple(stop.members)])
            seed_everything(group.rank())  # as `launch` does for the ranks of a world
            came[-1] = stop.visit(trial, fn, facts, group)
    return came


def as_many_groups(group) -> None:
    """Make all members know the same number of groups. Torch uses this number in the name of a
    group that only its own ranks make, as a Mesh does."""
    known = all_reduce(torch.tensor(len(group.recorder.groups)), group, op="max")
    while len(group.recorder.groups) < known:
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


# --- messages from any source -------------------------------------------------------------------

ANYONE = (
    "You receive from any source, and more than one rank sends to you: now and then another one's "
    "message is the first. Say from whom: recv(like, source, group)."
)


class Shuffled(Wrapped):
    """Each receive from any source takes the message of the next rank in `sources`."""

    def __init__(self, fn: Callable, facts: Facts, sources: dict[int, list[int]]):
        super().__init__(fn, facts)
        self.sources = sources

    def __call__(self, *args, **kwargs):
        groups = [g for g in groups_in(args, kwargs) if g.me in self.sources]
        for group in groups:
            group.recv_anysource = functools.partial(self.from_the_next, group)
        try:
            return self.fn(*args, **kwargs)
        finally:
            for group in groups:
                del group.recv_anysource

    def from_the_next(self, group, tensors, tag):
        left = self.sources[group.me]
        source = left.pop(next(i for i, rank in enumerate(left) if rank in group.ranks))
        return group.recv(tensors, group.ranks.index(source), tag)


def orders(run: Run) -> list[dict[int, list[int]]]:
    """Return two orders in which messages could have arrived, low ranks first and high ranks first:
    {receiver: senders} for each rank that received from any source while several ranks sent."""
    leaves, low, high = list(run.ledger.leaves()), {}, {}
    for rank in {comm.rank for comm in leaves if comm.op == "recv_anysource"}:
        sent = Counter(comm.rank for comm in leaves if comm.op == "send" and rank in comm.sent_to)
        for comm in leaves:
            if comm.op == "recv" and comm.rank == rank:
                sent.subtract(comm.received_from.keys())
        if len(+sent) > 1:  # the first message of every sender, then every second, ...
            messages = [(k, sender) for sender, count in sent.items() for k in range(count)]
            low[rank] = [sender for _, sender in sorted(messages)]
            high[rank] = [-sender for _, sender in sorted((k, -sender) for k, sender in messages)]
    return [low, high] if low else []


def depends_on_luck(trial: Callable, fn: Callable, case, run: Run, facts: Facts) -> bool:
    """Return whether the result changes if messages arrive in another order. (If the run does not
    end in that order, the order was impossible.)"""
    for sources in orders(run):
        try:
            args = (Shuffled(fn, facts, sources), case)
            results = once_started(trial, len(run.results), args).results
        except RankError:
            continue
        if not same(results, run.results):
            return True
    return False


# --- the whole tour -----------------------------------------------------------------------------


def mistake_in(trial: Callable, fn: Callable, passed: list[tuple], facts: Facts) -> str:
    """Return the hint of the first trial that a right answer does not pass; else "". passed: cases
    that were right, each with its run."""
    case, run = min(passed, key=lambda pair: rather(len(pair[1].results)))
    size, most = len(run.results), max(min(len(run.results), MOST) for _, run in passed)
    if depends_on_luck(trial, fn, case, run, facts):
        return ANYONE
    world = max(most, size + 1) if most > 1 else 1
    here = list(range(size)) if most == 1 else list(range(1, size + 1))
    hard = ways.Between, ways.Once, ways.Quiet, ways.Late, ways.Careful, ways.Strided
    others = []
    for other, its in passed:
        n = len(its.results)
        if other is not case and n <= MOST:  # without rank 0, as in the first stop, if it fits
            members = range(n) if n == world else range(1, n + 1)
            others.append(Stop(other, [*members][::-1], (ways.Strided,), results=its.results))
    stops = [Stop(case, here, hard, results=run.results), *others]
    if facts.scales and facts.gives_tensors:
        stops += [Stop(stop.case, stop.members, factor=ALL_DIGITS) for stop in stops]
        stops.append(Stop(case, here, factor=0))
        stops += [Stop(case, here, wider=True)] * (not facts.one_dtype)
    stops.append(Stop(case, here, (ways.Left,), results=run.results))

    def fails(hint: str, size: int, *stops: Stop) -> str:
        try:
            args = trial, fn, list(stops), facts
            came = once_started(on_tour, size, args, SECONDS + 2 * len(stops)).results
        except RankError as error:
            return told(error) or f"{hint}\n{error}"
        found = (stop.mistake([rank[i] for rank in came], hint) for i, stop in enumerate(stops))
        return next(filter(None, found), "")

    if not (found := fails(STATE, world, *stops)) or not found.startswith(STATE):
        return found
    once, ranks = ways.Once.concerns(facts), list(range(size))
    of_part = PART.format(n=size, more=size + 1, last=size - 1)
    late = Stop(case, ranks, (ways.Late,), results=run.results)
    if most > 1 and (hint := fails(of_part, size + 1, replace(late, members=here))):
        return fails(LATE, size, late) or hint
    once_only = ways.Once.HINT.format(names=" and ".join(once), name=once[0]) if once else ""
    for hint, way in ((once_only, ways.Once), (ways.Strided.HINT, ways.Strided)):
        if hint and (hint := fails(hint, size, replace(late, ways=(way,)))):
            return hint
    for other in others:
        if hint := fails(ORDER.format(members=other.members), world, replace(other, ways=())):
            return hint
        if hint := fails(ways.Strided.HINT, world, other):
            return hint
    return found


def rather(size: int) -> tuple[bool, int]:
    """Return a key that sorts 3 ranks first, then 4 and more, then 2: among 2 no peer is wrong."""
    return size < 3, abs(size - 3)


MOST = 5  # ranks of a case that is tried again
SECONDS = 10  # until a run that neither ends nor is a recognized deadlock is given up


def once_started(function: Callable, size: int, args: tuple, seconds: float = SECONDS) -> Run:
    """Launch, and launch again with six times the seconds if the machine may have been too slow: a
    module was still being loaded, or other programs keep the cores busy. If ranks that communicate
    have begun no operation for SECONDS, more time would not help. The inputs are on the host, and
    so are the ranks, whatever GPUs this machine has."""
    try:
        return launch(function, size, args, timeout=seconds, device="cpu", quiet=True)
    except RankError as error:
        loading = any(sign in str(error) for sign in ("No rank has started", "<frozen importlib"))
        slow = isinstance(error, RankTimeout) and error.idle < SECONDS and is_busy()
        if not loading and not slow:
            raise
    return launch(function, size, args, timeout=6 * seconds, device="cpu", quiet=True)


def is_busy() -> bool:
    """Return whether at least four threads per core were runnable in the last minute."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] >= 4 * (os.cpu_count() or 1)


def told(error: RankError) -> str:
    """Return the complaint of a rank if that is why the run failed; else ""."""
    complaints = [f.message for f in error.failures.values() if f.type == "Complaint"]
    return complaints[0] if complaints else ""
