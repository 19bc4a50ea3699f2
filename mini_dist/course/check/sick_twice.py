"""An exercise of lesson 29: name what is wrong with a run that has up to two faults.

The judge gives the function the records of runs that nobody has seen: each pair of a fault that
costs time and a fault that does not, on different ranks, faults that are alone, and healthy runs.
(If you read on, you read how they are made.)
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from functools import cache
from numbers import Integral

from ..profile.diagnose import diagnose_slow
from . import answers
from .engine import Measured
from .sick_runs import DISEASES, Record, Sick, run, run_all
from .slow_clinic import AGAINST, SlowClinic

COST_TIME = {  # name -> its strength, and whether one rank or all ranks have it
    "straggler": (2.0, "one"),
    "input stall": (2.5, "one"),
    "another batch size": (1.5, "one"),
    "buckets too small": (2.0, "all"),
    "host sync": (2.0, "all"),
}
COST_NONE = {
    "memory leak": (1.5, "one"),
    "bad shard": (1.5, "one"),
    "unsynchronised seeds": (2.0, "one"),
}


def pairs(seed: int, size: int = 4) -> list[Sick]:
    """Return each fault that costs time with each that does not, on two ranks by lot."""
    lots, found = random.Random(seed), []
    for one, (much, where) in COST_TIME.items():
        for other, (strength, _) in COST_NONE.items():
            first, second = lots.sample(range(size), 2)
            also = Sick(other, second, much=strength)
            rank = None if where == "all" else first
            found.append(Sick(one, rank, size, much, also=also))
    return found


def of_learners() -> list[Sick]:
    """Return the runs from which a learner's name draws one."""
    return [sick for seed in range(4) for sick in pairs(seed)]


@cache
def unseen() -> dict[str, Sick]:
    """Return what the judge asks about, by the names that its verdict uses."""
    few, more = dict(size=3), dict(size=4)
    runs = pairs(29, size=3)[::2] + pairs(30)[1::2]
    runs += [Sick("healthy", **few), Sick("healthy", batch=12, **more)]
    runs += [Sick("memory leak", **few), Sick("input stall", **few), Sick("host sync", **few)]
    runs += [Sick("another batch size", 1, much=0.5, **more), Sick("straggler", 2, much=1.5, **few)]
    runs += [Sick("unsynchronised seeds", 3, **more), Sick("bad shard", 0, **more)]
    random.Random(29).shuffle(runs)
    return {f"run {number}": sick for number, sick in enumerate(runs, 1)}


def visit(name: str) -> Record:
    """Return the record of one of the judge's runs, such as "run 3". Raises KeyError for an
    unknown name."""
    if name not in unseen():
        raise KeyError(f"no run {name!r}; there are run 1 to run {len(unseen())}")
    return copy.deepcopy(run(unseen()[name]))


def faults(sick: Sick) -> set[tuple[str, int | None]]:
    both = [sick, sick.also] if sick.also else [sick]
    return {(each.disease, each.rank) for each in both if each.disease != "healthy"}


def mistake(sick: Sick, answer) -> str:
    """Return what is wrong with an answer, without the right one; "" if nothing is."""
    if form := mistake_of_form(answer):
        return form
    found, there = {tuple(each) for each in answer}, faults(sick)
    if found == there:
        return ""
    names, real = {disease for disease, _ in found}, {disease for disease, _ in there}
    if missing := sorted(real - names):
        return f"a fault is missing. {AGAINST[missing[0]]}"
    if extra := sorted(names - real):
        if extra[0] == "straggler" and real & {"another batch size", "input stall"}:
            return (
                "straggler is one fault too many. The others wait for that rank, and another fault "
                "explains it: name a straggler only if the rank takes longer for the same work."
            )
        return f"{extra[0]} is one fault too many: which of its numbers did you take for a symptom?"
    wrong = min(disease for disease, _ in found ^ there)
    return (
        f"{wrong} it is, but not there. None says that all ranks are alike; a number says that the "
        "run would be healthy without this rank."
    )


def mistake_of_form(answer) -> str:
    several = isinstance(answer, Iterable) and not isinstance(answer, (str, dict))
    for each in answer if several else [answer]:
        two = isinstance(each, (tuple, list)) and len(each) == 2 and isinstance(each[0], str)
        if not several or not two:
            return (
                f"return a list of pairs (disease, rank), empty for a healthy run, not {answer!r}."
            )
        disease, rank = each
        if disease == "healthy":
            return "healthy is no fault: return an empty list for a healthy run."
        if disease not in DISEASES:
            return f"a disease is one of {', '.join(map(repr, DISEASES))}, not {disease!r}."
        if rank is not None and (not isinstance(rank, Integral) or isinstance(rank, bool)):
            return f"a rank is a number, or None if no single rank is at fault, not {rank!r}."
    return ""


class TwoFaults(SlowClinic):
    """`check.two_faults`: as `check.diagnose_slow`, but a run may have two faults."""

    module = "sick_twice"

    def runs(self) -> dict[str, Sick]:
        return unseen()

    def wrong_in(self, answer, sick: Sick) -> str:
        return mistake(sick, answer)


EXERCISES = [
    TwoFaults(
        "two_faults",
        answers.two_faults,
        run,
        [],
        Measured,
        refuses={diagnose_slow, pairs, of_learners, unseen, faults, mistake, run, run_all},
        makes=(Record, Sick),
        hints=[
            "Start from your diagnose_slow of lesson 21, and collect instead of returning. What "
            "ranks should have alike comes first: samples, losses, held bytes. Each of these "
            "questions is independent of the others.",
            "Among the faults that cost time at most one is there, so ask in an order: another "
            "number of samples explains a wait, and so does a stall of the input. Only a wait that "
            "nothing explains is a straggler.",
        ],
        skeleton="""\
def two_faults(record):
    found = []
    read = [{sample for step in steps for sample in step.samples} for steps in record.steps]
    ...                                      # unsynchronised seeds, bad shard, memory leak
    went = record.went                       # then one of: another batch size, input stall,
    ...                                      # straggler, buckets too small, host sync
    return found""",
    )
]
