"""Rules of thumb from tutorials, judged by the planner: what they allow, and what is fastest.

    for rule in RULES:
        print(judge(rule))

A rule leaves much open: micro-batch, recompute, chunks, what the other axes take.  It is judged by
the best and by the worst layout that it allows and that fits, against the best of all.

Sources: [Playbook] Hugging Face, The Ultra-Scale Playbook (2025), "Finding the best training
configuration", step 1, the GPU-rich case; [HF] Transformers documentation, "Parallelism methods",
scalability strategy; [Bridge] NVIDIA NeMo, Megatron-Bridge, skills/perf-parallelism-strategies,
"Decision by model size", dense models.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

from ..config import Layout
from . import published
from .layouts import Search, short
from .lines import readable
from .memory import device_memory, peak_memory
from .planner import plan
from .plans import CLOSE, Plan, worth_simulating
from .step_time import step_time

SEVERAL = range(2, 1025)


class Rule(NamedTuple):
    """A rule of thumb and a job that it speaks of."""

    says: str
    source: str
    model: str
    devices: int
    tokens: int  # of a global batch
    allows: dict[str, Collection]  # field of Layout -> what the rule lets it be
    machine: str = "h100"


M = 2**20
PLAYBOOK_SMALL = "under 10B: one technique on 8 GPUs, "
PLAYBOOK_MIDDLE = "10B to 100B: "
RULES = (
    Rule("fits on one GPU: DDP", "HF", "gpt2-xl", 8, M // 2, {"tp": [1], "pp": [1], "zero": [0]}),
    Rule("does not fit on one: PP", "HF", "llama3-8b", 8, M, {"pp": [8]}),
    Rule(PLAYBOOK_SMALL + "TP", "Playbook", "llama3-8b", 8, M, {"tp": [8]}),
    Rule(
        PLAYBOOK_SMALL + "ZeRO-3 with full recompute",
        "Playbook",
        "llama3-8b",
        8,
        M,
        {"dp": [8], "zero": [3], "recompute": ["full"], "recompute_every": [1]},
    ),
    Rule("1B to 10B: TP 2-4, DP", "Bridge", "llama3-8b", 16, M, {"tp": [2, 3, 4], "pp": [1]}),
    Rule(PLAYBOOK_MIDDLE + "TP 8, PP", "Playbook", "llama3-70b", 64, M, {"tp": [8], "pp": SEVERAL}),
    Rule(
        PLAYBOOK_MIDDLE + "TP 8, ZeRO-3",
        "Playbook",
        "llama3-70b",
        64,
        M,
        {"tp": [8], "pp": [1], "zero": [3]},
    ),
    Rule(
        PLAYBOOK_MIDDLE + "ZeRO-3 only", "Playbook", "llama3-70b", 64, M, {"dp": [64], "zero": [3]}
    ),
    Rule(
        "10B to 70B: TP 4-8, PP 2-4",
        "Bridge",
        "llama3-70b",
        64,
        M,
        {"tp": range(4, 9), "pp": range(2, 5)},
    ),
    Rule(
        "from 512 GPUs ZeRO-3 alone is inefficient",
        "Playbook",
        "llama3-70b",
        512,
        4 * M,
        {"dp": [512], "zero": [3]},
    ),
    Rule(
        "from 512 GPUs ZeRO-3 alone is inefficient",
        "Playbook",
        "llama3-70b",
        512,
        4 * M,
        {"dp": [512], "zero": [3]},
        "h100-hf",
    ),
    Rule(
        "70B to 175B: TP 8, PP 4-8",
        "Bridge",
        "gpt3-175b",
        256,
        2 * M,
        {"tp": [8], "pp": range(4, 9)},
    ),
    Rule(
        "from 1,024 GPUs: TP 8, PP and ZeRO-2",
        "Playbook",
        "llama3-405b",
        1024,
        8 * M,
        {"tp": [8], "pp": SEVERAL, "zero": [2], "cp": [1, 2]},
    ),
    Rule(
        "175B to 500B: TP 8, PP 8-16, CP 2",
        "Bridge",
        "llama3-405b",
        1024,
        8 * M,
        {"tp": [8], "pp": range(8, 17), "cp": [2]},
    ),
)


class Judgement(NamedTuple):
    """Compare what a rule allows with the best layout of all."""

    rule: Rule
    best: Layout | None  # that the rule allows; None where none fits
    best_seconds: float
    worst_seconds: float
    fitting: int  # layouts that the rule allows and that fit
    tried: int
    winner: Layout
    winner_seconds: float
    extrapolated: bool  # no published run like one of the two was compared at this size

    @property
    def times(self) -> float | None:
        """How many times as long as the winner's the rule's best step is."""
        return self.best_seconds / self.winner_seconds if self.best else None

    @property
    def verdict(self) -> str:
        """One phrase."""
        if self.best is None:
            return "out of memory"
        if self.times <= 1:
            return "the best"
        return "as good" if self.times <= CLOSE else f"{self.times:.2f} times as long"

    def __str__(self):
        rule = self.rule
        found = f"{self.fitting} of {self.tried} layouts fit"
        if self.best:
            found += f", best {short(self.best)} {readable(self.best_seconds, 's')}"
            found += f", worst {readable(self.worst_seconds, 's')}"
        winner = f"{short(self.winner)} {readable(self.winner_seconds, 's')}"
        if self.extrapolated:
            winner += " (an extrapolation: no published run like one of them is nearly as large)"
        return (
            f"{rule.says} ({rule.source}), {rule.model} on {rule.devices} {rule.machine}: "
            f"{self.verdict}. {found}; best of all {winner}"
        )


def judge(rule: Rule) -> Judgement:
    """The rule's best and worst layout that fit, and the best of all, by the same formulas."""
    longest = max(rule.allows.get("cp", [0])) or None
    found = _planned(rule.model, rule.machine, rule.devices, rule.tokens, longest)
    winner = found.best.layout
    allowed = _allowed(rule, found)
    planned = {candidate.layout: candidate.time.seconds for candidate in found.candidates}
    dropped = {drop.layout for drop in found.dropped}
    seconds = {layout: planned[layout] for layout in allowed if layout in planned}
    for layout in allowed:  # with a ZeRO stage that the planner does not try there
        if layout in planned or layout in dropped:
            continue
        needed = device_memory(peak_memory(found.model, layout, found.how).total, found.how)
        if needed <= found.machine.device.memory_bytes:
            seconds[layout] = step_time(found.model, layout, found.machine, found.how).seconds
    ranked = sorted(seconds, key=seconds.__getitem__)
    played = {layout: _played(found, layout) for layout in (winner, *ranked[:10])}
    best = min(ranked[:10], key=played.__getitem__, default=None)
    if best and played[best] < played[winner]:  # of a kind that the planner does not try
        winner = best
    return Judgement(
        rule,
        best,
        played[best] if best else 0.0,
        max(seconds.values(), default=0.0),
        len(seconds),
        len(allowed),
        winner,
        played[winner],
        any(_extrapolated(layout, found) for layout in (best, winner) if layout),
    )


def _extrapolated(layout: Layout, found: Plan) -> bool:
    """Whether no run like it has been compared with the model of time at half its size or more."""
    runs = published.alike(layout, found.machine)
    return layout.world_size > 2 * max((run.layout.world_size for run in runs), default=0)


def _allowed(rule: Rule, found: Plan) -> list[Layout]:
    """What the rule allows of the layouts that were tried, with its own ZeRO stages put in."""
    tried = [c.layout for c in found.candidates]
    tried += [d.layout for d in found.dropped if d.reason == "memory"]
    if "zero" in rule.allows:
        tried = [layout.replace(zero=zero) for layout in tried for zero in rule.allows["zero"]]
    return [
        layout
        for layout in dict.fromkeys(tried)
        if all(getattr(layout, field) in values for field, values in rule.allows.items())
    ]


def _played(found: Plan, layout: Layout) -> float:
    """Seconds of a step, with the pipeline simulated as the planner does it."""
    play = worth_simulating(layout)
    return step_time(found.model, layout, found.machine, found.how, simulate=play).seconds


@lru_cache
def _planned(model: str, machine: str, devices: int, tokens: int, max_cp: int | None) -> Plan:
    return plan(model, machine, devices, tokens, search=Search(max_cp=max_cp))
