"""The clinic of lesson 21: what is wrong with a slow run, or a stopped one? Judged on records.

    visit("A")                        # the record of a patient: nine of them, each sick in its way
    check.diagnose_slow(fn)           # fn(record) -> (disease, rank), on runs that nobody has seen

The judge gives the function records of other runs than the patients': another rank is sick, the
run has three ranks, the disease is worse or milder, or nothing is wrong at all. (sick_runs.py has
the programs. If you read on, you read the answers.)
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from numbers import Integral

from ..profile.diagnose import diagnose_slow
from .clinic import Asked
from .engine import RIGHT, WRONG, Line, Measured, Verdict
from .sick_runs import DISEASES, Record, Sick, run, run_all

__all__ = ["DISEASES", "visit"]


def patients() -> dict[str, Sick]:
    return {
        "A": Sick("straggler", 2, much=1.5),
        "B": Sick("input stall"),
        "C": Sick("another batch size", 1, much=1.5),
        "D": Sick("host sync"),
        "E": Sick("memory leak", 0),
        "F": Sick("buckets too small"),
        "G": Sick("bad shard", 3),
        "H": Sick("unsynchronised seeds", 1),
        "I": Sick("save on one rank", 0),
        "healthy": Sick("healthy"),
    }


def unseen() -> list[Sick]:
    """Return the runs of the judge: each disease of one rank two or three times, on ranks by lot;
    diseases of all ranks; healthy runs. The size, 3 or 4, does not depend on the disease."""
    lots, few, more = random.Random(21), dict(size=3, steps=6), dict(size=4, steps=6)
    runs = [Sick("healthy", batch=12, **more)]
    for disease, strengths in STRENGTHS.items():
        for rank, much in zip(lots.sample(range(4), 3), strengths):
            runs.append(Sick(disease, rank, much=much, **(more if rank == 3 else few)))
    for disease in ("healthy", "input stall", "host sync", "memory leak", "buckets too small"):
        runs.append(Sick(disease, **lots.choice((few, more))))
    lots.shuffle(runs)
    return runs


def asked() -> dict[str, Sick]:
    """Return the runs that a verdict goes through, by the names that `visit` knows."""
    return {f"unseen {i}": sick for i, sick in enumerate(unseen(), 1)} | patients()


STRENGTHS = {  # of the diseases that a single rank can have
    "straggler": (1.4, 2.0, 3.0),
    "input stall": (2.0, 2.5, 3.0),
    "another batch size": (0.5, 2.0, 1.25),
    "memory leak": (1.0, 2.0, 3.0),
    "bad shard": (1.0, 2.0, 1.5),
    "unsynchronised seeds": (2.0, 2.0, 2.0),
    "save on one rank": (2.0, 2.0),  # (each costs a run that stops)
}


def visit(patient: str) -> Record:
    """Return the record of a patient, of a healthy run ("healthy"), or of an unseen one by its
    number ("unseen 3"). Raises KeyError for an unknown name."""
    if patient not in asked():
        known = f"{', '.join(patients())} and unseen 1 to {len(unseen())}"
        raise KeyError(f"no patient {patient!r}; there are {known}")
    run_all(patients().values())  # all at once: a learner who visits one visits others
    return copy.deepcopy(run(asked()[patient]))


# The hint for a wrong diagnosis, by the disease that the run really has.
AGAINST = {
    "input stall": "Where did the time go? Look at .went.seconds, all parts of it, on all ranks: "
    "what does a rank do before it waits for others?",
    "straggler": "Look whom the others wait for, .went.waited, and whether that rank had more to "
    "do than they, or longer for the same.",
    "another batch size": "Compare what ranks should have alike before you look at times: how many "
    "samples has each in a step?",
    "unsynchronised seeds": "Which samples did each rank have? No sample should be read by two.",
    "buckets too small": "Where did the time go? Nobody is late, and still it is sent and sent: "
    "count .messages(rank).",
    "host sync": "Where did the time go? Nobody waits for others, for data or for messages: the "
    "device has nothing to do. Who keeps it waiting?",
    "memory leak": "What is held after each step?",
    "bad shard": "Look at each rank's own losses, step by step.",
    "save on one rank": "It has stopped: .waiting. Who waits in another operation than the others?",
    "healthy": "Nothing is wrong with it. Which of its numbers did you take for a symptom? A "
    "healthy run sends a little, and looks at its loss now and then.",
}


class SlowClinic(Asked):
    """`check.diagnose_slow`: the records are made on ranks, the diagnoses here."""

    module = "slow_clinic"  # its `visit` shows a run

    def runs(self) -> dict[str, Sick]:
        return asked()

    def wrong_in(self, answer, sick: Sick) -> str:
        return mistake(sick, answer)

    def judge(self, fn: Callable) -> Verdict:
        if verdict := self.made_before(fn):
            return verdict
        lines, runs = [], self.runs()
        run_all(runs.values())
        for name in [*runs, *reversed(runs)]:  # twice, so that counting calls does not help
            sick, look = runs[name], f' ({self.module}.visit("{name}") shows it.)'
            record = copy.deepcopy(run(sick))
            where = f" With {name}, {sick.size} ranks.{look}"
            answer, verdict = self.ask(fn, record, lines=lines, where=where)
            if verdict:
                return verdict
            wrong = self.wrong_in(answer, sick)
            if not wrong and vars(record) != vars(run(sick)):
                wrong = "It is right, but the record is changed: others also want to read it."
            told = Line(f"{name}: {sick.size} ranks", str(answer), "what it has", not wrong)
            lines += [told] * (len(lines) < len(runs))
            if wrong:
                return Verdict(self.name, WRONG, lines, f"{name.capitalize()}: {wrong}{look}")
        return Verdict(self.name, RIGHT, lines)


def mistake(sick: Sick, answer) -> str:
    """Return what is wrong with an answer, without the right one; "" if nothing is."""
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        return f"return (disease, rank), not {answer!r}."
    disease, rank = answer
    if not isinstance(disease, str) or disease not in DISEASES:
        return f"the disease is one of {', '.join(map(repr, DISEASES))}, not {disease!r}."
    if rank is not None and (not isinstance(rank, Integral) or isinstance(rank, bool)):
        return f"the rank is a number, or None where no single one is at fault, not {rank!r}."
    if disease != sick.disease:
        return f"you say {disease}. {AGAINST[sick.disease]}"
    if rank != sick.rank:
        where = "on no single rank" if rank is None else f"on rank {rank}"
        return (
            f"{disease} it is, but not {where}. None says that all ranks are alike; a number says "
            "that the run would be healthy without this rank."
        )
    return ""


EXERCISES = [
    SlowClinic(
        "diagnose_slow",
        diagnose_slow,
        run,
        [],
        Measured,
        refuses={patients, unseen, mistake, run, run_all},
        makes=(Record, Sick),
        hints=[
            "From what is certain to what is a matter of degree: has it stopped? What should ranks "
            "have alike (how many samples, which, held bytes)? Whose loss jumps? Only then times.",
            "For times take shares of a step: record.went.seconds[rank][part] / "
            "record.went.step[rank]. Compare with slow_clinic.visit('healthy'), and put your limit "
            "between healthy and sick. A straggler is the one that does not wait.",
        ],
        skeleton="""\
def diagnose_slow(record):
    if record.waiting:
        return "save on one rank", ...       # whose operation is another than the others'?
    counts = [len(steps[0].samples) for steps in record.steps]
    ...                                      # another batch size, unsynchronised seeds
    losses = [max(step.loss for step in steps) for steps in record.steps]
    ...                                      # bad shard, memory leak
    went = record.went
    waiting = [parts["waiting"] / step for parts, step in zip(went.seconds, went.step)]
    ...                                      # input stall, straggler, buckets, host sync
    return "healthy", None""",
    )
]
