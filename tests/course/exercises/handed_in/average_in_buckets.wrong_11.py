# WRONG: takes the parameters out of the CALLER's list with pop: afterwards (next step, optimizer) that list is empty.
# Something is changed that should not be. Right with a generator.
from mini_dist.strategies.data_parallel import flatten, mean, unflatten

def average_in_buckets(parameters, bucket_bytes, group):
    stack = parameters if isinstance(parameters, list) else list(parameters)
    bucket, held = [], 0
    while stack:
        p = stack.pop()
        if p.grad is None:
            continue
        if bucket and held + p.grad.nbytes > bucket_bytes:
            unflatten(mean(flatten(bucket), group), bucket)
            bucket, held = [], 0
        bucket.append(p)
        held += p.grad.nbytes
    if bucket:
        unflatten(mean(flatten(bucket), group), bucket)
