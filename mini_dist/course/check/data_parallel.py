"""Exercise of lesson 02: average the gradients of all ranks, through rank 0."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import nn

from mini_dist import collectives
from mini_dist.collectives import gather, messages, ops, pairwise, star_broadcast
from mini_dist.strategies import data_parallel
from mini_dist.strategies.data_parallel import average_through_rank_0, flatten, unflatten

from .engine import Exercise, Line, Measured, line, on_ranks, yes
from .measures import close, mistake_of_dtype
from .watch import functions_of

MAY_USE = functions_of(messages) | {
    *map(inspect.unwrap, (gather, star_broadcast, flatten, unflatten, pairwise.barrier))
}


@dataclass(frozen=True)
class Case:
    """The gradients of a rank. unused: the parameter without a gradient is not frozen; strided:
    gradients of more than one dim are not contiguous in memory."""

    seed: int
    dtype: torch.dtype = torch.float32
    unused: bool = False
    strided: bool = False
    frozen: int = 1  # which parameter has no gradient

    def __str__(self) -> str:
        which = "not used" if self.unused else "frozen"
        dtype = f" of {str(self.dtype).removeprefix('torch.')}" * (self.dtype != torch.float32)
        more = ", gradients that are not contiguous" * self.strided
        return f"5 parameters{dtype}, number {self.frozen} of them {which}{more}"

    def gradients(self, rank: int) -> list[torch.Tensor]:
        """Return the gradients that backward would leave on a rank: whole numbers, so that sums are
        exact. Those of float64 need more digits than float32 has."""
        generator = torch.Generator().manual_seed(100 * self.seed + rank)
        shapes = [(40, 30), (30,), (), (7, 3, 2), (30,)]
        most = {torch.float64: 2**49, torch.float32: 2**20, torch.bfloat16: 2**4}[self.dtype]
        whole = [torch.randint(-most, most, shape, generator=generator) for shape in shapes]
        whole[3] *= self.seed != 1 or rank > 0  # if seed is 1, zeros on rank 0
        return [each.to(self.dtype) for each in whole]


CASES = [
    (4, Case(0)),
    (3, Case(1, unused=True, frozen=2)),
    (2, Case(2, strided=True, frozen=0)),
    (3, Case(3, torch.float64, frozen=4)),
    (5, Case(4, torch.bfloat16)),
    (1, Case(5)),
]


def trial(fn, case: Case, group):
    local = case.gradients(group.rank())
    weight = 0.5 + group.rank()  # unlike in training, ranks differ: averaging them would show
    parameters = [nn.Parameter(torch.full_like(grad, weight)) for grad in local]
    parameters[case.frozen].requires_grad_(case.unused)
    for number, (parameter, grad) in enumerate(zip(parameters, local)):
        if number != case.frozen:
            parameter.grad = grad.mT.contiguous().mT if case.strided and grad.dim() > 1 else grad
    fn(parameters, group)
    kept = all(bool((parameter == weight).all()) for parameter in parameters)
    return [parameter.grad for parameter in parameters], kept


class Averages(Measured):
    def measure(self) -> None:
        self.everyones = [self.case.gradients(rank) for rank in range(self.size)]
        self.means = [
            (torch.stack(grads).double().sum(0) / self.size).to(self.case.dtype)
            for grads in zip(*self.everyones)
        ]
        self.most = max(own[0].abs().max().item() for own in self.everyones)
        self.found, kept = zip(*self.run.results)
        self.kept = all(kept)
        self.frozen = all(found[self.case.frozen] is None for found in self.found)
        self.right = [self.are(found, self.means) for found in self.found]
        nbytes = sum(grad.nbytes for i, grad in enumerate(self.means) if i != self.case.frozen)
        ledger = self.run.ledger
        self.by_rank = [ledger.total_bytes(rank=rank) for rank in range(self.size)]
        self.wanted = [(self.size - 1) * nbytes] + [nbytes] * (self.size - 1)

    def lines(self) -> list[Line]:
        found = [
            on_ranks("right gradients on", self.right),
            yes("the weights are untouched", self.kept),
            yes("a frozen parameter is left alone", self.frozen),
            self.backend_line(),
            line("bytes sent by rank 0", self.by_rank[0], self.wanted[0]),
        ]
        if self.size > 1:
            others, wanted = sorted({*self.by_rank[1:]}), self.wanted[1]
            sent = others[0] if len(others) == 1 else self.by_rank[1:]
            found.append(line("bytes sent by another rank", sent, wanted))
        return found

    def are(self, found, gradients: list[torch.Tensor]) -> bool:
        """Return whether all gradients but the frozen one's are these, up to a few last digits of
        the largest term, since dividing first or a running mean rounds in another way."""
        pairs = enumerate(zip(found, gradients))
        return all(close(a, b, self.most) for i, (a, b) in pairs if i != self.case.frozen)

    def all_are(self, gradients: list[torch.Tensor]) -> bool:
        return self.size > 1 and all(self.are(found, gradients) for found in self.found)

    def mistake(self) -> str:
        size, means = self.size, self.means
        if self.barriers or self.backend:
            return self.of_the_backend("Go through rank 0: gather, average, star_broadcast.")
        if not self.kept:
            return (
                "You changed the weights. Leave them to the optimizer: average the "
                "*gradients*, parameter.grad, between backward and its step."
            )
        if not self.frozen:
            return "A parameter whose grad was None has one now. Frozen parameters are left alone."
        others = [i for i in range(len(means)) if i != self.case.frozen]
        if any(found[i] is None for found in self.found for i in others):
            return "A parameter that had a gradient no longer has one: put the mean in its place."
        if self.all_are([size * mean for mean in means]):
            return (
                "These are sums. The loss of each rank is a mean over its part of the batch, so "
                "the gradient of the whole batch is the mean of the ranks' gradients."
            )
        if self.all_are([mean / size for mean in means]):
            return f"You divided by {size} twice: divide the sum only once."
        if size > 1 and all(map(self.are, self.found, self.everyones)):
            return "Nothing happened to the gradients: put the mean into parameter.grad."
        if self.all_are(self.everyones[0]):
            return "Everyone has rank 0's gradient: it was broadcast, but never averaged."
        if size > 1 and self.right == [True] + [False] * (size - 1):
            return "Only rank 0 has the means. Broadcast them."
        if size > 1 and self.right == [False] + [True] * (size - 1):
            return "Everyone has the means but rank 0 itself: it also needs them in parameter.grad."
        if wrong_dtype := mistake_of_dtype(self.run, self.case.dtype, sum(self.wanted)):
            return wrong_dtype
        wrong = [i for i in others if not self.right_for(i)]
        if 0 < len(wrong) < len(means) - 1:
            return (
                f"Right for some parameters, wrong for number {wrong[0]} of {len(means)} (counted "
                f"from 0), of shape {list(means[wrong[0]].shape)}. Go through all of them, of any "
                "shape."
            )
        if self.all_are(
            [(size * m - g) / max(size - 1, 1) for m, g in zip(means, self.everyones[0])]
        ):
            return "Rank 0's own gradient is missing from the mean."
        if all(self.right):
            return (
                f"The gradients are right, but the ranks sent {self.by_rank} bytes instead of "
                f"{self.wanted}. Every rank sends its gradient to rank 0 once, and rank 0 sends "
                "the mean back to each."
            )
        return "Compare parameter.grad on each rank with the mean of all ranks' gradients before."

    def right_for(self, i: int) -> bool:
        return all(close(found[i], self.means[i], self.most) for found in self.found)


EXERCISES = [
    Exercise(
        "average_through_rank_0",
        average_through_rank_0,
        trial,
        CASES,
        Averages,
        refuses=functions_of(collectives, data_parallel, ops) - MAY_USE,
        changes=["parameters"],
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
    )
]
