"""Exercise of lesson 22: predict from DeepSpeed's settings what it sends in a step.

The answer's formula gives the expected bytes. tests/course/frameworks compares the formula with the
ledger of DeepSpeed's own runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from . import answers
from .engine import Exercise, Line, Measured, line
from .measures import plain

SIZES = (16_384, 64, 4_096, 4_096, 64, 12_288, 12_288)


@dataclass(frozen=True)
class Settings:
    """zero: items of the config's "zero_optimization"."""

    zero: tuple[tuple[str, object], ...]
    micro_batches: int = 1
    ranks: int = 4
    sizes: tuple[int, ...] = SIZES

    def __str__(self) -> str:
        said = ", ".join(f"{name}={value}" for name, value in self.zero)
        return f"{said}, {self.micro_batches} micro-batches, {self.ranks} ranks"

    def sent(self) -> int:
        """Return the bytes that all ranks send, in float32."""
        return answers.deepspeed_bytes(
            dict(self.zero), list(self.sizes), self.micro_batches, self.ranks
        )


def settings_trial(fn, case: Settings, group):
    return plain(fn(dict(case.zero), list(case.sizes), case.micro_batches, case.ranks))


class Counted(Measured):
    def measure(self):
        self.came, self.wanted = self.results[0], self.case.sent()

    def lines(self) -> list[Line]:
        return [line("bytes of all ranks in a step", self.came, self.wanted)]

    def mistake(self) -> str:
        if isinstance(self.came, bool) or not isinstance(self.came, Real):
            return "Return a number: the bytes that all ranks send in a step, together."
        case, wanted = self.case, self.wanted
        zero, k, total = dict(case.zero), case.micro_batches, sum(case.sizes)
        each = 4 * (case.ranks - 1) * total  # bytes of one gather, or one scatter, of everything
        if not wanted:
            return "One rank has nobody to send to: n - 1 is 0."
        if self.came * 4 == wanted:
            return "Numbers, not bytes: each has 4."
        if self.came * case.ranks == wanted or self.came * (case.ranks - 1) == wanted:
            return (
                "All ranks together send (n-1) times the model in a gather: each of n ranks "
                "sends (n-1)/n of it."
            )
        if self.came * (case.ranks - 1) == wanted * case.ranks:
            return "n times where it is n - 1 times: a rank does not send itself its own part."
        stage = zero.get("stage", 0)
        if stage == 3:
            if self.came == 4 * (case.ranks - 1) * 3 * k * total:
                return (
                    "Parameters of at most stage3_param_persistence_threshold numbers, 100,000 "
                    "where nothing is said, stay whole: they are gathered once a step, after it."
                )
            return (
                "Stage 3, in every micro-batch: large parameters are gathered twice, and all "
                "gradients scattered once. Once a step the small parameters are gathered, those "
                "of at most the threshold."
            )
        if stage == 0:
            return "Stage 0 is data parallelism: one all-reduce per step (2) and nothing to gather."
        if not zero.get("reduce_scatter", True) and self.came < wanted:
            return "With reduce_scatter false all gradients are all-reduced (2) in any case."
        together = stage == 2 and k > 1 or zero.get("use_multi_rank_bucket_allreduce", True)
        if self.came == wanted - each and not together:
            return "After the step the ranks gather the new parameters: 1 more."
        if stage == 2 and k > 1 and self.came == case_of(case, 1):
            return "Stage 2 holds no whole gradients: it reduces them after each micro-batch."
        if stage == 1 and k > 1 and self.came > wanted:
            return (
                "Stage 1 holds whole gradients and reduces them once per step, not per micro-batch."
            )
        return (
            "Stages 1 and 2 gather parameters once a step. Their gradients are all-reduced, 2, as "
            "long as use_multi_rank_bucket_allreduce is true, which it is where nothing is said, "
            "or reduce_scatter is false, which it is only if the file says so; else each part is "
            "reduced to its rank, 1. Stage 2 does so in every micro-batch."
        )


def case_of(case: Settings, micro_batches: int) -> float:
    return Settings(case.zero, micro_batches, case.ranks, case.sizes).sent()


APART = ("use_multi_rank_bucket_allreduce", False)
FREED = (  # only parameters up to the threshold stay gathered
    ("stage3_max_reuse_distance", 0),
    ("stage3_max_live_parameters", 0),
    ("stage3_prefetch_bucket_size", 0),
)
THRESHOLD = "stage3_param_persistence_threshold"
SAID = [  # (stage, other settings, micro-batches, ranks)
    (1, (), 1, 8),
    (1, (APART,), 1, 4),
    (2, (APART,), 3, 4),
    (2, (), 2, 8),
    (1, (APART,), 4, 4),
    (0, (), 2, 4),
    (0, (APART,), 2, 4),
    (3, ((THRESHOLD, 0), *FREED), 2, 4),
    (3, ((THRESHOLD, 4_096), *FREED), 2, 8),
    (3, (APART, ("reduce_scatter", False), *FREED), 2, 4),
    (2, (APART, ("reduce_scatter", False)), 2, 4),
    (2, (("use_multi_rank_bucket_allreduce", True),), 2, 2),
    (2, (), 2, 1),
]
EXERCISES = [
    Exercise(
        "deepspeed_bytes",
        answers.deepspeed_bytes,
        settings_trial,
        [
            *((1, Settings((("stage", stage), *more), k, n)) for stage, more, k, n in SAID),
            (1, Settings((("stage", 3), *FREED), 1, 4, (*SIZES, 100_000, 100_001))),
            (1, Settings((), 2, 4)),  # Without a stage it is 0.
        ],
        Counted,
        hints=[
            "Count what moves all parameters once: a gather or a scatter is 1, an all-reduce 2. "
            "How often does each stage do each of them?",
            "Stage 1: gradients once a step. Stage 2: in every micro-batch. Stage 3: 2 gathers of "
            "large parameters and 1 scatter of all gradients in every micro-batch, 1 gather of the "
            "small ones a step.",
        ],
        skeleton="""
def deepspeed_bytes(zero, sizes, k, n):
    total, stage = sum(sizes), zero.get("stage", 0)
    if stage == 3:
        limit = zero.get("stage3_param_persistence_threshold", 100_000)
        small = ...
        numbers = ...
    else:
        reduced = ...                      # 2 for an all-reduce, 1 for a reduce: two keys say
        numbers = ...
    return 4 * (n - 1) * numbers
""",
    )
]
