"""What a rank does between its communications: every kernel, its FLOPs, the bytes it touches.

    run = launch(train, world_size=2, count=True)
    run.ledger.programs[0]      # what rank 0 did, in order: kernels, messages begun and waited for

`mini_dist.course.replay` plays these programs with another machine's rates and links. It only
takes the order from the run and no times, so a busy machine, or the counting itself, changes
nothing. The times of kernels and host have one purpose: the rates of this machine
(`measure_here`).
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils.flop_counter import flop_registry

from .memory import tensors_in

aten = torch.ops.aten


class Kernel(NamedTuple):
    """One call of an operator that computes or copies; views and scalars do not count."""

    name: str
    kind: str  # product, attention or stream
    flops: float  # of a product or attention, all scores counted; otherwise 0
    nbytes: int  # of the tensors read and written
    shape: tuple[int, ...]  # of a product: (batch, m, n, k)
    arithmetic: str  # of a product or attention: 16 bits, tf32 or fp32
    causal: bool
    phase: str
    seconds: float  # CPU time of this thread, measured: for `replay.measure_here` only

    @property
    def signature(self) -> tuple:
        """Return a key that is equal for calls of equal cost."""
        return self[:-2]


class Host(NamedTuple):
    """Work between kernels since the last other event: Python, autograd, the dispatcher.

    seconds: CPU time of this thread, with what the counting of `operators` and of one event took.
    """

    seconds: float
    operators: int


class Begin(NamedTuple):
    """Hand a message or a native collective to the backend. `comm`: index in the ledger."""

    comm: int
    tag: int


class Wait(NamedTuple):
    """Wait: the program continues when that communication is over."""

    comm: int


class Enter(NamedTuple):
    """A collective of ours begins; noted in simulated runs only. `comm`: index in the ledger."""

    comm: int


class Leave(NamedTuple):
    """And returns."""

    comm: int


class Give(NamedTuple):
    """Give a task to another thread: it may start from here on."""

    task: int


class Take(NamedTuple):
    """The other thread starts the task."""

    task: int


class Done(NamedTuple):
    """The other thread finishes the task."""

    task: int


class Join(NamedTuple):
    """Wait: the program continues when that task is done."""

    task: int


class Phase(NamedTuple):
    """From here on the rank is in this phase of training."""

    name: str


class Updated(NamedTuple):
    """An optimizer has taken its step."""


class Stated(NamedTuple):
    """Work that takes a given time on any machine, as on an emulated device."""

    name: str
    seconds: float


class HostClock(threading.local):
    """CPU time of this thread outside kernels and outside the counter."""

    seconds, operators, since = 0.0, 0, None

    def stop(self) -> float:
        now = time.thread_time()
        if self.since is not None:
            self.seconds += now - self.since
        self.since = None
        return now

    def start(self) -> None:
        self.since = time.thread_time()

    def read(self) -> Host:
        """Return the time and reset it to zero."""
        shown = Host(self.seconds, self.operators)
        self.seconds, self.operators = 0.0, 0
        return shown


class Counter:
    """One rank's programs, one line per thread: 0 is the main thread, others work in its pools.

    times_host: note what the host took between two events; no use in a simulated run.
    `rows`: (thread, event), in the order in which they happened.
    """

    def __init__(self, phases, times_host: bool = True) -> None:
        self.phases, self.times_host = phases, times_host
        self.rows: list[tuple[int, object]] = []
        self._line = threading.local()  # this thread's number
        self.host = HostClock()
        self._threads, self._tasks = itertools.count(1), itertools.count()
        self._submit = ThreadPoolExecutor.submit
        self._phase = ""
        self.mode_of_thread = lambda: KernelMode(self)
        self.coming: dict[int, list] = {}  # storage that a native collective is filling -> its row

    @contextmanager
    def hooks(self):
        """Beside the mode: hooks that tell of other threads and of the optimizer."""
        self._line.number = 0
        counter = self

        def submit(pool, function, /, *args, **kwargs):
            return counter._hand_over(pool, function, args, kwargs)

        ThreadPoolExecutor.submit = submit
        hook = register_optimizer_step_post_hook(lambda *_: self.note(Updated()))
        try:
            yield
        finally:
            ThreadPoolExecutor.submit = self._submit
            hook.remove()

    def note(self, event) -> None:
        if self.times_host:
            self.host.stop()
        line = getattr(self._line, "number", 0)  # autograd's own threads work for the main one
        now = self.phases.now
        changes = line == 0 and now != self._phase
        if self.times_host and (changes or not isinstance(event, Kernel)):
            self.rows.append((line, self.host.read()))
        if changes:
            self._phase = now
            self.rows.append((0, Phase(now)))
        self.rows.append((line, event))
        if self.times_host:
            self.host.start()

    def begin(self, row: list, tag: int, filled=()) -> None:
        self.note((Begin, row, tag))
        for tensor in filled:
            self.coming[tensor.untyped_storage()._cdata] = row

    def wait(self, row: list) -> None:
        self.coming = {place: other for place, other in self.coming.items() if other is not row}
        self.note((Wait, row))

    def enter(self, row: list) -> None:
        self.note((Enter, row))

    def leave(self, row: list) -> None:
        self.note((Leave, row))

    def read(self, *arguments) -> None:
        """Count reading what a collective fills as waiting for it: in C++, as DDP's reducer
        does."""
        for tensor in tensors_in(arguments):
            if tensor.layout == torch.strided:
                if row := self.coming.get(tensor.untyped_storage()._cdata):
                    self.wait(row)

    def _hand_over(self, pool, function, args, kwargs):
        """Submit a task so that its start, its kernels and its waiters are recorded."""
        task, phase = next(self._tasks), self.phases.now

        def run():
            if not hasattr(self._line, "number"):
                self._line.number = next(self._threads)
            self.note(Take(task))
            try:
                with self.phases.during(phase), self.mode_of_thread():
                    return function(*args, **kwargs)
            finally:
                self.note(Done(task))

        self.note(Give(task))
        future = self._submit(pool, run)
        itself = weakref.ref(future)  # A circle would keep the result until the next collection.

        def join(timeout=None):
            value = Future.result(itself(), timeout)
            self.note(Join(task))
            return value

        future.result = join
        return future

    def export(self, comms: list[list]) -> list[tuple[int, tuple]]:
        """Return the rows as plain data, each communication by its index in this rank's ledger."""
        place = {id(row): index for index, row in enumerate(comms)}
        return [
            (line, event[0](place[id(event[1])], *event[2:]) if type(event) is tuple else event)
            for line, event in self.rows
        ]


class KernelMode(TorchDispatchMode):
    """See every operator of this thread, including backward's."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor: first it becomes operators on this rank's part
        kwargs, counter, host = kwargs or {}, self.counter, self.counter.host
        host.operators += 1
        if function.is_view or function.namespace != "aten":
            return function(*args, **kwargs)
        if counter.coming:
            counter.read(args, kwargs)
        began = host.stop()
        result = function(*args, **kwargs)
        seconds = time.thread_time() - began
        kernel = kernel_of(function, args, kwargs, result, counter.phases.now, seconds)
        if kernel:
            counter.note(kernel)
        else:
            host.seconds += seconds
            host.start()
        return result


FREE = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten._unsafe_view}
FREE |= {aten._local_scalar_dense, aten.promote_types, aten.set_, aten.resize_}
# The argument that an operator does not read: it uses only its shape, or overwrites it.
UNREAD = dict.fromkeys([aten.copy_, aten.zero_, aten.fill_, aten.normal_, aten.uniform_], 0)
UNREAD |= dict.fromkeys([aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like], 0)
UNREAD |= dict.fromkeys([aten.randn_like, aten.new_zeros, aten.new_ones, aten.new_full], 0)
UNREAD |= {aten.nll_loss_backward: 1}
# These read from their first argument only the elements that an index names, ...
LOOK_UP = {aten.embedding, aten.gather, aten.index, aten.index_select, aten.nll_loss_forward}
# ... and these change only such elements of it, in place.
CHANGE_PARTS = {aten.index_put_, aten.index_add_, aten.index_copy_, aten.scatter_}
CHANGE_PARTS |= {aten.scatter_add_, aten._index_put_impl_}
ATTENTION = {  # products of all scores with a head's vectors: the kernel computes scores twice
    "_scaled_dot_product_flash_attention_for_cpu": 2,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 5,
    "_scaled_dot_product_flash_attention": 2,
    "_scaled_dot_product_flash_attention_backward": 5,
    "_scaled_dot_product_efficient_attention": 2,
    "_scaled_dot_product_efficient_attention_backward": 5,
}


def kernel_of(function, args, kwargs, result, phase: str, seconds: float) -> Kernel | None:
    """Return what a call costs; None if nothing. Scalars stay on the host, as in optimizers."""
    packet = function.overloadpacket
    read, written = list(tensors_in((args, kwargs))), list(tensors_in((result,)))
    if packet in FREE or not written or not any(t.numel() > 1 for t in (*read, *written)):
        return None
    nbytes = bytes_moved(packet, args, read, written)
    name, arithmetic = packet.__name__, arithmetic_of(written[0])
    if name in ATTENTION:
        q, k = read[1:3] if name.endswith("backward") else read[:2]  # backward: its gradient first
        *batch, queries, head = q.shape
        flops = 2 * ATTENTION[name] * math.prod(batch) * queries * k.shape[-2] * head
        causal = any(value is True for value in (*args, *kwargs.values()))
        return Kernel(name, "attention", flops, nbytes, (), arithmetic, causal, phase, seconds)
    if packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=result)
        shape = product_shape(name, args)
        return Kernel(name, "product", flops, nbytes, shape, arithmetic, False, phase, seconds)
    return Kernel(name, "stream", 0, nbytes, (), "", False, phase, seconds)


def bytes_moved(packet, args, read: list[Tensor], written: list[Tensor]) -> int:
    """Return the bytes that an operator reads from memory and writes to it."""
    moved = {id(t): t.nbytes for t in read}  # x + x reads x once
    if packet in UNREAD:
        moved.pop(id(args[UNREAD[packet]]), None)
    if packet not in LOOK_UP | CHANGE_PARTS:
        return sum(moved.values()) + sum(t.nbytes for t in written)
    table = args[0]
    others = [t for t in read if t is not table]
    if packet in CHANGE_PARTS:  # each changed element is read and written
        moved[id(table)] = 2 * table.element_size() * max(t.numel() for t in others)
        return sum(moved.values())
    named = max(t.numel() for t in (*others, *written))
    moved[id(table)] = min(table.nbytes, table.element_size() * named)
    return sum(moved.values()) + sum(t.nbytes for t in written)


def arithmetic_of(result: Tensor) -> str:
    """Return what a product is computed in. torch takes TF32 only where a program asks for it."""
    if result.element_size() <= 2:
        return "16 bits"
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def product_shape(name: str, args) -> tuple[int, ...]:
    """Return (batch, m, n, k) of a matrix product; () for a convolution."""
    if name not in ("mm", "addmm", "bmm", "baddbmm"):
        return ()
    a, b = args[-2:] if name in ("mm", "bmm") else args[1:3]
    return (a.shape[0] if a.dim() == 3 else 1, a.shape[-2], b.shape[-1], a.shape[-1])
