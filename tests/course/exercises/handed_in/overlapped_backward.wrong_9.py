# WRONG: takes buckets out of the caller's list: the next step has no buckets. Something is changed that should not be.
from mini_dist.strategies.data_parallel import flatten, mean, unflatten

def overlapped_backward(loss, buckets, sender, group):
    missing, left, handles = {id(b): len(b) for b in buckets}, [], []
    def leave():
        b = buckets.pop(0)
        left.append((b, sender.submit(mean, flatten(b), group)))
    def hook(b):
        def ready(_):
            missing[id(b)] -= 1
            while buckets and missing[id(buckets[0])] == 0:
                leave()
        return ready
    for b in buckets:
        handles += [p.register_post_accumulate_grad_hook(hook(b)) for p in b]
    loss.backward()
    while buckets:
        leave()
    for b, f in left:
        unflatten(f.result(), b)
    for h in handles:
        h.remove()
