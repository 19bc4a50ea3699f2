# WRONG: counts by taking parameters out of the caller's units: afterwards units are empty lists (next step: nothing happens).
import torch
from mini_dist import reduce_scatter

def backward_in_units(loss, units, group):
    parts, handles, whole_units = [None] * len(units), [], [list(u) for u in units]
    def hook(i):
        def ready(p):
            units[i][:] = [q for q in units[i] if q is not p]
            if not units[i]:
                flat = torch.cat([q.grad.flatten() for q in whole_units[i]])
                for q in whole_units[i]:
                    q.grad = None
                parts[i] = reduce_scatter(flat, group, op="mean")
        return ready
    for i, unit in enumerate(units):
        handles += [p.register_post_accumulate_grad_hook(hook(i)) for p in unit]
    loss.backward()
    for h in handles:
        h.remove()
    return parts
