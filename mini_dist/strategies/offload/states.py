"""Adam whose two moments have 8 bits each (Dettmers et al. 2021, "8-bit Optimizers via Block-wise
Quantization").

Adam's moments take two bytes per parameter instead of eight. A moment is stored in blocks with one
scale each. Each value is an index into a table of 256 values, dense near 0 and sparse near 1
("dynamic": leading zeros give the power of ten, the other bits the digits). During a tensor's step
its moments are float32. Small tensors keep float32 moments, as in the paper's code. Adafactor, with
a row and a column per matrix (Shazeer and Stern 2018), is torch.optim.Adafactor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .ideas import blockwise, undo

BLOCK = 2048  # elements per scale, as in the paper
SMALL = 4096  # elements: smaller tensors are not rounded


def dynamic_code(signed: bool) -> Tensor:
    """Return 256 values up to 1, with twice as many per power of ten as one below (section 1.3)."""
    values = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (power + (not signed)) + 1, dtype=torch.float64)
        middles = (edges[1:] + edges[:-1]) / 2
        values += [x * 10.0 ** (power - 6) for x in middles.tolist()]
    if signed:
        values += [-x for x in values if 0 < x < 1]
    return torch.tensor(sorted(values))


class Adam8bit(torch.optim.Optimizer):
    """AdamW with 8-bit moments. Blocks are cut from the flattened tensor, so a shard is rounded
    differently from the whole tensor: ZeRO does not accept this optimizer."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.codes = {"exp_avg": dynamic_code(True), "exp_avg_sq": dynamic_code(False)}

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.step_one(p, **{k: v for k, v in group.items() if k != "params"})

    def step_one(self, p: Tensor, lr: float, betas, eps: float, weight_decay: float) -> None:
        states = self.state[p]
        states["step"] = states.get("step", 0) + 1
        first, second = (self.whole(p, name) for name in self.codes)
        gradient = p.grad.flatten().float()
        first.lerp_(gradient, 1 - betas[0])
        second.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
        c1, c2 = (1 - beta ** states["step"] for beta in betas)
        p.mul_(1 - lr * weight_decay)
        step = (first / c1) / ((second / c2).sqrt() + eps)
        p.sub_((lr * step).view_as(p))
        self.put_away(p, "exp_avg", first)
        self.put_away(p, "exp_avg_sq", second)

    def whole(self, p: Tensor, name: str) -> Tensor:
        kept = self.state[p].get(name)
        if kept is None:
            return torch.zeros(p.numel(), device=p.device)
        if p.numel() < SMALL:
            return kept
        values = undo(kept, self.state[p][f"{name}_size"], self.codes[name].to(p.device), BLOCK)
        return values[: p.numel()]

    def put_away(self, p: Tensor, name: str, moment: Tensor) -> None:
        if p.numel() < SMALL:
            self.state[p][name] = moment
            return
        moment = torch.nn.functional.pad(moment, (0, -len(moment) % BLOCK))
        places, size = blockwise(moment, self.codes[name].to(p.device), BLOCK)
        self.state[p][name], self.state[p][f"{name}_size"] = places, size
