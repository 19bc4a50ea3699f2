# WRONG: remembers from the first call which positions have a gradient. A second call with another model
# (or after unfreezing) leaves gradients un-averaged / fails. Breaks "replaces each parameter.grad".
# Shown by two calls in one run, with a parameter frozen only in the first.
from mini_dist import gather
from mini_dist.collectives import star_broadcast

def average_through_rank_0(parameters, group, active=[]):
    parameters = list(parameters)
    if not active:
        active.extend(i for i, p in enumerate(parameters) if p.grad is not None)
    for i in active:
        if i < len(parameters) and parameters[i].grad is not None:
            p = parameters[i]
            everyones = gather(p.grad[None], 0, group)
            p.grad = star_broadcast(p.grad if everyones is None else everyones.mean(0), 0, group)
