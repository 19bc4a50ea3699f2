"""Exercise of lesson 02: average the gradients of all ranks, through rank 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ..data_parallel import average_through_rank_0
from .exercise import Exercise, Line, Trial, ranks

FROZEN = 1  # which parameter has no gradient


@dataclass(frozen=True)
class Case:
    seed: int

    def __str__(self) -> str:
        return "4 parameters, one of them frozen"


CASES = [(4, Case(0)), (3, Case(1)), (1, Case(2))]  # of ranks and gradients


def gradients(rank: int, seed: int) -> list[torch.Tensor]:
    """What backward would leave on a rank: quarters, so that sums and most means are exact."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    shapes = [(40, 30), (30,), (), (7, 3, 2)]
    return [torch.randint(-400, 400, shape, generator=generator) / 4 for shape in shapes]


def trial(fn: Callable, case: Case, group):
    local = gradients(group.rank(), case.seed)
    weight = 0.5 + group.rank()  # never equal on two ranks in training: averaging them would show
    parameters = [nn.Parameter(torch.full_like(grad, weight)) for grad in local]
    for number, (parameter, grad) in enumerate(zip(parameters, local)):
        if number != FROZEN:
            parameter.grad = grad
    fn(parameters, group)
    kept = all(bool((parameter == weight).all()) for parameter in parameters)
    return [parameter.grad for parameter in parameters], kept


def judge(trials: list[Trial]) -> tuple[list[Line], str]:
    lines, hint = [], ""
    for number, one in enumerate(trials):
        found, found_hint = judge_one(one)
        for line in found:
            if number == 0 or not line.ok:
                line.what += f" ({ranks(one.run.world_size)})" * (number > 0)
                lines.append(line)
        if found_hint and not hint:
            here = f"Right with 4 ranks, not with {one.run.world_size}. " * (number > 0)
            hint = here + found_hint
    return lines, hint


def judge_one(one: Trial) -> tuple[list[Line], str]:
    run, size = one.run, one.run.world_size
    everyones = [gradients(rank, one.case.seed) for rank in range(size)]
    means = [torch.stack(grads).mean(0) for grads in zip(*everyones)]
    results = [result for result, _ in run.results]
    right = [same(result, means) for result in results]
    kept = all(unchanged for _, unchanged in run.results)
    frozen = all(result[FROZEN] is None for result in results)
    leaves = list(run.ledger.leaves())
    native = sorted({comm.op for comm in leaves if comm.op not in ("send", "recv")})
    nbytes = sum(grad.nbytes for i, grad in enumerate(everyones[0]) if i != FROZEN)
    sent = [run.ledger.total_bytes(rank=rank) for rank in range(size)]
    wanted = [(size - 1) * nbytes] + [nbytes] * (size - 1)
    lines = [
        Line(
            "right gradients on",
            f"{sum(right)} of {size} ranks",
            f"{size} of {size} ranks",
            all(right),
        ),
        Line("the weights are untouched", kept, True, kept),
        Line("a frozen parameter is left alone", frozen, True, frozen),
        Line("calls of the backend's collectives", ", ".join(native) or "none", "none", not native),
        Line("bytes sent by rank 0", sent[0], wanted[0], sent[0] == wanted[0]),
        Line(
            "bytes sent by another rank",
            max(sent[1:], default=0),
            max(wanted[1:], default=0),
            sent[1:] == wanted[1:],
        ),
    ]
    if all(line.ok for line in lines):
        return lines, ""
    return lines, mistake(results, everyones, means, right, kept, native, sent, wanted)


def mistake(results, everyones, means, right, kept, native, sent, wanted) -> str:
    size = len(results)
    if native:
        return (
            f"The work is done by the backend's own {' and '.join(native)}. "
            "Here the point is the way through rank 0: gather, average, star_broadcast."
        )
    if not kept:
        return (
            "You changed the weights. They are the optimizer's business: it is the *gradients*, "
            "parameter.grad, that are to be averaged, between backward and its step."
        )
    if any(result[FROZEN] is not None for result in results):
        return "A parameter whose grad was None has one now. Frozen parameters are left alone."
    if all(same(result, [size * mean for mean in means]) for result in results):
        return (
            "These are sums. The loss of each rank is a mean over its part of the batch, so the "
            "gradient of the whole batch is the mean of the ranks' gradients."
        )
    if all(same(result, own) for result, own in zip(results, everyones)):
        return "Nothing happened to the gradients: put the mean into parameter.grad."
    if all(same(result, everyones[0]) for result in results):
        return "Everyone has rank 0's gradient: it was broadcast, but never averaged."
    if right == [True] + [False] * (size - 1):
        return "Only rank 0 has the means. Broadcast them."
    if right == [False] + [True] * (size - 1):
        return "Everyone has the means but rank 0 itself: it, too, needs them in parameter.grad."
    wrong = [i for i in range(len(means)) if not all(same([r[i]], [means[i]], ()) for r in results)]
    wrong = [number for number in wrong if number != FROZEN]
    if 0 < len(wrong) < len(means) - 1:
        return (
            f"Right for some parameters, wrong for number {wrong[0]} of {len(means)} (counted from "
            f"0), of shape {list(means[wrong[0]].shape)}. Go through all of them, of any shape."
        )
    if size > 1 and all(
        same(result, [(size * m - g) / (size - 1) for m, g in zip(means, everyones[0])])
        for result in results
    ):
        return "Rank 0's own gradient is missing from the mean."
    if all(right) and sent != wanted:
        return (
            f"The gradients are right, but the ranks sent {sent} bytes instead of {wanted}. Every "
            "rank sends its gradient to rank 0 once, and rank 0 sends the mean back to each."
        )
    return "Compare parameter.grad on each rank with the mean of all ranks' gradients before."


def same(result: list, expected: list[torch.Tensor], but=(FROZEN,)) -> bool:
    """Whether all gradients (but the frozen one's) agree, up to rounding of a division."""
    return all(
        isinstance(a, torch.Tensor)
        and (a.shape, a.dtype) == (b.shape, b.dtype)
        and torch.allclose(a, b)
        for i, (a, b) in enumerate(zip(result, expected))
        if i not in but
    )


EXERCISES = [
    Exercise(
        "average_through_rank_0",
        average_through_rank_0,
        trial,
        CASES,
        judge,
        hints=[
            "For each parameter: gather(grad, 0, group) gives rank 0 everyone's gradient, and the "
            "other ranks None. star_broadcast(x, 0, group) gives everyone rank 0's x.",
            "gather joins along the first dimension: with parameter.grad[None] rank 0 gets "
            "[n, ...], and .mean(0) is the mean over ranks. Skip parameters whose grad is None.",
        ],
        skeleton="""\
def average_through_rank_0(parameters, group):
    for parameter in parameters:
        if parameter.grad is None:
            continue
        everyones = gather(..., 0, group)          # [n, ...] on rank 0, None elsewhere
        mean = ... if everyones is not None else parameter.grad
        parameter.grad = star_broadcast(..., 0, group)""",
        parts=frozenset({"gather", "star_broadcast"}),
    ),
]
