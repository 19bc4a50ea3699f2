"""What can still be read of a parameter that ZeRO-3 has freed, and what cannot.

It keeps its shape while its storage is empty. An operation on it would read memory that does not
exist, in C, without an exception. So a freed parameter gets a class of its own, which torch asks
before every operation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

ABOUT = """shape ndim dtype device layout itemsize nbytes names is_cpu is_cuda is_leaf is_meta
    is_sparse is_quantized is_nested requires_grad retains_grad grad grad_fn grad_dtype output_nr
    _base _version _grad _grad_fn _backward_hooks _post_accumulate_grad_hooks""".split()
METHODS = """size dim ndimension numel nelement element_size stride storage_offset is_contiguous
    is_floating_point is_complex is_same_size get_device untyped_storage __len__
    requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad
    new_empty new_zeros new_ones new_full new_tensor""".split()
LIKE = """empty_like zeros_like ones_like full_like rand_like randn_like randint_like
    numel is_floating_point is_complex is_same_size""".split()
HARMLESS = {
    *(getattr(Tensor, name).__get__ for name in ABOUT if hasattr(Tensor, name)),
    *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")),
    Tensor.grad.__delete__,
    *(getattr(Tensor, name) for name in METHODS),
    *(getattr(torch, name) for name in LIKE),
}


class FreedError(RuntimeError):
    """A parameter was read or written while it was freed."""


class Freed(nn.Parameter):
    """The class of a parameter while it is freed (see `Unit.free`)."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        given = tree_leaves((args, kwargs))
        raise error(next(one for one in given if isinstance(one, Freed)))

    def __repr__(self, *, tensor_contents=None):
        return f"Parameter of shape {list(self.shape)}, {self.dtype}, freed by ZeRO-3"

    def __format__(self, spec):
        return format(repr(self), spec)

    # These would read `data`: raise an error that names what was called.

    def __deepcopy__(self, memo):
        raise error(self)

    def __reduce_ex__(self, protocol):
        raise error(self)

    def __dlpack__(self, *args, **kwargs):
        raise error(self)


def error(parameter: Freed) -> FreedError:
    return FreedError(
        f"this parameter of shape {list(parameter.shape)} is freed: in ZeRO-3 its values are "
        "together only while its unit computes. Read or change it inside `with model.gathered():`, "
        "or get the whole model's state dict from mini_dist.full_state_dict(model, group)"
    )
