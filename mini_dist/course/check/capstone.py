"""Exercises of lesson 29: a plan for the learner's own job, her own strategy, and her own run.

The planner judges the plan, for the job that her name draws. The strategy is judged on real ranks
for its values and on simulated GPUs for its time and memory. The run is killed and resumed, once
from its own files and once after the newest of them was damaged.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from mini_dist.model.data import Batches
from mini_dist.model.gpt import GPT
from mini_dist.plan.calculators import num_parameters, readable
from mini_dist.plan.config import Layout, ModelConfig
from mini_dist.ranks.diagnose import RankError
from mini_dist.ranks.launch import launch
from mini_dist.ranks.older_torch import new_group
from mini_dist.strategies import zero

from .. import capstone
from . import answers
from .adversities import PART, once_started, told
from .at_scale import LARGE, large_loss
from .engine import (
    RIGHT,
    WRONG,
    Exercise,
    Line,
    Measured,
    Verdict,
    line,
    on_ranks,
    watched,
)
from .measures import all_close as same
from .planner import Choice, Task
from .watch import functions_of
from .ways import hooks_of, take_hooks_from

# ---- the plan -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class YourJob:
    def __str__(self) -> str:
        return "your job"


def plan_trial(fn, case: YourJob, group):
    return fn()


class Planned(Measured):
    """Everything up to the memory is judged as in lesson 17; then days and dollars."""

    def measure(self):
        self.form, came = "", self.results[0]
        if not isinstance(came, (tuple, list)) or len(came) != 3:
            self.form = "Return three things: your name, the offer you take, and a Layout(...)."
            return
        name, self.offer, layout = came
        if not isinstance(name, str) or not capstone.named(name):
            self.form = f"The first value must be your name, which draws the job, and not {name!r}."
        elif self.offer not in ("A", "B"):
            self.form = f'The second is the offer you take, "A" or "B", and not {self.offer!r}.'
        elif not isinstance(layout, Layout):
            self.form = f"The third is a Layout(...), and not a {type(layout).__name__}."
        if self.form:
            return
        self.job, self.layout = capstone.job(name), layout
        there = self.job.offer(self.offer)
        task = Task(self.job.model, (there.machine,), there.devices, self.job.batch_tokens)
        self.choice = Choice(task, SimpleNamespace(results=[layout]))
        self.up_to_memory = [
            each for each in self.choice.lines() if not each.what.startswith("regret")
        ]

    def lines(self) -> list[Line]:
        if self.form:
            return [line("returns", type(self.results[0]).__name__, "(name, offer, Layout)")]
        lines = [Line("the job of", self.job.learner, "", True), *self.up_to_memory]
        if not all(each.ok for each in lines):
            return lines
        bill, job = capstone.bill(self.job, self.offer, self.layout), self.job
        return [
            *lines,
            Line("days", f"{bill.days:.2f}", f"<= {job.days:.1f}", bill.days <= job.days),
            Line(
                "dollars",
                f"{bill.dollars:,.0f}",
                f"<= {job.dollars:,.0f}",
                bill.dollars <= job.dollars,
            ),
        ]

    def mistake(self) -> str:
        if self.form:
            return self.form
        if not all(each.ok for each in self.up_to_memory):
            return self.choice.mistake()
        best = capstone.best(self.job, self.offer).best
        if not capstone.bill(self.job, self.offer, best.layout).keeps(self.job):
            return (
                f"On offer {self.offer} even the planner's best layout breaks a limit: "
                f"{readable(best.time.seconds, 's')} per step. Plan the other offer."
            )
        return self.choice.what_costs_most()


# ---- the strategy -------------------------------------------------------------------------------

GPUS, MACHINE = 64, "h100"
MOST, MOST_SLOWED, MOST_BYTES = 1.1, 1.25, 12e9
SLOWED = {5: 2.0}  # the network of rank 5's server has half its speed
LR = 0.05
LARGE_BYTES = 2 * num_parameters(LARGE)  # in bf16
LEAST_SENT = 2 * (GPUS - 1) / GPUS * LARGE_BYTES  # all gradients and new parameters, in rings


class Uneven(nn.Module):
    """Parameters of sizes that few numbers of ranks divide; `tied` is used twice."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.tied, self.scale, self.last = (
            nn.Parameter(torch.linspace(0.3, 1 + n, size, dtype=dtype))
            for n, size in enumerate((7, 1, 5))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = (x * self.tied).tanh() * self.tied * self.scale
        return torch.cat([x[:, :5] * self.last, x[:, 5:]], dim=1)


@dataclass(frozen=True)
class Steps:
    micro_batches: int
    dtype: torch.dtype = torch.float64
    steps: int = 3

    def __str__(self) -> str:
        special = f" of {self.dtype}" * (self.dtype != torch.float64)
        return f"{self.steps} steps of {self.micro_batches} micro-batches{special}"

    def batches(self, rank: int) -> list[list[Tensor]]:
        """Return the micro-batches of each step; the last step has one more."""
        generator = torch.Generator().manual_seed(rank)
        shape = self.steps, self.micro_batches + 1, 2, 7
        x = torch.randn(shape, dtype=torch.float64, generator=generator).to(self.dtype)
        return [*(list(each[1:]) for each in x[:-1]), list(x[-1])]


def momentum(parameters) -> torch.optim.Optimizer:
    """Make an optimizer with momentum that, unlike AdamW, steps further if gradients are larger."""
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


def uneven_loss(model: Uneven, x: Tensor) -> Tensor:
    return model(x).square().sum()


def strategy_trial(fn, case: Steps, group):
    model, seen = Uneven(case.dtype), []
    step = fn(model, momentum, uneven_loss, group)
    for batches in case.batches(group.rank()):
        before = hooks_of(model.parameters())
        step(batches)
        seen.append([p.detach().clone() for p in model.parameters()])
    more = hooks_of(model.parameters()) - before
    take_hooks_from(model.parameters())
    return seen, more


def one_process(case: Steps, size: int, share=lambda k, n: 1 / (k * n)) -> list:
    """Return the parameters after each step on all ranks' micro-batches."""
    model, seen = Uneven(case.dtype), []
    optimizer = momentum(model.parameters())
    for step in range(case.steps):
        optimizer.zero_grad()
        for rank in range(size):
            for x in case.batches(rank)[step]:
                share_of_one = share(len(case.batches(rank)[step]), size)
                (share_of_one * uneven_loss(model, x)).backward()
        optimizer.step()
        seen.append([p.detach().clone() for p in model.parameters()])
    return seen


class Stepped(Measured):
    """The values, on real ranks."""

    def measure(self):
        self.seen, self.hooks = zip(*self.results)
        self.expected = one_process(self.case, self.size)

    def right(self, rank: int) -> bool:
        return all(same(a, b, 100.0) for a, b in zip(self.seen[rank], self.expected))

    def lines(self) -> list[Line]:
        lines = [
            on_ranks("parameters as one process's on", map(self.right, range(self.size))),
            line("extra hooks after the last step", max(self.hooks), 0),
        ]
        return lines

    def mistake(self) -> str:
        first, untouched = self.seen[0], list(Uneven(self.case.dtype).parameters())
        if all(map(self.right, range(self.size))):
            return (
                "Each step adds hooks to those of the steps before: keep the handles of the "
                "parameters' hooks and .remove() them, or add them once, before the first step."
            )
        if same(first[-1], untouched, 1.0):
            return (
                "The model's parameters have not changed: after the optimizer has stepped your "
                "shards, gather them and copy them back into the model."
            )
        if any(not same(a, b, 100.0) for seen in self.seen for a, b in zip(seen[0], first[0])):
            return (
                "The ranks hold different parameters after one step. Each rank steps its shard of "
                "the mean gradient, and every shard has to reach every rank."
            )
        sums = one_process(self.case, self.size, share=lambda k, n: 1 / k)
        if all(same(a, b, 100.0) for a, b in zip(first, sums)):
            return "The gradients are sums over the ranks: divide by group.size()."
        sums = one_process(self.case, self.size, share=lambda k, n: 1 / n)
        if all(same(a, b, 100.0) for a, b in zip(first, sums)):
            return "The micro-batches are added and not averaged: divide each loss by len(batches)."
        if not same(first[0], self.expected[0], 100.0):
            return (
                "The first step is not one process's. A rank steps with the mean over ranks and "
                "micro-batches, and its shard of the gradient has to be the shard of the same "
                "parameters."
            )
        return (
            "The first step is right and a later one is not: something of the step before is left "
            "over (a gradient that is not cleared), or the optimizer does not keep its moments."
        )


def at_scale(fn, group) -> None:
    """Run two steps of one row of 2,048 tokens, in bf16; the first one makes AdamW's moments."""
    gpt = GPT(LARGE, device=group.device, dtype=torch.bfloat16)
    step = fn(gpt, torch.optim.AdamW, large_loss, group)
    row = torch.zeros(1, LARGE.seq_len, dtype=torch.int64, device=group.device)
    for _ in range(2):
        step([(row, row)])


def alone(model, make_optimizer, loss_of, group):
    optimizer = make_optimizer(model.parameters())

    def step(batches):
        for batch in batches:
            loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class OwnStrategy(Exercise):
    """A right strategy also runs on simulated GPUs, where its time and its memory are judged."""

    def judge(self, fn) -> Verdict:
        verdict = super().judge(fn)
        if verdict.state != RIGHT:
            return verdict
        lines = verdict.lines
        one = launch(at_scale, 1, (alone,), simulate=MACHINE, quiet=True).step_seconds
        try:
            run = launch(at_scale, GPUS, (fn,), simulate=MACHINE, quiet=True)
            slow = launch(at_scale, GPUS, (fn,), simulate=MACHINE, slow_links=SLOWED, quiet=True)
        except (RankError, ValueError) as error:
            return Verdict(self.name, WRONG, lines, f"On {GPUS} GPUs: {error}")
        lines += [
            up_to(f"{GPUS} simulated GPUs / one", run.step_seconds / one, MOST),
            up_to("with a network at half speed", slow.step_seconds / one, MOST_SLOWED),
        ]
        held = max(run.peak_memory)
        told = f"{held / 1e9:.1f} GB", f"up to {MOST_BYTES / 1e9:.0f} GB"
        lines.append(Line("fullest GPU", *told, held <= MOST_BYTES))
        # The small model may fit into one bucket, and the large one has no values here. But if a
        # bucket never leaves, too little is sent.
        sent = sum(comm.sent for comm in last_step(run)) / LARGE_BYTES
        told = f"{sent:.2f} models", f"{LEAST_SENT / LARGE_BYTES:.2f} models or more"
        lines.append(Line("rank 0 sends", *told, sends_all(run)))
        if all(each.ok for each in lines):
            return Verdict(self.name, RIGHT, lines)
        return Verdict(self.name, WRONG, lines, too_much(run, held))


def last_step(run) -> list:
    """Return what rank 0 sent in the last simulated step."""
    began, _ = run.steps[-1]
    return [comm for comm in run.ledger.leaves(rank=0) if comm.sent and comm.start >= began]


def sends_all(run) -> bool:
    return sum(comm.sent for comm in last_step(run)) > 0.999 * LEAST_SENT


def up_to(what: str, ratio: float, most: float) -> Line:
    return Line(what, f"{ratio:.2f} times", f"up to {most} times", ratio <= most)


def too_much(run, held: float) -> str:
    """Say what costs a simulated step most."""
    sent = last_step(run)
    if wide := {comm.dtype for comm in sent} - {"bfloat16", "int64"}:
        return (
            f"bfloat16 travels as {' and '.join(sorted(wide))}: more bytes than there are. Send "
            "gradients and parameters in their own dtype."
        )
    if max((comm.nbytes for comm in sent if comm.phase == "backward"), default=0) > LARGE_BYTES / 8:
        return (
            "A bucket of that size is complete late: when it leaves, little of backward is left to "
            "hide it. Make buckets smaller."
        )
    if not sends_all(run):
        return (
            "Some gradients or new parameters never leave rank 0. A small model has a single "
            "bucket, so all of its values are right; the large one has several: does each "
            "parameter count down its own bucket?"
        )
    if held > MOST_BYTES:
        return (
            "It takes as much memory as if a rank held the optimizer's states of all parameters: "
            "make the optimizer of this rank's shards only."
        )
    in_backward = sum(comm.sent for comm in sent if comm.phase == "backward")
    if in_backward < 0.75 * LARGE_BYTES:
        return (
            "Gradients leave when backward is over, and the device waits for them: let a hook, "
            "p.register_post_accumulate_grad_hook(fn), send each bucket when it is complete."
        )
    if len(sent) > 60:
        return (
            f"Rank 0 sends {len(sent)} messages per step. Each has a latency, and small ones are "
            "nothing but latency: put parameters into buckets of some hundred megabytes."
        )
    return (
        "Messages leave during backward, but something waits for them: begin_reduce_scatter and "
        "begin_all_gather_ return at once, so begin all of them before the first .wait()."
    )


# ---- the run ------------------------------------------------------------------------------------

RANKS, STEPS, EVERY, KILL_AT = 3, 9, 2, 7
SHAPE = ModelConfig(vocab_size=17, num_layers=1, d_model=16, num_heads=2, seq_len=8)


@dataclass(frozen=True)
class Twin:
    """A small run. kill_at: the last rank dies when it asks for this step's batch. is_part: the
    job's first rank is not in the group."""

    folder: str
    dropout: float = 0.1
    kill_at: int | None = None
    is_part: bool = False

    def __str__(self) -> str:
        return f"{STEPS} steps, a checkpoint after every {EVERY}"


def twin_trial(fn, case: Twin, group):
    if case.is_part:
        members = new_group(range(1, group.size()))
        if group.rank() == 0:
            return {}
        group = members
    rank, size = group.rank(), group.size()
    model = GPT(SHAPE.replace(dropout=case.dropout), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, 17, (12 * STEPS * 8 + 1,), generator=torch.Generator().manual_seed(1))
    batches = Batches(tokens, 12, SHAPE.seq_len, rank=rank, size=size)
    mortal = capstone.Mortal(batches, case.kill_at if rank == size - 1 else None)
    found = fn(model, optimizer, mortal, STEPS, EVERY, case.folder, group)
    return {int(step): float(loss) for step, loss in dict(found).items()}


class OwnRun(Exercise):
    """Runs the learner's training on real ranks: undisturbed, killed, resumed, and resumed from a
    damaged folder."""

    def judge(self, fn) -> Verdict:
        if verdict := self.made_before(fn):
            return verdict
        with tempfile.TemporaryDirectory() as folder:
            return self.judged(fn, Path(folder))

    def judged(self, fn, folder: Path) -> Verdict:
        lines: list[Line] = []

        def wrong(hint: str) -> Verdict:
            return Verdict(self.name, WRONG, lines, hint)

        def losses(size: int, where: str, **how) -> list[dict[int, float]]:
            case = Twin(str(folder / where), **how)
            Path(case.folder).mkdir(exist_ok=True)
            run = once_started(watched, size, (twin_trial, fn, case, self._refuses, self._facts))
            used.update(*(called for _, called in run.results))
            return [result for result, _ in run.results]

        used: set[str] = set()
        try:
            alone = losses(1, "alone", dropout=0.0)[0]
            plain = losses(RANKS, "plain", dropout=0.0)
            whole = losses(RANKS, "whole")
        except RankError as error:
            return wrong(told(error) or f"Undisturbed: {error}")
        if used:
            return self._not_the_learners(fn, used, lines)
        steps = [sorted(each) == list(range(STEPS)) for each in (alone, *plain, *whole)]
        lines.append(Line("steps of an undisturbed run", len(whole[0]), STEPS, all(steps)))
        if not all(steps):
            return wrong("Return a dict with the loss of each step, from step 0: {step: loss}.")
        gap = max(abs(mine[s] - alone[s]) for mine in plain for s in alone)
        lines.append(Line("losses as one process's", f"within {gap:.0e}", "1e-4", gap < 1e-4))
        if gap >= 1e-4:
            if max(abs(mine[0] - alone[0]) for mine in plain) >= 1e-4:
                return wrong(
                    "The first step's loss is not one process's: return the mean over all ranks "
                    "and not this rank's own."
                )
            return wrong(
                "The first step's loss is one process's, later ones are not: the ranks train "
                "apart. Average the gradients over the group."
            )
        of_part = PART.format(n=RANKS, more=RANKS + 1, last=RANKS - 1)
        try:
            part = losses(RANKS + 1, "part", dropout=0.0, is_part=True)[1:]
        except RankError as error:
            return wrong(told(error) or f"{of_part}\n{error}")
        if part != plain:
            return wrong(of_part)
        return self.after_the_kill(losses, whole, folder, lines, wrong)

    def after_the_kill(self, losses, whole, folder: Path, lines: list[Line], wrong) -> Verdict:
        try:
            losses(RANKS, "killed", kill_at=KILL_AT)
            return wrong("The run did not ask for each step's batch: batches.batch(step).")
        except RankError as error:
            if "SIGKILL" not in str(error) and "signal 9" not in str(error):
                return wrong(told(error) or str(error))
        if not newest_file(folder / "killed"):
            return wrong("Nothing was saved: a killed run leaves no file of a kilobyte.")
        shutil.copytree(folder / "killed", folder / "damaged")
        newest = KILL_AT - KILL_AT % EVERY
        for where, earliest, what in (
            ("killed", newest, "killed"),
            ("damaged", newest - EVERY, "killed, newest file cut"),
        ):
            if where == "damaged":
                cut = newest_file(folder / where)
                os.truncate(cut, cut.stat().st_size // 2)
            try:
                found = losses(RANKS, where)
            except RankError as error:
                return wrong(told(error) or MEANS[where] + str(error))
            began = min(found[0], default=STEPS)
            lines.append(Line(f"{what}: went on at step", began, earliest, began == earliest))
            if began != earliest:
                return wrong(elsewhere(where, began, earliest))
            equal = [
                all(whole[r][s] == mine.get(s) for s in range(began, STEPS))
                for r, mine in enumerate(found)
            ]
            lines.append(on_ranks(f"{what}: equal to the last bit on", equal))
            if not all(equal):
                first = all(mine[began] == whole[r][began] for r, mine in enumerate(found))
                return wrong(NOT_EQUAL[first])
        return Verdict(self.name, RIGHT, lines)


MEANS = {
    "killed": "After the kill, started again: ",
    "damaged": "The newest large file of the folder was cut in half, as a save that was killed "
    "leaves it, and the run did not go on from the checkpoint before: ",
}
NOT_EQUAL = {
    True: "The first loss after the restart is right and a later one is not. The first does not "
    "depend on the optimizer: its states are lost (or the random generators').",
    False: "The first loss after the restart is another one: parameters, the batch of that step, "
    "or the random generators that draw the dropout masks are not what they were.",
}


def elsewhere(where: str, began: int, earliest: int) -> str:
    if began == 0 and where == "damaged":
        return "It started over at step 0: keep the checkpoint before, and go back to it."
    if began == 0:
        return "It started over at step 0: resume from the folder before the loop."
    if where == "damaged" and began > earliest:
        return (
            "It went on from a checkpoint that is damaged: what was read is not what was saved. "
            "Write a checksum with each file, and refuse a file that has another one."
        )
    if began > earliest:
        return f"It went on at step {began}, but step {earliest} was the first that nobody saved."
    return (
        f"It went on at step {began}: {earliest} steps were done at the last good save. Save after "
        "every `every` steps, and keep the checkpoint before."
    )


def newest_file(folder: Path) -> Path | None:
    """Return the newest file of a kilobyte or more."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    large = [path for path in files if path.stat().st_size >= 1024]
    return max(large, key=lambda path: path.stat().st_mtime_ns, default=None)


EXERCISES = [
    Exercise(
        "my_plan",
        answers.my_plan,
        plan_trial,
        [(1, YourJob())],
        Planned,
        scales=False,
        hints=[
            "plan(model, machine, devices, batch_tokens) of lesson 17 plans one offer. Plan both, "
            "and compare capstone.bill(job, offer, layout) with the limits.",
            "print(plan(...).best.layout) shows a Layout that you can write down. Fields that are "
            "1, False or 'none' may be left out.",
        ],
        skeleton="""\
def my_plan():
    layout = Layout(dp=..., tp=..., zero=..., micro_batch_size=..., num_micro_batches=...)
    return "...", "A", layout                # your name, the offer, the layout""",
    ),
    OwnStrategy(
        "my_strategy",
        answers.my_strategy,
        strategy_trial,
        [
            (3, Steps(2)),
            (2, Steps(1, torch.float32)),
            (4, Steps(3, steps=2)),
            (1, Steps(2)),
        ],
        Stepped,
        refuses=functions_of(zero)
        | {each.__init__ for each in (zero.ZeRO1, zero.ZeRO2, zero.ZeRO3)},
        changes=("model",),
        again=False,
        scales=False,
        hints=[
            "Once, before the first step: put the parameters into buckets, flatten each bucket and "
            "pad it, keep this rank's chunk as its shard, and make the optimizer of the shards. "
            "The step is lesson 28's, with begin_reduce_scatter in place of the all-reduce.",
            "A hook counts the gradients of its bucket that are still missing. When none is, it "
            "begins to scatter the bucket. After backward: shard.grad = work.wait() / size, step, "
            "then begin_all_gather_ for all buckets, wait for each, and copy the parts back.",
        ],
        skeleton="""\
def my_strategy(model, make_optimizer, loss_of, group):
    rank, size = group.rank(), group.size()
    buckets, bucket_of = ..., ...            # lists of parameters; parameter -> its bucket
    shards = [...]                           # of each bucket, this rank's chunk: a clone
    optimizer = make_optimizer(shards)

    def step(batches):
        missing, under_way = [len(bucket) for bucket in buckets], {}

        def ready(p):
            ...                              # begin_reduce_scatter when the bucket is complete

        ...                                  # backward, as in lesson 28: hooks in the last one
        for n, work in under_way.items():
            shards[n].grad = work.wait() / size
        optimizer.step()
        ...                                  # begin_all_gather_ of all shards, then copy back

    return step""",
    ),
    OwnRun(
        "my_training",
        answers.my_training,
        twin_trial,
        [],
        Measured,
        hints=[
            "Training(model, optimizer, group) of lesson 16 saves and resumes everything that the "
            "next step needs. Wrap the model by a strategy first, such as Overlapped.",
            "saved = training.resume(folder) is None if there is nothing yet; else saved.step "
            "steps are done. After step s, s + 1 steps are done: that is what you save.",
        ],
        skeleton="""\
def my_training(model, optimizer, batches, steps, every, folder, group):
    model, losses = ..., {}                  # averaged over the group
    training = Training(model, optimizer, group)
    ...                                      # where to begin
    for step in range(..., steps):
        losses[step] = ...                   # train_step(...).loss.item()
        ...                                  # save
    return losses""",
    ),
]
