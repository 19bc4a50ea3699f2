"""Exercises of lesson 09: copy and its partner all-reduce, column and row linear, the loss.

The judge checks backward's results and messages as well as forward's: a layer with a right output
but wrong gradients is the usual mistake. Numbers are compared in the dtype that was asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from mini_dist.collectives import ops
from mini_dist.model.loss import IGNORE_INDEX, token_loss
from mini_dist.strategies import tensor_parallel as library

from .answers import copy, differentiable_all_reduce, loss_of_cut_logits
from .engine import NO_BARRIER, Exercise, Line, Measured, line, on_ranks, too_few_bytes, yes
from .watch import functions_of

# --- what all exercises with a backward share ---------------------------------------------------


@dataclass(eq=False)
class Seen:
    """A rank's result and its gradients; None for a missing one."""

    y: Tensor | None
    gradients: dict[str, Tensor | None]
    extra: object = None


def seen(y, leaves: dict[str, Tensor], dy: Tensor, extra=None) -> Seen:
    """Run backward from y with dy, if y is a tensor like dy that has a graph."""
    if not isinstance(y, Tensor):
        return Seen(None, dict.fromkeys(leaves), extra)
    gradients = [None] * len(leaves)
    if y.requires_grad and (y.shape, y.dtype) == (dy.shape, dy.dtype):
        gradients = torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True)
    return Seen(y.detach(), dict(zip(leaves, gradients)), extra)


def randoms(seed: int, *shapes, dtype=torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def near(a, b: Tensor, bound: float) -> bool:
    largest = max(1.0, b.abs().max().item()) if b.numel() else 1.0
    return (
        isinstance(a, Tensor)
        and a.shape == b.shape
        and bool(((a - b).abs() <= bound * largest).all())
    )


def same(a, b: Tensor) -> bool:
    """Compare up to the rounding of another order of additions."""
    return near(a, b, torch.finfo(b.dtype).eps ** 0.75) and a.dtype == b.dtype


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


FOLD = 7 / 6  # bytes of a gather by halves on three ranks, as a multiple of the ring's


class WithBackward(Measured):
    """The results of a function and its backward on each rank, and the expected ones.

    `measure` sets wanted (of each rank) and forward and backward, the bytes of all ranks.
    """

    wanted: list[Seen]
    forward = backward = 0

    def lines(self) -> list[Line]:
        return [
            on_ranks("right results on", self.right()),
            *self.more_lines(),
            *(
                on_ranks(f"right gradients of {n} on", self.right(n))
                for n in self.wanted[0].gradients
            ),
            line("barriers", self.barriers, 0),
            self.bytes_line("forward"),
            self.bytes_line("backward"),
        ]

    def more_lines(self) -> list[Line]:
        return []

    def bytes_line(self, phase: str) -> Line:
        sent, wanted = self.sent_in(phase), getattr(self, phase)
        most = wanted * FOLD if self.size == 3 else wanted
        enough = self.least(phase) <= sent <= most
        return Line(f"bytes sent in {phase}, all ranks", sent, wanted, enough)

    def least(self, phase: str) -> int:
        """Return the fewest bytes that a right answer can send."""
        return getattr(self, phase)

    def sent_in(self, phase: str) -> int:
        """Return the bytes that all ranks send in backward, or everywhere else."""
        backward = self.run.ledger.total_bytes(phase="backward")
        return backward if phase == "backward" else self.sent - backward

    def right(self, name: str = "", how=same) -> list[bool]:
        """Return for each rank whether the result is right, or the gradient of `name`."""
        return [
            how(a.gradients[name], b.gradients[name]) if name else how(a.y, b.y)
            for a, b in zip(self.results, self.wanted)
        ]

    def are_right(self, *names: str) -> bool:
        return all(all(self.right(name)) for name in names)

    def times(self, factor: float, name: str = "") -> bool:
        """Return whether every rank has `factor` times the wanted values."""
        return all(self.right(name, lambda a, b: same(a, b * factor)))

    def missing(self, *names: str) -> bool:
        return any(rank.gradients[name] is None for rank in self.results for name in names)

    def mistake(self) -> str:
        return self.common_mistake() or self.own_mistake() or self.mistake_in_bytes()

    def common_mistake(self) -> str:
        """Return the hint for a mistake that can be made in every exercise; else ""."""
        found, wanted = self.results[0].y, self.wanted[0].y
        if any(rank.y is None for rank in self.results):
            return "Return the result: on some rank it is no tensor."
        if self.barriers:
            return NO_BARRIER
        if found.dtype != wanted.dtype:
            return (
                f"The result is {name_of(found.dtype)}, and what came in was "
                f"{name_of(wanted.dtype)}: compute and send in the dtype that was given."
            )
        names = ["", *self.wanted[0].gradients]
        roughly = [self.right(name, lambda a, b: near(a, b, 0.02)) for name in names]
        if all(map(all, roughly)) and not self.are_right(*names):
            return (
                "The first digits are right, the others are not. It looks as if numbers were "
                "rounded on the way instead of being computed and sent in the dtype they came in, "
                f"{name_of(wanted.dtype)}. Or a small term was added that was not asked for."
            )
        return ""

    def own_mistake(self) -> str:
        raise NotImplementedError

    def mistake_in_bytes(self) -> str:
        for phase in ("forward", "backward"):
            if self.sent_in(phase) < getattr(self, phase):
                return too_few_bytes(self.sent_in(phase), getattr(self, phase))
        sent = f"{self.sent_in('forward')} bytes were sent in forward and "
        sent += f"{self.sent_in('backward')} in backward"
        return f"Right, but {sent}: {self.enough}"

    def wrong_shape(self) -> str:
        """Return what is wrong with the first result of another shape; else ""."""
        for found, wanted in zip(self.results, self.wanted):
            if found.y.shape != wanted.y.shape:
                return (
                    f"The result has the shape {list(found.y.shape)} instead of "
                    f"{list(wanted.y.shape)}"
                )
        return ""


# --- column and row linear ----------------------------------------------------------------------

D, F = 12, 24


@dataclass(frozen=True)
class Matrices:
    shape: tuple[int, ...]  # of x, without its features
    with_bias: bool
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        sizes = ", ".join(map(str, [*self.shape, "..."]))
        bias = "with bias" if self.with_bias else "bias=None"
        return f"x [{sizes}] in {name_of(self.dtype)}, {bias}"


LINEARS = [
    (4, Matrices((3,), True)),
    (2, Matrices((2, 3), False, torch.float32)),
    (3, Matrices((), True)),
    (1, Matrices((1, 2), True)),
]


def linear_case(kind: str, case: Matrices, rank: int, size: int):
    """Return this rank's x, weight, bias and dy, and the expected results."""
    inputs, outputs = (D, F) if kind == "column" else (F, D)
    shapes = (*case.shape, inputs), (outputs, inputs), (outputs,), (*case.shape, outputs)
    x, weight, bias, dy = randoms(0, *shapes, dtype=case.dtype)
    whole = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = functional.linear(whole[0], whole[1], whole[2] if case.with_bias else None)
    y.backward(dy)
    dx, dweight, dbias = (t.grad for t in whole)

    def mine(t, dim):
        return None if t is None else t.detach().chunk(size, dim)[rank]

    if kind == "column":
        given = x, mine(weight, 0), mine(bias, 0), mine(dy, -1)
        y, gradients = mine(y, -1), (dx, mine(dweight, 0), mine(dbias, 0))
    else:
        given = mine(x, -1), mine(weight, 1), bias, dy
        y, gradients = y.detach(), (mine(dx, -1), mine(dweight, 1), dbias)
    names = ("x", "weight", "bias")[: 2 + case.with_bias]
    return given, Seen(y, dict(zip(names, gradients)))


def linear_trial(kind: str, fn, case: Matrices, group):
    (x, weight, bias, dy), _ = linear_case(kind, case, group.rank(), group.size())
    leaves = {"x": x.requires_grad_(), "weight": weight.requires_grad_()}
    if case.with_bias:
        leaves["bias"] = bias.requires_grad_()
    return seen(fn(x, weight, leaves.get("bias"), group), leaves, dy)


class Linear(WithBackward):
    kind: str

    def measure(self):
        cases = [linear_case(self.kind, self.case, rank, self.size) for rank in range(self.size)]
        self.biases = [given[2] for given, _ in cases]
        self.wanted = [wanted for _, wanted in cases]
        elements = math.prod(self.case.shape) * D  # of the tensor that is all-reduced
        self.once = 2 * (self.size - 1) * elements * self.case.dtype.itemsize  # an all-reduce

    def plus_bias(self, times: int) -> bool:
        """Return whether the result contains the bias this many times too often."""
        shifted = zip(self.results, self.wanted, self.biases)
        return self.case.with_bias and all(same(a.y - times * b, w.y) for a, w, b in shifted)


class Column(Linear):
    kind = "column"
    enough = "one all-reduce backward is enough. Forward needs none: all ranks have x."

    def measure(self):
        super().measure()
        self.backward = self.once

    def own_mistake(self) -> str:
        if shape := self.wrong_shape():
            return (
                f"{shape}: a rank keeps the outputs of its own rows. Whoever comes next works on "
                "them as they are."
            )
        if self.plus_bias(-1):
            return "The bias is missing: add this rank's piece of it."
        if not self.are_right(""):
            return "The outputs are x @ weight.T + bias of this rank's pieces, nothing else."
        if self.missing("x"):
            return "No gradient reaches x: some function on the way is none that autograd knows."
        if not self.are_right("x"):
            return (
                "The results are right, the gradient of x is not: every rank's outputs depend on "
                "all of x, so its gradient is the sum of what the ranks find. Which of the "
                "operations of ops.py does nothing forward and adds up backward?"
            )
        if not self.are_right(*self.wanted[0].gradients):
            return (
                "The gradients of this rank's weight and bias are its own: nothing is to be "
                "added there."
            )
        return ""


class Row(Linear):
    kind = "row"
    enough = "one all-reduce forward is enough."

    def measure(self):
        super().measure()
        self.forward = self.once

    def own_mistake(self) -> str:
        if shape := self.wrong_shape():
            return f"{shape}: every rank needs the whole sum."
        if self.size > 1 and self.plus_bias(self.size - 1):
            return (
                f"The bias is there {self.size} times: each rank added it to its summand, and then "
                "they were added up. Add it once, after the sum."
            )
        if self.plus_bias(-1):
            return "The bias is missing. Add it after the sum."
        if not self.are_right(""):
            return (
                "Each rank has a part of the inputs, so its product is one summand of the result: "
                "the ranks' products have to be added."
            )
        if self.missing("x"):
            return (
                "The results are right, but no gradient gets through. The collectives of "
                "mini_dist.collectives are not differentiable; those in mini_dist.collectives.ops "
                "are."
            )
        if self.case.with_bias and self.are_right("x") and not self.are_right("bias"):
            return (
                "The bias gets its gradient on some ranks only, so after a step their copies "
                "differ. Every rank adds it, after the sum."
            )
        if not self.are_right(*self.wanted[0].gradients):
            return (
                "The results are right, the gradients are not: what all ranks get alike from the "
                "sum has a gradient that is alike, and each summand's is that, once. Nothing is "
                "added."
            )
        return ""


# --- the pair -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vectors:
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return f"x {list(self.shape)} in {name_of(self.dtype)}"


VECTORS = [
    (4, Vectors((6,))),
    (3, Vectors((2, 5), torch.float32)),
    (2, Vectors((2, 3, 2), torch.bfloat16)),
    (1, Vectors((4,))),
]


def vector_case(kind: str, case: Vectors, rank: int, size: int):
    """Return a rank's x and dy, and the expected results. copy shares x, all_reduce shares dy."""
    xs = randoms(1, *[case.shape] * size, dtype=case.dtype)
    dys = randoms(2, *[case.shape] * size, dtype=case.dtype)
    if kind == "copy":
        return xs[0], dys[rank], Seen(xs[0], {"x": sum(dys)})
    return xs[rank], dys[0], Seen(sum(xs), {"x": dys[0]})


def as_it_comes(x: Tensor) -> Tensor:
    """Copy x; the copy is contiguous only if it has one dim."""
    return x * 1 if x.dim() == 1 else x.transpose(0, -1).contiguous().transpose(0, -1)


def vector_trial(kind: str, fn, case: Vectors, group):
    x, dy, _ = vector_case(kind, case, group.rank(), group.size())
    leaf = x.clone().requires_grad_()
    input = as_it_comes(leaf)  # no leaf, so that an in-place change is possible and is caught
    y = fn(input, group)
    given = as_it_comes(dy)
    found = seen(y, {"x": leaf}, given)
    found.extra = torch.equal(input.detach(), x), torch.equal(given, dy)
    return found


class OneOfAPair(WithBackward):
    kind: str
    enough = "more than one all-reduce takes."

    def measure(self):
        cases = [vector_case(self.kind, self.case, rank, self.size) for rank in range(self.size)]
        self.wanted = [wanted for _, _, wanted in cases]
        self.dys = [dy for _, dy, _ in cases]
        once = 2 * (self.size - 1) * math.prod(self.case.shape) * self.case.dtype.itemsize
        self.forward, self.backward = (0, once) if self.kind == "copy" else (once, 0)

    def more_lines(self):
        inputs, dys = (all(each) for each in zip(*(rank.extra for rank in self.results)))
        return [yes("the inputs are untouched", inputs), yes("the dy are untouched", dys)]

    def own_mistake(self) -> str:
        if not all(rank.extra[0] for rank in self.results):
            return (
                "The function wrote into its input. Autograd may have saved that tensor for the "
                "backward of whatever made it: gradients go wrong without a word. Return a new "
                "tensor."
            )
        if not self.are_right(""):
            return self.in_forward
        if self.missing("x"):
            return (
                "No gradient comes back. Write a torch.autograd.Function with forward and "
                "backward, and call its apply(...): the collectives alone end the graph."
            )
        if not all(rank.extra[1] for rank in self.results):
            return (
                "Backward wrote into dy. Others may get the same tensor as their gradient: return "
                "a new one."
            )
        if self.are_right("x"):
            return ""
        if hint := self.in_backward():
            return hint
        if self.times(1 / self.size, "x"):
            return "The gradient of x is divided by the number of ranks: nothing here is a mean."
        return "Forward is right. Backward is the partner: of copy all_reduce, and of that copy."

    def in_backward(self) -> str:
        raise NotImplementedError


class Copy(OneOfAPair):
    kind = "copy"
    in_forward = "copy changes nothing in forward: it returns x as it is."

    def in_backward(self) -> str:
        if not all(same(rank.gradients["x"], dy) for rank, dy in zip(self.results, self.dys)):
            return ""
        return (
            "Each rank has its own dy as its gradient. x went to all ranks, each used it in its "
            "own way, so its gradient is the sum of all their dy."
        )


class AllReduce(OneOfAPair):
    kind = "differentiable_all_reduce"
    in_forward = "The result is the sum of all ranks' x, on every rank."

    def in_backward(self) -> str:
        if not self.times(self.size, "x"):
            return ""
        return (
            f"The gradient is {self.size} times too large. The ranks' dy is one and the same "
            "gradient, of one sum that all of them hold; adding it up counts it once a rank."
        )


# --- the loss -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Logits:
    shape: tuple[int, ...]  # of the targets
    vocab: int
    dtype: torch.dtype = torch.float64
    large: bool = False

    def __str__(self) -> str:
        tokens = f"{math.prod(self.shape)} tokens {list(self.shape)}"
        words = f"{tokens}, {self.vocab} logits each in {name_of(self.dtype)}"
        return words + ", some of 1000 and more" * self.large


LOSSES = [
    (4, Logits((2, 3), 40)),
    (2, Logits((2, 1, 3), 40, large=True)),
    (3, Logits((7,), 9, torch.float32)),
    (2, Logits((3,), 6, torch.float32, large=True)),
    (1, Logits((2, 3), 8)),
]


def loss_case(case: Logits, size: int):
    """Return all logits, and targets: two at the edges of a rank's shard, one that is ignored."""
    (logits,) = randoms(3, (*case.shape, case.vocab), dtype=case.dtype)
    logits = logits * 700 if case.large else logits
    generator = torch.Generator().manual_seed(4)
    targets = torch.randint(0, case.vocab, (math.prod(case.shape),), generator=generator)
    targets[0], targets[1] = case.vocab // size - 1, IGNORE_INDEX
    targets[2] = case.vocab - case.vocab // size  # the last rank's first word
    return logits, targets.view(case.shape)


def loss_trial(fn, case: Logits, group):
    logits, targets = loss_case(case, group.size())
    mine = logits.chunk(group.size(), -1)[group.rank()].requires_grad_()
    loss = fn(mine, targets, group)
    total, count = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
    if isinstance(count, Tensor) and count.numel() == 1:
        count = count.item()
    return seen(total, {"logits": mine}, torch.ones((), dtype=case.dtype), count)


class Loss(WithBackward):
    enough = "none is needed in backward."

    def measure(self):
        logits, targets = loss_case(self.case, self.size)
        self.total, count = token_loss(logits.requires_grad_(), targets)
        self.total.backward()
        self.count, self.total = int(count), self.total.detach()
        chunks = logits.grad.chunk(self.size, -1)
        self.wanted = [Seen(self.total, {"logits": chunk}) for chunk in chunks]
        self.counts = [rank.extra for rank in self.results]
        self.forward = 2 * (self.size - 1) * 3 * targets.numel() * self.case.dtype.itemsize

    def least(self, phase: str) -> int:
        """Return the fewest bytes: tokens that do not count need no message."""
        all_tokens = math.prod(self.case.shape)
        return getattr(self, phase) * self.count // all_tokens

    def more_lines(self):
        wrong = [n for n in self.counts if n != self.count]
        return [line("tokens that count", (wrong or self.counts)[0], self.count)]

    def common_mistake(self) -> str:
        if not all(isinstance(n, (int, float)) for n in self.counts):
            return "Return TokenLoss(total, num_tokens): the sum of the losses, and how many."
        return super().common_mistake()

    def own_mistake(self) -> str:
        if not all(bool(rank.y.isfinite().all()) for rank in self.results):
            return (
                "With large logits exp overflows. Subtract the largest logit first, and it must be "
                "the largest of all ranks."
            )
        if set(self.counts) == {self.size * self.count} and self.size > 1:
            return (
                "The tokens are counted once a rank: all ranks have the same targets, so each "
                "counts them all by itself."
            )
        if min(self.counts) > self.count:
            return "Targets of IGNORE_INDEX do not count."
        if set(self.counts) != {self.count}:
            return "Too few tokens count: every target counts but IGNORE_INDEX, word 0 as well."
        if shape := self.wrong_shape():
            return f"{shape}: it is the sum of the losses that count, one number."
        if not self.are_right(""):
            return self.wrong_total()
        if self.sent_in("forward") > self.forward:
            return (
                f"Right, but {self.sent_in('forward')} bytes were sent: more than three numbers a "
                "token. Do not gather logits; a maximum, a sum and the target's logit are enough."
            )
        if not self.are_right("logits"):
            return (
                "The loss is right, its gradient is not: a sum over ranks has to be one that "
                "autograd knows (ops.all_reduce). Only the maximum needs no gradient."
            )
        if self.sent_in("forward") < self.least("forward"):
            return (
                "Right for these small logits, but fewer than three numbers per token were sent. "
                "The largest logit of all ranks has to be one of them: without it exp overflows "
                "for large logits."
            )
        return ""

    def wrong_total(self) -> str:
        if self.times(1 / self.count):
            return "That is the mean. Return the sum: whoever adds up ranks divides later."
        if not all(same(rank.y, self.results[0].y) for rank in self.results):
            return (
                "The ranks have different losses. Each needs all ranks' sum of exp, and the logit "
                "of the target, which one rank has: the others contribute 0."
            )
        return (
            "The loss of a token is log(sum of exp over the whole vocabulary) minus the logit of "
            "its target. If the ranks subtract different maxima, their sums do not fit together."
        )


# ------------------------------------------------------------------------------------------------

LIBRARY = functions_of(library)
# Each of copy and all_reduce may use the other one.
REFUSED = functions_of(ops) - {ops.copy, ops.all_reduce}
CLASSES = [ops.Copy.forward, ops.AllReduce.forward]

EXERCISES = [
    Exercise(
        "column_linear",
        library.column_linear,
        partial(linear_trial, "column"),
        LINEARS,
        Column,
        hints=[
            "Forward, there is nothing to send: all ranks have x, each computes its own outputs.",
            "Backward, each rank finds a part of the gradient of x. One operation of ops.py does "
            "nothing forward and adds up backward; put x through it.",
        ],
        skeleton="""\
def column_linear(x, weight, bias, group):
    x = ...  # the operation of ops.py that adds up backward
    return torch.nn.functional.linear(x, weight, bias)""",
        refuses=LIBRARY,
    ),
    Exercise(
        "row_linear",
        library.row_linear,
        partial(linear_trial, "row"),
        LINEARS,
        Row,
        hints=[
            "The product of this rank's inputs and weights is one summand of the result.",
            "ops.all_reduce adds them up and is differentiable. Where does the bias go?",
        ],
        skeleton="""\
def row_linear(x, weight, bias, group):
    y = ...  # the sum over ranks of this rank's product
    return ...  # with the bias, if there is one""",
        refuses=LIBRARY,
    ),
    Exercise(
        "copy",
        ops.copy,
        partial(vector_trial, "copy"),
        VECTORS,
        Copy,
        hints=[
            "Write a torch.autograd.Function. What each rank does with its copy comes back as its "
            "own dy.",
            "backward(ctx, dy) returns all_reduce(dy, group).",
        ],
        skeleton="""\
def copy(x, group):
    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return ...

        @staticmethod
        def backward(ctx, dy):
            return ..., None  # the second one for the group

    return Copy.apply(x, group)""",
        refuses=[*REFUSED, *CLASSES],
        answer=(copy,),
    ),
    Exercise(
        "differentiable_all_reduce",
        ops.all_reduce,
        partial(vector_trial, "differentiable_all_reduce"),
        VECTORS,
        AllReduce,
        hints=[
            "y = x_0 + x_1 + ...: by how much does y change if only x_0 changes by 1?",
            "All ranks hold one y and go on alike, so their dy is one gradient, not a part each.",
        ],
        skeleton="""\
def differentiable_all_reduce(x, group):
    class AllReduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return ...

        @staticmethod
        def backward(ctx, dy):
            return ..., None  # the second one for the group

    return AllReduce.apply(x, group)""",
        refuses=[*REFUSED, *CLASSES],
        answer=(differentiable_all_reduce,),
    ),
    Exercise(
        "vocab_parallel_cross_entropy",
        library.vocab_parallel_cross_entropy,
        loss_trial,
        LOSSES,
        Loss,
        hints=[
            "loss = log(sum of exp(logit)) - logit of the target, per token. The sum runs over all "
            "ranks' logits, and one rank has the target's.",
            "Three numbers per token travel: the largest logit (all_reduce with op='max', without "
            "gradient), the sum of exp, and the target's logit or 0 (ops.all_reduce, both in one).",
        ],
        skeleton="""\
def vocab_parallel_cross_entropy(logits, targets, group):
    highest = ...  # [...], the largest of all ranks' logits, without gradient
    mine = ...  # [...] bool: is the target one of this rank's logits?
    at_target = ...  # its logit minus the highest, 0 where it is another rank's
    exp_sum, at_target = ...  # both summed over the ranks
    loss = exp_sum.log() - at_target
    counts = targets != IGNORE_INDEX
    return TokenLoss(loss[counts].sum(), counts.sum())""",
        refuses=LIBRARY - {library.ideas.find_rows},
        answer=(loss_of_cut_logits,),
    ),
]
