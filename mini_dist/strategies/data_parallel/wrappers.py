"""Data parallelism for training: what ideas.py does, at every step and for any model.

    Naive        one all-reduce per parameter: no central rank, but many small messages
    Bucketed     flat buckets, made once
    Overlapped   buckets that are sent during backward

All three have the same interface. Wrapping broadcasts rank 0's parameters and buffers, so the ranks
start equal. `finish()`, after the last backward of a step, leaves the mean gradient over the ranks
in `.grad`:

    model = Overlapped(GPT(config), group)
    with model.no_sync():                    # all micro-batches but the last: accumulate only
        loss(model(first)).backward()
    loss(model(last)).backward()
    model.finish()
    optimizer.step()

A mean over ranks weighs all ranks equally. If they have different numbers of tokens, use the loss
n * (sum over this rank's tokens) / (tokens of all ranks), as train.py does.

Legend: n ranks, N bytes of gradients. Each of the three sends 2(n-1)/n N bytes per rank and step,
on average over the ranks; in a ring every rank sends the same amount.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager

from torch import Tensor, nn

from mini_dist.collectives import all_reduce, pipelined_ring_all_reduce, ring_all_reduce
from mini_dist.plan.defaults import BUCKET_BYTES, IN_PLACE_BYTES
from mini_dist.plan.fields import checks_kinds

from ..replicas import broadcast_state, gradient, meet
from ..trainable import Trainable
from .ideas import flatten, unflatten


class Naive(Trainable):
    """One all-reduce per parameter, after backward.

    reduce: (tensor, group) -> its mean over the group: `mean_` by default, `ring_mean`,
    `backend_mean_`, or your own. The tensor is not read again, so `reduce` may overwrite it. Or an
    object whose `of_bucket(parameters)` makes such a function, with its own state, for each
    bucket (compression/engine.py).
    A parameter that a rank did not use counts as zeros there. So it gets a gradient on all ranks,
    even if only zeros: weight decay and momentum still change parameters that no rank used. (DDP
    with find_unused_parameters=True leaves such a gradient unchanged: None.) ignored: parameters
    that another wrapper handles. Raises ValueError if there is nothing to train.
    """

    def __init__(
        self,
        module: nn.Module,
        group,
        reduce: Callable | None = None,
        ignored: Iterable[Tensor] = (),
    ):
        super().__init__(module)
        self.group, self.reduce, self.ignored = group, reduce or mean_, set(ignored)
        self.parameters_to_average = self.tensors_to_step()
        if not self.parameters_to_average:
            raise ValueError("no parameter requires a gradient: there is nothing to train")
        self.synchronizes = True
        self.is_finishing = False  # inside finish(), or finish() ended in an exception
        self.send_in([[parameter] for parameter in self.parameters_to_average])
        broadcast_state(module, group, self.ignored)

    def send_in(self, buckets: list[list[Tensor]]) -> None:
        """Send the gradients of each of these lists together."""
        make = getattr(self.reduce, "of_bucket", lambda bucket: self.reduce)
        self.buckets, self.reduces = buckets, [make(bucket) for bucket in buckets]

    def tensors_to_step(self) -> list[Tensor]:
        return [p for p in super().tensors_to_step() if p not in self.ignored]

    @contextmanager
    def no_sync(self):
        """Only accumulate gradients inside `with`: use it for all micro-batches but the last."""
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def finish(self) -> None:
        self.is_finishing = True
        self.average()
        self.is_finishing = False

    def average(self) -> None:
        for (parameter,), reduce in zip(self.buckets, self.reduces):
            parameter.grad = reduce(gradient(parameter).flatten(), self.group).view_as(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients. If a step ended in an exception, call this on all ranks, and the
        next step is as if the failed one had not begun. Raises RuntimeError if that is impossible,
        because compression has stored what it left out of buckets that were already sent."""
        if self.is_interrupted():
            if self.has_sent() and hasattr(self.reduce, "of_bucket"):
                raise RuntimeError(
                    f"{type(self.reduce).__name__} has kept what it left out of gradients that are "
                    "forgotten now, of a step that ended in an exception: rebuild the model"
                )
            self.start_over()
            meet(self.group)
        super().zero_grad(set_to_none)

    def is_interrupted(self) -> bool:
        """Return whether the last step was interrupted (ask outside of a step)."""
        return self.is_finishing

    def has_sent(self) -> bool:
        """Return whether the interrupted step may have sent a bucket."""
        return self.is_finishing

    def start_over(self) -> None:
        self.is_finishing = False


@checks_kinds
class Bucketed(Naive):
    """Send gradients in flat buckets of about `bucket_bytes`, after backward.

    Each message has a fixed cost, so a large number of small ones is slow; see lesson 04.
    """

    def __init__(self, module, group, reduce=None, bucket_bytes: int = BUCKET_BYTES, ignored=()):
        super().__init__(module, group, reduce, ignored)
        self.send_in(make_buckets(self.parameters_to_average, bucket_bytes))

    def average(self) -> None:
        for bucket, reduce in zip(self.buckets, self.reduces):
            unflatten(reduce(flatten(bucket), self.group), bucket)


@checks_kinds
class Overlapped(Bucketed):
    """Send each bucket as soon as backward has computed its last gradient.

    One background thread sends, in the order of the buckets: all ranks must enter their
    all-reduces in the same order, whatever the order in which their gradients become ready. The
    thread lives from a step's first bucket to `finish`, because `launch` never considers a rank
    with another thread stuck: it would report a deadlock only after its timeout.
    """

    def __init__(self, module, group, reduce=None, bucket_bytes: int = BUCKET_BYTES, ignored=()):
        super().__init__(module, group, reduce, bucket_bytes, ignored)
        self.sender: ThreadPoolExecutor | None = None
        self.bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self.leaving: list[Future] = []
        self.missing = [len(bucket) for bucket in self.buckets]
        for parameter in self.parameters_to_average:
            # This hook runs after the gradient is complete and added to .grad. A hook on the
            # parameter itself (register_hook) would run before that.
            parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)

    def is_interrupted(self) -> bool:
        whole = [len(bucket) for bucket in self.buckets]
        return bool(self.leaving) or self.missing != whole or super().is_interrupted()

    def has_sent(self) -> bool:
        return bool(self.leaving)

    def start_over(self) -> None:
        super().start_over()
        wait_for(self.leaving)
        if self.sender:
            self.sender.shutdown()
            self.sender = None
        self.missing, self.leaving = [len(bucket) for bucket in self.buckets], []

    def gradient_is_ready(self, parameter: Tensor) -> None:
        number = self.bucket_of[parameter]
        if number < len(self.leaving):
            raise RuntimeError(
                "a gradient came after its bucket had left: put all backwards of a step but the "
                "last inside no_sync(), and call finish() after the last, or zero_grad() on all "
                "ranks if a backward ended in an exception"
            )
        if self.synchronizes:
            self.missing[number] -= 1
            while len(self.leaving) < len(self.buckets) and self.missing[len(self.leaving)] == 0:
                self.leave()

    def leave(self) -> None:
        """Start to send the next bucket."""
        if self.sender is None:
            self.sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sender")
        number = len(self.leaving)
        bucket, reduce = self.buckets[number], self.reduces[number]
        flat = [flatten(bucket)]
        for parameter in bucket:
            parameter.grad = None  # the bucket has a copy: do not hold both
        # `pop`, so that only reduce holds it. The thread would hold an argument until it next
        # gets a core, perhaps in the middle of the optimizer's step.
        self.leaving.append(self.sender.submit(lambda: reduce(flat.pop(), self.group)))

    def average(self) -> None:
        while len(self.leaving) < len(self.buckets):  # parameters that this rank did not use
            self.leave()
        for bucket, future in zip(self.buckets, self.leaving):
            unflatten(future.result(), bucket)
        self.start_over()


def mean_(x: Tensor, group) -> Tensor:
    """Average with the algorithm that suits the size: for a large bucket the pipelined ring, which
    is as fast as gloo's, in place. A bucket is a copy of gradients, and one copy is enough."""
    if x.nbytes <= IN_PLACE_BYTES:
        return all_reduce(x, group).div_(group.size())
    return pipelined_ring_all_reduce(x, group, "mean", out=x)


def ring_mean(x: Tensor, group) -> Tensor:
    """Average with the ring of lesson 03: 2(n-1)/n of x on every link, whatever its size."""
    return ring_all_reduce(x, group).div_(group.size())


def backend_mean_(x: Tensor, group) -> Tensor:
    """Average with the all-reduce of gloo or NCCL, in place."""
    group.allreduce([x]).wait()
    return x.div_(group.size())


@checks_kinds
def make_buckets(parameters: list[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Group parameters of one dtype, last one first, into buckets of at most `bucket_bytes`.

    Backward computes the gradients of the last layers first. A parameter that is larger than a
    bucket gets its own bucket. Raises ValueError if bucket_bytes is below 1.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes} holds nothing: give 1 or more bytes")
    buckets: list[list[Tensor]] = []
    for parameter in reversed(parameters):
        last = buckets[-1] if buckets else []
        fits = sum(p.nbytes for p in last) + parameter.nbytes <= bucket_bytes
        if last and fits and last[0].dtype == parameter.dtype:
            last.append(parameter)
        else:
            buckets.append([parameter])
    return buckets
