"""Exercise of lesson 06: a block that keeps its input, and makes the rest again in backward.

Right gradients are not enough: a block that keeps everything has them, too. So what is kept is
judged, by autograd and by whoever holds on to what the block has computed, how often the block ran,
and where the random numbers are afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from .. import recompute
from ..recompute import SavedBytes, recomputed
from .exercise import Exercise, Line, Trial, calls_of


@dataclass(frozen=True)
class Dropout:
    p: float

    def __str__(self) -> str:
        return f"dropout {self.p}" if self.p else "no dropout"


@dataclass
class Seen:
    """What one forward and backward left behind."""

    out: Tensor
    gradients: list[Tensor | None]  # of the input's leaf, then of the parameters
    next_draw: float  # the first random number that is drawn afterwards
    kept: int  # bytes that autograd holds between forward and backward
    inside: int  # outputs inside the block that are still there then
    runs: tuple[int, int]  # of the block, in forward and in backward
    used: set[str]  # functions that did the work instead


def seen(fn: Callable, p: float) -> Seen:
    """Run fn(block, x) with these dice; the x has a graph behind it, as a block's has."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(p), nn.Linear(256, 64))
    leaf = torch.randn(32, 64, requires_grad=True)
    x = 2 * leaf
    runs, inside = [0], []
    block.register_forward_pre_hook(lambda *_: runs.__setitem__(0, runs[0] + 1))
    for layer in block[:-1]:
        layer.register_forward_hook(
            lambda _, __, out: inside.append(weakref.ref(out.untyped_storage()))
        )
    with (
        SavedBytes(block) as saved,
        calls_of({"recomputed"}, recompute) as ours,
        calls_of({"checkpoint"}, torch.utils.checkpoint) as theirs,
    ):
        out = fn(block, x)
        alive = {storage.data_ptr() for ref in inside if (storage := ref()) is not None}
        kept, held, in_forward = saved.now, len(alive), runs[0]
    torch.rand(())  # as the next block would
    out.square().sum().backward()
    gradients = [leaf.grad, *(parameter.grad for parameter in block.parameters())]
    return Seen(
        out.detach(),
        gradients,
        torch.rand(()).item(),
        kept,
        held,
        (in_forward, runs[0] - in_forward),
        ours | theirs,
    )


def trial(fn: Callable, case: Dropout, group) -> tuple[Seen, Seen]:
    return seen(fn, case.p), seen(lambda block, x: block(x), case.p)


INPUT = 4 * 32 * 64  # bytes of x


def judge(trials: list[Trial]) -> tuple[list[Line], str]:
    lines: list[Line] = []
    for trial_ in trials:
        found, plain = trial_.run.results[0]
        room = INPUT + len(torch.get_rng_state())  # the state of the dice may be saved like x
        new = [
            Line(f"{trial_.case}: same output", *yes(same([found.out], [plain.out]))),
            Line("bytes that autograd keeps", found.kept, f"<= {room}", found.kept <= room),
            Line("tensors inside the block still held", found.inside, 0, not found.inside),
            Line("runs in forward, in backward", found.runs, (1, 1), found.runs == (1, 1)),
            Line("same gradients", *yes(same(found.gradients, plain.gradients))),
            Line("same random numbers afterwards", *yes(found.next_draw == plain.next_draw)),
        ]
        lines += [line for line in new if trial_ is trials[0] or not line.ok]
        if not all(line.ok for line in new):
            return lines, mistake(found, plain, room)
    return lines, ""


def yes(ok: bool) -> tuple[str, str, bool]:
    return "yes" if ok else "no", "yes", ok


def same(found: list[Tensor | None], expected: list[Tensor]) -> bool:
    """To the last bit: the same numbers are computed from the same inputs."""
    return all(a is not None and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def mistake(found: Seen, plain: Seen, room: int) -> str:
    if not same([found.out], [plain.out]):
        return (
            "Another output than block(x): forward is as it always was, with the random numbers "
            "that come next."
        )
    if found.kept > room or found.inside:
        return (
            f"{found.kept:,} bytes are kept for backward where the input's {INPUT:,} do, and "
            f"tensors from inside the block that live on: {found.inside}. Autograd keeps nothing "
            "inside a Function's forward, unless enable_grad tells it to or you put it into ctx."
        )
    if found.runs != (1, 1):
        return f"The block ran {found.runs[0]} times in forward and {found.runs[1]} in backward."
    if any(gradient is None for gradient in found.gradients[1:]):
        return (
            "The block's parameters have no gradient. out.backward(grad) gives it to them; "
            "torch.autograd.grad(out, x, grad) only to x."
        )
    if not same(found.gradients, plain.gradients):
        return (
            "Wrong gradients. In backward: cut x off from the graph before it (detach, then "
            "requires_grad_), return its gradient, and throw the same dice as in forward: "
            "torch.get_rng_state() there, torch.set_rng_state(...) here."
        )
    return (
        "Right gradients, but afterwards other random numbers are drawn than without "
        "recomputation: perhaps those of forward once more. torch.random.fork_rng() puts the dice "
        "back where they were, and no seed is to be set."
    )


class OneDeviceExercise(Exercise):
    def used(self, trials: list[Trial]) -> set[str]:
        return set().union(*(trial_.run.results[0][0].used for trial_ in trials))


EXERCISES = [
    OneDeviceExercise(
        "forget_and_repeat",
        recomputed,
        trial,
        [(1, Dropout(0.0)), (1, Dropout(0.5))],
        judge,
        hints=[
            "Forgetful is nearly right: with dropout its second run is another than its first. "
            "What would the second have to know?",
            "In forward: ctx.dice = torch.get_rng_state(), before block(x). In backward: with "
            "torch.random.fork_rng(): torch.set_rng_state(ctx.dice), and the block once more.",
        ],
        skeleton="""\
class Careful(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x):
        ...                                   # remember block, x and the dice
        return block(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), ...:        # as if nothing had been drawn, afterwards
            ...
            out = ctx.block(x)
        out.backward(grad)
        return None, x.grad

def forget_and_repeat(block, x):
    return Careful.apply(block, x)""",
    )
]
