"""How Python objects travel between the parent and its ranks: cloudpickle on a socket, in frames.

A message consists of frames: first a pickle, then the bytes of each large tensor or array in it.
They are sent from where they are and received where they will stay, so nothing is copied on the way
(pickle protocol 5, PEP 574).
"""

from __future__ import annotations

import functools
import importlib
import io
import math
import pickle
import socket
import struct
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType

from .unsendable import blame

COUNT = struct.Struct("<q")
IN_A_FRAME_FROM = 1 << 16  # bytes; smaller data is in the pickle

Frames = list  # of bytes, bytearrays and memoryviews


class PicklingError(TypeError):
    """An argument or a result cannot be sent to another process."""


def to_frames(obj, what: str) -> Frames:
    """Pickle with cloudpickle, so that functions and classes of a notebook cell travel by value.

    Raises PicklingError, which names `what` could not travel, the innermost reason and, if it can
    be found, the variable.
    """
    try:
        return pickled(obj)
    except Exception as error:  # cloudpickle raises many types, some of them from __reduce__
        raise PicklingError(
            f"{what} cannot be sent to another process: {error}. {blame(obj, pickled)}"
        ) from None


def pickled(obj) -> Frames:
    buffer, large = io.BytesIO(), []

    def is_small(part: pickle.PickleBuffer) -> bool:
        raw = part.raw()
        if raw.nbytes >= IN_A_FRAME_FROM:
            large.append(raw)
        return raw.nbytes < IN_A_FRAME_FROM

    pickler()(buffer, protocol=5, buffer_callback=is_small).dump(obj)
    return [buffer.getvalue(), *large]


def from_frames(frames: Frames, device=None):
    """Unpickle. device: the torch.device on which tensors arrive; None: the host."""
    if device is None:
        return pickle.loads(frames[0], buffers=frames[1:])
    return UnpicklerTo(device, io.BytesIO(frames[0]), buffers=frames[1:]).load()


class UnpicklerTo(pickle.Unpickler):
    def __init__(self, device, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.device = device

    def find_class(self, module: str, name: str):
        found = super().find_class(module, name)
        to_device = found is rebuild_tensor
        return functools.partial(found, device=self.device) if to_device else found


def pickler():
    import cloudpickle
    from cloudpickle.cloudpickle import _code_reduce as reduce_code
    from cloudpickle.cloudpickle import _should_pickle_by_reference as by_reference

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj):
            # torch.ops creates its members on access, so an import finds nothing in it.
            module = type(obj).__module__
            if module == "torch._ops":
                return reduce_torch_op(obj)
            if module == "torch" and type(obj).__name__ == "Tensor":
                # The parent must not start CUDA just because a rank returned a tensor.
                return reduce_tensor(obj.detach().cpu() if obj.is_cuda else obj)
            if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
                # cloudpickle looks for modules by their exact type; torch's config modules, which
                # come along with a function that says `torch` and `config`, are of a subclass.
                if sys.modules.get(obj.__name__) is obj:
                    return importlib.import_module, (obj.__name__,)
            if isinstance(obj, ModuleType) and obj.__name__ not in sys.modules:
                # A part of native code that no import finds, torch._C._functions: a cell's function
                # that torch has decorated (once_differentiable) brings it along.
                parent, _, name = obj.__name__.rpartition(".")
                if getattr(sys.modules.get(parent), name, None) is obj:
                    return getattr, (sys.modules[parent], name)
            if isinstance(obj, functools._lru_cache_wrapper) and not by_reference(obj.__wrapped__):
                # By default it is pickled by name, and ranks do not know a cell's names.
                return cached, (obj.__wrapped__, obj.cache_parameters())
            if type(obj) is functools.cached_property:  # before Python 3.12 it holds a lock
                return cached_property, (obj.func, obj.attrname)
            if isinstance(obj, CodeType):
                make, arguments = reduce_code(obj)
                # Since version 3.1.3, cloudpickle leaves out the file, so no error could name it.
                named = (obj.co_filename if a == "<dynamic-code>" else a for a in arguments)
                return make, (*named,)
            return super().reducer_override(obj)

    return Pickler


def cached(function, parameters: dict):
    return functools.lru_cache(**parameters)(function)


def cached_property(function, name: str | None):
    made = functools.cached_property(function)
    if name is not None:
        made.__set_name__(None, name)
    return made


def reduce_tensor(x):
    """Pickle a tensor's own elements, not the whole storage of which it is a view, as torch
    does."""
    import torch

    plain = x.layout is torch.strided and not x.is_nested and not x.is_quantized
    plain = plain and x.device.type == "cpu" and not x.is_conj() and not x.is_neg()
    if not plain or x.__dict__ or x._backward_hooks:
        return x.__reduce_ex__(5)
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    in_memory = x.detach().permute(order)  # in the order of its elements in memory
    if in_memory.is_contiguous():
        strides = x.stride()
    else:  # gaps or repetitions
        in_memory, strides = x.detach().contiguous(), None
    try:
        data = pickle.PickleBuffer(in_memory.reshape(-1).view(torch.uint8).numpy())
    except (RuntimeError, TypeError):  # a dtype of less than a byte
        return x.__reduce_ex__(5)
    return rebuild_tensor, (data, x.dtype, tuple(x.shape), strides, x.requires_grad)


def rebuild_tensor(data, dtype, shape, strides, requires_grad, device=None):
    import torch

    if math.prod(shape) == 0:
        x = torch.empty(shape, dtype=dtype, device="cpu")  # (the caller may have another default)
        x = x.as_strided(shape, strides or x.stride())
    else:
        flat = torch.frombuffer(data, dtype=dtype)
        if flat.nbytes < IN_A_FRAME_FROM:
            flat = flat.clone()  # into torch's own memory, which can be resized
        x = flat.view(shape) if strides is None else flat.as_strided(shape, strides)
    x = x if device is None else x.to(device)
    return x.requires_grad_(requires_grad)


def reduce_torch_op(obj):
    kind = type(obj).__name__
    if kind == "_Ops":
        return find_torch_op, ()
    if kind == "_OpNamespace":
        return find_torch_op, (obj.name,)
    if kind == "OpOverloadPacket":
        return find_torch_op, tuple(obj._qualified_op_name.split("::"))
    if kind == "OpOverload":
        packet = obj._overloadpacket._qualified_op_name
        return find_torch_op, (*packet.split("::"), obj._overloadname)
    return NotImplemented


def find_torch_op(*names: str):
    import torch

    found = torch.ops
    for name in names:
        found = getattr(found, name)
    return found


# --- on a socket ---------------------------------------------------------------------------------


def send(connection: socket.socket, frames: Frames) -> None:
    views = [memoryview(frame) for frame in frames]
    head = COUNT.pack(len(views)) + b"".join(COUNT.pack(view.nbytes) for view in views)
    connection.sendall(head)
    for view in views:
        connection.sendall(view)


def receive(connection: socket.socket) -> Frames:
    """Return one message; EOFError if the other side is gone."""
    inbox = Inbox()
    while inbox.message is None:
        if not inbox.read(connection):
            raise EOFError("the other process is gone")
    return inbox.message


def assemble() -> Iterator[memoryview]:
    """Yield the memory that the next bytes belong in, until a message is whole; return it."""
    count = bytearray(COUNT.size)
    yield memoryview(count)
    lengths = bytearray(COUNT.size * COUNT.unpack(count)[0])
    yield memoryview(lengths)
    frames = []
    for (length,) in COUNT.iter_unpack(lengths):
        frames.append(bytearray(length))
        yield memoryview(frames[-1])
    return frames


class Inbox:
    """A message that arrives on a socket, for a reader that cannot afford to wait."""

    def __init__(self):
        self.message: Frames | None = None
        self.parts = assemble()
        self.room = next(self.parts)

    def read(self, connection: socket.socket) -> bool:
        """Read what is there; return False when nothing more can come."""
        count = connection.recv_into(self.room)
        self.room = self.room[count:]
        try:
            while not self.room:
                self.room = next(self.parts)
        except StopIteration as whole:
            self.message = whole.value
        return count > 0
