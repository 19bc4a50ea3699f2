"""Lesson 05, solved as a learner would."""

from mini_dist.collectives import all_reduce
from mini_dist.data_parallel import flatten, mean, unflatten


def average_in_buckets(parameters, bucket_bytes, group):
    def send(bucket):
        unflatten(all_reduce(flatten(bucket), group, op="mean"), bucket)

    bucket, held = [], 0
    for p in reversed(parameters):
        if p.grad is None:
            continue
        if bucket and held + p.grad.nbytes > bucket_bytes:
            send(bucket)
            bucket, held = [], 0
        bucket.append(p)
        held += p.grad.nbytes
    if bucket:
        send(bucket)


def overlapped_backward(loss, buckets, sender, group):
    missing, leaving, hooks = [len(bucket) for bucket in buckets], [], []
    for number, bucket in enumerate(buckets):

        def ready(p, number=number):
            missing[number] -= 1
            while len(leaving) < len(buckets) and missing[len(leaving)] == 0:
                leaving.append(sender.submit(mean, flatten(buckets[len(leaving)]), group))

        hooks += [p.register_post_accumulate_grad_hook(ready) for p in bucket]
    loss.backward()
    for future, bucket in zip(leaving, buckets):
        unflatten(future.result(), bucket)
    for hook in hooks:
        hook.remove()
