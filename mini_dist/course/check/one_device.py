"""Exercise of lesson 06: a block that saves only its input, and recomputes the rest in backward.

Right gradients are not enough: a block that saves everything has them as well. So the judge checks
what is still saved, by autograd or by anything else, how often the block ran, and the state of the
random numbers afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mini_dist.model import recompute
from mini_dist.model.recompute import SavedBytes, recomputed

from .engine import Exercise, Line, Measured, line, yes
from .measures import Alive, close, referred_to
from .watch import functions_of
from .zero import at_most


@dataclass(frozen=True)
class Block:
    """p: dropout probability. times: how many copies of the block are applied in sequence."""

    p: float
    shape: tuple[int, ...] = (32, 64)
    dtype: torch.dtype = torch.float32
    times: int = 1

    def __str__(self) -> str:
        special = f", the same block {self.times} times" * (self.times > 1)
        special += f", {self.dtype}" * (self.dtype != torch.float32)
        return (f"dropout {self.p}" if self.p else "no dropout") + special

    @property
    def input_bytes(self) -> int:
        return torch.zeros(self.shape, dtype=self.dtype).nbytes


@dataclass(eq=False)
class Seen:
    """What one forward and backward left behind."""

    out: Tensor
    gradients: list[Tensor | None]  # of the input's leaf, then of the parameters
    added: list[Tensor | None]  # the same of a second pass, added to the first's
    next_draw: float  # the first random number that is drawn afterwards
    kept: int  # bytes that autograd holds between forward and backward
    held: int  # bytes made in forward that still exist then, without the output
    inside: int  # outputs inside the block that still exist then
    output_held: bool  # whether the output still exists when its caller has let go of it
    runs: tuple[int, int]  # of the block, in forward and in backward


def seen(fn: Callable, case: Block) -> Seen:
    """Run fn(block, x) from a fixed seed. As in a model, x is the output of earlier operations."""
    torch.manual_seed(0)
    layers = nn.Linear(64, 256), nn.GELU(), nn.Dropout(case.p), nn.Linear(256, 64)
    block = nn.Sequential(*layers).to(case.dtype)
    leaf = torch.randn(case.shape, dtype=case.dtype).requires_grad_()
    x = 2 * leaf
    runs, inside = [0], []
    block.register_forward_pre_hook(lambda *_: runs.__setitem__(0, runs[0] + 1))

    def note(_, __, out):
        with suppress(NotImplementedError):  # inside torch.func, a tensor has no memory
            inside.append(weakref.ref(out.untyped_storage()))

    for layer in block[:-1]:
        layer.register_forward_hook(note)
    with SavedBytes(block) as saved, Alive() as alive:
        out = x
        for _ in range(case.times):
            out = fn(block, out)
        there = [storage for ref in inside if (storage := referred_to(ref)) is not None]
        places = {storage.data_ptr() for storage in there}
        del there
        kept, in_forward = saved.now, runs[0]
    result = out.detach().clone()
    loss = (out * torch.linspace(-1, 1, out.shape[-1], dtype=case.dtype)).sum()  # forgets out
    output = weakref.ref(out.untyped_storage())
    del out
    held, output_held = alive.nbytes(), referred_to(output) is not None
    torch.rand(())  # the next block draws as well
    wanted = [leaf, *block.parameters()]
    loss.backward()
    gradients = [None if each.grad is None else each.grad.clone() for each in wanted]
    in_backward, next_draw = runs[0] - in_forward, torch.rand(()).item()
    again = x.detach().requires_grad_()  # a second pass, which adds to .grad
    torch.manual_seed(1)
    out_again = again
    for _ in range(case.times):
        out_again = fn(block, out_again)
    out_again.square().sum().backward()
    added = [again.grad, *(parameter.grad for parameter in block.parameters())]
    found = result, gradients, added, next_draw
    return Seen(*found, kept, held, len(places), output_held, (in_forward, in_backward))


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def trial(fn: Callable, case: Block, group) -> Seen:
    return seen(fn, case)


def same(found: list[Tensor | None], expected: list[Tensor]) -> bool:
    """Compare up to rounding, because a right answer may add in another order."""
    return len(found) == len(expected) and all(
        a is None if b is None else close(a, b, 4 * b.abs().max().item())
        for a, b in zip(found, expected)
    )


class Forgetting(Measured):
    def measure(self):
        self.expected, self.found = seen(plain, self.case), self.results[0]
        dice = len(torch.get_rng_state())  # a random state may be saved like x
        self.room = self.case.times * (self.case.input_bytes + dice)
        # The output of one block is the input of the next one, so it has to exist.
        self.room_held = self.room + (self.case.times - 1) * self.case.input_bytes

    def lines(self) -> list[Line]:
        found, expected, once = self.found, self.expected, (self.case.times,) * 2
        return [
            yes(f"{self.case}: same output", same([found.out], [expected.out])),
            at_most("bytes that autograd keeps", found.kept, self.room),
            at_most("bytes made in forward that are held", found.held, self.room_held),
            line("tensors inside the block still held", found.inside, 0),
            line("outputs still held", int(found.output_held), 0),
            line("runs in forward, in backward", found.runs, once),
            yes("same gradients", same(found.gradients, expected.gradients)),
            yes("added to existing gradients", same(found.added, expected.added)),
            yes("same random numbers afterwards", found.next_draw == expected.next_draw),
        ]

    def mistake(self) -> str:
        found, expected, times = self.found, self.expected, self.case.times
        if not same([found.out], [expected.out]):
            return (
                "The output is not block(x): forward must stay the same, with the next random "
                "numbers."
            )
        if found.kept > self.room or found.inside:
            return (
                f"{found.kept:,} bytes are kept for backward where the input's "
                f"{times * self.case.input_bytes:,} do, and tensors from inside the block that "
                f"live on: {found.inside}. Autograd keeps nothing inside a Function's forward, "
                "unless enable_grad tells it to or you put it into ctx."
            )
        if found.held > self.room_held:
            return (
                f"{found.held:,} bytes made in forward still exist when it is "
                "over: in ctx, in a list, as a copy. The input and the random state are enough."
            )
        if found.output_held:
            return (
                "The output still exists after its caller has let go of it: something of yours "
                "holds it until backward. The input and the random state are enough."
            )
        if found.runs != (times, times):
            return (
                f"The block ran {found.runs[0]} times in forward and {found.runs[1]} in backward."
            )
        if any(gradient is None for gradient in found.gradients[1:]):
            return (
                "The block's parameters have no gradient. out.backward(grad) gives it to them; "
                "torch.autograd.grad(out, x, grad) only to x."
            )
        if not same(found.gradients, expected.gradients):
            shared = " Each use of a block must save its own state." * (times > 1)
            return (
                "Wrong gradients. In backward: cut x off from the graph before it (detach, then "
                "requires_grad_), return its gradient, and draw the same random numbers: "
                f"torch.get_rng_state() there, torch.set_rng_state(...) here.{shared}"
            )
        if not same(found.added, expected.added):
            return (
                "Earlier gradients are gone: other micro-batches, or another use "
                "of the block, have put them into .grad. Add to it, as out.backward(grad) does."
            )
        return (
            "Right gradients, but afterwards the random numbers differ from those without "
            "recomputation: perhaps forward's numbers once more. torch.random.fork_rng() puts the "
            "random state back; do not set a seed."
        )


EXERCISES = [
    Exercise(
        "forget_and_repeat",
        recomputed,
        trial,
        [
            (1, Block(0.0)),
            (1, Block(0.5)),
            (1, Block(0.5, (5, 64))),
            (1, Block(0.5, (4, 8, 64), times=2)),
            (1, Block(0.1, (3, 64), torch.float64)),
        ],
        Forgetting,
        refuses=functions_of(recompute) | {recompute.Recompute.forward, checkpoint},
        again=False,
        hints=[
            "Forgetful is nearly right: with dropout its second run differs from its first. "
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
        answer=(recompute.forget_and_repeat,),
    )
]
