"""A process group that records everything that passes through it.

`RecordingGroup` is a thin adapter around gloo or NCCL, registered as a backend of
torch.distributed. So everything that communicates goes through it: our own sends, raw `dist.*`
calls, DDP's reducer, FSDP2, DTensor, torch's pipelining. Each call is noted twice: in the
`Recorder`'s list (recording.py; sent to the parent when the run ends) and in the flight recorder
(readable by the parent while the run hangs).
"""

from __future__ import annotations

import contextlib
import functools
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # (not in torch.distributed)

from ..connections import refuse_strangers, sockets_here
from ..older_torch import as_today, silent_gloo, with_former_names
from ..threads import threads_that_do_not_interrupt
from .recording import Recorder, end
from .staged import Staged

BACKEND = "mini_dist"  # the name under which torch.distributed knows RecordingGroup


class RecordedWork(dist._Work):
    """The handle of a communication; it ends when its caller waits. A message has no other end."""

    def __init__(self, work, row: list, recorder: Recorder, number: int):
        super().__init__()
        self._work, self._row, self._number = work, row, number
        self._recorder, self._flight = recorder, recorder.flight

    def wait(self, timeout=timedelta(0)) -> bool:
        if self._flight and not timeout:  # with a timeout, this rank continues in any case
            self._flight.wait(self._number)
        self._recorder.waits(self._row)
        try:
            wait = functools.partial(self._work.wait, timeout) if timeout else self._work.wait
            members = self._recorder.membership  # of an elastic run; else None
            return members.call(wait) if members else wait()
        finally:
            end(self._row)
            if self._flight:
                self._flight.done(self._number)

    def is_completed(self) -> bool:
        done = self._work.is_completed()
        if done:
            end(self._row)
        return done

    def get_future(self):
        return self._work.get_future()

    def result(self):
        return self._work.result()

    def synchronize(self) -> None:
        self._work.synchronize()

    def block_current_stream(self) -> None:
        self._work.block_current_stream()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self):
        return self._work.exception()

    def source_rank(self) -> int:
        return self._work._source_rank()

    _source_rank = source_rank


class DoneWork(dist._Work):
    """The handle of an operation that is already complete. DDP takes the result from its future."""

    def __init__(self, result):
        super().__init__()
        self.future = torch.futures.Future()
        self.future.set_result(result)

    def wait(self, timeout=None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future:
        return self.future


@with_former_names
class RecordingGroup(dist.ProcessGroup):
    """gloo (and NCCL, if each rank has a GPU) with a recorder in front.

    `ranks`: the world ranks of its members; `device`: where this rank's tensors belong; `carriers`:
    what carries the messages of tensors on each kind of device.
    """

    def __init_subclass__(cls, **more):
        super().__init_subclass__(**more)
        with_former_names(cls)

    def __init__(self, options, recorder: Recorder, device: torch.device, shared: bool):
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        members = recorder.membership  # of an elastic run; else None
        self.carriers = {"cpu": "gloo", device.type: "gloo"}
        self.is_staged = shared
        self.connect(options, members, device)
        self.ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        self.name = self.group_name  # read for every message, and slow to ask torch for
        if members and members.generation:  # an earlier group had this name, with other ranks
            self.ranks = [members.members[each] for each in self.ranks]
            self.name += f"-{members.generation}"
        self.me = self.ranks[rank]
        self.device = device
        self.recorder = recorder
        recorder.groups[self.name] = self.ranks
        if len(recorder.groups) == 1 or (members and self.ranks == list(members.members)):
            recorder.axes[self.name] = "world"
        if recorder.flight:
            recorder.flight.add_group(self.name, self.ranks)

    def connect(self, options, members, device: torch.device) -> None:
        """Connect the ranks: `inner` carries what this group has recorded."""
        rank, size = options.group_rank, options.group_size

        def make_gloo():
            before = sockets_here()
            with threads_that_do_not_interrupt(), silent_gloo():
                gloo = dist.ProcessGroupGloo(options.store, rank, size, timeout=options.timeout)
            refuse_strangers(sockets_here() - before)
            return gloo

        gloo = members.call(make_gloo) if members else make_gloo()
        kinds = dist.ProcessGroup.BackendType
        backends = [("cpu", kinds.GLOO, gloo)]
        if self.is_staged:
            backends.append((device.type, kinds.GLOO, gloo))
        elif device.type == "cuda":
            self.carriers["cuda"] = "NCCL"
            store = dist.PrefixStore("cuda", options.store)
            nccl = dist.ProcessGroupNCCL(store, rank, size, options.timeout)
            backends.append(("cuda", kinds.NCCL, nccl))
        # The real group is a member, not the base: pybind would hand super().allreduce back to us.
        self.inner = dist.ProcessGroup(options.store, rank, size)
        for group in (self, self.inner):
            for kind, backend_type, backend in backends:
                group._register_backend(torch.device(kind), backend_type, backend)
            group._set_default_backend(kinds.GLOO)
            group._set_group_name(options.group_id)
        self.inner = as_today(self.inner)
        if self.is_staged:
            self.inner = Staged(self.inner, device.type)

    # -- point to point -----------------------------------------------------------------------

    def send(self, tensors, dst, tag):
        return self._message("send", tensors, dst, tag)

    def recv(self, tensors, src, tag):
        return self._message("recv", tensors, src, tag)

    def recv_anysource(self, tensors, tag):
        return self._message("recv_anysource", tensors, None, tag)

    def _message(self, op, tensors, peer, tag):
        if peer is not None:
            there = 0 <= peer < len(self.ranks)
            if not there or self.ranks[peer] == self.me:
                which = " itself: a message goes to another rank;" if there else ":"
                raise ValueError(
                    f"{op} with rank {peer}{which} this group has ranks 0 to "
                    f"{len(self.ranks) - 1}. In a ring, (rank + 1) % size and (rank - 1) % size "
                    "wrap round."
                )
        elif not tensors[0].numel():
            raise ValueError(
                "recv from any rank of an empty tensor, which gloo cannot do: name the rank that "
                "it comes from, recv(tensor, group_src=rank)"
            )
        carrier = self.carriers[tensors[0].device.type]
        row = self.recorder.begin(op, self.name, tensors, peer, tag, carrier=carrier)
        flight, number = self.recorder.flight, -1
        if flight:
            other = "any" if peer is None else self.ranks[peer]
            where = self.name, self.me, peer, other, tag
            words = message_in_words(op, *where, row[2], tensors[0].shape)
            number = flight.begin(*words, waits=False)
        call = getattr(self.inner, op)
        try:
            work = call(tensors, tag) if peer is None else call(tensors, peer, tag)
        except RuntimeError as error:
            raise explained(error, self.recorder) from error
        return RecordedWork(work, row, self.recorder, number)

    # -- collectives --------------------------------------------------------------------------

    def _collective(self, method: str, op: str, tensors, args, opts, detail=None):
        """Record a native collective with the volume of `tensors`, then pass it on."""
        filled = torch.utils._pytree.tree_leaves(args[:1]) if self.recorder.counter else ()
        carrier = self.carriers[tensors[0].device.type] if tensors else None
        row = self.recorder.begin(op, self.name, tensors, detail, filled=filled, carrier=carrier)
        flight, number = self.recorder.flight, -1
        waits = not getattr(opts, "asyncOp", True)
        if flight:
            shapes = ", ".join(f"{row[2]}{list(t.shape)}" for t in tensors[:3])
            if op == "all_to_all":
                sent, received = (" ".join(map(str, each)) for each in detail)
                shapes += f", sends {sent}, receives {received} bytes"
            # (The str of a ReduceOp is its address; its state is its value.)
            reduction = opts.reduceOp.__getstate__()[0].name if hasattr(opts, "reduceOp") else ""
            # Splits may differ between ranks; everything else must agree.
            numel = "" if op == "all_to_all" else sum(t.numel() for t in tensors)
            rooted = "" if isinstance(detail, tuple) else detail
            number = flight.begin(
                f"collective {self.name}",
                f"{op} {row[2]} {numel} {reduction} {rooted}",
                f"{op}({shapes}{'' if reduction in ('', 'SUM') else f', {reduction}'}"
                f"{'' if detail is None or rooted == '' else f', root {detail}'})",
                waits=waits,
            )
        try:
            work = getattr(self.inner, method)(*args, opts)
        except RuntimeError as error:
            raise explained(error, self.recorder) from error
        if work is None:
            return None
        handle = RecordedWork(work, row, self.recorder, number)
        if waits or self.is_staged:
            return handle  # A callback would run in gloo's thread and fight the caller for the GIL.

        def ended(_):
            end(row)
            if flight:
                flight.done(number)

        with contextlib.suppress(RuntimeError):  # gloo's reduce_scatter has no future
            work.get_future().add_done_callback(ended)
        return handle

    def allreduce(self, tensors, opts=None):
        opts = opts or dist.AllreduceOptions()
        return self._collective("allreduce", "all_reduce", tensors, [tensors], opts)

    def allreduce_coalesced(self, tensors, opts=None):
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._collective("allreduce_coalesced", "all_reduce", tensors, [tensors], opts)

    def broadcast(self, tensors, opts):
        return self._collective("broadcast", "broadcast", tensors, [tensors], opts, opts.rootRank)

    def reduce(self, tensors, opts):
        return self._collective("reduce", "reduce", tensors, [tensors], opts, opts.rootRank)

    def gather(self, outputs, inputs, opts):
        args = [outputs, inputs]
        return self._collective("gather", "gather", inputs, args, opts, opts.rootRank)

    def scatter(self, outputs, inputs, opts):
        args = [outputs, inputs]
        return self._collective("scatter", "scatter", outputs, args, opts, opts.rootRank)

    def allgather(self, outputs, inputs, opts=None):
        opts = opts or AllgatherOptions()
        return self._collective("allgather", "all_gather", inputs, [outputs, inputs], opts)

    def allgather_coalesced(self, outputs, inputs, opts=None):
        opts = opts or AllgatherOptions()
        args = [outputs, inputs]
        return self._collective("allgather_coalesced", "all_gather", inputs, args, opts)

    def all_gather_single(self, output, input, opts=None):
        opts = opts or AllgatherOptions()
        args = [output, input]
        return self._collective("all_gather_single", "all_gather", [input], args, opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        opts = opts or AllgatherOptions()
        args = [outputs, inputs]
        return self._collective("all_gather_single_coalesced", "all_gather", inputs, args, opts)

    def reduce_scatter(self, outputs, inputs, opts=None):
        opts = opts or dist.ReduceScatterOptions()
        args = [outputs, inputs]
        return self._collective("reduce_scatter", "reduce_scatter", inputs[0], args, opts)

    def reduce_scatter_single(self, output, input, opts=None):
        opts = opts or dist.ReduceScatterOptions()
        args = [output, input]
        return self._collective("reduce_scatter_single", "reduce_scatter", [input], args, opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        opts = opts or dist.ReduceScatterOptions()
        args = [outputs, inputs]
        method = "reduce_scatter_single_coalesced"
        return self._collective(method, "reduce_scatter", inputs, args, opts)

    def all_to_all_single(self, output, input, output_splits, input_splits, opts=None):
        opts = opts or dist.AllToAllOptions()
        sent = splits_in_bytes(input, input_splits, self.size())
        received = splits_in_bytes(output, output_splits, self.size())
        args = [output, input, output_splits, input_splits]
        detail = (sent, received)
        return self._collective("all_to_all_single", "all_to_all", [input], args, opts, detail)

    def alltoall(self, outputs, inputs, opts=None):
        opts = opts or dist.AllToAllOptions()
        detail = ([t.nbytes for t in inputs], [t.nbytes for t in outputs])
        args = [outputs, inputs]
        return self._collective("alltoall", "all_to_all", inputs, args, opts, detail)

    def barrier(self, opts=None):
        opts = opts or dist.BarrierOptions()
        return self._collective("barrier", "barrier", [], [], opts)

    def getBackendName(self) -> str:  # (torch's own name for it)
        return BACKEND


def explained(error: Exception, recorder: Recorder) -> Exception:
    """Return what stopped a communication: in an elastic run perhaps a rank's death."""
    return recorder.membership.explain(error) if recorder.membership else error


@functools.lru_cache(4096)
def message_in_words(op, group, me, peer, other, tag, dtype, shape) -> tuple[str, str, str]:
    """Channel, signature and text for the flight recorder; me and other are world ranks.

    (Cached: each step sends the same messages, with cold CPU caches, where Python takes three times
    as long as in a loop.)
    """
    route = f"{me} {other}" if op == "send" else f"{other} {me}"
    where = {"send": f", to rank {peer}", "recv": f", from rank {peer}"}.get(op, "")
    return (
        f"message {group} {route} {tag}",
        f"{dtype} {shape.numel()}",
        f"{op}({dtype}{list(shape)}{where})",
    )


def splits_in_bytes(tensor, splits, size: int) -> list[int]:
    if not splits:
        return [tensor.nbytes // size] * size
    row = tensor.nbytes // tensor.shape[0] if tensor.shape[0] else 0
    return [row * split for split in splits]


def register(recorder: Recorder, device: torch.device, shared: bool = False) -> None:
    """Make RecordingGroup the backend `mini_dist` of this process's torch.distributed.

    shared: other ranks use the same GPU, so gloo carries what NCCL would refuse.
    """
    dist.Backend.register_backend(
        BACKEND,
        lambda options, _: RecordingGroup(options, recorder, device, shared),
        extended_api=True,
        devices=[*{"cpu", device.type}],
    )
