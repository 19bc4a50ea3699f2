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

import linecache
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .ledger.counting import kernel_of
from .ledger.group import DoneWork, RecordingGroup
from .ledger.memory import tensors_in
from .ledger.recording import Recorder
from .older_torch import as_today, fake_group

BACKEND = "mini_dist_without_storage"
META = torch.device("meta")
aten = torch.ops.aten

# Operations that a GPU allows on tensors of two devices: a copy, and indices from the host.
MAY_MIX = {aten.copy_, aten._to_copy}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
CHANGE_SHAPE = {aten.resize_, aten.resize_as_, aten.set_, aten.squeeze_, aten.unsqueeze_, aten.t_}
CHANGE_SHAPE |= {aten.transpose_, aten.swapaxes_, aten.as_strided_}
ASK_FOR_VALUES = {aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.nonzero}


class DeviceMismatch(RuntimeError):
    """An operation got tensors of two devices: one of them was made on the wrong device."""


class NoValue(RuntimeError):
    """A program asked for a value of a tensor that has no storage."""


@contextmanager
def without_storage(
    rank: int,
    world_size: int,
    record: bool = False,
    pretend: dict | None = None,
    outcomes: dict | None = None,
) -> Iterator[RecordingGroup]:
    """Be rank `rank` of `world_size` ranks whose tensors, on `group.device`, have no storage.

    record: note every kernel, and the bytes that the tensors would hold. pretend: name -> the value
    that a program gets where it asks for one on a line with that name, as {"loss": 5.0}. outcomes:
    what operations gave on the last rank that this process was, so that this one need not find out.
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
        group.recorder.start(memory=record, count=record)
        with OneDevice(group.recorder.counter, group.recorder.memory, pretend, outcomes):
            yield group
        group.recorder.stop()
    finally:
        dist.destroy_process_group()


def make_group(options, _) -> RecordingGroup:
    world = dist.group.WORLD  # None while the first group is made
    recorder = Recorder() if world is None else world.recorder
    recorder.is_simulated = True
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
        call = getattr(self.fake, method)
        if "gather" in method or "scatter" in method or "to_all" in method:
            return partial(unseen, call)
        return call

    def allreduce(self, tensors, options):
        self.fake.allreduce(tensors, options)
        return DoneWork(tensors)

    def recv(self, tensors, source: int, tag: int):
        for tensor in tensors:
            tensor.zero_()  # what arrives on the host is alike in every run
        return self.fake.recv(tensors, source, tag)


def unseen(call, *args):
    """Call a collective of the fake group. It copies what a rank sends to itself, and that copy is
    no kernel of the program's, nor a read of what the collective fills."""
    with _disable_current_modes():
        return call(*args)


class OneDevice(TorchDispatchMode):
    """Inside, operations are as strict about devices as on a GPU, and copies to the host have no
    storage either.

    torch computes the shapes of many meta operations in Python, which takes up to a millisecond.
    A model repeats its operations, so `outcomes` remembers what came of each signature.

    counter, memory: the recorders of a run that notes its kernels and its bytes. This mode calls
    them, since each mode more on the stack would cost as much as the operation.
    """

    def __init__(self, counter=None, memory=None, pretend=None, outcomes=None) -> None:
        super().__init__()
        self.counter, self.memory, self.pretend = counter, memory, pretend or {}
        self.outcomes: dict[tuple, Outcome] = {} if outcomes is None else outcomes
        self.under_way: dict[int, tuple] = {}  # storage that a collective fills -> (group, row)
        if counter and memory:  # The counter of a real run enters a mode in each thread, too.
            counter.mode_of_thread = lambda: OneDevice(counter, None, pretend, self.outcomes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # there, operations arrive that are made of others
            with self:
                if (out := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return out
        if func.namespace == "_c10d_functional":
            return self.collective(func, args, kwargs)
        if func.is_view and args[0].is_meta:  # No kernel, no new memory: nothing to remember.
            if self.memory:
                self.memory.see(args[0])
            return func(*args, **kwargs)
        try:
            key = (func, *map(signature, args), *map(signature, kwargs.items()))
            outcome = self.outcomes.get(key)
        except TypeError:  # an argument that has no signature
            key = outcome = None
        if outcome is None:
            result = self.first(func, args, kwargs)
            outcome = Outcome.of(func, args, result)
            if key is not None and outcome.repeats:
                self.outcomes[key] = outcome
        else:
            result = outcome.again(args)
        if self.counter:
            self.record(func, args, kwargs, result, outcome)
        return result

    def collective(self, func, args, kwargs):
        """A collective of DTensor: on the meta device, torch would not hand it to the group."""
        result, name = func(*args, **kwargs), func.overloadpacket.__name__
        if name == "wait_tensor":
            group, row = self.under_way.pop(args[0].untyped_storage()._cdata, (None, None))
            if row:
                group.recorder.waits(row)
            return result
        op = FUNCTIONAL.get(name)
        if op is None:
            return result
        group, x = _resolve_process_group(args[-1]), args[0]
        detail = args[1] if op == "broadcast" else None
        if op == "all_to_all":
            row_bytes = x[:1].nbytes if len(x) else 0
            detail = tuple([row_bytes * rows for rows in splits] for splits in (args[2], args[1]))
        row = group.recorder.begin(op, group.name, [x], detail, carrier="NCCL")
        self.under_way[result.untyped_storage()._cdata] = group, row
        return result

    def record(self, func, args, kwargs, result, outcome: Outcome) -> None:
        counter = self.counter
        if self.memory and not outcome.repeats:  # Its arguments may come from outside.
            self.memory.see_all(args, kwargs, (result,))
        elif self.memory and outcome.argument is None:
            self.memory.see_all((result,))
        if func.is_view or func.namespace != "aten":
            return
        if counter.coming:
            counter.read(args, kwargs)
        phase = counter.phases.now
        kernel = outcome.kernels.get(phase)
        if kernel is None:
            kernel = kernel_of(func, args, kwargs, result, phase, 0.0) or False
            outcome.kernels[phase] = kernel
        if kernel:
            counter.note(kernel)

    def first(self, func, args, kwargs):
        """Check an operation and let torch work out the shape of its result."""
        name = func.overloadpacket
        compared = (args[0], args[2:]) if name in INDEXED else (args, kwargs)
        tensors = list(tensors_in(compared))
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
            return self.pretended(func)
        if name is aten._to_copy:  # whatever the device is called, there is nothing to copy
            kwargs = {**kwargs, "device": META, "pin_memory": False}
        if name is aten.bincount:  # (torch has no meta kernel for it)
            length = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
            return torch.empty(length, dtype=torch.int64, device=META)
        return func(*args, **kwargs)

    def pretended(self, func):
        """The value that the caller has stated for this line; NoValue if there is none."""
        where, line = who_asked(), line_that_asked()
        for name, value in self.pretend.items():
            if re.search(rf"\b{re.escape(name)}\b", line):
                return value
        raise NoValue(
            f"{where}: `{line}` asks for a value ({func}), but the tensor has no storage. State "
            'it by a name on that line: launch(..., pretend={"loss": 5.0}), or leave the line out'
        )


FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
VALUES = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def signature(value):
    """What the result's shape can depend on. Raises TypeError for what is more than that."""
    kind = type(value)
    if kind in PLAIN:
        if not value.is_meta:
            raise TypeError("a tensor with values")
        return value.shape, value.stride(), value.dtype
    if kind in (list, tuple) or kind is torch.Size:
        return tuple(map(signature, value))
    if value is None or kind in VALUES:
        return kind, value
    raise TypeError(f"{kind.__name__} has no signature")


class Outcome:
    """What came of an operation: an argument again, or new tensors of known shapes."""

    __slots__ = ("repeats", "argument", "outputs", "is_one", "kernels")

    def __init__(self):
        self.repeats, self.argument, self.outputs, self.is_one = False, None, None, True
        self.kernels = {}  # phase -> the Kernel, or False for an operation that costs nothing

    @classmethod
    def of(cls, func, args, result) -> Outcome:
        """repeats: the same signature will have the same outcome."""
        outcome = cls()
        if func._schema.is_mutable:
            same = [n for n, each in enumerate(args) if each is result]
            if same and func.overloadpacket not in CHANGE_SHAPE:
                outcome.repeats, outcome.argument = True, same[0]
            return outcome
        outcome.is_one = not isinstance(result, tuple)
        outputs = (result,) if outcome.is_one else result
        made = [each for each in outputs if each is not None]  # (gradients that nobody wants)
        if not all(type(each) is Tensor and each.is_meta for each in made):
            return outcome
        given = {each.untyped_storage()._cdata for each in tensors_in(args)}
        if made and not any(each.untyped_storage()._cdata in given for each in made):
            outcome.repeats = True
            outcome.outputs = [
                None if each is None else (each.shape, each.stride(), each.dtype)
                for each in outputs
            ]
        return outcome

    def again(self, args):
        if self.argument is not None:
            return args[self.argument]
        made = [
            known and torch.empty_strided(known[0], known[1], dtype=known[2], device=META)
            for known in self.outputs
        ]
        return made[0] if self.is_one else tuple(made)


def who_asked() -> str:
    """File and line of the innermost frame that is neither torch's nor this file's. A cell has no
    file; RankError names it beside its frames."""
    frame = frame_that_asked()
    file = frame.f_code.co_filename
    return f"{file}, line {frame.f_lineno}" if Path(file).exists() else f"line {frame.f_lineno}"


def line_that_asked() -> str:
    frame = frame_that_asked()
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


def frame_that_asked():
    torch_home, frame = str(Path(torch.__file__).parent), sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith((torch_home, __file__)):
        frame = frame.f_back
    return frame
