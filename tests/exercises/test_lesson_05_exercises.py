"""Lesson 05: who buckets or overlaps wrongly is told what is wrong, also where values are right."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from mini_dist import check
from mini_dist.collectives import all_reduce, gather
from mini_dist.data_parallel import flatten, make_buckets, mean, unflatten
from tests.exercises import solutions_05
from tests.exercises.wrong import Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(solutions_05)

buckets_wrong, overlap_wrong = Wrong(), Wrong()


def with_gradient(parameters):
    return [p for p in parameters if p.grad is not None]


# ---- average_in_buckets -------------------------------------------------------------------------


@buckets_wrong("the naive way")
def one_call_a_parameter(parameters, bucket_bytes, group):
    for p in reversed(with_gradient(parameters)):
        p.grad = all_reduce(p.grad, group, op="mean")


@buckets_wrong("is more than bucket_bytes")
def one_bucket_for_all(parameters, bucket_bytes, group):
    bucket = with_gradient(parameters)[::-1]
    unflatten(mean(flatten(bucket), group), bucket)


@buckets_wrong("is more than bucket_bytes")
def a_bucket_ends_after_it_is_too_full(parameters, bucket_bytes, group):
    bucket = []
    for p in reversed(with_gradient(parameters)):
        bucket.append(p)
        if sum(q.nbytes for q in bucket) >= bucket_bytes:
            unflatten(mean(flatten(bucket), group), bucket)
            bucket = []
    if bucket:
        unflatten(mean(flatten(bucket), group), bucket)


@buckets_wrong("bucket_bytes counts bytes, p.grad.nbytes, not numbers")
def counts_numbers_not_bytes(parameters, bucket_bytes, group):
    buckets, held = [[]], 0
    for p in reversed(with_gradient(parameters)):
        if buckets[-1] and held + p.numel() > bucket_bytes:
            buckets, held = [*buckets, []], 0
        buckets[-1].append(p)
        held += p.numel()
    for bucket in buckets:
        unflatten(mean(flatten(bucket), group), bucket)


@buckets_wrong("in reverse")
def begins_with_the_first_parameter(parameters, bucket_bytes, group):
    for bucket in make_buckets(with_gradient(parameters)[::-1], bucket_bytes):
        unflatten(mean(flatten(bucket), group), bucket)


@buckets_wrong("These are sums")
def sum_for_mean(parameters, bucket_bytes, group):
    for bucket in make_buckets(with_gradient(parameters), bucket_bytes):
        unflatten(all_reduce(flatten(bucket), group), bucket)


@buckets_wrong("Nothing happened to the gradients")
def forgets_to_put_it_back(parameters, bucket_bytes, group):
    for bucket in make_buckets(with_gradient(parameters), bucket_bytes):
        mean(flatten(bucket), group)


@buckets_wrong("the last bucket is sent, too")
def leaves_the_last_bucket(parameters, bucket_bytes, group):
    for bucket in make_buckets(with_gradient(parameters), bucket_bytes)[:-1]:
        unflatten(mean(flatten(bucket), group), bucket)


@buckets_wrong("in the order and sizes in which you filled it")
def cuts_in_another_order(parameters, bucket_bytes, group):
    for bucket in make_buckets(with_gradient(parameters), bucket_bytes):
        unflatten(mean(flatten(bucket), group), bucket[::-1])


@buckets_wrong("Frozen parameters are left alone")
def fills_in_the_frozen_one(parameters, bucket_bytes, group):
    for bucket in make_buckets(parameters, bucket_bytes):
        unflatten(mean(flatten(bucket), group), bucket)


@buckets_wrong("library's gather")
def gathers_first(parameters, bucket_bytes, group):
    for bucket in make_buckets(with_gradient(parameters), bucket_bytes):
        gather(flatten(bucket), 0, group)
        unflatten(mean(flatten(bucket), group), bucket)


@buckets_wrong("enough")
def averages_each_bucket_twice(parameters, bucket_bytes, group):
    for bucket in make_buckets(with_gradient(parameters), bucket_bytes):
        unflatten(mean(mean(flatten(bucket), group), group), bucket)


@buckets_wrong("something is None")
def trips_over_the_frozen_one(parameters, bucket_bytes, group):
    flat = torch.cat([p.grad.flatten() for p in parameters])
    unflatten(mean(flat, group), parameters)


# ---- overlapped_backward ------------------------------------------------------------------------


def overlap(register, leave, loss, buckets, put_back=unflatten, remove=True):
    """The right way, for the wrong answers to be wrong in one thing only."""
    missing, leaving, hooks = [len(bucket) for bucket in buckets], {}, []
    for number, bucket in enumerate(buckets):

        def ready(value, number=number, bucket=bucket):
            missing[number] -= 1
            if missing[number] == 0:
                leaving[number] = leave(bucket)

        hooks += [getattr(p, register)(ready) for p in bucket]
    loss.backward()
    for number, bucket in enumerate(buckets):
        put_back(leaving[number].result(), bucket)
    for hook in hooks if remove else []:
        hook.remove()


AFTER = "register_post_accumulate_grad_hook"


@overlap_wrong("runs before its gradient is added")
def hook_on_the_parameter_instead_of_its_gradient(loss, buckets, sender, group):
    def leave(bucket):
        return sender.submit(mean, flatten(bucket).clone(), group)

    overlap("register_hook", leave, loss, buckets)


@overlap_wrong("Only the last micro-batch was reduced")
def only_the_last_micro_batch(loss, buckets, sender, group):
    for bucket in buckets:
        for p in bucket:
            p.grad = None
    overlap(AFTER, lambda b: sender.submit(mean, flatten(b), group), loss, buckets)


@overlap_wrong("Only the last micro-batch was averaged")
def averages_the_last_and_adds_the_first(loss, buckets, sender, group):
    before = {p: p.grad for bucket in buckets for p in bucket}
    for p in before:
        p.grad = None
    overlap(AFTER, lambda b: sender.submit(mean, flatten(b), group), loss, buckets)
    for p, grad in before.items():
        p.grad = p.grad + grad


@overlap_wrong("These are sums")
def sum_for_mean_in_overlap(loss, buckets, sender, group):
    overlap(AFTER, lambda b: sender.submit(all_reduce, flatten(b), group), loss, buckets)


@overlap_wrong("All buckets leave after backward")
def leaves_after_backward(loss, buckets, sender, group):
    loss.backward()
    leaving = [sender.submit(mean, flatten(bucket), group) for bucket in buckets]
    for bucket, future in zip(buckets, leaving):
        unflatten(future.result(), bucket)


class Done:
    def __init__(self, value):
        self.value = value

    def result(self):
        return self.value


@overlap_wrong("Nothing was handed to the sender")
def waits_in_the_hook(loss, buckets, sender, group):
    overlap(AFTER, lambda b: Done(mean(flatten(b), group)), loss, buckets)


@overlap_wrong("A hook calls .result()")
def waits_for_the_sender_in_the_hook(loss, buckets, sender, group):
    def leave(bucket):
        return Done(sender.submit(mean, flatten(bucket), group).result())

    overlap(AFTER, leave, loss, buckets)


@overlap_wrong("Your hooks are still there")
def leaves_hooks_that_would_send_nothing(loss, buckets, sender, group):
    leave = lambda b: sender.submit(mean, flatten(b), group)  # noqa: E731
    overlap(AFTER, leave, loss, buckets, remove=False)


@overlap_wrong("Your hooks are still there")
def leaves_its_hooks_behind(loss, buckets, sender, group):
    missing, leaving = [len(bucket) for bucket in buckets], {}
    for number, bucket in enumerate(buckets):

        def ready(p, number=number, bucket=bucket):
            missing[number] -= 1
            if missing[number] % len(bucket) == 0:
                leaving[number] = sender.submit(mean, flatten(bucket), group)

        for p in bucket:
            p.register_post_accumulate_grad_hook(ready)
    loss.backward()
    for number, bucket in enumerate(buckets):
        unflatten(leaving[number].result(), bucket)


@overlap_wrong("with the first of its gradients, not the last")
def leaves_with_the_first_gradient(loss, buckets, sender, group):
    leaving, hooks = {}, []
    for number, bucket in enumerate(buckets):

        def ready(p, number=number, bucket=bucket):
            if number not in leaving:
                leaving[number] = sender.submit(mean, flatten(bucket), group)

        hooks += [p.register_post_accumulate_grad_hook(ready) for p in bucket]
    loss.backward()
    for number, bucket in enumerate(buckets):
        unflatten(leaving[number].result(), bucket)
    for hook in hooks:
        hook.remove()


def hooks_on(which, loss, buckets, sender, group):
    """No count: a bucket leaves when the gradient at this place of it is there."""
    leaving = []

    def ready(p):
        bucket = next(bucket for bucket in buckets if bucket[which] is p)
        leaving.append(sender.submit(mean, flatten(bucket), group))

    hooks = [bucket[which].register_post_accumulate_grad_hook(ready) for bucket in buckets]
    loss.backward()
    for bucket, future in zip(buckets, leaving):
        unflatten(future.result(), bucket)
    for hook in hooks:
        hook.remove()


@overlap_wrong("another order inside the buckets: The last micro-batch is missing")
def takes_the_last_of_the_list_for_the_last_that_is_ready(loss, buckets, sender, group):
    hooks_on(-1, loss, buckets, sender, group)


@overlap_wrong("The last micro-batch is missing")
def takes_the_first_of_the_list_for_the_last_that_is_ready(loss, buckets, sender, group):
    hooks_on(0, loss, buckets, sender, group)


@overlap_wrong("ready in another order on rank 1: The ranks average different buckets")
def leaves_in_the_order_of_getting_ready(loss, buckets, sender, group):
    overlap(AFTER, lambda b: sender.submit(mean, flatten(b), group), loss, buckets)


@overlap_wrong("Several buckets leave at once")
def all_leave_with_the_last_gradient(loss, buckets, sender, group):
    missing, leaving, hooks = [sum(map(len, buckets))], [], []

    def ready(p):
        missing[0] -= 1
        if missing[0] == 0:
            leaving.extend(sender.submit(mean, flatten(bucket), group) for bucket in buckets)

    hooks = [p.register_post_accumulate_grad_hook(ready) for bucket in buckets for p in bucket]
    loss.backward()
    for bucket, future in zip(buckets, leaving):
        unflatten(future.result(), bucket)
    for hook in hooks:
        hook.remove()


@overlap_wrong("Wrong gradients")
def never_puts_the_means_back(loss, buckets, sender, group):
    leave = lambda b: sender.submit(mean, flatten(b), group)  # noqa: E731
    overlap(AFTER, leave, loss, buckets, put_back=lambda flat, bucket: None)


@overlap_wrong("Nothing was handed to the sender")
def the_backend_after_backward(loss, buckets, sender, group):
    loss.backward()
    for bucket in buckets:
        flat = flatten(bucket)
        dist.all_reduce(flat, group=group)
        unflatten(flat / group.size(), bucket)


# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn, says", buckets_wrong.answers, ids=buckets_wrong.names())
def test_wrong_buckets_are_refused_with_the_hint_that_names_the_mistake(fn, says):
    verdict = check.average_in_buckets.judge(fn)
    assert verdict.state == "wrong"
    assert says in verdict.hint


@pytest.mark.parametrize("fn, says", overlap_wrong.answers, ids=overlap_wrong.names())
def test_a_wrong_overlap_is_refused_with_the_hint_that_names_the_mistake(fn, says):
    verdict = check.overlapped_backward.judge(fn)
    assert verdict.state == "wrong"
    assert says in verdict.hint


def by_the_backend(parameters, bucket_bytes, group):
    for bucket in make_buckets(with_gradient(parameters), bucket_bytes):
        flat = flatten(bucket)
        dist.all_reduce(flat, group=group)
        unflatten(flat / group.size(), bucket)


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("average_in_buckets", solutions_05.average_in_buckets),
        ("average_in_buckets", by_the_backend),
        ("overlapped_backward", solutions_05.overlapped_backward),
    ],
)
def test_right_answers_are_right(name, fn):
    verdict = check.exercises()[name].judge(fn)
    assert verdict.state == "right", verdict
