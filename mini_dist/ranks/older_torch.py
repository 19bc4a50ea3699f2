"""What torch 2.8 to 2.12 do in another way than torch 2.13, in one place.

The library is written for torch 2.13. Everything that an older torch needs besides is here, so when
the oldest version in pyproject.toml rises, this is the file that shrinks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

# Methods of a process group: the name since torch 2.13, and the name before.
FORMER_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


def collective_of(group, method: str) -> Callable:
    """Return a method of torch's process group by the name that torch 2.13 gives it."""
    found = getattr(group, method, None)
    return found or getattr(group, FORMER_NAMES.get(method, method))


def with_former_names(group_class: type) -> type:
    """Let torch call the methods of a process group class by their former names as well."""
    for name, former in FORMER_NAMES.items():
        setattr(group_class, former, getattr(group_class, name))
    return group_class


def gradients_of(given: Sequence[Tensor] | tuple[list[Tensor]]) -> list[Tensor]:
    """Return what backward(ctx, *given) of a function with `boxed_grads_call` got, as a list.

    Since torch 2.13 backward gets one list that it may empty, which frees each gradient after its
    last use. An older torch passes the gradients one by one and keeps them until backward returns.
    """
    return given[0] if isinstance(given[0], list) else list(given)
