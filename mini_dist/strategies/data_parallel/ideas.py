"""Three ways to average gradients; each solves a problem of the one before.

    average_through_rank_0   gather, average, broadcast: correct, but all bytes pass through rank 0
    average_in_buckets       a few large messages of flat buckets, but only after backward
    overlapped_backward      sends a bucket once its last gradient is ready and the earlier
                             buckets have been sent, so all ranks send in the same order

Each rank's loss is a mean over equally many tokens, so the mean of the ranks' gradients is the
gradient of the whole batch's mean loss. An all-reduce of N bytes sends 2 (n-1)/n N per rank, on
average over the ranks. wrappers.py does the same for a model that trains for many steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mini_dist.collectives import all_reduce, gather, star_broadcast
from mini_dist.ranks.ledger.recording import recorded

from ..replicas import gradient


@recorded
def average_through_rank_0(parameters: Iterable[Tensor], group) -> None:
    """Replace each gradient by its mean over the ranks: gather on rank 0, average, broadcast.

    Parameters without a gradient (frozen, or unused on all ranks) are skipped. For N bytes of
    gradients, rank 0 receives (n-1) N and sends (n-1) N; every other rank sends and receives N.
    This is the traffic of a parameter server with synchronous workers (Li et al. 2014, section 2).
    """
    for parameter in parameters:
        if parameter.grad is None:
            continue
        everyones = gather(parameter.grad.unsqueeze(0), 0, group)  # [n, ...] on rank 0
        averaged = parameter.grad if everyones is None else everyones.mean(0)
        parameter.grad = star_broadcast(averaged, 0, group)  # read on rank 0 only


@recorded
def average_in_buckets(parameters: Iterable[Tensor], bucket_bytes: int, group) -> None:
    """Replace each gradient by its mean over the ranks, in flat buckets, from the last parameter to
    the first, as backward produces them.

    A bucket is full when the next gradient would make it larger than `bucket_bytes`. Parameters
    without a gradient are skipped.
    """

    def send(bucket):
        unflatten(mean(flatten(bucket), group), bucket)

    bucket, held = [], 0
    for parameter in reversed(list(parameters)):
        if parameter.grad is None:
            continue
        if bucket and held + parameter.grad.nbytes > bucket_bytes:
            send(bucket)
            bucket, held = [], 0
        bucket.append(parameter)
        held += parameter.grad.nbytes
    if bucket:
        send(bucket)


@recorded
def overlapped_backward(loss: Tensor, buckets: list[list[Tensor]], sender, group) -> None:
    """Run backward, and average each bucket's gradients while the rest is still being computed.

    buckets: every trainable parameter once, equal on all ranks; the first bucket holds the
    parameters that backward finishes first. sender: an executor with one thread: `submit(fn,
    *args)` returns at once, and its `.result()` waits. Parameters that this rank did not use get a
    gradient as well.
    """
    missing, leaving = [len(bucket) for bucket in buckets], []

    def leave():  # sends the next bucket; the order is the same on all ranks
        leaving.append(sender.submit(mean, flatten(buckets[len(leaving)]), group))

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


def mean(x: Tensor, group) -> Tensor:
    """Average x over the ranks: the operation applied to each bucket."""
    return all_reduce(x, group, op="mean")


def flatten(bucket: list[Tensor]) -> Tensor:
    """Concatenate the bucket's gradients, with zeros for parameters that have none."""
    return torch.cat([gradient(parameter).flatten() for parameter in bucket])


def unflatten(flat: Tensor, bucket: list[Tensor]) -> None:
    """Make each gradient a view of its part of `flat`."""
    parts = flat.split([parameter.numel() for parameter in bucket])
    for parameter, part in zip(bucket, parts):
        parameter.grad = part.view_as(parameter)
