"""Lesson 05: wrong buckets and overlap get a hint that names the mistake, even for right values."""

import sys
from concurrent import futures

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from mini_dist import check
from mini_dist.collectives import all_reduce, gather
from mini_dist.strategies import data_parallel as library
from mini_dist.strategies.data_parallel import flatten, mean, unflatten
from tests.course.exercises import solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(solutions)

buckets_wrong, overlap_wrong = Wrong(), Wrong()


def with_gradient(parameters):
    return [p for p in parameters if p.grad is not None]


def make_buckets(parameters, bucket_bytes):
    """Fill buckets by hand, because the library's function solves the exercise."""
    buckets = [[]]
    for p in reversed(parameters):
        if buckets[-1] and sum(q.nbytes for q in [*buckets[-1], p]) > bucket_bytes:
            buckets.append([])
        buckets[-1].append(p)
    return [bucket for bucket in buckets if bucket]


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


@buckets_wrong("the last bucket is sent as well")
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


def average(bucket, group):
    unflatten(mean(flatten(bucket), group), bucket)


def in_buckets(parameters, bucket_bytes, too_full, nbytes=lambda p: p.grad.nbytes):
    buckets, held = [[]], 0
    for p in reversed(list(parameters)):
        if buckets[-1] and too_full(held + nbytes(p), bucket_bytes):
            buckets, held = [*buckets, []], 0
        buckets[-1].append(p)
        held += nbytes(p)
    return [bucket for bucket in buckets if bucket]


@buckets_wrong("is full, not too full")
def begins_a_new_one_when_it_fits_to_the_byte(parameters, bucket_bytes, group):
    have = [p for p in parameters if p.grad is not None]
    for bucket in in_buckets(have, bucket_bytes, lambda held, limit: held >= limit):
        average(bucket, group)


@buckets_wrong("take up no room")
def frozen_parameters_take_up_room(parameters, bucket_bytes, group):
    every = in_buckets(
        parameters, bucket_bytes, lambda held, limit: held > limit, lambda p: p.nbytes
    )
    for bucket in map(with_gradient, every):
        if bucket:
            average(bucket, group)


@buckets_wrong("only the last bucket is open")
def puts_each_into_the_first_with_room(parameters, bucket_bytes, group):
    buckets = []
    for p in [p for p in parameters if p.grad is not None][::-1]:
        for bucket in buckets:
            if sum(q.grad.nbytes for q in bucket) + p.grad.nbytes <= bucket_bytes:
                bucket.append(p)
                break
        else:
            buckets.append([p])
    for bucket in buckets:
        average(bucket, group)


@buckets_wrong("travel as float64")
def sends_double(parameters, bucket_bytes, group):
    for bucket in make_buckets([p for p in parameters if p.grad is not None], bucket_bytes):
        flat = flatten(bucket)
        unflatten(mean(flat.double(), group).to(flat), bucket)


@buckets_wrong("are needed: numbers travel in the dtype")
def sends_half(parameters, bucket_bytes, group):
    for bucket in make_buckets([p for p in parameters if p.grad is not None], bucket_bytes):
        flat = flatten(bucket)
        unflatten(mean(flat.bfloat16(), group).to(flat), bucket)


@buckets_wrong("A barrier moves nothing")
def meets_before_each_bucket(parameters, bucket_bytes, group):
    for bucket in make_buckets([p for p in parameters if p.grad is not None], bucket_bytes):
        dist.barrier(group=group)
        average(bucket, group)


@buckets_wrong("library's make_buckets")
def lets_the_library_fill_the_buckets(parameters, bucket_bytes, group):
    fill = library.make_buckets
    for bucket in fill([p for p in parameters if p.grad is not None], bucket_bytes):
        average(bucket, group)


@buckets_wrong("library's Bucketed.__init__")
def lets_the_library_do_it(parameters, bucket_bytes, group):
    have = [p for p in parameters if p.grad is not None and p.requires_grad]
    library.Bucketed(torch.nn.ParameterList(have), group, bucket_bytes=bucket_bytes).finish()


@buckets_wrong("Your function changes parameters")
def turns_the_callers_list(parameters, bucket_bytes, group):
    parameters.reverse()
    for bucket in in_buckets(with_gradient(parameters)[::-1], bucket_bytes, lambda a, b: a > b):
        average(bucket, group)


@buckets_wrong("Ask `p.grad is not None`")
def takes_all_that_require_a_gradient(parameters, bucket_bytes, group):
    for bucket in make_buckets([p for p in parameters if p.requires_grad], bucket_bytes):
        unflatten(mean(torch.cat([p.grad.flatten() for p in bucket]), group), bucket)


@buckets_wrong("Begin with parameters = list(parameters)")
def goes_through_the_parameters_twice(parameters, bucket_bytes, group):
    if any(p.grad is not None for p in parameters):
        for bucket in make_buckets([p for p in parameters if p.grad is not None], bucket_bytes):
            average(bucket, group)


# ---- overlapped_backward ------------------------------------------------------------------------


def overlap(register, leave, loss, buckets, put_back=unflatten, remove=True):
    """Overlap correctly, so that each wrong answer is wrong in one thing only."""
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
    """Send a bucket as soon as its gradient at index `which` is ready, without counting."""
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


@overlap_wrong("waits in another way")
def waits_for_the_future_in_the_hook(loss, buckets, sender, group):
    def leave(bucket):
        future = sender.submit(mean, flatten(bucket), group)
        futures.wait([future])
        return future

    overlap(AFTER, leave, loss, buckets)


@overlap_wrong("buckets are still in flight")
def never_waits(loss, buckets, sender, group):
    def leave(bucket):
        future = sender.submit(mean, flatten(bucket), group)
        future.add_done_callback(lambda future: unflatten(future.result(), bucket))
        return Done(None)

    overlap(AFTER, leave, loss, buckets, put_back=lambda flat, bucket: None)


@overlap_wrong("average each bucket once")
def averages_twice(loss, buckets, sender, group):
    twice = lambda flat, group: mean(mean(flat, group), group)  # noqa: E731
    overlap(AFTER, lambda b: sender.submit(twice, flatten(b), group), loss, buckets)


def in_order(leave, loss, buckets, put_back=unflatten):
    """Send buckets in list order, which is right except for what `leave` does."""
    missing, leaving, hooks = [len(bucket) for bucket in buckets], [], []
    for number, bucket in enumerate(buckets):

        def ready(p, number=number):
            missing[number] -= 1
            while len(leaving) < len(buckets) and missing[len(leaving)] == 0:
                leaving.append(leave(buckets[len(leaving)]))

        hooks += [p.register_post_accumulate_grad_hook(ready) for p in bucket]
    loss.backward()
    for future, bucket in zip(leaving, buckets):
        put_back(future.result(), bucket)
    for hook in hooks:
        hook.remove()


@overlap_wrong("A barrier moves nothing")
def a_barrier_a_bucket(loss, buckets, sender, group):
    def meet_and_average(flat, group):
        dist.barrier(group=group)
        return mean(flat, group)

    in_order(lambda b: sender.submit(meet_and_average, flatten(b), group), loss, buckets)


@overlap_wrong("are needed: numbers travel in the dtype")
def sends_bfloat16(loss, buckets, sender, group):
    half = lambda flat, group: mean(flat.bfloat16(), group).to(flat)  # noqa: E731
    in_order(lambda b: sender.submit(half, flatten(b), group), loss, buckets)


@overlap_wrong("The gradients are float32 and travel as float64")
def always_sends_double(loss, buckets, sender, group):
    double = lambda flat, group: mean(flat.double(), group).to(flat)  # noqa: E731
    in_order(lambda b: sender.submit(double, flatten(b), group), loss, buckets)


@overlap_wrong("unless it binds its own: def ready(p, number=number)")
def hooks_that_see_the_last_bucket(loss, buckets, sender, group):
    missing, leaving = {i: len(bucket) for i, bucket in enumerate(buckets)}, {}
    for number, bucket in enumerate(buckets):

        def ready(p):
            missing[number] -= 1  # noqa: B023
            if missing[number] == 0:  # noqa: B023
                leaving[number] = sender.submit(mean, flatten(bucket), group)  # noqa: B023

        for p in bucket:
            p.register_post_accumulate_grad_hook(ready)
    loss.backward()
    for number, bucket in enumerate(buckets):
        unflatten(leaving[number].result(), bucket)


@overlap_wrong("no hook has found its bucket complete")
def hooks_that_count_for_the_last_bucket(loss, buckets, sender, group):
    missing, leaving, hooks = [len(bucket) for bucket in buckets], [], []
    for number, bucket in enumerate(buckets):

        def ready(p):
            missing[number] -= 1  # noqa: B023
            while len(leaving) < len(buckets) and missing[len(leaving)] == 0:
                leaving.append(sender.submit(mean, flatten(buckets[len(leaving)]), group))

        hooks += [p.register_post_accumulate_grad_hook(ready) for p in bucket]
    loss.backward()
    for future, bucket in zip(leaving, buckets):
        unflatten(future.result(), bucket)
    for hook in hooks:
        hook.remove()


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


right_buckets, right_overlap = Right("average_in_buckets"), Right("overlapped_backward")
right_buckets(solutions.average_in_buckets)
right_overlap(solutions.overlapped_backward)


@right_buckets
def by_the_backend(parameters, bucket_bytes, group):
    for bucket in make_buckets(with_gradient(parameters), bucket_bytes):
        flat = flatten(bucket)
        dist.all_reduce(flat, group=group)
        unflatten(flat / group.size(), bucket)


@right_buckets
def divides_before_it_adds(parameters, bucket_bytes, group):
    for bucket in make_buckets(with_gradient(parameters), bucket_bytes):
        unflatten(all_reduce(flatten(bucket) / group.size(), group), bucket)


@right_buckets
def through_a_root(parameters, bucket_bytes, group):
    for bucket in make_buckets(with_gradient(parameters), bucket_bytes):
        flat = flatten(bucket)
        dist.reduce(flat, group_dst=0, group=group)
        flat /= group.size()
        dist.broadcast(flat, group_src=0, group=group)
        unflatten(flat, bucket)


@right_buckets
def all_buckets_under_way_at_once(parameters, bucket_bytes, group):
    leaving = []
    for bucket in make_buckets(with_gradient(parameters), bucket_bytes):
        flat = flatten(bucket)
        leaving.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in leaving:
        work.wait()
        for p in bucket:
            here, flat = flat[: p.numel()], flat[p.numel() :]
            p.grad.copy_(here.view_as(p)).div_(group.size())


@right_overlap
def fills_flat_buckets_as_gradients_arrive(loss, buckets, sender, group):
    flats = [torch.empty(sum(p.numel() for p in b), dtype=loss.dtype) for b in buckets]
    place = {}
    for number, bucket in enumerate(buckets):
        parts = flats[number].split([p.numel() for p in bucket])
        place |= {p: (number, part) for p, part in zip(bucket, parts)}
    missing, leaving = [len(bucket) for bucket in buckets], []

    def arrived(p):
        number, part = place[p]
        part.copy_(p.grad.flatten())
        missing[number] -= 1
        while len(leaving) < len(flats) and not missing[len(leaving)]:
            leaving.append(sender.submit(mean, flats[len(leaving)], group))

    hooks = [p.register_post_accumulate_grad_hook(arrived) for p in place]
    loss.backward()
    for bucket, future in zip(buckets, leaving):
        unflatten(future.result(), bucket)
    for hook in hooks:
        hook.remove()


@right_overlap
def hooks_on_the_nodes_that_add_up(loss, buckets, sender, group):
    ready, leaving, hooks, nodes = set(), [], [], []

    def added(p):
        ready.add(p)
        while len(leaving) < len(buckets) and ready.issuperset(buckets[len(leaving)]):
            leaving.append(sender.submit(mean, flatten(buckets[len(leaving)]), group))

    for p in [p for bucket in buckets for p in bucket]:
        nodes.append(p.view_as(p).grad_fn.next_functions[0][0])
        hooks.append(nodes[-1].register_hook(lambda *_, p=p: added(p)))
    loss.backward()
    for bucket, future in zip(buckets, leaving):
        unflatten(future.result(), bucket)
    for hook in hooks:
        hook.remove()


@right_overlap
def the_backend_in_the_senders_thread(loss, buckets, sender, group):
    def share(flat):
        flat /= group.size()
        dist.all_reduce(flat, group=group)
        return flat

    in_order(lambda bucket: sender.submit(share, flatten(bucket)), loss, buckets)


ANSWERS = [(each.name, fn) for each in (right_buckets, right_overlap) for fn in each.answers]


@pytest.mark.parametrize("name, fn", ANSWERS, ids=[fn.__name__ for _, fn in ANSWERS])
def test_right_answers_are_right(name, fn):
    verdict = check.exercises()[name].judge(fn)
    assert verdict.state == "right", verdict


def under_another_name(parameters, bucket_bytes, group):
    all_at_once = library.average_in_buckets
    all_at_once(parameters, bucket_bytes=bucket_bytes, group=group)


def test_the_librarys_own_is_known_by_what_runs_not_by_its_name():
    assert check.average_in_buckets.judge(under_another_name).state == "still the library's"
