"""This machine: what the host and messages cost, measured, to compare a replay with the clock."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from mini_dist.plan.calculators import hardware
from mini_dist.ranks.launch import launch
from mini_dist.ranks.ledger.counting import Host, Kernel, Updated


class Cost(NamedTuple):
    """Of a message or a native collective on this machine, in seconds.

    seconds: from begin to end. busy: what the backend's own threads compute on a rank's core
    meanwhile. There is no network card here: the cores themselves carry every byte.
    """

    seconds: float
    busy: float


@dataclass
class MeasuredMachine:
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


def measure_here(run, repeats: int = 9) -> MeasuredMachine:
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
    return MeasuredMachine(kernels, dict(zip(asked, measured[0])), *measure_counting(size))


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

    from mini_dist.collectives import exchange

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


STEPS = 24  # of the small model whose counting is measured


def measure_counting(size: int) -> tuple[float, float]:
    """CPU seconds that counting an operator takes, and an event: a small model's steps, counted and
    not. Every other one has messages, with their many events.

    On as many ranks as the run has, since cores that are all busy may be slower.
    """
    plain = launch(tiny_steps, size, (STEPS,), quiet=True).results[0]
    program = launch(tiny_steps, size, (STEPS,), count=True, quiet=True).ledger.programs[0]
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

    from mini_dist.model.gpt import GPT
    from mini_dist.model.loss import token_loss
    from mini_dist.plan.config import ModelConfig
    from mini_dist.strategies.data_parallel import Naive, ring_mean

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
