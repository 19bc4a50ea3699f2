# WRONG: a bucket that holds nothing is sent too: a first parameter larger than bucket_bytes makes flatten([]) raise.
# Breaks "A parameter larger than a bucket gets a bucket of its own". Shown by a large LAST parameter.
from mini_dist.strategies.data_parallel import flatten, mean, unflatten

def average_in_buckets(parameters, bucket_bytes, group):
    bucket, held = [], 0
    for p in reversed(list(parameters)):
        if p.grad is None:
            continue
        if held + p.grad.nbytes > bucket_bytes:
            unflatten(mean(flatten(bucket), group), bucket)
            bucket, held = [], 0
        bucket.append(p)
        held += p.grad.nbytes
    if bucket:
        unflatten(mean(flatten(bucket), group), bucket)
