# WRONG: the last bucket leaves when the loop meets parameters[0]; if that one is frozen the loop has skipped it
# and the last bucket is never averaged. Breaks "Frozen parameters stay as they are" + all others are averaged.
# Shown by a model whose FIRST parameter (embedding) is frozen.
from mini_dist.strategies.data_parallel import flatten, mean, unflatten

def average_in_buckets(parameters, bucket_bytes, group):
    parameters = list(parameters)
    bucket = []
    for i in range(len(parameters) - 1, -1, -1):
        p = parameters[i]
        if p.grad is None:
            continue
        if bucket and sum(q.grad.nbytes for q in bucket) + p.grad.nbytes > bucket_bytes:
            unflatten(mean(flatten(bucket), group), bucket)
            bucket = []
        bucket.append(p)
        if i == 0:
            unflatten(mean(flatten(bucket), group), bucket)
