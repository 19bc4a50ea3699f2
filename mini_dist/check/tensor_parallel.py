"""Exercises of lessons 09 (column and row linear, the pair, parallel loss) and 10 (the swap)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .. import collectives, ops
from .. import tensor_parallel as library
from ..ledger.recording import recorded
from ..model import IGNORE_INDEX, TokenLoss, token_loss
from .exercise import Exercise, Line, Trial

ITEM = 8  # bytes of a float64
PARTS = frozenset(collectives.__all__)  # a solution may use any collective, as ops.py does


@recorded
def sequence_parallel_mlp(x, norm, up, down, bias, group):
    """norm -> up -> GELU -> down of x [B, S/t, D], of which each rank has its part of the sequence.

    up [F/t, D] and down [D, F/t] are this rank's pieces, norm and bias [D] whole on every rank.
    This is what ParallelMLP does with pair=SEQUENCE, between the norm and the residual sum.
    """
    entered = ops.all_gather(norm(x), group, dim=1)  # [B, S, D]
    hidden = functional.gelu(functional.linear(entered, up))  # [B, S, F/t]
    return ops.reduce_scatter(functional.linear(hidden, down), group, dim=1) + bias


def mark(module, name: str) -> None:
    """In this rank, let calls of the library's own answer show in the ledger."""
    setattr(module, name, recorded(getattr(module, name)))


# --- what all trials return --------------------------------------------------------------------


@dataclass
class Seen:
    """A rank's result and what backward left; None for what was not there."""

    y: Tensor | None
    gradients: dict[str, Tensor | None]
    untouched: bool = True
    extra: object = None


def run_backward(y, leaves: dict[str, Tensor], dy: Tensor) -> dict[str, Tensor | None]:
    if not isinstance(y, Tensor) or not y.requires_grad or y.shape != dy.shape:
        return dict.fromkeys(leaves)
    found = torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True)
    return dict(zip(leaves, found))


def seen(y, leaves: dict[str, Tensor], dy: Tensor, before: dict[str, Tensor], extra=None) -> Seen:
    gradients = run_backward(y, leaves, dy)
    untouched = all(torch.equal(leaf.detach(), before[name]) for name, leaf in leaves.items())
    return Seen(y.detach() if isinstance(y, Tensor) else None, gradients, untouched, extra)


def same(mine, wanted: Tensor) -> bool:
    """In float64: sums in another order may differ in the last digits."""
    return (
        isinstance(mine, Tensor)
        and (mine.shape, mine.dtype) == (wanted.shape, wanted.dtype)
        and torch.allclose(mine, wanted, rtol=1e-9, atol=1e-9)
    )


def sent(run, phase: str) -> int:
    """Bytes, all ranks together: in backward, or everywhere else."""
    backward = run.ledger.total_bytes(phase="backward")
    return backward if phase == "backward" else run.ledger.total_bytes() - backward


def count(oks: list[bool]) -> str:
    return f"{sum(oks)} of {len(oks)} ranks"


def randoms(seed: int, *shapes) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def judge_with(judge_one: Callable) -> Callable:
    """All trials in turn; of the first the numbers are shown, of the others the mistakes."""

    def judge(trials: list[Trial]) -> tuple[list[Line], str]:
        lines, hint = [], ""
        for number, one in enumerate(trials):
            found, found_hint = judge_one(one)
            lines += [line for line in found if number == 0 or not line.ok]
            if found_hint and not hint:
                before = f"Right with {trials[0].run.world_size} ranks, not with"
                hint = f"{before} {one.run.world_size}. " * (number > 0) + found_hint
        return lines, hint

    return judge


def results_and_gradients(one: Trial, wanted: list[Seen], forward: int, backward: int):
    """The lines that all exercises with a gradient share."""
    size = one.run.world_size
    right = [same(mine.y, w.y) for mine, w in zip(one.run.results, wanted)]
    lines = [Line("right results on", count(right), count([True] * size), all(right))]
    for name in wanted[0].gradients:
        right = [
            same(mine.gradients[name], w.gradients[name])
            for mine, w in zip(one.run.results, wanted)
        ]
        what = f"right gradients of {name} on"
        lines.append(Line(what, count(right), count([True] * size), all(right)))
    native = sorted({c.op for c in one.run.ledger.leaves() if c.op not in ("send", "recv")})
    untouched = all(mine.untouched for mine in one.run.results)
    lines += [
        Line("the inputs are untouched", untouched, True, untouched),
        Line("calls of the backend's collectives", ", ".join(native) or "none", "none", not native),
    ]
    for phase, expected in (("forward", forward), ("backward", backward)):
        bytes_sent = sent(one.run, phase)
        what = f"bytes sent in {phase}, all ranks"
        lines.append(Line(what, bytes_sent, expected, bytes_sent == expected))
    return lines


def common_mistake(one: Trial, lines: list[Line]) -> str:
    """What can go wrong in any of them."""
    results, ok = one.run.results, {line.what: line.ok for line in lines}
    if any(mine.y is None for mine in results):
        return "Return the result: on some rank it is no tensor."
    if not ok["calls of the backend's collectives"]:
        return (
            "Use mini_dist.ops and mini_dist.collectives: the backend's own calls are no exercise."
        )
    if not ok["the inputs are untouched"]:
        return (
            "The function wrote into its input. Autograd may have saved that tensor for the "
            "backward of whatever made it: gradients go wrong without a word. Return a new tensor."
        )
    return ""


# --- lesson 09: column and row linear ----------------------------------------------------------


@dataclass(frozen=True)
class Matrices:
    with_bias: bool

    def __str__(self) -> str:
        return "x [3, 12], a weight [24, 12] or [12, 24], " + (
            "with bias" if self.with_bias else "bias=None"
        )


LINEARS = [(4, Matrices(True)), (2, Matrices(False)), (3, Matrices(True)), (1, Matrices(True))]


def linear_case(kind: str, case: Matrices, rank: int, size: int):
    """This rank's x, weight, bias and dy, and what should come out."""
    D, F = 12, 24
    inputs, outputs = (D, F) if kind == "column" else (F, D)
    x, weight, bias, dy = randoms(0, (3, inputs), (outputs, inputs), (outputs,), (3, outputs))
    whole = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = functional.linear(whole[0], whole[1], whole[2] if case.with_bias else None)
    y.backward(dy)
    dx, dweight, dbias = (t.grad for t in whole)
    y = y.detach()

    def mine(t, dim):
        return t.chunk(size, dim)[rank].contiguous()

    if kind == "column":
        given = x, mine(weight, 0), mine(bias, 0), mine(dy, -1)
        y, gradients = mine(y, -1), (dx, mine(dweight, 0), case.with_bias and mine(dbias, 0))
    else:
        given = mine(x, -1), mine(weight, 1), bias, dy
        gradients = (mine(dx, -1), mine(dweight, 1), dbias)
    names = ("x", "weight", "bias") if case.with_bias else ("x", "weight")
    return given, Seen(y, dict(zip(names, gradients)))


def linear_trial(kind: str) -> Callable:
    def trial(fn: Callable, case: Matrices, group):
        mark(library, f"{kind}_linear")
        (x, weight, bias, dy), _ = linear_case(kind, case, group.rank(), group.size())
        before = {"x": x.clone(), "weight": weight.clone(), "bias": bias.clone()}
        leaves = {"x": x.requires_grad_(), "weight": weight.requires_grad_()}
        if case.with_bias:
            leaves["bias"] = bias.requires_grad_()
        y = fn(x, weight, bias if case.with_bias else None, group)
        return seen(y, leaves, dy, before)

    return trial


def judge_column(one: Trial) -> tuple[list[Line], str]:
    size, case = one.run.world_size, one.case
    wanted = [linear_case("column", case, rank, size)[1] for rank in range(size)]
    lines = results_and_gradients(one, wanted, 0, 2 * (size - 1) * 3 * 12 * ITEM)
    if all(line.ok for line in lines):
        return lines, ""
    results, ok = one.run.results, {line.what: line.ok for line in lines}
    if hint := common_mistake(one, lines):
        return lines, hint
    shape = list(wanted[0].y.shape)
    if any(mine.y.shape != w.y.shape for mine, w in zip(results, wanted)):
        return lines, (
            f"The result has the shape {list(results[0].y.shape)} instead of {shape}: a rank keeps "
            "the outputs of its own rows. Whoever comes next works on them as they are."
        )
    if not ok["right results on"]:
        biased = case.with_bias and all(
            same(mine.y + linear_case("column", case, r, size)[0][2], wanted[r].y)
            for r, mine in enumerate(results)
        )
        return lines, (
            "The bias is missing: add this rank's piece of it."
            if biased
            else "The outputs are x @ weight.T + bias of this rank's pieces, nothing else."
        )
    if any(mine.gradients["x"] is None for mine in results):
        return (
            lines,
            "No gradient reaches x: some function on the way is none that autograd knows.",
        )
    if not ok["right gradients of x on"]:
        return lines, (
            "The results are right, the gradient of x is not: every rank's outputs depend on all "
            "of x, so its gradient is the sum of what the ranks find. Which of the operations of "
            "ops.py does nothing forward and adds up backward?"
        )
    if not ok["right gradients of weight on"]:
        return lines, "The gradient of this rank's weight is its own: nothing is to be added there."
    return lines, (
        f"Right, but {sent(one.run, 'forward')} bytes were sent in forward and "
        f"{sent(one.run, 'backward')} in backward. Forward needs none: all ranks have x."
    )


def judge_row(one: Trial) -> tuple[list[Line], str]:
    size, case = one.run.world_size, one.case
    wanted = [linear_case("row", case, rank, size)[1] for rank in range(size)]
    lines = results_and_gradients(one, wanted, 2 * (size - 1) * 3 * 12 * ITEM, 0)
    if all(line.ok for line in lines):
        return lines, ""
    results, ok = one.run.results, {line.what: line.ok for line in lines}
    if hint := common_mistake(one, lines):
        return lines, hint
    bias = linear_case("row", case, 0, size)[0][2]
    if any(mine.y.shape != w.y.shape for mine, w in zip(results, wanted)):
        return lines, (
            f"The result has the shape {list(results[0].y.shape)} instead of "
            f"{list(wanted[0].y.shape)}: every rank needs the whole sum."
        )
    if not ok["right results on"]:
        for times in (0, size):
            off = (times - 1) * bias
            if case.with_bias and all(same(m.y - off, w.y) for m, w in zip(results, wanted)):
                return lines, (
                    f"The bias is there {size} times: each rank added it to its summand, and then "
                    "they were added up. Add it once, after the sum."
                    if times
                    else "The bias is missing. Add it after the sum."
                )
        return lines, (
            "Each rank has a part of the inputs, so its product is one summand of the result: the "
            "ranks' products have to be added."
        )
    if any(mine.gradients["x"] is None for mine in results):
        return lines, (
            "The results are right, but no gradient gets through. The collectives of "
            "mini_dist.collectives are not differentiable; those of mini_dist.ops are."
        )
    if case.with_bias and not ok["right gradients of bias on"] and ok["right gradients of x on"]:
        return lines, (
            "The bias gets its gradient on some ranks only, so after a step their copies differ. "
            "Every rank adds it, after the sum."
        )
    if not ok["right gradients of x on"]:
        return lines, (
            "The results are right, the gradients are not: what all ranks get alike from the sum "
            "has a gradient that is alike, and each summand's is that, once. Nothing is added."
        )
    return lines, (
        f"Right, but {sent(one.run, 'forward')} bytes were sent in forward and "
        f"{sent(one.run, 'backward')} in backward: one all-reduce forward is enough."
    )


# --- lesson 09: the pair -----------------------------------------------------------------------


@dataclass(frozen=True)
class Vectors:
    length: int

    def __str__(self) -> str:
        return f"{self.length} numbers"


VECTORS = [(4, Vectors(6)), (3, Vectors(5)), (1, Vectors(4))]


def vector_case(kind: str, case: Vectors, rank: int, size: int):
    """x and dy of each rank: alike where the pair takes them so."""
    xs = randoms(1, *[(case.length,)] * size)
    dys = randoms(2, *[(case.length,)] * size)
    if kind == "copy":
        return xs[0], dys[rank], Seen(xs[0], {"x": sum(dys)})
    return xs[rank], dys[0], Seen(sum(xs), {"x": dys[0]})


def vector_trial(kind: str) -> Callable:
    def trial(fn: Callable, case: Vectors, group):
        mark(ops, kind)
        x, dy, _ = vector_case(kind, case, group.rank(), group.size())
        leaf = x.clone().requires_grad_()
        input = leaf * 1  # no leaf: an in-place change is possible, and what we want to catch
        y = fn(input, group)
        found = seen(y, {"x": leaf}, dy, {"x": x})
        found.untouched = torch.equal(input.detach(), x)
        return found

    return trial


def judge_pair(kind: str) -> Callable:
    def judge_one(one: Trial) -> tuple[list[Line], str]:
        size = one.run.world_size
        cases = [vector_case(kind, one.case, rank, size) for rank in range(size)]
        wanted = [w for _, _, w in cases]
        both = 2 * (size - 1) * one.case.length * ITEM
        lines = results_and_gradients(
            one, wanted, 0 if kind == "copy" else both, both if kind == "copy" else 0
        )
        if all(line.ok for line in lines):
            return lines, ""
        results, ok = one.run.results, {line.what: line.ok for line in lines}
        if hint := common_mistake(one, lines):
            return lines, hint
        if not ok["right results on"]:
            return lines, (
                "copy changes nothing in forward: it returns x as it is."
                if kind == "copy"
                else "The result is the sum of all ranks' x, on every rank."
            )
        found = [mine.gradients["x"] for mine in results]
        if any(gradient is None for gradient in found):
            return lines, (
                "No gradient comes back. Write a torch.autograd.Function with forward and "
                "backward, and call its apply(...): the collectives alone end the graph."
            )
        pairs = list(zip(found, (w.gradients["x"] for w in wanted)))
        if kind == "reduce" and all(same(g, size * w) for g, w in pairs):
            return lines, (
                f"The gradient is {size} times too large. The ranks' dy is one and the same "
                "gradient, of one sum that all of them hold; adding it up counts it once a rank."
            )
        if kind == "copy" and all(same(g, dy) for g, (_, dy, _) in zip(found, cases)):
            return lines, (
                "Each rank has its own dy as its gradient. x went to all ranks, each used it in "
                "its own way, so its gradient is the sum of all their dy."
            )
        if any(same(g, w / size) for g, w in pairs):
            return lines, "That is divided by the number of ranks: nothing here is a mean."
        if not ok["right gradients of x on"]:
            return (
                lines,
                "Forward is right. Backward is the partner: reduce of copy, copy of reduce.",
            )
        return lines, "Right, but more was sent than one all-reduce takes."

    return judge_one


# --- lesson 09: the loss -----------------------------------------------------------------------


@dataclass(frozen=True)
class Logits:
    vocab: int
    large: bool = False

    def __str__(self) -> str:
        return f"6 tokens, {self.vocab} logits each" + ", some of 1000 and more" * self.large


LOSSES = [(4, Logits(40)), (2, Logits(40, large=True)), (3, Logits(9)), (1, Logits(8))]


def loss_case(case: Logits):
    (logits,) = randoms(3, (2, 3, case.vocab))
    if case.large:
        logits = logits * 700
    generator = torch.Generator().manual_seed(4)
    targets = torch.randint(0, case.vocab, (2, 3), generator=generator)
    targets[0, 1] = IGNORE_INDEX
    return logits, targets


def loss_trial(fn: Callable, case: Logits, group):
    mark(library, "vocab_parallel_cross_entropy")
    logits, targets = loss_case(case)
    mine = logits.chunk(group.size(), -1)[group.rank()].contiguous()
    before = {"logits": mine.clone()}
    leaves = {"logits": mine.requires_grad_()}
    loss = fn(mine, targets, group)
    is_loss = isinstance(loss, tuple) and len(loss) == 2
    total = loss[0] if is_loss else loss
    extra = int(loss[1]) if is_loss else None
    return seen(total, leaves, torch.ones((), dtype=torch.float64), before, extra)


def judge_loss(one: Trial) -> tuple[list[Line], str]:
    size, (logits, targets) = one.run.world_size, loss_case(one.case)
    logits.requires_grad_()
    expected = token_loss(logits, targets)
    expected.total.backward()
    wanted = [
        Seen(expected.total.detach(), {"logits": chunk}) for chunk in logits.grad.chunk(size, -1)
    ]
    results, tokens = one.run.results, targets.numel()
    lines = results_and_gradients(one, wanted, 2 * (size - 1) * 3 * tokens * ITEM, 0)
    counts = [mine.extra for mine in results]
    right = all(n == int(expected.num_tokens) for n in counts)
    lines.insert(1, Line("tokens that count", counts[0], int(expected.num_tokens), right))
    if all(line.ok for line in lines):
        return lines, ""
    ok = {line.what: line.ok for line in lines}
    if hint := common_mistake(one, lines):
        return lines, hint
    if any(n is None for n in counts):
        return lines, "Return TokenLoss(total, num_tokens): the sum of the losses, and how many."
    if any(not bool(mine.y.isfinite()) for mine in results):
        return lines, (
            "With large logits exp overflows. Subtract the largest logit first, and it must be the "
            "largest of all ranks."
        )
    if not right:
        return lines, "Targets of IGNORE_INDEX do not count."
    if not ok["right results on"]:
        if all(same(m.y * expected.num_tokens, expected.total.detach()) for m in results):
            return lines, "That is the mean. Return the sum: whoever adds up ranks divides later."
        if not all(same(mine.y, results[0].y) for mine in results):
            return lines, (
                "The ranks have different losses. Each needs all ranks' sum of exp, and the logit "
                "of the target, which one rank has: the others contribute 0."
            )
        return lines, (
            "The loss of a token is log(sum of exp over the whole vocabulary) minus the logit of "
            "its target. If the ranks subtract different maxima, their sums do not fit together."
        )
    if sent(one.run, "forward") > 2 * (size - 1) * 3 * tokens * ITEM:
        return lines, (
            f"Right, but {sent(one.run, 'forward')} bytes were sent: more than three numbers a "
            "token. Do not gather logits; a maximum, a sum and the target's logit are enough."
        )
    if not ok["right gradients of logits on"]:
        return lines, (
            "The loss is right, its gradient is not: a sum over ranks has to be one that autograd "
            "knows (ops.reduce). Only the maximum needs no gradient."
        )
    if sent(one.run, "forward") < 2 * (size - 1) * 3 * tokens * ITEM:
        return lines, (
            "Right for these small logits, but fewer than three numbers a token were sent: is the "
            "largest logit of all ranks among them? Without it exp overflows for large logits."
        )
    return lines, "Right, but bytes were sent in backward, too: it needs none."


# --- lesson 10: the swap -----------------------------------------------------------------------

B, S, D, F = 2, 12, 6, 24


@dataclass(frozen=True)
class Sequence:
    def __str__(self) -> str:
        return f"x [{B}, {S}/t, {D}], up [{F}/t, {D}]"


# (Three ranks fold their gathers to a power of two, which costs bytes: see halving_doubling.py.)
SWAPS = [(4, Sequence()), (2, Sequence()), (1, Sequence())]


class WatchedGELU(TorchFunctionMode):
    """Inside it, what enters a GELU leaves its shape here."""

    def __init__(self):
        super().__init__()
        self.shapes: list[tuple] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "gelu":
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


class WatchedNorm(torch.nn.RMSNorm):
    """A norm that remembers on what it was used."""

    def __init__(self, weight: Tensor):
        super().__init__(D, eps=1e-5)
        self.weight = torch.nn.Parameter(weight)
        self.shapes: list[tuple] = []

    def forward(self, x: Tensor) -> Tensor:
        self.shapes.append(tuple(x.shape))
        return super().forward(x)


def swap_tensors():
    return randoms(5, (B, S, D), (D,), (F, D), (D, F), (D,), (B, S, D))


def swap_trial(fn: Callable, case: Sequence, group):
    rank, size = group.rank(), group.size()
    x, weight, up, down, bias, dy = swap_tensors()
    x, dy = (t.chunk(size, 1)[rank].contiguous() for t in (x, dy))
    up, down = up.chunk(size, 0)[rank].contiguous(), down.chunk(size, 1)[rank].contiguous()
    norm = WatchedNorm(weight)
    leaves = {"x": x, "up": up, "down": down, "bias": bias}
    before = {name: leaf.clone() for name, leaf in leaves.items()} | {"norm": weight.clone()}
    for leaf in leaves.values():
        leaf.requires_grad_()
    leaves["norm"] = norm.weight
    with WatchedGELU() as gelu:
        y = fn(x, norm, up, down, bias, group)
    return seen(y, leaves, dy, before, (norm.shapes, gelu.shapes))


def judge_swap(one: Trial) -> tuple[list[Line], str]:
    size, results = one.run.world_size, one.run.results
    x, weight, up, down, bias, dy = (t.requires_grad_() for t in swap_tensors())
    hidden = functional.gelu(functional.linear(functional.rms_norm(x, (D,), weight, 1e-5), up))
    y = functional.linear(hidden, down, bias)
    y.backward(dy.detach())
    gradients = {"x": x.grad, "up": up.grad, "down": down.grad}
    whole = {"norm": weight.grad, "bias": bias.grad}
    dims = {"x": 1, "up": 0, "down": 1}
    wanted = [
        Seen(
            y.detach().chunk(size, 1)[rank],
            {name: g.chunk(size, dims[name])[rank] for name, g in gradients.items()},
        )
        for rank in range(size)
    ]
    once = (size - 1) * B * S * D * ITEM  # a gather or a scatter, all ranks together
    lines = results_and_gradients(one, wanted, 2 * once, 2 * once)
    for name, gradient in whole.items():
        parts = [mine.gradients.get(name) for mine in results]
        right = all(isinstance(p, Tensor) for p in parts) and same(sum(parts), gradient)
        lines.append(Line(f"gradients of {name} add up", right, True, right))
    part = [(B, S // size, D)]
    shapes = [normed for normed, _ in (mine.extra for mine in results)]
    on_part = all(found == part for found in shapes)
    lines.append(Line("the norm works on", shapes[0], part, on_part))
    hidden = results[0].extra[1]  # nothing if GELU was written out
    tokens = (B, S, F // size)  # or [S, B, ...], where the sequence was gathered as dim 0
    in_order = hidden in ([], [tokens], [(S, B, F // size)])
    lines.append(Line("GELU works on", hidden or "not seen", [tokens], in_order))
    if all(line.ok for line in lines):
        return lines, ""
    ok = {line.what: line.ok for line in lines}
    if hint := common_mistake(one, lines):
        return lines, hint
    if any(mine.y.shape != w.y.shape for mine, w in zip(results, wanted)):
        return lines, (
            f"The result has the shape {list(results[0].y.shape)} instead of "
            f"{list(wanted[0].y.shape)}: leave the region with this rank's part of the sequence."
        )
    if not on_part:
        return lines, (
            f"The norm worked on {shapes[0]}: each rank should norm its own part of the sequence "
            "only. Enter the region after it."
        )
    if hidden and hidden[0][:2] == (size * B, S // size) and size > 1:
        return lines, (
            f"GELU worked on {hidden[0]}: the parts were put together along dim 0, as if they were "
            "other sequences. An MLP, which takes each token alone, does not mind; attention "
            "would. The sequence is dim 1."
        )
    if not ok["right results on"]:
        if all(same(m.y - (size - 1) * bias.detach(), w.y) for m, w in zip(results, wanted)):
            return lines, "The bias is there once a rank: add it after the sum."
        return lines, (
            "norm, gather the sequence, up, GELU, down, add up and scatter along the sequence "
            "(dim 1), bias."
        )
    gradients_ok = [ok[f"right gradients of {name} on"] for name in gradients]
    if not all(gradients_ok):
        return lines, (
            "Results right, gradients wrong. Inside the region each rank uses all of x with its "
            "own columns: that is all_gather (backward: reduce_scatter), not gather. And the sum "
            "leaves by reduce_scatter, whose backward is all_gather."
        )
    if not in_order:
        return lines, (
            f"Right, but GELU worked on {hidden[0]} instead of {tokens}: gather the tokens, and "
            "leave up and down cut."
        )
    return lines, (
        f"Right, but {sent(one.run, 'forward')} bytes were sent in forward and "
        f"{sent(one.run, 'backward')} in backward. A gather and a scatter each way are enough: an "
        "all-reduce followed by a cut sends twice what its scatter would."
    )


# -----------------------------------------------------------------------------------------------

EXERCISES = [
    Exercise(
        "column_linear",
        library.column_linear,
        linear_trial("column"),
        LINEARS,
        judge_with(judge_column),
        [
            "Forward, there is nothing to send: all ranks have x, each computes its own outputs.",
            "Backward, each rank finds a part of the gradient of x. One operation of ops.py does "
            "nothing forward and adds up backward; put x through it.",
        ],
        "def column_linear(x, weight, bias, group):\n"
        "    x = ...  # the operation of ops.py that adds up backward\n"
        "    return torch.nn.functional.linear(x, weight, bias)",
        PARTS,
    ),
    Exercise(
        "row_linear",
        library.row_linear,
        linear_trial("row"),
        LINEARS,
        judge_with(judge_row),
        [
            "The product of this rank's inputs and weights is one summand of the result.",
            "ops.reduce adds them up and is differentiable. Where does the bias go?",
        ],
        "def row_linear(x, weight, bias, group):\n"
        "    y = ...  # the sum over ranks of this rank's product\n"
        "    return ...  # with the bias, if there is one",
        PARTS,
    ),
    Exercise(
        "copy",
        ops.copy,
        vector_trial("copy"),
        VECTORS,
        judge_with(judge_pair("copy")),
        [
            "Write a torch.autograd.Function. What each rank does with its copy comes back as its "
            "own dy.",
            "backward(ctx, dy) returns all_reduce(dy, group).",
        ],
        "def copy(x, group):\n"
        "    class Copy(torch.autograd.Function):\n"
        "        @staticmethod\n"
        "        def forward(ctx, x):\n"
        "            return ...\n\n"
        "        @staticmethod\n"
        "        def backward(ctx, dy):\n"
        "            return ...\n\n"
        "    return Copy.apply(x)",
        PARTS,
    ),
    Exercise(
        "reduce",
        ops.reduce,
        vector_trial("reduce"),
        VECTORS,
        judge_with(judge_pair("reduce")),
        [
            "y = x_0 + x_1 + ...: by how much does y change if only x_0 changes by 1?",
            "All ranks hold one y and go on alike, so their dy is one gradient, not a part each.",
        ],
        "def reduce(x, group):\n"
        "    class Reduce(torch.autograd.Function):\n"
        "        @staticmethod\n"
        "        def forward(ctx, x):\n"
        "            return ...\n\n"
        "        @staticmethod\n"
        "        def backward(ctx, dy):\n"
        "            return ...\n\n"
        "    return Reduce.apply(x)",
        PARTS,
    ),
    Exercise(
        "vocab_parallel_cross_entropy",
        library.vocab_parallel_cross_entropy,
        loss_trial,
        LOSSES,
        judge_with(judge_loss),
        [
            "loss = log(sum of exp(logit)) - logit of the target, per token. The sum runs over all "
            "ranks' logits, and one rank has the target's.",
            "Three numbers a token travel: the largest logit (all_reduce with op='max', without "
            "gradient), the sum of exp, and the target's logit or 0 (ops.reduce, both in one).",
        ],
        "def vocab_parallel_cross_entropy(logits, targets, group):\n"
        "    highest = ...  # [...], the largest of all ranks' logits, without gradient\n"
        "    mine = ...  # [...] bool: is the target one of this rank's logits?\n"
        "    at_target = ...  # its logit minus the highest, 0 where it is another rank's\n"
        "    exp_sum, at_target = ...  # both summed over the ranks\n"
        "    loss = exp_sum.log() - at_target\n"
        "    counts = targets != IGNORE_INDEX\n"
        "    return TokenLoss(loss[counts].sum(), counts.sum())",
        PARTS,
    ),
    Exercise(
        "sequence_parallel_mlp",
        sequence_parallel_mlp,
        swap_trial,
        SWAPS,
        judge_with(judge_swap),
        [
            "Take the tensor-parallel version. copy becomes ..., reduce becomes ...",
            "x is cut along dim 1. The norm works on this rank's part; all_gather after it, "
            "reduce_scatter at the end, the bias after that.",
        ],
        "def sequence_parallel_mlp(x, norm, up, down, bias, group):\n"
        "    entered = ...  # [B, S, D]\n"
        "    hidden = gelu(linear(entered, up))  # [B, S, F/t]\n"
        "    return ... + bias  # [B, S/t, D]",
        PARTS,
    ),
]

__all__ = ["EXERCISES", "TokenLoss", "sequence_parallel_mlp"]
