# RIGHT: torch's own clipping, an explicit vote by max, the library's LossScaler.adjust is a method of the argument.
from mini_dist import all_reduce
import torch
def scaled_step(parameters, optimizer, scaler, max_norm, group):
    parameters = tuple(parameters)
    bad = max((float(not p.grad.isfinite().all()) for p in parameters), default=0.0)
    if all_reduce(torch.tensor([bad]), group, op="max").item():
        scaler.scale /= scaler.factor
        scaler.good_steps = 0
    else:
        for p in parameters:
            p.grad = all_reduce(p.grad / scaler.scale, group) / group.size()
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
        scaler.good_steps = (scaler.good_steps + 1) % scaler.growth_interval
        scaler.scale *= 1 if scaler.good_steps else scaler.factor
