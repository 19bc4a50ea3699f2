"""The exercise of lesson 28: gradients that a thousand GPUs average during backward.

The values are judged on a few real ranks, and the time, which a laptop cannot show, on 1,024
simulated GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mini_dist.model.gpt import GPT
from mini_dist.model.loss import token_loss
from mini_dist.plan.config import ModelConfig
from mini_dist.ranks.diagnose import RankError
from mini_dist.ranks.launch import launch

from . import answers
from .engine import (
    NO_BARRIER,
    RIGHT,
    WRONG,
    Exercise,
    Line,
    Measured,
    Verdict,
    line,
    on_ranks,
)
from .fast_data_parallel import REFUSED
from .measures import all_close as same
from .ways import hooks_of

GPUS, MACHINE, MICRO_BATCHES = 1024, "h100", 2
MOST = 1.2  # times one GPU: a kernel takes up to a fifth longer while a collective runs
LARGE = ModelConfig(
    vocab_size=32_000, d_model=4096, num_layers=8, num_heads=32, d_ffn=16_384, seq_len=2048
)


class Small(nn.Module):
    """Parameters of five kinds: `first` is not used in the last micro-batch, `frozen` has no
    gradient, `tied` is used twice, `spare` never."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.first, self.frozen, self.tied, self.last, self.spare = (
            nn.Parameter(torch.linspace(0.5, 1 + n / 4, 6, dtype=dtype).view(2, 3))
            for n in range(5)
        )
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, is_first: bool) -> Tensor:
        x = (x * self.frozen * self.tied).tanh() * self.last
        return x * self.first * self.tied if is_first else x * self.tied


@dataclass(frozen=True)
class Gradients:
    micro_batches: int
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        special = f" of {self.dtype}" * (self.dtype != torch.float64)
        return f"{self.micro_batches} micro-batches{special}"

    def batches(self, rank: int) -> list[tuple[Tensor, bool]]:
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(self.micro_batches, 2, 3, dtype=torch.float64, generator=generator)
        batches = [(each.to(self.dtype), number == 0) for number, each in enumerate(x)]
        return batches[:2] + batches[1:2] * (len(batches) - 2)  # the same object may come twice


def small_loss(model: Small, batch: tuple[Tensor, bool]) -> Tensor:
    return model(*batch).sum()


def small_trial(fn, case: Gradients, group):
    model = Small(case.dtype)
    fn(model, case.batches(group.rank()), small_loss, group)
    kept = model.training and all(
        torch.equal(p, q) for p, q in zip(model.parameters(), Small(case.dtype).parameters())
    )
    return [p.grad for p in model.parameters()], kept, hooks_of(model.parameters())


def large_loss(model: GPT, batch: tuple[Tensor, Tensor]) -> Tensor:
    return token_loss(model(batch[0]), batch[1]).mean()


def at_scale(fn, group) -> None:
    """Run forward and backward of 2 micro-batches, each a row of 2,048 tokens, in bf16."""
    gpt = GPT(LARGE, device=group.device, dtype=torch.bfloat16)
    row = torch.zeros(1, LARGE.seq_len, dtype=torch.int64, device=group.device)
    fn(gpt, [(row, row)] * MICRO_BATCHES, large_loss, group)


def alone(model, batches, loss_of, group) -> None:
    for batch in batches:
        (loss_of(model, batch) / len(batches)).backward()


class Averaging(Measured):
    """The values, on real ranks."""

    def measure(self):
        locals_ = []  # per rank
        for rank in range(self.size):
            model = Small(self.case.dtype)
            alone(model, self.case.batches(rank), small_loss, None)
            locals_.append([p.grad for p in model.parameters()])
        self.local = locals_[0]
        self.means = [None if of[0] is None else sum(of) / self.size for of in zip(*locals_)]
        self.found, self.kept, self.hooks = zip(*self.results)

    def right(self) -> list[bool]:
        return [same(found, self.means, 10.0) for found in self.found]

    def lines(self) -> list[Line]:
        lines = [
            on_ranks("right gradients on", self.right()),
            on_ranks("weights as they were on", self.kept),
            line("hooks left behind", max(self.hooks), 0),
        ]
        return lines + [line("barriers", self.barriers, 0)] * bool(self.barriers)

    def mistake(self) -> str:
        if not all(self.right()):
            return self.mistake_in_values(self.found[0])
        if not all(self.kept):
            return (
                "The weights have changed, or the model was put into eval(): only gradients are to "
                "be averaged."
            )
        if max(self.hooks):
            return (
                "Your hooks are still there in the next backward: keep the handles, .remove() them."
            )
        return NO_BARRIER

    def mistake_in_values(self, found) -> str:
        first = 0  # the number of Small.first among its parameters
        others = [number for number in range(len(found)) if number != first]
        if all(grad is None for grad in found):
            return "No parameter has a .grad at the end: leave the averages there."
        if any(grad is not None and mean is None for grad, mean in zip(found, self.means)):
            return "A parameter that no rank used has a gradient now: such a .grad stays None."
        if self.is_all(found, lambda mean: mean * self.size):
            return "These are the sums over the ranks: divide by group.size()."
        if self.is_all(found, lambda mean: mean * self.case.micro_batches):
            return "The micro-batches are added and not averaged: divide each loss by len(batches)."
        if self.case.micro_batches == 1:
            first = None
        elif same([found[n] for n in others], [self.means[n] for n in others], 10.0):
            return (
                "Right but for a parameter that the last micro-batch does not use: its gradient "
                "came earlier, no hook is called for it in the last backward, and it is never "
                "averaged. After backward, average what has a .grad and has not been sent."
            )
        if same(found, self.local, 10.0):
            return "Each rank has kept its own gradients: nothing was averaged."
        return (
            "The gradients are not the mean over ranks and micro-batches. Wait for every "
            "all-reduce before you divide, and average each gradient once, when the last "
            "micro-batch has added its part."
        )

    def is_all(self, found, turn) -> bool:
        return same(found, [None if m is None else turn(m) for m in self.means], 30.0)

    @staticmethod
    def raised(error: str) -> str:
        if "doesn't require gradient" in error or "does not require grad" in error:
            return "a frozen parameter takes no hook, and has no gradient: ask p.requires_grad.\n"
        return ""


class AtScale(Exercise):
    """An exercise whose right answers also run on simulated GPUs, where their time is judged."""

    def judge(self, fn) -> Verdict:
        verdict = super().judge(fn)
        if verdict.state != RIGHT:
            return verdict
        one = launch(at_scale, 1, (alone,), simulate=MACHINE, quiet=True)
        try:
            run = launch(at_scale, GPUS, (fn,), simulate=MACHINE, quiet=True)
        except (RankError, ValueError) as error:
            return Verdict(self.name, WRONG, verdict.lines, f"On {GPUS:,} GPUs: {error}")
        share = run.seconds / one.seconds
        said = f"{share:.2f} times"
        row = Line(f"{GPUS:,} simulated GPUs / one", said, f"up to {MOST} times", share <= MOST)
        if share <= MOST:
            return Verdict(self.name, RIGHT, [*verdict.lines, row])
        return Verdict(self.name, WRONG, [*verdict.lines, row], too_slow(run))


def too_slow(run) -> str:
    """Say what delays the step most."""
    whole = sum(p.nbytes for p in GPT(LARGE, device="meta", dtype=torch.bfloat16).parameters())
    sent = [comm for comm in run.ledger.leaves(rank=0) if comm.sent]
    if not sent:
        return "Rank 0 sends nothing at all: its gradients stay its own."
    others = [comm for comm in sent if comm.dtype != "bfloat16"]
    if sum(comm.sent for comm in others) > whole / 100:
        return (
            "The gradients are bfloat16 and travel as "
            f"{' and '.join(sorted({comm.dtype for comm in others}))}: more bytes "
            "than they have. Send them in their own dtype."
        )
    if sum(comm.sent for comm in sent) > 2.1 * whole:
        return (
            "More is sent than each gradient once. The gradients of all micro-batches are added "
            "on the rank first; only their sum travels, with the last micro-batch."
        )
    hidden = [comm for comm in sent if comm.phase == "backward"]
    if sum(comm.sent for comm in hidden) < 0.75 * sum(comm.sent for comm in sent):
        return (
            "Messages leave when backward is over, and the device waits for them: let a hook, "
            "p.register_post_accumulate_grad_hook(fn), send each gradient in the last backward."
        )
    if max(comm.nbytes for comm in hidden) > whole / 4:
        return (
            "A bucket of that size is complete late: when it leaves, little of backward is left to "
            "hide it. Send smaller ones."
        )
    return (
        "Messages leave during backward, but it waits for them: pass async_op=True, keep the "
        "handles, and call .wait() after loss.backward()."
    )


EXERCISES = [
    AtScale(
        "gradients_at_scale",
        answers.gradients_at_scale,
        small_trial,
        [
            (3, Gradients(2)),
            (2, Gradients(1, torch.float32)),
            (4, Gradients(3)),
            (1, Gradients(2)),
        ],
        Averaging,
        refuses=REFUSED,
        changes=("model",),
        again=False,
        hints=[
            "Only the last micro-batch's backward completes the gradients: run the others first. "
            "In the last one, p.register_post_accumulate_grad_hook(fn) calls fn(p) as soon as "
            "p.grad is complete.",
            "In the hook: work = dist.all_reduce(p.grad, group=group, async_op=True), and keep p "
            "and work. After backward, wait for each and divide. Then take the hooks back, and "
            "average gradients that no hook has sent.",
        ],
        skeleton="""\
def gradients_at_scale(model, batches, loss_of, group):
    *earlier, last = batches
    for batch in earlier:
        (loss_of(model, batch) / len(batches)).backward()
    under_way = {}

    def leave(p):
        under_way[p] = ...                   # begins, and does not wait

    hooks = [p.register_post_accumulate_grad_hook(leave) for p in ...]
    (loss_of(model, last) / len(batches)).backward()
    for hook in hooks:
        hook.remove()
    for p in model.parameters():
        if p.grad is not None and p not in under_way:
            leave(p)                         # the last micro-batch did not use it
    for p, work in under_way.items():
        ...                                  # wait, divide""",
    ),
]
