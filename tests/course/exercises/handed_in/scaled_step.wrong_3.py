# WRONG: divides the scale once for EVERY parameter that overflowed. Breaks "divide the scale by scaler.factor".
# Right if one parameter overflows.
from mini_dist import all_reduce
import torch
def scaled_step(parameters, optimizer, scaler, max_norm, group):
    parameters, good, scale = list(parameters), True, scaler.scale
    for p in parameters:
        p.grad = all_reduce(p.grad, group, op="mean") / scale
        if not p.grad.isfinite().all():
            scaler.scale /= scaler.factor
            good = False
    if not good:
        scaler.good_steps = 0
        return
    norm = torch.cat([p.grad.flatten() for p in parameters]).norm()
    for p in parameters:
        p.grad *= (max_norm / norm).clamp(max=1)
    optimizer.step()
    scaler.good_steps += 1
    if scaler.good_steps == scaler.growth_interval:
        scaler.scale *= scaler.factor
        scaler.good_steps = 0
