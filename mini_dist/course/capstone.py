"""The job of lesson 29, different for each learner: what to train, for how much, on which cluster.

    mine = job("Ada Lovelace")     # drawn by the name: a model, tokens, dollars, days, two offers
    bill(mine, "A", layout)        # what a layout costs on offer A, by the planner of lesson 17
    record("Ada Lovelace")         # the record of a run in which two things are wrong
    report(mine, ...)              # one page, filled with her figures

Prices are drawn as well and are not market prices. On one of the two offers, the planner's best
layout stays within the dollars and the days. On the other offer it exceeds the dollars or the days.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from random import Random

from mini_dist.model.data import Batches
from mini_dist.plan import calculators
from mini_dist.plan.calculators import Plan, num_parameters, readable, short, step_time
from mini_dist.plan.config import Layout, ModelConfig
from mini_dist.plan.fields import checks_kinds

MODELS = ("llama2-7b", "llama2-13b", "llama3-8b", "qwen2.5-7b", "qwen3-8b")
CLUSTERS = (  # machine, devices, dollars per device and hour
    ("a100-80", (128, 256), (1.0, 1.2, 1.4, 1.6)),
    ("h100", (64, 128), (1.9, 2.2, 2.5, 2.9)),
    ("h100-hf", (64, 128), (1.7, 1.9, 2.1)),
    ("h200", (64, 128), (2.4, 2.8, 3.3)),
)
SEQUENCES = (512, 1024)  # per step
TOKENS_PER_PARAMETER = (100, 150, 200, 300)
MARGIN = 1.10  # limits over the best plan's needs; predicted step times are about that far off


@checks_kinds
@dataclass(frozen=True)
class Offer:
    """A cluster that may be rented."""

    machine: str
    devices: int
    dollars_per_hour: float  # of one device

    def __str__(self) -> str:
        return f"{self.devices} {self.machine} at {self.dollars_per_hour:.2f} $ per GPU-hour"


@checks_kinds
@dataclass(frozen=True)
class Bill:
    """What the job takes with one layout on one offer, if nothing ever fails."""

    step_seconds: float
    days: float
    dollars: float

    def keeps(self, job: Assignment) -> bool:
        return self.days <= job.days and self.dollars <= job.dollars


@dataclass(frozen=True)
class Assignment:
    """What is to be trained, and the limits. batch_tokens: per step."""

    learner: str
    model: str
    tokens: int
    batch_tokens: int
    days: float
    dollars: float
    A: Offer
    B: Offer

    @property
    def config(self) -> ModelConfig:
        return calculators.model(self.model)

    @property
    def twin(self) -> ModelConfig:
        """Return a small model of the same kind, which trains on a laptop in a second."""
        small = dict(num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, d_ffn=64, seq_len=16)
        small |= dict(head_dim=8, qk_norm=False)  # (our GPT has no norm of q and k)
        return self.config.replace(vocab_size=ModelConfig().vocab_size, dropout=0.1, **small)

    def offer(self, name: str) -> Offer:
        """Return the offer of this name. Raises ValueError if it is not "A" or "B"."""
        if name not in ("A", "B"):
            raise ValueError(f'there is no offer {name!r}: the offers are "A" and "B"')
        return self.A if name == "A" else self.B

    def __repr__(self) -> str:
        return "\n".join(
            [
                f"The job of {self.learner}",
                f"  train {self.model} on {self.tokens / 1e9:,.0f} billion tokens, "
                f"{self.batch_tokens:,} per step",
                f"  within {self.dollars:,.0f} dollars and {self.days:.1f} days",
                f"  offer A: {self.A}",
                f"  offer B: {self.B}",
            ]
        )


@checks_kinds
def named(learner: str) -> str:
    """Return a name in the form that is compared: in lower case, with single spaces."""
    return " ".join(learner.casefold().split())


@checks_kinds
@cache
def best(job: Assignment, offer: str) -> Plan:
    """Return the planner's plan for the job on one of its offers."""
    there = job.offer(offer)
    return calculators.plan(job.model, there.machine, there.devices, job.batch_tokens)


@checks_kinds
def bill(job: Assignment, offer: str, layout: Layout) -> Bill:
    """Return what the job takes with this layout. Raises ValueError if the layout cannot cut the
    model, if it is for another number of GPUs or tokens, or if there is no such offer."""
    there = job.offer(offer)
    layout.check(job.config)
    tokens = layout.global_batch_size * job.config.seq_len
    if layout.world_size != there.devices:
        raise ValueError(f"{layout.world_size} ranks: offer {offer} has {there.devices} GPUs")
    if tokens != job.batch_tokens:
        raise ValueError(f"{tokens:,} tokens per step: the job has {job.batch_tokens:,}")
    seconds = step_time(job.config, layout, there.machine, simulate=True).seconds
    hours = seconds * job.tokens / job.batch_tokens / 3600
    return Bill(seconds, hours / 24, hours * there.devices * there.dollars_per_hour)


@checks_kinds
def job(learner: str) -> Assignment:
    """Draw the job of this learner: the same name draws the same job, on every machine.

    Raises ValueError for an empty name.
    """
    if not named(learner):
        raise ValueError("the job is drawn by your name: give it, such as job('Ada Lovelace')")
    return _drawn(named(learner), " ".join(learner.split()))


@cache
def _drawn(name: str, told: str) -> Assignment:
    lots = Random(f"lesson 29, {name}")
    while True:
        model = lots.choice(MODELS)
        size = num_parameters(calculators.model(model))
        tokens = round(lots.choice(TOKENS_PER_PARAMETER) * size, -9)
        batch = lots.choice(SEQUENCES) * calculators.model(model).seq_len
        offers = [
            Offer(machine, lots.choice(devices), lots.choice(prices))
            for machine, devices, prices in lots.sample(CLUSTERS, 2)
        ]
        free = Assignment(told, model, tokens, batch, math.inf, math.inf, *offers)
        bills = {each: bill(free, each, best(free, each).best.layout) for each in ("A", "B")}
        good, bad = lots.sample(("A", "B"), 2)
        days = math.ceil(10 * MARGIN * bills[good].days) / 10
        dollars = math.ceil(MARGIN * bills[good].dollars / 1000) * 1000
        if bills[bad].days > MARGIN * days or bills[bad].dollars > MARGIN * dollars:
            return Assignment(told, model, tokens, batch, days, dollars, *offers)


@checks_kinds
class Mortal:
    """The batches of a rank that is killed when it asks for batch `dies_at`, as a crash would."""

    def __init__(self, batches: Batches, dies_at: int | None):
        self.batches, self.dies_at = batches, dies_at

    def batch(self, step: int):
        if step == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.batches.batch(step)


@checks_kinds
def record(learner: str):
    """Return the record of the learner's run of lesson 29, in which two things are wrong; see
    `Record` in check/sick_runs.py."""
    from .check.sick_runs import run
    from .check.sick_twice import of_learners

    return run(Random(f"faults of lesson 29, {named(learner)}").choice(of_learners()))


# ---- the report ----------------------------------------------------------------------------------

TEMPLATE = """\
REPORT of {learner}

1. The job. {model}, {tokens:,.0f} billion tokens, at most {limit_dollars:,.0f} dollars and
   {limit_days:.1f} days.
2. The plan. Offer {offer}: {there}.
   {layout}: {step} per step.
   {days:.1f} days and {dollars:,.0f} dollars: {spare:.0%} of the money is left.
3. My strategy on {gpus} simulated {machine}: {share:.2f} times one GPU's step, {memory:.1f} GB on
   the fullest rank. With one server's network at half speed: {slow:.2f} times.
4. The twin. Killed at step {killed}; went on from step {resumed}; {same}.
5. The faults of my run: {faults}.
6. Decision. {decision}
7. Doubt. {doubt}
"""
BLANK = "(yours: three sentences)"


@checks_kinds
def report(
    job: Assignment,
    offer: str,
    layout: Layout,
    *,
    figures: Mapping,
    decision: str = "",
    doubt: str = "",
) -> str:
    """Return the one-page report. figures: gpus, machine, share, memory, slow, killed, resumed,
    same and faults, as the cells of the lesson collect them.

    Raises ValueError if a figure is missing.
    """
    needed = {"gpus", "machine", "share", "memory", "slow", "killed", "resumed", "same", "faults"}
    if missing := sorted(needed - {*figures}):
        raise ValueError(f"the report needs the figures {', '.join(missing)}: run their cells")
    there, cost = job.offer(offer), bill(job, offer, layout)
    told = dict(figures)
    told["same"] = (
        "its losses equal the undisturbed run's" if figures["same"] else "its losses differ"
    )
    told["faults"] = (
        ", ".join(
            disease if rank is None else f"{disease} on rank {rank}"
            for disease, rank in figures["faults"]
        )
        or "none"
    )
    return TEMPLATE.format(
        learner=job.learner,
        model=job.model,
        tokens=job.tokens / 1e9,
        limit_dollars=job.dollars,
        limit_days=job.days,
        offer=offer,
        there=there,
        layout=short(layout),
        step=readable(cost.step_seconds, "s"),
        days=cost.days,
        dollars=cost.dollars,
        spare=1 - cost.dollars / job.dollars,
        decision=decision or BLANK,
        doubt=doubt or BLANK,
        **told,
    )
