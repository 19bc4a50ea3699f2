"""torch.autocast for tensors without storage, which torch has none for.

Inside, products of matrices get 16-bit operands, and what loses digits gets float32 ones, as CUDA's
autocast does it (PyTorch's list, "Automatic mixed precision: op-specific behavior", torch 2.13). A
parameter is converted once per region.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

PRODUCTS = {"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm"}
PRODUCTS |= {"einsum", "conv1d", "conv2d", "conv3d"}
IN_FLOAT32 = {"layer_norm", "group_norm", "softmax", "log_softmax", "cross_entropy", "nll_loss"}
IN_FLOAT32 |= {"norm", "pow", "exp", "log", "cumsum", "prod", "logsumexp"}


class AutocastWithoutStorage(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.converted: dict[Tensor, Tensor] = {}

    def __exit__(self, *error) -> None:
        self.converted.clear()
        return super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in PRODUCTS:
            args = tuple(self.narrow(each) for each in args)
            kwargs = {key: self.narrow(each) for key, each in (kwargs or {}).items()}
        elif name in IN_FLOAT32:
            args = tuple(map(wide, args))
        return function(*args, **(kwargs or {}))

    def narrow(self, value):
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(self.dtype)
        if value not in self.converted:
            self.converted[value] = value.to(self.dtype)
        return self.converted[value]


def wide(value):
    halves = (torch.bfloat16, torch.float16)
    return value.float() if isinstance(value, Tensor) and value.dtype in halves else value
