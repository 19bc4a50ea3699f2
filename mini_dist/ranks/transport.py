"""How Python objects travel between the parent and its ranks: cloudpickle, framed, on a socket."""

from __future__ import annotations

import io
import pickle
import socket
import struct

LENGTH = struct.Struct("<q")


class PicklingError(TypeError):
    """An argument or a result cannot be sent to another process."""


def to_bytes(obj, what: str) -> bytes:
    """Pickle with cloudpickle, so that functions and classes of a notebook cell travel by value.

    Raises PicklingError, which names `what` could not travel and the innermost reason.
    """
    buffer = io.BytesIO()
    try:
        pickler()(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    except Exception as error:  # cloudpickle raises many types, some of them from __reduce__
        raise PicklingError(
            f"{what} cannot be sent to another process: {error}. Numbers, strings, tensors, "
            "Modules, functions and containers of them can; open files, locks, generators, "
            "sockets and process groups cannot."
        ) from None
    return buffer.getvalue()


def pickler():
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj):
            # torch.ops makes its members on access, so nothing in it can be found by import.
            module = type(obj).__module__
            if module == "torch._ops":
                return reduce_torch_op(obj)
            if module == "torch" and type(obj).__name__ == "Tensor" and obj.is_cuda:
                # The parent must not start CUDA only because a rank returned a tensor.
                return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return super().reducer_override(obj)

    return Pickler


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


def send(connection: socket.socket, payload: bytes) -> None:
    connection.sendall(LENGTH.pack(len(payload)) + payload)


def receive(connection: socket.socket) -> bytes:
    """One message; EOFError if the other side is gone."""
    (length,) = LENGTH.unpack(receive_exactly(connection, LENGTH.size))
    return receive_exactly(connection, length)


def receive_exactly(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view, got = memoryview(data), 0
    while got < length:
        count = connection.recv_into(view[got:])
        if count == 0:
            raise EOFError("the other process is gone")
        got += count
    return data


class Inbox:
    """Messages from a socket that must not block the reader, as they become complete."""

    def __init__(self):
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._data += data
        messages = []
        while len(self._data) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._data)
            if len(self._data) < LENGTH.size + length:
                break
            messages.append(bytes(self._data[LENGTH.size : LENGTH.size + length]))
            del self._data[: LENGTH.size + length]
        return messages
