"""One rank of any world, in this process alone, with tensors that have shapes and no storage.

    with without_storage(rank=5, world_size=1024) as group:
        model = parallelize(config, layout, group, make_optimizer)   # on group.device
        model.step(*batches.batch(0))
        sent = group.recorder.export()["comms"]     # what rank 5 would have sent, and to whom

The tensors are on torch's "meta" device. Nothing is computed and nothing is sent: the group is
torch's "fake" process group behind our recorder, so the ledger is written as in a real run.

Inside, torch is as strict as on a GPU. An operation on tensors of two devices raises
`DeviceMismatch`. So a run here proves that a function makes its tensors on the device of its group,
on a machine without a GPU. And where a program asks for a value, such as `loss.item()`, it gets
`NoValue` with the file and the line that asked.

Both checks hold in the thread that entered `without_storage` and in autograd's; in other threads of
the program, torch's own kernels for the meta device check most operations, but not all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .ledger.group import RecordingGroup
from .ledger.recording import Recorder
from .older_torch import as_today, fake_group

BACKEND = "mini_dist_without_storage"
META = torch.device("meta")
aten = torch.ops.aten

# Operations that a GPU allows on tensors of two devices: a copy, and indices from the host.
MAY_MIX = {aten.copy_, aten._to_copy}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
ASK_FOR_VALUES = {aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.nonzero}


class DeviceMismatch(RuntimeError):
    """An operation got tensors of two devices: one of them was made on the wrong device."""


class NoValue(RuntimeError):
    """A program asked for a value of a tensor that has no storage."""


@contextmanager
def without_storage(rank: int, world_size: int) -> Iterator[RecordingGroup]:
    """Be rank `rank` of `world_size` ranks whose tensors, on `group.device`, have no storage.

    Raises RuntimeError if this process is in a world of torch.distributed already, DeviceMismatch
    and NoValue as above.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError(
            "this process is a rank of another world: call without_storage outside of launch"
        )
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(
            BACKEND, make_group, extended_api=True, devices=[META.type, "cpu"]
        )
    dist.init_process_group(BACKEND, store=FakeStore(), rank=rank, world_size=world_size)
    try:
        group = dist.group.WORLD
        group.recorder.start(memory=False)
        with OneDevice():
            yield group
        group.recorder.stop()
    finally:
        dist.destroy_process_group()


def make_group(options, _) -> RecordingGroup:
    world = dist.group.WORLD  # None while the first group is made
    recorder = Recorder() if world is None else world.recorder
    return StoragelessGroup(options, recorder, META, shared=False)


class StoragelessGroup(RecordingGroup):
    """A RecordingGroup that writes everything down and sends nothing."""

    def connect(self, options, members, device: torch.device) -> None:
        kind = dist.ProcessGroup.BackendType.CUSTOM
        fake = fake_group(options.group_rank, options.group_size)
        for each in (device, torch.device("cpu")):
            self._register_backend(each, kind, fake)
        self._set_default_backend(kind)
        self._set_group_name(options.group_id)
        self.inner = Silent(as_today(fake))
        self.carriers = {device.type: "fake", "cpu": "fake"}


class Silent:
    """torch's fake process group, whose messages from others are zeros."""

    def __init__(self, fake):
        self.fake = fake

    def __getattr__(self, method: str):
        return getattr(self.fake, method)

    def recv(self, tensors, source: int, tag: int):
        for tensor in tensors:
            tensor.zero_()  # what arrives on the host is alike in every run
        return self.fake.recv(tensors, source, tag)


class OneDevice(TorchDispatchMode):
    """Inside, operations are as strict about devices as on a GPU, and copies to the host have no
    storage either."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket
        if torch.is_inference_mode_enabled():  # there, operations arrive that are made of others
            with self:
                if (out := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return out
        compared = (args[0], args[2:]) if name in INDEXED else (args, kwargs)
        tensors = [each for each in tree_leaves(compared) if isinstance(each, Tensor)]
        if not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        on_host = [tensor for tensor in tensors if not tensor.is_meta and tensor.dim()]
        if on_host and name not in MAY_MIX:
            raise DeviceMismatch(
                f"{who_asked()}: {func} got a tensor {list(on_host[0].shape)} on "
                f"{on_host[0].device} among tensors on the device of the group: make it with "
                "device=group.device, or from a tensor that is there"
            )
        if name in ASK_FOR_VALUES or (name is aten.copy_ and not args[0].is_meta):
            raise NoValue(f"{who_asked()}: {func} asks for values, but the tensor has no storage")
        if name is aten._to_copy:  # whatever the device is called, there is nothing to copy
            kwargs = {**kwargs, "device": META, "pin_memory": False}
        if name is aten.bincount:  # (torch has no meta kernel for it)
            length = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
            return torch.empty(length, dtype=torch.int64, device=META)
        return func(*args, **kwargs)


def who_asked() -> str:
    """File and line of the innermost frame that is neither torch's nor this file's."""
    torch_home, frame = str(Path(torch.__file__).parent), sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith((torch_home, __file__)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}"
