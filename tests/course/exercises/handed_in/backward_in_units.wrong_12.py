# WRONG: .view(-1) raises for gradients that are not contiguous (a parameter that is a transposed tensor).
import torch
from mini_dist import reduce_scatter

def backward_in_units(loss, units, group):
    parts, handles = [None] * len(units), []
    def hook(i, unit):
        def ready(_):
            if all(p.grad is not None for p in unit):
                flat = torch.cat([p.grad.view(-1) for p in unit])
                for p in unit:
                    p.grad = None
                parts[i] = reduce_scatter(flat, group, op="mean")
        return ready
    for i, unit in enumerate(units):
        h = hook(i, unit)
        handles += [p.register_post_accumulate_grad_hook(h) for p in unit]
    loss.backward()
    for h in handles:
        h.remove()
    return parts
