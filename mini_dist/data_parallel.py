"""Data parallelism: the same model everywhere, a part of the batch each, gradients averaged.

Four ways to average, each the answer to what the one before could not do:

    average_through_rank_0   gather, average, broadcast: right, and rank 0 drowns
    Naive                    an all-reduce a parameter: no centre, but many small messages
    Bucketed                 flat buckets: few large messages, but all of them after backward
    Overlapped               a bucket leaves as soon as its last gradient is there

The three classes have one interface. Wrapping broadcasts rank 0's parameters and buffers, so that
the ranks start equal. `finish()`, after the last backward of a step, leaves in `.grad` the mean
gradient over the ranks:

    model = Overlapped(GPT(config), group)
    with model.no_sync():                    # micro-batches but the last: add up, send nothing
        loss(model(first)).backward()
    loss(model(last)).backward()
    model.finish()
    optimizer.step()

A mean over ranks weighs all ranks alike. Where they have different numbers of tokens, the loss is
n * (sum over this rank's tokens) / (tokens of all ranks), as train.py does it.

Legend: n ranks, N bytes of gradients. Each of the three sends 2(n-1)/n N bytes a rank a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .collectives import (
    all_reduce,
    gather,
    pipelined_ring_all_reduce,
    ring_all_reduce,
    star_broadcast,
)
from .ledger.recording import recorded
from .replicas import Replica, broadcast_state, gradient

BUCKET_BYTES = 25 << 20  # the default of torch's DistributedDataParallel (Li et al. 2020, 3.2.3)
LARGE = 4 << 20  # below, the number of messages decides; above, the bytes


@recorded
def average_through_rank_0(parameters: Iterable[Tensor], group) -> None:
    """Replace each gradient by its mean over the ranks: gather on rank 0, average, broadcast.

    Parameters without a gradient (frozen, or unused on all ranks) are left alone. For N bytes of
    gradients rank 0 receives (n-1) N and sends (n-1) N, every other rank N and N. This is a
    parameter server with one server and synchronous workers (Li et al. 2014, section 2).
    """
    for parameter in parameters:
        if parameter.grad is None:
            continue
        everyones = gather(parameter.grad.unsqueeze(0), 0, group)  # [n, ...] on rank 0
        mean = parameter.grad if everyones is None else everyones.mean(0)
        parameter.grad = star_broadcast(mean, 0, group)  # elsewhere the values are not read


@recorded
def average_in_buckets(parameters: Iterable[Tensor], bucket_bytes: int, group) -> None:
    """Replace each gradient by its mean over the ranks, in flat buckets, last parameter first.

    Parameters without a gradient are left alone. Raises ValueError if bucket_bytes is below 1.
    """
    have = [parameter for parameter in parameters if parameter.grad is not None]
    for bucket in make_buckets(have, bucket_bytes):
        unflatten(mean_(flatten(bucket), group), bucket)


@recorded
def overlapped_backward(loss: Tensor, buckets: list[list[Tensor]], sender, group) -> None:
    """Run backward, and average each bucket's gradients while the rest of it is computed.

    sender: an executor with one thread: `submit(fn, *args)` returns at once, and its `.result()`
    waits. `Overlapped`, below, is this with hooks that stay.
    """
    missing, leaving = [len(bucket) for bucket in buckets], []

    def leave():  # the next one, on all ranks in the order of the buckets
        leaving.append(sender.submit(mean_, flatten(buckets[len(leaving)]), group))

    def ready(number):
        def gradient_is_ready(parameter):
            missing[number] -= 1
            while len(leaving) < len(buckets) and missing[len(leaving)] == 0:
                leave()

        return gradient_is_ready

    hooks = [
        parameter.register_post_accumulate_grad_hook(ready(number))
        for number, bucket in enumerate(buckets)
        for parameter in bucket
    ]
    loss.backward()
    while len(leaving) < len(buckets):  # parameters that this rank did not use
        leave()
    for bucket, future in zip(buckets, leaving):
        unflatten(future.result(), bucket)
    for hook in hooks:
        hook.remove()


class Naive(Replica):
    """One all-reduce a parameter, after backward.

    reduce: (tensor, group) -> its mean over the group: `mean_` unless given, `ring_mean`,
    `backend_mean`, or your own. The tensor is not read again, so its memory may be used.
    A parameter that a rank did not use counts as zeros there, so that it has a gradient, if only
    zeros, on all of them: weight decay and momentum still move what no rank used. (DDP with
    find_unused_parameters=True leaves such a gradient as it was: None.)
    ignored: parameters that another wrapper takes care of.
    Raises ValueError if there is nothing to train.
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
        self.parameters_to_average = self.trained()
        if not self.parameters_to_average:
            raise ValueError("no parameter requires a gradient: there is nothing to train")
        self.synchronizes = True
        broadcast_state(module, group, self.ignored)

    def trained(self) -> list[Tensor]:
        return [p for p in super().trained() if p not in self.ignored]

    @contextmanager
    def no_sync(self):
        """Inside, backward only adds up gradients: for all micro-batches of a step but the last."""
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def finish(self) -> None:
        for parameter in self.parameters_to_average:
            parameter.grad = self.reduce(gradient(parameter), self.group)


class Bucketed(Naive):
    """Gradients travel in flat buckets of about `bucket_bytes`, after backward.

    A message has a fixed cost, so many small ones are slow; see lesson 04.
    """

    def __init__(self, module, group, reduce=None, bucket_bytes: int = BUCKET_BYTES, ignored=()):
        super().__init__(module, group, reduce, ignored)
        self.buckets = make_buckets(self.parameters_to_average, bucket_bytes)

    def finish(self) -> None:
        for bucket in self.buckets:
            unflatten(self.reduce(flatten(bucket), self.group), bucket)


class Overlapped(Bucketed):
    """A bucket leaves as soon as backward has finished its last gradient.

    The sending is done by one background thread, in the order of the buckets: all ranks must
    enter their all-reduces in the same order, whatever order their gradients get ready in.
    """

    def __init__(self, module, group, reduce=None, bucket_bytes: int = BUCKET_BYTES, ignored=()):
        super().__init__(module, group, reduce, bucket_bytes, ignored)
        self.sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sender")
        self.bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self.start_over()
        for parameter in self.parameters_to_average:
            # Its gradient is complete when it has been added to .grad. A hook on the parameter
            # itself (register_hook) would run before that.
            parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)

    def start_over(self) -> None:
        self.missing = [len(bucket) for bucket in self.buckets]
        self.leaving: list[Future] = []

    def gradient_is_ready(self, parameter: Tensor) -> None:
        number = self.bucket_of[parameter]
        if number < len(self.leaving):
            raise RuntimeError(
                "a gradient came after its bucket had left: put all backwards of a step but the "
                "last inside no_sync(), and call finish() after the last"
            )
        if self.synchronizes:
            self.missing[number] -= 1
            while len(self.leaving) < len(self.buckets) and self.missing[len(self.leaving)] == 0:
                self.leave()

    def leave(self) -> None:
        """Send the next bucket off."""
        bucket = self.buckets[len(self.leaving)]
        flat = flatten(bucket)
        for parameter in bucket:
            parameter.grad = None  # the bucket has a copy: hold one, not two
        self.leaving.append(self.sender.submit(self.average, [flat]))

    def average(self, parcel: list[Tensor]) -> Tensor:
        """In the background thread. The executor keeps arguments a little longer than the result
        is awaited; taken out of its list, the bucket is gone when its mean is there."""
        return self.reduce(parcel.pop(), self.group)

    def finish(self) -> None:
        while len(self.leaving) < len(self.buckets):  # parameters that this rank did not use
            self.leave()
        for bucket, future in zip(self.buckets, self.leaving):
            unflatten(future.result(), bucket)
        self.start_over()


def mean(x: Tensor, group) -> Tensor:
    """By whichever of our algorithms suits the size: for a large bucket the pipelined ring, which
    keeps up with gloo's own."""
    algorithm = "pipelined_ring" if x.nbytes > LARGE else "auto"
    return all_reduce(x, group, algorithm=algorithm).div_(group.size())


def mean_(x: Tensor, group) -> Tensor:
    """The same; where x is large, in its own memory. A bucket is a copy, and one is enough."""
    if x.nbytes <= LARGE:
        return mean(x, group)
    return pipelined_ring_all_reduce(x, group, out=x).div_(group.size())


def ring_mean(x: Tensor, group) -> Tensor:
    """By the ring of lesson 03: 2(n-1)/n of x on every link, whatever its size."""
    return ring_all_reduce(x, group).div_(group.size())


def backend_mean(x: Tensor, group) -> Tensor:
    """By the all-reduce that gloo or NCCL brings along."""
    total = x.clone()
    group.allreduce([total]).wait()
    return total.div_(group.size())


def make_buckets(parameters: list[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Group parameters of one dtype, last one first, into buckets of at most `bucket_bytes`.

    Backward makes the gradients of the last layers first. A parameter that is larger than a bucket
    has one to itself. Raises ValueError if bucket_bytes is below 1.
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


def flatten(bucket: list[Tensor]) -> Tensor:
    return torch.cat([gradient(parameter).flatten() for parameter in bucket])


def unflatten(flat: Tensor, bucket: list[Tensor]) -> None:
    """Make each gradient a view of its part of `flat`."""
    parts = flat.split([parameter.numel() for parameter in bucket])
    for parameter, part in zip(bucket, parts):
        parameter.grad = part.view_as(parameter)
