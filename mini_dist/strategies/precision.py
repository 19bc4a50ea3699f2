"""Mixed precision: 16-bit arithmetic around parameters that stay in 32 bits.

    precision = Precision(torch.float16, LossScaler())
    train_step(model, optimizer, micro_batches, precision=precision)

Matrices are multiplied in 16 bits. The loss and the optimizer's sums stay in 32 bits (Micikevicius
et al. 2018, section 3.1): bfloat16 has 8 binary digits, so it rounds 1 + 1/512 to 1, and a small
update would not change a weight.

    format      digits   smallest normal   largest
    float32     24       1e-38             3e38
    bfloat16     8       1e-38             3e38        the range of float32: no scaling needed
    float16     11       6e-5              65504       gradients vanish below 6e-8
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_dist.collectives import all_reduce
from mini_dist.plan.fields import checks_kinds
from mini_dist.ranks.autocast import AutocastWithoutStorage

HALVES = (torch.bfloat16, torch.float16)


@checks_kinds
@dataclass
class LossScaler:
    """Scale the loss up so that small gradients do not vanish in float16. The scale is adjusted
    during training: too large a scale makes gradients overflow, and such a step is skipped.

    scale: the current scale. A step whose gradients overflow divides it by `factor`; after
    `growth_interval` steps in a row without an overflow it is multiplied by `factor`. All ranks
    must adjust alike, which the common gradient norm ensures (see train.update). Powers of two
    change no digit of a gradient. Rule and defaults: torch.amp.GradScaler.
    """

    scale: float = 2.0**16
    growth_interval: int = 2000
    factor: float = 2.0
    good_steps: int = 0  # since the scale last changed

    def __post_init__(self):
        for field, least in (("scale", 0), ("factor", 1), ("growth_interval", 0)):
            if not getattr(self, field) > least:
                value = getattr(self, field)
                raise ValueError(f"{field}={value!r} is too small: give more than {least}")

    def adjust(self, overflowed: bool) -> None:
        """Adjust the scale after a step: lower it after an overflow, raise it after many
        steps without one."""
        if overflowed:
            self.scale, self.good_steps = self.scale / self.factor, 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * self.factor, 0


def scaled_step(
    parameters: Iterable[Tensor], optimizer, scaler: LossScaler, max_norm: float, group
) -> None:
    """Finish a step in float16: average, unscale and clip the gradients, then step; skip the step
    on all ranks if the gradients of any rank overflowed.

    Each `.grad` holds this rank's gradient of its loss times scaler.scale, which is equal on all
    ranks. An inf or nan on one rank is in the mean on every rank, so they agree without a message.
    This shows the idea (Micikevicius et al. 2018, section 3.2); train.update does it for any
    strategy.
    """
    parameters = list(parameters)
    for parameter in parameters:
        parameter.grad = all_reduce(parameter.grad, group, op="mean") / scaler.scale
    norm = torch.cat([parameter.grad.flatten() for parameter in parameters]).norm()
    if not norm.isfinite():
        scaler.scale /= scaler.factor
        scaler.good_steps = 0
        return
    for parameter in parameters:
        parameter.grad *= (max_norm / norm).clamp(max=1)
    optimizer.step()
    scaler.good_steps += 1
    if scaler.good_steps == scaler.growth_interval:
        scaler.scale *= scaler.factor
        scaler.good_steps = 0


@dataclass(frozen=True)
class Precision:
    """How a step computes: in the parameters' own dtype (None), or in 16 bits where that is safe.

    float16 needs a LossScaler. Raises ValueError for any other dtype.
    """

    dtype: torch.dtype | None = None
    scaler: LossScaler | None = None

    def __post_init__(self):
        if self.dtype not in (None, *HALVES):
            raise ValueError(
                f"dtype={self.dtype} is no 16-bit float: give torch.bfloat16, torch.float16, or "
                "None for the dtype of the parameters"
            )
        if self.dtype == torch.float16 and self.scaler is None:
            raise ValueError(
                "float16 loses gradients below 6e-8: give a LossScaler(), or take bfloat16"
            )

    @property
    def scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.scale

    def autocast(self, device_type: str):
        """Let torch pick each operation's dtype inside `with`: 16 bits for matrix products."""
        if device_type == "meta":  # torch has no autocast there
            return nullcontext() if self.dtype is None else AutocastWithoutStorage(self.dtype)
        return torch.autocast(device_type, self.dtype, enabled=self.dtype is not None)


FULL = Precision()
