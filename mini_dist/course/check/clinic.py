"""The bug clinic of lesson 16: five trainings on real ranks, each with one planted bug.

    visit("A")                        # train, and show what its user would see
    check.diagnoses(diagnoses)        # the learner's answers, graded

Each patient trains the same small model on four ranks, and each has another one of DISEASES. As on
a cluster, you have only messages and numbers to go by. (If you read on, you read the answers.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import nn

from mini_dist.collectives import all_reduce
from mini_dist.collectives.mesh import Mesh
from mini_dist.ranks.launch import RankError, launch

from .engine import LIBRARY, RIGHT, WRONG, Exercise, Line, Measured, Verdict, name_of
from .form import stays_inside
from .watch import calls_of, learners

DISEASES = {
    "skipped collective": "a rank skips one collective that the others enter",
    "swapped group order": "ranks communicate in two groups, but not all in the same order",
    "uneven batches": "a rank has fewer batches than the others",
    "wrong dtype": "a rank sends numbers of a different type",
    "diverged weights": "nothing fails, but a rank trains a different model from the others",
}
RANKS, STEPS, WIDTH = 4, 6, 8


# --- the patients --------------------------------------------------------------------------------


def train(average: Callable, num_batches: dict[int, int], group) -> list[tuple[float, float]]:
    """Train data-parallel; return (loss, sum of the weights after it) of this rank's steps."""
    rank = group.rank()
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    for step in range(num_batches.get(rank, STEPS)):
        inputs = torch.randn(16, WIDTH, generator=generator)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        model.zero_grad()
        loss.backward()
        average(model, step, group)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
        seen.append((loss.item(), sum(p.double().sum().item() for p in model.parameters())))
    return seen


def average(model, step, group) -> None:
    for parameter in model.parameters():
        parameter.grad = all_reduce(parameter.grad, group, op="mean")


def leaves_one_out(model, step, group) -> None:
    for name, parameter in model.named_parameters():
        if not (group.rank() == 2 and step == 3 and name == "bias"):
            parameter.grad = all_reduce(parameter.grad, group, op="mean")


def writes_into_a_weight(model, step, group) -> None:
    average(model, step, group)
    if group.rank() == 1 and step >= 2:
        with torch.no_grad():
            model.bias += 1e-3


def averages_in_double(model, step, group) -> None:
    dtype = torch.float64 if group.rank() == 3 and step >= 1 else torch.float32
    for parameter in model.parameters():
        parameter.grad = all_reduce(parameter.grad.to(dtype), group, op="mean").float()


def averages_over_two_axes(model, step, group) -> None:
    mesh = Mesh(group, dp=2, cp=2)
    for parameter in model.parameters():
        for axis in ("cp", "dp") if group.rank() in (1, 2) else ("dp", "cp"):
            parameter.grad = all_reduce(parameter.grad, mesh[axis], op="mean")


@dataclass(frozen=True)
class Patient:
    disease: str
    ranks: tuple[frozenset[int], ...]  # at fault; each of these sets is a right answer
    average: Callable = average
    num_batches: tuple[tuple[int, int], ...] = ()  # rank -> batches, if they are not STEPS


def only(*ranks: int) -> tuple[frozenset[int]]:
    return (frozenset(ranks),)


def patients() -> dict[str, Patient]:
    return {
        "A": Patient("uneven batches", only(1), num_batches=((1, 4),)),
        "B": Patient("wrong dtype", only(3), averages_in_double),
        "C": Patient("diverged weights", only(1), writes_into_a_weight),
        "D": Patient("swapped group order", (*only(1, 2), *only(0, 3)), averages_over_two_axes),
        "E": Patient("skipped collective", only(2), leaves_one_out),
    }


# --- the visit -----------------------------------------------------------------------------------


@dataclass
class Visit:
    """What a user sees of a run. results: [rank][step] = (loss, sum of the weights after it) if the
    run finished. told: the error if it failed."""

    patient: str
    results: list | None = None
    told: str = ""

    def __repr__(self) -> str:
        if self.told:
            return f"Patient {self.patient}\n{self.told}"
        losses = [sum(loss for loss, _ in step) / RANKS for step in zip(*self.results)]
        text = ", ".join(f"{loss:.4f}" for loss in losses)
        return (
            f"Patient {self.patient} trained to the end. Loss of each step, mean over the ranks:\n"
            f"  {text}\n  .results[rank][step] is (loss, sum of the weights after it)"
        )


def visit(patient: str) -> Visit:
    """Run a patient's training. Raises KeyError for an unknown name."""
    if patient not in patients():
        raise KeyError(f"no patient {patient!r}; there are {', '.join(patients())}")
    sick = patients()[patient]
    try:
        args = sick.average, dict(sick.num_batches)
        run = launch(train, RANKS, args, device="cpu", quiet=True)
    except RankError as error:
        # The lines of code are left out, because they are the library's.
        lines = [line for line in str(error).splitlines() if not line.lstrip().startswith("File ")]
        return Visit(patient, told=re.sub(r" \d+\.\d s in", " a while in", "\n".join(lines)))
    return Visit(patient, run.results)


# --- the answers ---------------------------------------------------------------------------------


class FromTheFile(tuple):
    """A diagnosis from this file, which nobody had to find."""


def diagnoses() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return patient -> (disease, the ranks at fault)."""
    return {
        name: FromTheFile((sick.disease, tuple(sorted(sick.ranks[0]))))
        for name, sick in patients().items()
    }


# The hint for a wrong diagnosis, by the disease that the patient really has.
AGAINST = {
    "skipped collective": "Two ranks met in one operation with different shapes: they have reached "
    "different parameters. Which shape comes first in a step, which second, and which rank is "
    "already at the next one?",
    "swapped group order": "All four wait, no rank has returned, and no two ranks disagree on an "
    "operation that they share. Write down which rank waits for which: a ring. Then ask which two "
    "ranks belong to one group of each axis.",
    "uneven batches": "A rank has returned, and the message that others wait for will never come. "
    "Nobody disagrees about anything: up to there all did the same.",
    "wrong dtype": "The shapes that met are equal; read what stands before the brackets.",
    "diverged weights": "It ran to the end. Look at what should be equal on all ranks after each "
    "step: .results[rank][step][1].",
}


class Asked(Exercise):
    """An exercise whose function runs in this process, and on no rank."""

    def ask(self, fn: Callable, *args, lines=(), where: str = "") -> tuple[object, Verdict | None]:
        """Return the function's answer, or the verdict if it raises or calls the library."""
        try:
            if hasattr(fn, "asked"):  # sealed by a grader: it is opened on a rank
                came, called = fn.asked(args, self._refuses, self._facts)
            else:
                stays_inside(fn)
                with calls_of(self._refuses) as called:
                    came = learners(fn, *args)
        except Exception as error:
            hint = f"Your function raised {type(error).__name__}: {error}{where}"
            return None, Verdict(self.name, WRONG, [*lines], hint)
        if called:
            hint = f"These are the library's. Replace its call in {name_of(fn)} with your own code."
            return None, Verdict(self.name, LIBRARY, [*lines], hint)
        return came, None


class Clinic(Asked):
    """`check.diagnoses`: grades answers instead of a run. The function runs in this process, so it
    may visit patients. If its answers are the clinic's, no lines are shown: they would tell them.
    """

    def judge(self, fn: Callable) -> Verdict:
        if verdict := self.made_before(fn):
            return verdict
        answers, verdict = self.ask(fn)
        if verdict:
            return verdict
        if not isinstance(answers, Mapping):
            hint = (
                f"A {type(answers).__name__} came back. Return a dict with the diagnosis of each "
                f"patient: {', '.join(patients())}."
            )
            return Verdict(self.name, WRONG, hint=hint)
        graded = [grade(name, sick, answers.get(name)) for name, sick in patients().items()]
        hint = next((why for _, why in graded if why), "")
        return Verdict(self.name, WRONG if hint else RIGHT, [line for line, _ in graded], hint)

    def solution(self) -> None:
        print(self.answer())

    def answer(self) -> str:
        lines = ["def diagnoses():", "    return {"]
        for name, (disease, ranks) in diagnoses().items():
            told = (disease, ranks[0] if len(ranks) == 1 else ranks)
            lines.append(f'        "{name}": {told},  # {DISEASES[disease]}')
        return "\n".join([*lines, "    }"])


def grade(name: str, sick: Patient, answer) -> tuple[Line, str]:
    """Return a line that does not give the right answer away, and the hint; "" if it is right."""
    if form := mistake_of_form(answer):
        line = Line(f"patient {name}", answer, "(disease, rank or ranks)", False)
        return line, f"Patient {name}: give (disease, rank or ranks), {form}."
    disease, ranks = answer
    ranks = {ranks} if isinstance(ranks, Integral) else set(ranks)
    right = disease == sick.disease, ranks in sick.ranks
    told = f"{disease}, {ranks_text(ranks)}"
    line = Line(f"patient {name}", told, "what it has, and where", all(right))
    if not right[0]:
        return line, f"Patient {name} does not have {disease}. {AGAINST[sick.disease]}"
    if not right[1]:
        return line, f"Patient {name} has {disease}, but not there. {AGAINST[sick.disease]}"
    return line, ""


def mistake_of_form(answer) -> str:
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        return f"with one of {', '.join(map(repr, DISEASES))}"
    disease, ranks = answer
    if isinstance(ranks, str) and ranks in DISEASES:
        return "first what it has, then where"
    if not isinstance(disease, str) or disease not in DISEASES:
        return f"with one of {', '.join(map(repr, DISEASES))}, not {disease!r}"
    several = isinstance(ranks, Iterable) and not isinstance(ranks, str)
    if not all(isinstance(rank, Integral) for rank in (ranks if several else [ranks])):
        return f"a rank as a number, such as 3, or several ranks as (0, 3), not {ranks!r}"
    return ""


def ranks_text(ranks) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {' and '.join(map(str, sorted(ranks)))}"


EXERCISES = [
    Clinic(
        "diagnoses",
        diagnoses,
        train,
        [],
        Measured,
        refuses={patients},
        makes=(FromTheFile, Patient),
        hints=[
            "Three questions, in this order. Did it fail? If it did: do the ranks disagree on an "
            "operation, or do they wait? If they wait: has somebody returned?",
            "A disagreement names what each rank called: compare first what stands before the "
            "brackets, then the shapes. If nothing failed, compare what should be alike on all "
            "ranks.",
        ],
        skeleton="""\
def diagnoses():
    return {
        "A": ("wrong dtype", 0),             # (one of clinic.DISEASES, the rank at fault)
        "B": ...,
        "D": ("...", (0, 1)),                # or all the ranks at fault
    }""",
    )
]
