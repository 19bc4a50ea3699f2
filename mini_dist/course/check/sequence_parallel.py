"""Exercise of lesson 10: an MLP that enters by all-gather and leaves by reduce-scatter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mini_dist.collectives import ops
from mini_dist.strategies import tensor_parallel as library

from .engine import Exercise, Line, yes
from .tensor_parallel import Seen, WithBackward, randoms, same, seen
from .watch import functions_of


def sequence_parallel_mlp(x, norm, up, down, bias, group):
    """Apply norm, up, GELU and down to x [B, S/t, D], this rank's part of the sequence.

    up [F/t, D] and down [D, F/t] are this rank's shards; norm and bias [D] are whole on every rank.
    `tensor_parallel.ideas.mlp` with pair=SEQUENCE does the same without the norm.
    """
    entered = ops.all_gather(norm(x), group, dim=1)  # [B, S, D]
    hidden = functional.gelu(functional.linear(entered, up))  # [B, S, F/t]
    return ops.reduce_scatter(functional.linear(hidden, down), group, dim=1) + bias


B, S, D, F = 2, 12, 6, 36  # the weights have more numbers than the tokens
CUT = {"x": 1, "up": 0, "down": 1}  # the sharded dim of each


@dataclass(frozen=True)
class Sequence:
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return f"x [{B}, {S}/t, {D}], up [{F}/t, {D}]"


SIZES = [(4, Sequence()), (2, Sequence(torch.float32)), (3, Sequence()), (1, Sequence())]


class WatchedGELU(TorchFunctionMode):
    """Note the shapes of the inputs of every GELU inside `with`."""

    def __init__(self):
        super().__init__()
        self.shapes: set[tuple] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "gelu":
            self.shapes.add(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


class WatchedNorm(torch.nn.RMSNorm):
    """A norm that notes the shapes of its inputs."""

    def __init__(self, weight: Tensor):
        super().__init__(D, eps=1e-5)
        self.weight = torch.nn.Parameter(weight)
        self.shapes: set[tuple] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.shapes.add(tuple(x.shape))
        return super().forward(x)


def tensors(case: Sequence) -> dict[str, Tensor]:
    shapes = {"x": (B, S, D), "up": (F, D), "down": (D, F), "bias": (D,), "norm": (D,)}
    found = randoms(5, *shapes.values(), (B, S, D), dtype=case.dtype)
    return dict(zip([*shapes, "dy"], found))


def trial(fn, case: Sequence, group):
    rank, size = group.rank(), group.size()
    leaves = tensors(case)
    dy = leaves.pop("dy").chunk(size, 1)[rank]
    norm = WatchedNorm(leaves.pop("norm"))
    for name, dim in CUT.items():
        leaves[name] = leaves[name].chunk(size, dim)[rank]
    for leaf in leaves.values():
        leaf.requires_grad_()
    x, up, down, bias = leaves.values()
    with WatchedGELU() as gelu:
        y = fn(x, norm, up, down, bias, group)
    leaves["norm"] = norm.weight
    return seen(y, leaves, dy, (sorted(norm.shapes), sorted(gelu.shapes)))


class Swap(WithBackward):
    enough = (
        "an all-gather and a reduce-scatter each way are enough: an all-reduce followed by a cut "
        "sends twice what a reduce-scatter does."
    )

    def measure(self):
        whole = tensors(self.case)
        dy = whole.pop("dy")
        x, up, down, bias, weight = (t.requires_grad_() for t in whole.values())
        hidden = functional.gelu(functional.linear(functional.rms_norm(x, (D,), weight, 1e-5), up))
        y = functional.linear(hidden, down, bias)
        y.backward(dy)
        chunks = {n: whole[n].grad.chunk(self.size, dim) for n, dim in CUT.items()}
        self.wanted = [
            Seen(of_y, {name: of[rank] for name, of in chunks.items()})
            for rank, of_y in enumerate(y.detach().chunk(self.size, 1))
        ]
        self.sums = {"norm": weight.grad, "bias": bias.grad}
        self.bias = bias.detach()
        normed, entered_gelu = zip(*(rank.extra for rank in self.results))
        self.normed, self.hidden = normed[0], entered_gelu[0]
        self.part, self.tokens = (B, S // self.size, D), (B, S, F // self.size)
        once = (self.size - 1) * y.nbytes  # a gather or a scatter, all ranks together
        self.forward = self.backward = 2 * once

    def adds_up(self, name: str) -> bool:
        parts = [rank.gradients[name] for rank in self.results]
        return all(isinstance(part, Tensor) for part in parts) and same(sum(parts), self.sums[name])

    def where_the_norm_works(self) -> Line:
        """Return the line on the norm: no input may be larger than this rank's part."""
        ok = bool(self.normed) and all(math.prod(s) <= math.prod(self.part) for s in self.normed)
        return Line("the norm works on", self.normed, [self.part], ok)

    def where_gelu_works(self) -> Line:
        """Return the line on GELU: it may see only this rank's features, in pieces of any size."""
        ok = not self.as_sequences() and all(s[-1] <= F // self.size for s in self.hidden)
        return Line("GELU works on", self.hidden or "not seen", [self.tokens], ok)

    def as_sequences(self) -> bool:
        wrong = self.size * B, S // self.size
        return self.size > 1 and any(shape[:2] == wrong for shape in self.hidden)

    def lines(self):
        sums = [yes(f"gradients of {name} add up", self.adds_up(name)) for name in self.sums]
        return [*super().lines(), *sums, self.where_the_norm_works(), self.where_gelu_works()]

    def own_mistake(self) -> str:
        if shape := self.wrong_shape():
            return f"{shape}: leave the region with this rank's part of the sequence."
        if not self.normed:
            return "The norm was not called: norm(x), before the region."
        if not self.where_the_norm_works().ok:
            return (
                f"The norm worked on {self.normed}: each rank should norm its own part of the "
                "sequence only. Enter the region after it."
            )
        if self.as_sequences():
            return (
                f"GELU worked on {self.hidden[0]}: the parts were concatenated along dim 0, as if "
                "they were other sequences. An MLP, which takes each token alone, does not mind; "
                "attention would. The sequence is dim 1."
            )
        if not self.are_right(""):
            return self.wrong_result()
        if self.missing(*CUT, "norm"):
            return (
                "The results are right, but some gradient does not get through. The collectives of "
                "mini_dist.collectives are not differentiable; those in mini_dist.collectives.ops "
                "are."
            )
        if not self.are_right(*CUT):
            return (
                "Results right, gradients wrong. Inside the region each rank uses all of x with "
                "its own columns: that is all_gather (backward: reduce_scatter), not join. And the "
                "sum leaves by reduce_scatter, whose backward is all_gather."
            )
        for name in self.sums:
            if not self.adds_up(name):
                return (
                    f"The gradients of {name}, each of the tokens that its rank has, do not add up "
                    f"to the whole gradient: every rank uses {name} on its own tokens, as it is."
                )
        if not self.where_gelu_works().ok:
            return (
                f"Right, but GELU worked on {self.hidden[0]} instead of {self.tokens}: gather the "
                "tokens, and leave up and down cut."
            )
        return ""

    def wrong_result(self) -> str:
        found = zip(self.results, self.wanted)
        if all(same(a.y - (self.size - 1) * self.bias, w.y) for a, w in found):
            return "The bias is added once per rank: add it after the sum."
        found = zip(self.results, self.wanted)
        if all(same(a.y + self.bias, w.y) for a, w in found):
            return "The bias is missing: add it after the sum."
        return (
            "norm, gather the sequence, up, GELU, down, add up and scatter along the sequence "
            "(dim 1), bias."
        )


EXERCISES = [
    Exercise(
        "sequence_parallel_mlp",
        sequence_parallel_mlp,
        trial,
        SIZES,
        Swap,
        hints=[
            "Take the tensor-parallel version. copy becomes ..., all_reduce becomes ...",
            "x is cut along dim 1. The norm works on this rank's part; all_gather after it, "
            "reduce_scatter at the end, the bias after that.",
        ],
        skeleton="""\
def sequence_parallel_mlp(x, norm, up, down, bias, group):
    entered = ...  # [B, S, D]
    hidden = gelu(linear(entered, up))  # [B, S, F/t]
    return ... + bias  # [B, S/t, D]""",
        refuses=functions_of(library),
    )
]
