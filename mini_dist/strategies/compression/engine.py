"""Compression for training: the functions of ideas.py for buckets of Naive, Bucketed, Overlapped.

    model = Overlapped(GPT(config), group, reduce=half())
    model = Overlapped(GPT(config), group, reduce=Compressed(top_k(0.01)))
    model = Overlapped(GPT(config), group, reduce=OneBit())
    model = Overlapped(GPT(config), group, reduce=PowerSGD(rank=4))

Each rank stores what was left out of each bucket, N more elements. 16-bit values are averaged in
place, and their rounding error is dropped, as in torch's hook. PowerSGD sends all thin matrices
of a bucket in one message, together with all tensors that are not large matrices; the page uses
two all-reduces per matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mini_dist.collectives import all_reduce, pipelined_ring_all_reduce
from mini_dist.plan.fields import checks_kinds

from .ideas import (
    majority,
    one_bit_mean,
    quantized_mean,
    random_k_mean,
    sign_mean,
    top_k_mean,
    with_feedback,
)


@checks_kinds
class Compressed:
    """Average buckets by `mean`, (x, group) -> (mean, sent), and feed back what was left out.

    feedback=False drops it. Raises FloatingPointError if a gradient is not finite: by feedback it
    would stay in all later gradients.
    """

    def __init__(self, mean: Callable, feedback: bool = True):
        self.mean, self.feedback = mean, feedback

    def of_bucket(self, parameters: Sequence[Tensor]) -> Callable:
        """Return the function that a wrapper calls with this bucket's gradients, [N], and the
        group."""
        error: Tensor | float = 0.0

        def reduce(flat: Tensor, group) -> Tensor:
            nonlocal error
            check_finite(flat)
            found, left_out = with_feedback(self.mean, flat, error, group)
            if self.feedback:
                error = left_out
            return found

        return reduce


def check_finite(gradients: Tensor) -> None:
    if not gradients.is_meta and not gradients.sum().isfinite():
        raise FloatingPointError(
            "a gradient is inf or nan, and feedback would carry it into every later step: "
            "skip such a step before it is sent, or lower the loss scale"
        )


def half(dtype: torch.dtype = torch.bfloat16) -> Callable:
    """Return a function that averages gradients in 16 bits, without feedback."""

    def reduce(flat: Tensor, group) -> Tensor:
        part = flat.to(dtype).div_(group.size())
        return flat.copy_(pipelined_ring_all_reduce(part, group, out=part))

    return reduce


@checks_kinds
def int8(seed: int = 0) -> Callable:
    """Use int8 with a scale per block, rounded at random; each rank's random numbers are
    different."""
    lots = Lots(seed)
    return lambda x, group: quantized_mean(x, lots.of(x, group), group)


class Lots:
    """A rank's own random numbers, on the device that needs them."""

    def __init__(self, seed: int):
        self.seed, self.generator = seed, None
        self.at_begin: Tensor | None = None  # the generator's state when this step began

    def of(self, x: Tensor, group) -> torch.Generator:
        if self.generator is None:
            # (On the meta device nothing is drawn, and torch has no generator for it.)
            self.generator = torch.Generator() if x.is_meta else torch.Generator(x.device)
            self.generator.manual_seed(group.size() * self.seed + group.rank())
            self.at_begin = self.generator.get_state()
        return self.generator

    def begin_step(self) -> None:
        if self.generator is not None:
            self.at_begin = self.generator.get_state()

    def repeat_step(self) -> None:
        """Reset to the start of this step, so that it can be repeated with the same numbers."""
        if self.generator is not None:
            self.generator.set_state(self.at_begin)


def sign() -> Callable:
    return sign_mean


@checks_kinds
def top_k(share: float) -> Callable:
    """Send the largest elements of each bucket, this share of all. Raises ValueError outside
    0...1."""
    check_share(share)
    return lambda x, group: top_k_mean(x, max(1, round(share * len(x))), group)


@checks_kinds
def random_k(share: float, seed: int = 0) -> Callable:
    """Send random elements of each bucket, this share of all. Raises ValueError outside 0...1."""
    check_share(share)
    generator = torch.Generator().manual_seed(seed)
    return lambda x, group: random_k_mean(x, max(1, round(share * len(x))), generator, group)


def check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"share={share}: give the part of all elements that is sent, such as 0.01")


def vote(flat: Tensor, group) -> Tensor:
    """Replace a bucket by its majority of signs, +1 or -1, for an optimizer that steps by signs,
    such as plain SGD with a small learning rate. Raises FloatingPointError if a gradient is not
    finite, because nan has no sign."""
    check_finite(flat)
    return majority(flat, group)


class OneBit:
    """Average buckets with one bit both ways and feedback on both: N more elements for this rank's
    gradient, and N/n more for the means that it sends out (Tang et al. 2021).

    Raises FloatingPointError if a gradient is not finite.
    """

    def of_bucket(self, parameters: Sequence[Tensor]) -> Callable:
        error: Tensor | float = 0.0
        left: Tensor | float = 0.0

        def reduce(flat: Tensor, group) -> Tensor:
            nonlocal error, left
            check_finite(flat)
            whole = flat + error
            mean, sent, left = one_bit_mean(whole, left, group)
            error = whole - sent
            return mean

        return reduce


@checks_kinds
class PowerSGD:
    """Average every large matrix by two thin ones (Vogels et al. 2019), and all else uncompressed.

    rank: columns of the thin matrices. A matrix [A, B] is large if 2 rank (A + B) < A B, as in
    torch's hook, so both sides are above the rank. Raises ValueError for a rank below 1 or, at the
    first gradients, for a rank that makes no matrix of the model large, because nothing would be
    compressed. Raises FloatingPointError if a gradient is not finite.
    """

    def __init__(self, rank: int, feedback: bool = True, seed: int = 0):
        if rank < 1:
            raise ValueError(f"rank={rank}: a thin matrix has at least 1 column")
        self.rank, self.feedback, self.seed = rank, feedback, seed
        self.most = 0  # the highest rank that a matrix of any bucket can have

    def of_bucket(self, parameters: Sequence[Tensor]) -> Callable:
        bucket = PowerBucket(self, [parameter.shape for parameter in parameters])
        return bucket.reduce


class PowerBucket:
    """PowerSGD's state for one bucket: each matrix's last q, and what was left out of the
    matrix."""

    def __init__(self, options: PowerSGD, shapes: list[torch.Size]):
        self.options, self.sizes = options, [shape.numel() for shape in shapes]
        self.sides = {}  # index in the bucket -> (A, B), for each large matrix
        for place, shape in enumerate(shapes):
            if len(shape) > 1:
                a, b = shape[0], shape[1:].numel()
                if 2 * options.rank * (a + b) < a * b:
                    self.sides[place] = a, b
                options.most = max(options.most, min(a, b))
        self.generator = torch.Generator().manual_seed(options.seed)  # the same on all ranks
        self.q: list[Tensor] = []  # [B, r]
        self.errors: list[Tensor] = []  # [A, B]

    def reduce(self, flat: Tensor, group) -> Tensor:
        """Return the mean over the ranks of a bucket's gradients [N], in place."""
        if 0 < self.options.most < self.options.rank:
            raise ValueError(
                f"rank={self.options.rank}: no matrix of this model has a rank above "
                f"{self.options.most}, and all would be sent whole; give a rank far below that"
            )
        parts = flat.split(self.sizes)
        matrices = [parts[place].view(sides) for place, sides in self.sides.items()]
        rest = [part for place, part in enumerate(parts) if place not in self.sides]
        for x, error in zip(matrices, self.errors):
            x += error
        if not self.q:
            self.q = [self.random_q(x) for x in matrices]

        means = means_together([*(x @ q for x, q in zip(matrices, self.q)), *rest], group)
        if self.options.feedback:
            self.remember(matrices)
        ps = [torch.linalg.qr(p).Q for p in means[: len(matrices)]]
        self.q = means_together([x.T @ p for x, p in zip(matrices, ps)], group)
        for x, p, q in zip(matrices, ps, self.q):
            torch.mm(p, q.T, out=x)
        for x, error in zip(matrices, self.errors):
            error -= x
        for part, mean in zip(rest, means[len(matrices) :]):
            part.copy_(mean)
        return flat

    def remember(self, matrices: list[Tensor]) -> None:
        """Copy the matrices into memory of our own before they are overwritten with what is
        sent."""
        if not self.errors:
            self.errors = [torch.empty_like(x) for x in matrices]
        for error, x in zip(self.errors, matrices):
            error.copy_(x)

    def random_q(self, x: Tensor) -> Tensor:
        shape = x.shape[1], self.options.rank
        dice = self.generator
        return torch.randn(shape, generator=dice, device=dice.device).to(x)


def means_together(tensors: list[Tensor], group) -> list[Tensor]:
    """Return each tensor's mean over the ranks, with one message for all."""
    if not tensors:
        return []
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    check_finite(flat)  # x @ q is not finite where x is not, and x @ q is smaller
    parts = all_reduce(flat, group, op="mean").split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]
