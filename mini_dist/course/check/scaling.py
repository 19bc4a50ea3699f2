"""Exercise of lesson 06: unscale before clipping, skip on all ranks, lower and raise the scale.

One good step does not show enough, so several steps are made, and in some of them one rank
overflows. On every rank the judge checks which steps were taken, and the scale after each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mini_dist.strategies import train
from mini_dist.strategies.precision import LossScaler, scaled_step

from .engine import NO_BARRIER, Exercise, Line, Measured, line, on_ranks
from .measures import mistake_of_dtype

SHAPES = [(3, 4), (5,), (2, 2, 2), ()]
FLAG = 8  # bytes of a number, for an answer that asks once more whether a rank has overflowed
INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True)
class Steps:
    """overflows: (step, rank, value that is among the rank's gradients in this step)."""

    overflows: tuple[tuple[int, int, float], ...] = ((1, 1, INF), (2, 0, NAN), (7, 1, -INF))
    interval: int = 2  # good steps until the scale grows
    max_norm: float = 2.0
    count: int = 9
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        odd = f", {self.dtype}" * (self.dtype != torch.float32)
        return f"{self.count} steps, a growth_interval of {self.interval}{odd}"

    def scaler(self) -> LossScaler:
        return LossScaler(scale=2.0**10, growth_interval=self.interval, factor=2.0**self.interval)

    def parameters(self) -> list[Tensor]:
        made = [torch.full(shape, 0.5, dtype=self.dtype) for shape in SHAPES]
        return [each.requires_grad_() for each in made]

    def gradients(self, step: int, rank: int) -> list[Tensor]:
        """Return this rank's gradients, not scaled. They have to be clipped in every third step; in
        step 6 they are huge, but finite."""
        dice = torch.Generator().manual_seed(100 * step + rank)
        size = (3.0, 0.1, 1e-4)[step % 3] * (step != 4)  # zeros in step 4
        size *= 1e6 if step == 6 else 1
        made = [size * torch.randn(shape, generator=dice).to(self.dtype) for shape in SHAPES]
        for at, who, value in self.overflows:
            if (at, who) == (step, rank):
                for part in {at % 3, 1}:  # of one parameter or of two
                    made[part].view(-1)[-1] = value
        return made


class Watched(torch.optim.SGD):
    """SGD that counts its steps. With momentum, even a step with zeros moves the parameters."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.made = 0

    def step(self, closure=None):
        self.made += 1
        return super().step(closure)


@dataclass(eq=False)
class After:
    """What a step has left on a rank."""

    made: int  # steps of the optimizer
    scale: float
    good_steps: int
    parameters: list[Tensor]


def trial(fn, case: Steps, group) -> list[After]:
    parameters, scaler, seen = case.parameters(), case.scaler(), []
    optimizer = Watched(parameters)
    for step in range(case.count):
        made = optimizer.made
        for parameter, gradient in zip(parameters, case.gradients(step, group.rank())):
            parameter.grad = gradient * scaler.scale
        fn(parameters, optimizer, scaler, case.max_norm, group)
        now = [parameter.detach().clone() for parameter in parameters]
        seen.append(After(optimizer.made - made, scaler.scale, scaler.good_steps, now))
    return seen


def expected(case: Steps, size: int, rank: int, mistake: str = "") -> list[After]:
    """Return what each step leaves, or would leave with one of the usual mistakes."""
    parameters, scaler, seen = case.parameters(), case.scaler(), []
    optimizer = Watched(parameters)
    for step in range(case.count):
        everyones = [torch.cat([g.flatten() for g in case.gradients(step, r)]) for r in range(size)]
        if mistake == "each clips its own":
            everyones = [clipped(gradient, case.max_norm) for gradient in everyones]
        mean = torch.stack(everyones).sum(0) / (1 if mistake == "sums" else size)
        good = bool(mean.isfinite().all())
        if mistake == "its own only":
            mean = everyones[rank]
        if mistake in ("not unscaled", "clipped before"):
            mean = mean * scaler.scale
        if mistake == "always":
            mean = mean * case.max_norm / mean.norm()
        elif mistake not in ("not clipped", "each clips its own"):
            mean = clipped(mean, case.max_norm)
        if mistake == "clipped before":
            mean = mean / scaler.scale
        if good:
            for parameter, part in zip(parameters, mean.split([p.numel() for p in parameters])):
                parameter.grad = part.view_as(parameter)
            optimizer.step()
        scaler.adjust(not good)
        now = [parameter.detach().clone() for parameter in parameters]
        seen.append(After(int(good), scaler.scale, scaler.good_steps, now))
    return seen


def clipped(gradient: Tensor, max_norm: float) -> Tensor:
    return gradient * (max_norm / gradient.norm()).clamp(max=1)


VALUES = {
    "sums": "These are steps with sums of the ranks' gradients: all_reduce(..., op='mean').",
    "its own only": "Each rank steps with its own gradient, and the ranks drift apart: average "
    "them first.",
    "not unscaled": "The gradients still belong to the scaled loss: divide by scaler.scale.",
    "clipped before": "Clipped before they were unscaled, the gradients are cut to "
    "max_norm / scaler.scale: almost nothing. First divide by scaler.scale, then take the norm.",
    "not clipped": "Nothing is clipped: if the norm of all gradients together is above "
    "max_norm, they are multiplied by max_norm / norm.",
    "always": "Small gradients became larger: the factor max_norm / norm is 1 at most.",
    "each clips its own": "Each rank clips its own gradient, so the mean is not the clipped "
    "mean: first average, then clip by the norm of the mean.",
}


def near(found: After, expected: After) -> bool:
    return all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-6)
        for a, b in zip(found.parameters, expected.parameters)
    )


class Scaling(Measured):
    def measure(self):
        case = self.case
        self.right = expected(case, self.size, 0)
        numbers = sum(torch.Size(shape).numel() for shape in SHAPES)
        step = 2 * (self.size - 1) * numbers * case.dtype.itemsize
        self.wanted = step * case.count
        self.least = step * sum(after.made for after in self.right)  # if skipped steps send nothing
        self.room = 2 * (self.size - 1) * FLAG * case.count

    def steps(self, of: list[After]) -> str:
        return " ".join("step" if after.made == 1 else "-" for after in of)

    def lines(self) -> list[Line]:
        found, scales = self.results[0], [after.scale for after in self.right]
        interval = self.case.interval
        agree = (
            [same_choice(*pair, interval) for pair in zip(each, self.right)]
            for each in self.results
        )
        right = (all(map(near, each, self.right)) for each in self.results)
        enough = self.least <= self.sent <= self.wanted + self.room
        return [
            line("steps that were made", self.steps(found), self.steps(self.right)),
            line("the scale after each", [after.scale for after in found], scales),
            on_ranks("the same steps, scales and counts on", map(all, agree)),
            on_ranks("right parameters on", right),
            Line("bytes sent by all ranks", self.sent, self.wanted, enough),
            line("barriers", self.barriers, 0),
        ]

    def mistake(self) -> str:
        if wrong_dtype := mistake_of_dtype(self.run, self.case.dtype, self.wanted):
            return wrong_dtype
        return self.mistake_in_choice() or self.mistake_in_values() or self.mistake_in_bytes()

    def mistake_in_choice(self) -> str:
        """Return the hint for the first step with a wrong decision to step, or a wrong scale."""
        for step, should in enumerate(self.right):
            did = [each[step] for each in self.results]
            for rank, after in enumerate(did):
                if after.made > 1:
                    return f"In step {step} the optimizer stepped {after.made} times."
                if after.made == should.made:
                    continue
                if should.made:
                    return f"Rank {rank} skipped step {step}, in which no gradient overflowed."
                if any(other.made == 0 for other in did):
                    return (
                        f"In step {step} one rank has an inf or nan, and rank {rank} steps while "
                        "another skips: check the mean of all gradients, not its own."
                    )
                return (
                    f"Step {step} was made with an inf or nan among the gradients: ask "
                    "torch.isfinite of all of them (nan is not) and skip: no step, not even one of "
                    "zeros, because momentum still moves the parameters."
                )
            for after in did:
                if not same_choice(after, should, self.case.interval):
                    return self.mistake_in_scale(step, after, should)
        return ""

    def mistake_in_scale(self, step: int, after: After, should: After) -> str:
        interval = self.case.interval
        before = self.right[step - 1].scale if step else self.case.scaler().scale
        if not should.made:
            return (
                f"After step {step}, which overflowed, the scale is {after.scale} and good_steps "
                f"{after.good_steps}: it was {before}, and becomes that / scaler.factor, once; the "
                "count of good steps begins again at 0."
            )
        return (
            f"After step {step} the scale is {after.scale} and good_steps {after.good_steps}, not "
            f"{should.scale} and {should.good_steps}. A good step counts one more; at "
            f"growth_interval={interval} of them in a row the scale is multiplied by scaler.factor "
            "and the count begins again."
        )

    def mistake_in_values(self) -> str:
        if all(all(map(near, each, self.right)) for each in self.results):
            return ""
        for mistake, hint in VALUES.items():
            usual = [expected(self.case, self.size, rank, mistake) for rank in range(self.size)]
            if all(all(map(near, *pair)) for pair in zip(self.results, usual)):
                return hint
        return (
            "Wrong parameters. In this order: the mean over the ranks, divided by the scale that "
            "the loss had; its norm, of all parameters together; all of it times max_norm / norm "
            "if that is below 1; optimizer.step()."
        )

    def mistake_in_bytes(self) -> str:
        if self.barriers:
            return NO_BARRIER
        return (
            f"Right, but {self.sent:,} bytes were sent where {self.wanted:,} do: average each "
            "gradient once. Whether one has overflowed, the mean says."
        )

    @staticmethod
    def raised(error: str) -> str:
        if not error.startswith("deadlock"):
            return ""
        return (
            "if a rank decides by its own gradients and leaves, the others wait for its all-reduce "
            "forever: average first, then ask the mean, which is the same on all ranks.\n"
        )


def same_choice(found: After, should: After, interval: int) -> bool:
    """Compare two steps. The count may run on if the scale grows at multiples of the interval."""
    good = (found.good_steps - should.good_steps) % interval == 0
    return good and (found.made, found.scale) == (should.made, should.scale)


EXERCISES = [
    Exercise(
        "scaled_step",
        scaled_step,
        trial,
        [
            (2, Steps()),
            (3, Steps(((0, 2, NAN), (4, 0, INF)), interval=3, dtype=torch.float64)),
            (1, Steps(((1, 0, INF),), interval=1, count=4)),
        ],
        Scaling,
        hints=[
            "Average first: an inf or nan of one rank is in the mean of all, so all ranks see the "
            "same. Then divide by scaler.scale, then take the norm of all gradients together: is "
            "it finite?",
            "norm = torch.cat([p.grad.flatten() for p in parameters]).norm(). If it is not finite: "
            "scaler.scale /= scaler.factor, scaler.good_steps = 0, and nothing else. If it is: "
            "p.grad *= (max_norm / norm).clamp(max=1), optimizer.step(), one good step more, and "
            "at scaler.growth_interval of them the scale grows and the count begins again.",
        ],
        skeleton="""\
def scaled_step(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    for p in parameters:
        p.grad = ...                         # the mean over the ranks, unscaled
    norm = ...                               # of all of them together
    if not norm.isfinite():
        ...                                  # a smaller scale, and no step
        return
    for p in parameters:
        p.grad *= ...
    optimizer.step()
    ...                                      # one good step more; perhaps a larger scale""",
        refuses=[LossScaler.adjust, train.update, train.train_step],
        changes=("parameters", "optimizer", "scaler"),
        again=False,
    )
]
