# WRONG: overflow is looked for in the SUM only after clipping in float16-like range: treats norms above 65504 as an overflow.
# Breaks "If anything overflowed": a large but finite gradient is clipped, not skipped. Shown by finite gradients of norm 1e6.
from mini_dist import all_reduce
import torch

def scaled_step(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    for p in parameters:
        p.grad = all_reduce(p.grad, group, op="mean") / scaler.scale
    norm = torch.cat([p.grad.flatten() for p in parameters]).norm()
    if not norm <= 65504:
        scaler.scale, scaler.good_steps = scaler.scale / scaler.factor, 0
        return
    for p in parameters:
        p.grad *= (max_norm / norm).clamp(max=1)
    optimizer.step()
    scaler.good_steps += 1
    if scaler.good_steps == scaler.growth_interval:
        scaler.scale, scaler.good_steps = scaler.scale * scaler.factor, 0
