"""What ran here, on another machine: the same kernels and the same messages, other rates and links.

    run = launch(train, world_size=8, count=True)         # count: note every kernel
    replay(run, "h100")                                   # 8 H100s in one node, NVLink
    replay(run, "h100", nodes=2)                          # the same ranks on 2 nodes, InfiniBand
    elsewhere(run)                                        # both, and A100s on a slow network

Of the run only the order is kept: what each rank computed, what it sent, what it waited for, what
another thread did for it. A kernel takes the time of the roofline in calculators.kernels: matrices
on measured GEMM ceilings, everything else at the memory's rate. A message takes latency + bytes /
bandwidth, begins when both sides are there, and each rank sends one and receives one at a time.
A native collective (DDP's, say) is a ring, timed as the planner times it.

What is left out: the host. It takes 5 to 10 microseconds to start a kernel from Python, so small
models run slower than this says, unless CUDA graphs start them. For this machine the host's time is
measured, as all other rates are, and no card carries its messages (`measure_here`): so the replay
of a run can be held against the clock (benchmarks/replay.py).
"""

from __future__ import annotations

import heapq
import math
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from .calculators import Hardware, hardware, readable
from .calculators.kernels import collective_seconds, gemm_seconds
from .calculators.links import Link
from .calculators.machines import FLASH_BACKWARD, FLASH_FORWARD, KERNEL_SECONDS
from .launch import launch
from .ledger import Ledger
from .ledger.counting import (
    Begin,
    Done,
    Give,
    Host,
    Join,
    Kernel,
    Phase,
    Stated,
    Take,
    Updated,
    Wait,
)
from .ledger.table import Table

SLOW_NETWORK = 1.25e9  # bytes/s a device: 10 Gb/s Ethernet
# float32 products on tensor cores run as TF32, at half the rate of bf16 (A100: 156 of 312 TFLOP/s;
# H100: 494.5 of 989).
SLOWER_IN_FP32 = 2
NATIVE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")  # others: as one message


class Span(NamedTuple):
    """Something in replayed time, in seconds. kind: product, attention, stream, wait or message."""

    rank: int
    kind: str
    name: str
    start: float
    end: float
    peer: int | None = None  # of a message, which stands in its sender's row


@dataclass
class Elsewhere:
    """A machine for the replay: how long a kernel takes, and which link joins two ranks.

    wider: as if every side of every matrix were that many times longer: bytes grow with its
    square, FLOPs with its cube. So a small run shows what a large model of that program would do.
    """

    machine: Hardware
    wider: float = 1.0

    @property
    def peak_flops(self) -> float:
        return self.machine.device.peak_flops

    def kernel_seconds(self, kernel: Kernel) -> float:
        device, w = self.machine.device, self.wider
        nbytes, flops = w**2 * kernel.nbytes, w**3 * kernel.flops
        slower = SLOWER_IN_FP32 if kernel.itemsize >= 4 else 1
        if kernel.kind == "product" and kernel.shape:
            batch, m, n, k = kernel.shape
            one = gemm_seconds(device, w * m, w * n, w * k) - KERNEL_SECONDS
            return slower * batch * one + KERNEL_SECONDS
        if kernel.kind == "attention":
            speed = FLASH_BACKWARD if kernel.name.endswith("backward") else FLASH_FORWARD
            computed = flops / 2 if kernel.causal else flops
            moved = nbytes / device.stream_bandwidth
            return max(slower * computed / (speed * device.gemm_rate), moved) + KERNEL_SECONDS
        # On a GPU torch's optimizers update all tensors in a few kernels ("foreach").
        start = 0.0 if kernel.phase == "step" else KERNEL_SECONDS
        return max(slower * flops / device.gemm_rate, nbytes / device.stream_bandwidth) + start

    def host_seconds(self, host: Host) -> float:
        return 0.0

    def busy_seconds(self, op: str, nbytes: float) -> float:
        return 0.0  # network cards carry messages, and the devices compute

    def link(self, source: int, target: int) -> Link:
        size = self.machine.devices_per_node
        if source // size == target // size:
            return self.machine.node_link("send")
        return self.machine.network_link()

    def message_seconds(self, nbytes: int, source: int, target: int) -> float:
        return self.link(source, target).seconds(self.wider**2 * nbytes)

    def collective_seconds(self, op: str, nbytes: float, ranks: tuple[int, ...]) -> float:
        """nbytes: of the whole tensor, as calculators.links counts."""
        nbytes *= self.wider**2
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        if op in NATIVE:
            return collective_seconds(self.machine, op, nbytes, len(ranks), stride)
        far = max(ranks, key=lambda rank: rank // self.machine.devices_per_node)
        rounds = math.ceil(math.log2(len(ranks))) if len(ranks) > 1 else 0
        return self.link(ranks[0], far).seconds(nbytes if op != "barrier" else 0, rounds)


@dataclass
class Replay:
    """A replayed run. Times in seconds; steps are rank 0's, up to what follows its optimizer."""

    machine: str
    spans: list[Span]
    num_ranks: int
    steps: list[tuple[float, float]]
    flops: float  # of a step, all ranks together, counted in the run
    total_bytes: int  # of the whole run: sent, all ranks together
    peak_flops: float  # of one device

    @property
    def seconds(self) -> float:
        """Of a step: the mean of all but the first, if there are several."""
        lengths = [end - start for start, end in self.steps]
        return sum(lengths[1:]) / len(lengths[1:]) if len(lengths) > 1 else lengths[0]

    @property
    def exposed(self) -> float:
        """Seconds of a step in which a rank computes nothing and waits; the mean over the ranks.

        In a pipeline this holds the bubble, too.
        """
        start, end = self.steps[-1]
        waited = sum(
            max(0.0, min(span.end, end) - max(span.start, start))
            for span in self.spans
            if span.kind == "wait"
        )
        return waited / self.num_ranks

    @property
    def mfu(self) -> float:
        """Counted FLOPs / (time * datasheet peak): with recompute it is what papers call HFU."""
        return self.flops / (self.seconds * self.num_ranks * self.peak_flops)

    def row(self) -> tuple:
        share = self.exposed / self.seconds if self.seconds else 0.0
        return (
            self.machine,
            readable(self.seconds, "s"),
            readable(self.exposed, "s"),
            f"{share:.0%}",
            f"{self.mfu:.1%}",
        )

    def table(self) -> Table:
        return Table(HEAD, [self.row()])

    def timeline(self, title: str = ""):
        """The last step as a picture: what each rank computes, and where it waits."""
        from .draw import replayed

        return replayed(self, title)

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


HEAD = ["machine", "a step", "exposed", "of the step", "MFU"]


def replay(
    run, machine: Hardware | str | Elsewhere = "h100", *, nodes: int = 1, wider: float = 1.0
) -> Replay:
    """Play `run`, made by launch(..., count=True), on another machine.

    machine: a name of calculators.HARDWARE, a Hardware, or anything with Elsewhere's functions
    (`measure_here()`). nodes: over how many its ranks are spread, evenly; with 1 they share one,
    however many they are. wider: see Elsewhere. Raises ValueError for a run that was not counted.
    """
    ledger: Ledger = run.ledger if hasattr(run, "ledger") else run
    if not ledger.programs or ledger.programs[0] is None:
        raise ValueError("this run's kernels were not counted: launch it with count=True.")
    size = len(ledger.programs)
    if isinstance(machine, str):
        machine = hardware(machine)
    if isinstance(machine, Hardware):
        if nodes < 1 or size % nodes:
            raise ValueError(f"nodes={nodes} does not divide the {size} ranks of the run.")
        placed = machine.replace(devices_per_node=size // nodes)
        name = f"{size} x {machine.device.name}" + (f" on {nodes} nodes" if nodes > 1 else "")
        machine = Elsewhere(placed, wider)
    else:
        name = machine.name
    player = Player(ledger, machine)
    player.play()
    flops = getattr(machine, "wider", 1.0) ** 3 * player.flops_of_a_step()
    return Replay(
        name, player.spans, size, player.steps(), flops, ledger.total_bytes(), machine.peak_flops
    )


def elsewhere(run, wider: float = 1.0) -> Table:
    """One run on three machines: an H100 node, two of them, and A100s with 10 Gb/s between each."""
    size = len(run.ledger.programs or [0])
    slow = hardware("a100-80").replace(network_bandwidth=SLOW_NETWORK)
    found = [replay(run, "h100", wider=wider)]
    if size % 2 == 0:
        found.append(replay(run, "h100", nodes=2, wider=wider))
    apart = replay(run, slow, nodes=size, wider=wider)
    apart.machine += ", 10 Gb/s"
    rows = [each.row() for each in [*found, apart]]
    return Table(HEAD, rows, "this program elsewhere" + (f", {wider:g} x wider" * (wider != 1)))


# ---- this machine ----------------------------------------------------------------------------


class Cost(NamedTuple):
    """Of a message or a native collective on this machine, in seconds.

    seconds: from begin to end. busy: what the backend's own threads compute on a rank's core
    meanwhile. There is no network card here: the cores themselves carry every byte.
    """

    seconds: float
    busy: float


@dataclass
class Here:
    """This machine as the replay takes it: every kernel's and every message's own time, and the
    host's. operator, event: CPU seconds that counting one added to the host's."""

    kernels: dict[tuple, float]
    communications: dict[tuple[str, int], Cost]
    operator: float
    event: float
    name: str = "this machine, measured"
    peak_flops: float = hardware("laptop").device.peak_flops / 2  # of one core

    def kernel_seconds(self, kernel: Kernel) -> float:
        return self.kernels[kernel.signature]

    def host_seconds(self, host: Host) -> float:
        return max(0.0, host.seconds - self.operator * host.operators - self.event)

    def link(self, source: int, target: int) -> str:
        return "loopback"

    def message_seconds(self, nbytes: int, source: int, target: int) -> float:
        return self.communications["message", nbytes].seconds

    def collective_seconds(self, op: str, nbytes: float, ranks: tuple[int, ...]) -> float:
        return self.communications[op, nbytes].seconds

    def busy_seconds(self, op: str, nbytes: float) -> float:
        """For one rank's side of it."""
        return self.communications[op, nbytes].busy


def measure_here(run, repeats: int = 9) -> Here:
    """This machine's rates for a run that was counted on it, with at most as many ranks as cores.

    Kernels: the median CPU time of each in that run. Host: as noted there, less the counting.
    Communications: timed here, at the sizes of the run, between ranks that do nothing else.
    """
    seconds: dict[tuple, list[float]] = defaultdict(list)
    for program in run.ledger.programs:
        for _, event in program:
            if isinstance(event, Kernel):
                seconds[event.signature].append(event.seconds)
    kernels = {signature: statistics.median(found) for signature, found in seconds.items()}
    size = len(run.ledger.programs)
    asked = sorted({asked_for(comm) for comm in run.ledger.leaves()})
    measured = launch(communicate_each, size, (asked, repeats), quiet=True).results
    return Here(kernels, dict(zip(asked, measured[0])), *measure_counting(size))


def asked_for(comm) -> tuple[str, int]:
    """Which measurement a communication needs: message or op, and the bytes of a whole tensor."""
    if comm.op in ("send", "recv"):
        return "message", comm.nbytes
    parts = len(comm.group) if comm.op in ("all_gather", "gather", "scatter") else 1
    return comm.op, comm.nbytes * parts


def communicate_each(asked, repeats, group) -> list[Cost]:
    """Each of `asked`, on this machine, through the ledger's group as in any run."""
    import torch
    import torch.distributed as dist

    from .collectives import exchange

    rank, size = group.rank(), group.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    calls = {  # whole: the whole tensor; part: a rank's part of it. Native ones as DDP calls them
        "message": lambda whole, part: exchange(whole, after, before, group),
        "all_reduce": lambda whole, part: group.allreduce([whole]).wait(),
        "all_gather": lambda whole, part: group._allgather_base(whole, part).wait(),
        "reduce_scatter": lambda whole, part: group._reduce_scatter_base(part, whole).wait(),
        "all_to_all": lambda whole, part: group.alltoall_base(whole.clone(), whole, [], []).wait(),
        "broadcast": lambda whole, part: group.broadcast([whole], dist.BroadcastOptions()).wait(),
        "reduce": lambda whole, part: group.reduce([whole], dist.ReduceOptions()).wait(),
        "barrier": lambda whole, part: group.barrier().wait(),
    }
    other = torch.zeros(4 << 20)  # what a rank computes with between two communications

    def tensors(op, nbytes):
        part = torch.zeros(max(1, nbytes // 4 // size))
        return torch.zeros(len(part) * size if op != "message" else max(1, nbytes // 4)), part

    def times(call, *given) -> tuple[float, float, float]:
        """Seconds of a call on the clock and in this thread, medians; the backend's, a mean."""
        call(*given)  # the first one makes connections
        walls, own, backend = [], [], 0.0
        for _ in range(repeats):
            other.add_(1)
            exchange(torch.zeros(2), after, before, group)  # so that all begin at once
            backend -= time.process_time() - time.thread_time()
            wall, thread = time.perf_counter(), time.thread_time()
            call(*given)
            walls.append(time.perf_counter() - wall)
            own.append(time.thread_time() - thread)
            time.sleep(1e-3)  # its threads finish
            backend += time.process_time() - time.thread_time()
        return statistics.median(walls), statistics.median(own), max(0.0, backend / repeats)

    _, calling, _ = times(calls["message"], *tensors("message", 8))  # Python: the host's already
    costs = []
    for op, nbytes in asked:
        wall, _, busy = times(calls[op], *tensors(op, nbytes))
        sides = 2 if op == "message" else 1  # an exchange is two of them
        took = max(0.0, wall - calling)
        costs.append(Cost(took, min(busy, took) / sides))  # (a core does not work longer than that)
    return costs


def measure_counting(size: int, steps: int = 24) -> tuple[float, float]:
    """CPU seconds that counting an operator takes, and an event: a small model's steps, counted and
    not. Every other one has messages, with their many events.

    On as many ranks as the run has, since cores that are all busy may be slower.
    """
    plain = launch(tiny_steps, size, (steps,), quiet=True).results[0]
    program = launch(tiny_steps, size, (steps,), count=True, quiet=True).ledger.programs[0]
    counted = []  # of each step: CPU seconds, operators, events
    step = [0.0, 0, 0]
    for _, event in program:
        if isinstance(event, (Kernel, Host)):
            step[0] += event.seconds
        if isinstance(event, Host):
            step[1:] = step[1] + event.operators, step[2] + 1
        if isinstance(event, Updated):
            counted.append(step)
            step = [0.0, 0, 0]

    def median_of_every_other(first):
        more = [with_it[0] - without for with_it, without in zip(counted, plain)]
        return statistics.median(more[first::2]), *counted[first][1:]

    alone, operators, _ = median_of_every_other(2)  # (steps 0 and 1 are everything's first)
    with_messages, as_well, events = median_of_every_other(3)
    operator = max(0.0, alone / operators)
    return operator, max(0.0, (with_messages - operator * as_well) / events)


def tiny_steps(steps: int, group) -> list[float]:
    """CPU seconds of each step of a model that is all host, in this thread."""
    import torch

    from .config import ModelConfig
    from .data_parallel import Naive, ring_mean
    from .model import GPT, token_loss

    config = ModelConfig(vocab_size=8, seq_len=4, d_model=8, num_layers=2, num_heads=2)
    model, times = Naive(GPT(config), group, reduce=ring_mean), []
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(1, 5, dtype=torch.long)
    for number in range(steps):
        began = time.thread_time()
        optimizer.zero_grad()
        token_loss(model(tokens[:, :-1]), tokens[:, 1:]).mean().backward()
        if number % 2:
            model.finish()
        optimizer.step()
        times.append(time.thread_time() - began)
    return times


# ---- the player ----------------------------------------------------------------------------------


class Line(NamedTuple):
    """One line of execution: a rank's main thread (0), or another thread that works for it."""

    rank: int
    thread: int


class Player:
    """Runs every line of every rank in replayed time, the earliest first.

    A line stops where it has to wait for something whose end is not known yet: a message whose
    other side is not there, a task. Whoever finds out the end wakes it.
    """

    def __init__(self, ledger: Ledger, machine) -> None:
        self.machine = machine
        self.events: dict[Line, list] = {Line(rank, 0): [] for rank in range(len(ledger.programs))}
        for rank, program in enumerate(ledger.programs):
            for thread, event in program:
                self.events.setdefault(Line(rank, thread), []).append(event)
        self.comms: list[list] = [[] for _ in ledger.programs]
        for comm in ledger.comms:
            self.comms[comm.rank].append(comm)
        self.place = dict.fromkeys(self.events, 0)  # in a line's events
        self.clock = dict.fromkeys(self.events, 0.0)
        self.ends: dict[tuple, float] = {}  # when something was over, as far as that is known
        self.waiting: dict[tuple, list[Line]] = defaultdict(list)
        self.sides: dict[tuple, dict] = defaultdict(dict)  # begun so far: rank -> (comm, moment)
        self.numbers: dict[tuple, int] = defaultdict(int)
        self.unwaited: dict[int, list] = defaultdict(list)  # native collectives of a rank
        self.device_free = [0.0] * len(ledger.programs)
        self.carried: list[list] = [[] for _ in ledger.programs]  # messages' begin, device's work
        self.way_free: dict[tuple, float] = defaultdict(float)
        self.begins = [begins(self.events[Line(rank, 0)]) for rank in range(len(ledger.programs))]
        self.phases: list[list[tuple[float, bool]]] = [[] for _ in ledger.programs]
        self.spans: list[Span] = []
        self.ready: list[tuple[float, Line]] = []

    def play(self) -> None:
        for line in self.events:
            self.wake(line)
        while self.ready:  # one event, then it is another line's turn, if that is earlier
            _, line = heapq.heappop(self.ready)
            events, place = self.events[line], self.place[line]
            if place < len(events) and self.goes_on(line, events[place]):
                self.place[line] += 1
                self.wake(line)
        for line, place in self.place.items():
            if place < len(self.events[line]):
                raise ValueError(
                    f"rank {line.rank} waits for ever at {self.events[line][place]}: its other "
                    "side is not in the ledger."
                )

    def wake(self, line: Line) -> None:
        heapq.heappush(self.ready, (self.clock[line], line))

    def over(self, what: tuple, end: float) -> None:
        self.ends[what] = end
        for line in self.waiting.pop(what, ()):
            self.wake(line)

    def goes_on(self, line: Line, event) -> bool:
        """Play one event; False if the line has to wait, for what it will be woken by."""
        rank = line.rank
        if isinstance(event, Host):
            if seconds := self.machine.host_seconds(event):
                self.compute(line, seconds)
        elif isinstance(event, (Kernel, Stated)):
            stated = isinstance(event, Stated)
            start = self.compute(
                line, event.seconds if stated else self.machine.kernel_seconds(event)
            )
            kind = "stated" if stated else event.kind
            self.spans.append(Span(rank, kind, event.name, start, self.clock[line]))
        elif isinstance(event, Begin):
            self.begin(line, event)
        elif isinstance(event, Wait):
            return self.wait(line, (rank, event.comm))
        elif isinstance(event, Give):
            self.over(("given", rank, event.task), self.clock[line])
        elif isinstance(event, Take):
            return self.wait(line, ("given", rank, event.task))
        elif isinstance(event, Done):
            self.over(("done", rank, event.task), self.clock[line])
        elif isinstance(event, Join):
            return self.wait(line, ("done", rank, event.task))
        elif isinstance(event, Phase):
            # whatever C++ waited for and nobody read: over when backward is
            if event.name == "step":
                for comm in self.unwaited[rank]:
                    if not self.wait(line, (rank, comm)):
                        return False
                self.unwaited[rank].clear()
            self.phases[rank].append((self.clock[line], self.begins[rank][self.place[line]]))
        return True

    def compute(self, line: Line, seconds: float) -> float:
        """Move this line on by that much work of its device, and return when it began.

        Messages that the device itself carries interrupt it, and delay it if it had been idle.
        """
        carried, free, longer = self.carried[line.rank], self.device_free[line.rank], 0.0
        start = max(self.clock[line], free)
        while carried and carried[0][0] < start + seconds + longer:
            begun, busy = heapq.heappop(carried)
            if begun <= start:
                free = max(free, begun) + busy
                start = max(self.clock[line], free)
            else:
                longer += busy
        self.clock[line] = self.device_free[line.rank] = start + seconds + longer
        return start

    def wait(self, line: Line, what: tuple) -> bool:
        if what not in self.ends:
            self.waiting[what].append(line)
            return False
        end = self.ends[what]
        if end > self.clock[line]:
            if line.thread == 0:
                self.spans.append(Span(line.rank, "wait", str(what[0]), self.clock[line], end))
            self.clock[line] = end
        return True

    def begin(self, line: Line, event: Begin) -> None:
        """Note this side of a message or collective; when all sides are there it takes place."""
        rank, comm = line.rank, self.comms[line.rank][event.comm]
        if comm.op == "recv_anysource":
            raise ValueError("a receive from any source has no other side that replay could know.")
        if comm.op in ("send", "recv"):
            (peer,) = comm.peers
            ends = (rank, peer) if comm.op == "send" else (peer, rank)
            name, needed = (comm.group, ends, event.tag), 2
        else:
            ends, name, needed = None, (comm.group,), len(comm.group)
            self.unwaited[rank].append(event.comm)
        # between two ranks those with the same name stay in order, and so do a group's collectives
        key = (*name, self.numbers[rank, name])
        self.numbers[rank, name] += 1
        sides = self.sides[key]
        sides[rank] = (event.comm, self.clock[line])
        if len(sides) == needed:
            self.takes_place(comm, ends, self.sides.pop(key))

    def takes_place(self, comm, ends: tuple[int, int] | None, sides: dict) -> None:
        begun = max(moment for _, moment in sides.values())
        if ends:
            source, target = ends
            busy = self.machine.busy_seconds("message", comm.nbytes)
            link = self.machine.link(source, target)
            ways = [("out", source, link), ("in", target, link)]
            seconds = self.machine.message_seconds(comm.nbytes, source, target)
        else:
            ways = [("collective", rank) for rank in comm.group]
            gathered = comm.op in ("all_gather", "gather", "scatter")
            nbytes = comm.nbytes * (len(comm.group) if gathered else 1)
            seconds = self.machine.collective_seconds(comm.op, nbytes, comm.group)
            busy = self.machine.busy_seconds(comm.op, nbytes)
        start = max(begun, *(self.way_free[way] for way in ways))
        for way in ways:
            self.way_free[way] = start + seconds
        for rank in sides if busy else ():
            heapq.heappush(self.carried[rank], (start, busy))
        for rank, (number, _) in sides.items():
            self.over((rank, number), start + seconds)
        row, peer = (ends[0], ends[1]) if ends else (comm.group[0], None)
        self.spans.append(Span(row, "message", comm.op, start, start + seconds, peer))

    # -- what came of it --

    def end(self) -> float:
        return max(self.clock.values())

    def steps(self) -> list[tuple[float, float]]:
        """Rank 0's steps, each up to what follows its optimizer; what went before has none."""
        starts = [moment for moment, is_first in self.phases[0] if is_first] or [0.0]
        return list(zip(starts, [*starts[1:], self.end()]))

    def flops_of_a_step(self) -> float:
        """Counted FLOPs of the last step, all ranks together."""
        total = 0.0
        for line, events in self.events.items():
            flops = 0.0
            for event, is_first in zip(events, begins(events)):
                flops = 0.0 if is_first else flops
                flops += event.flops if isinstance(event, Kernel) else 0.0
            total += flops if line.thread == 0 else 0.0
        return total


def begins(events: list) -> list[bool]:
    """Of each event whether it begins a step: a phase of training after setup, or after the
    optimizer and what belongs to it (the gathering of ZeRO-1)."""
    found, between = [], True
    for event in events:
        is_first = between and isinstance(event, Phase) and event.name not in ("setup", "step")
        between = isinstance(event, Updated) or (between and not is_first)
        found.append(is_first)
    return found
