"""What a rank holds: bytes by kind and phase, from the creation and end of every tensor's storage.

On a CPU nothing counts allocations, and the resident size of a process says little. So a dispatch
mode looks at every operation and notes each new storage, and a weak reference tells when it is
gone. Views share a storage and are counted once. Sometimes a storage's kind is known only later (a
buffer of backward becomes a gradient), so kinds are settled at the end.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

KINDS = ("parameters", "gradients", "optimizer state", "activations", "buffers", "other")


class MemoryRecorder(TorchDispatchMode):
    """Log of storages that appear, vanish and change size; `kinds` is filled in as it becomes
    known.

    A storage created in forward is an activation. Parameters of Modules, their gradients and
    optimizer states count as such, wherever created. All else is "other": inputs, temporaries, flat
    buffers. counts_meta: count a tensor without storage with the bytes that it stands for.
    """

    def __init__(self, phases, counts_meta: bool = False):
        super().__init__()
        self.events: list[tuple[float, str, int, int]] = []  # time, phase, serial, change in bytes
        self.kinds: dict[int, str] = {}
        self._phases = phases
        self._serials: dict[int, tuple[int, weakref.ref]] = {}  # id of a live storage -> serial
        self._sizes: list[int] = []  # by serial
        self._known = WeakIdKeyDictionary()  # parameters
        self.counts_meta = counts_meta

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.see_all(args, kwargs, result)
        return result

    def see_all(self, *values) -> None:
        for value in tensors_in(values):
            self.see(value)

    def see(self, tensor: torch.Tensor, kind: str | None = None) -> None:
        """Note this tensor's storage if it is new or resized, and its kind if known."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            tensor = getattr(tensor, "_local_tensor", None)  # a DTensor's part on this rank
            if tensor is None:
                return
        if tensor.layout is not torch.strided or (tensor.is_meta and not self.counts_meta):
            return
        storage = tensor.untyped_storage()
        known = self._serials.get(id(storage))
        is_known = known is not None and known[1]() is storage
        if is_known and not kind and self._sizes[known[0]] == storage.nbytes():
            return
        if not is_known:
            serial = len(self._sizes)
            key = id(storage)
            reference = weakref.ref(storage, lambda _: self._gone(key, serial))
            self._serials[key] = (serial, reference)
            self._sizes.append(0)
            if self._phases.now == "forward":
                self.kinds[serial] = "activations"
        else:
            serial = known[0]
        self._resize(serial, storage.nbytes())
        if kind:
            self.kinds[serial] = kind

    def _resize(self, serial: int, nbytes: int) -> None:
        change = nbytes - self._sizes[serial]
        if change:
            self._sizes[serial] = nbytes
            self.events.append((time.time(), self._phases.now, serial, change))

    def _gone(self, key: int, serial: int) -> None:
        self._resize(serial, 0)
        if self._serials.get(key, (None,))[0] == serial:
            del self._serials[key]

    # -- kinds of storages --------------------------------------------------------------------

    def _see_module(self, module, inputs) -> None:
        for parameter in module.parameters(recurse=False):
            self.see(parameter, "parameters")
            if parameter.requires_grad and parameter.is_leaf and parameter not in self._known:
                self._known[parameter] = True
                parameter.register_post_accumulate_grad_hook(self._see_gradient)
        # (not module.buffers: Megatron's DDP has a list of that name)
        for buffer in torch.nn.Module.buffers(module, recurse=False):
            self.see(buffer, "buffers")

    def _see_gradient(self, parameter) -> None:
        if parameter.grad is not None:
            self.see(parameter.grad, "gradients")

    def _see_optimizer(self, optimizer, args, kwargs) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.see(parameter, "parameters")
                self._known[parameter] = True
                self._see_gradient(parameter)
        for value in tree_leaves(list(optimizer.state.values())):
            if isinstance(value, torch.Tensor):
                self.see(value, "optimizer state")

    @contextmanager
    def hooks(self):
        """Add hooks inside `with` that tell parameters, gradients and optimizer states."""
        forward_hook = torch.nn.modules.module.register_module_forward_pre_hook(self._see_module)
        step_hook = register_optimizer_step_post_hook(self._see_optimizer)
        resize = torch.UntypedStorage.resize_

        def resize_(storage, nbytes):  # how FSDP frees and refills a buffer: no visible operation
            resize(storage, nbytes)
            known = self._serials.get(id(storage))
            if known and known[1]() is storage:
                self._resize(known[0], nbytes)
            return storage

        torch.UntypedStorage.resize_ = resize_
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize
            forward_hook.remove()
            step_hook.remove()

    def export(self) -> MemoryRecord:
        for parameter in self._known:  # a gradient may have been assigned by hand
            self._see_gradient(parameter)
        return MemoryRecord(
            [(t, phase, self.kinds.get(s, "other"), change) for t, phase, s, change in self.events],
            [serial for _, _, serial, _ in self.events],
        )


def tensors_in(values) -> Iterator[torch.Tensor]:
    """The tensors among an operation's arguments, which tree_leaves finds in five times as long."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            yield from tensors_in(value)


@dataclass
class MemoryRecord:
    """Bytes that one rank held, over time. `events`: (time, phase, kind, change in bytes);
    `serials`: the storage of each event."""

    events: list[tuple[float, str, str, int]]
    serials: list[int]

    def live(self) -> dict[str, int]:
        """Return bytes by kind after the last event. (When the function has returned, little is
        left: `held` answers the same question inside it.)"""
        held = dict.fromkeys(KINDS, 0)
        for _, _, kind, change in self.events:
            held[kind] += change
        return held

    def peak(self, phase: str | None = None) -> dict[str, int]:
        """Return bytes by kind at the peak of the run (or of a phase)."""
        held, most = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
        for _, now, kind, change in self.events:
            held[kind] += change
            if phase in (None, now) and sum(held.values()) > sum(most.values()):
                most = dict(held)
        return most

    def peak_bytes(self, phase: str | None = None, kind: str | None = None) -> int:
        """Return the peak bytes in total, or of one kind (which may peak at another time)."""
        held = most = 0
        for _, now, of_kind, change in self.events:
            if kind in (None, of_kind):
                held += change
            if phase in (None, now):
                most = max(most, held)
        return most


def held(group) -> dict[str, int]:
    """Return the bytes by kind that this rank holds now; call it inside a run on ranks.

    Raises ValueError if the run was launched without memory=True.
    """
    return memory_of(group).export().live()


def memory_of(group) -> MemoryRecorder:
    """Return the recorder of this run's memory; ValueError if there is none."""
    memory = getattr(getattr(group, "recorder", None), "memory", None)
    if memory is None:
        raise ValueError("this run does not record memory: launch(..., memory=True)")
    return memory
