"""Nine slow or stopped trainings, and a healthy one: programs on emulated devices, their records.

Each rank is a host that issues work, a device that does it, and a link; all times are virtual
(emulate.py), so a record is the same on every machine. The training is real, and so are losses,
samples, weights and held bytes: a linear model whose gradients the ranks average.

A rank writes a line per step into a file. A run that stops leaves these lines and, from the flight
recorder, the operation in which each rank waits. A diagnosis has nothing else to go by. (If you
read on, you read how the sick runs are made.)
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # (not in torch.distributed)

from mini_dist.collectives.emulate import Clock, EmulatedDevice
from mini_dist.plan.calculators.costs import all_reduce as cost_of_all_reduce
from mini_dist.plan.calculators.links import Link
from mini_dist.ranks.launch import RankError, launch

from ..profile import Span, Timeline, where_it_went
from ..profile.where import Went
from .measures import Alive

DISEASES = {
    "input stall": "batches arrive after they are needed",
    "straggler": "a rank's device is slow, and all wait for it",
    "another batch size": "a rank has more samples in a batch, or fewer, than the others",
    "unsynchronised seeds": "a rank shuffles the samples with a seed of its own",
    "buckets too small": "gradients leave in very many messages, so latency adds up",
    "host sync": "in each step the host waits for the device before it issues more work",
    "memory leak": "each step holds more bytes than the one before",
    "bad shard": "a rank reads garbage data, and the loss jumps",
    "save on one rank": "one rank alone enters a collective, to save a checkpoint",
    "healthy": "nothing is wrong",
}


@dataclass(frozen=True)
class Sick:
    """What a run suffers from, on which rank (None: on all), how much; and its size. also: a second
    disease, of which only the name, the rank and the strength count."""

    disease: str
    rank: int | None = None
    size: int = 4
    much: float = 2.0
    batch: int = 8
    steps: int = 12
    also: Sick | None = None

    def on(self, rank: int) -> dict[str, float]:
        """Return what this rank suffers from, and how much."""
        both = [self, self.also] if self.also else [self]
        return {each.disease: each.much for each in both if each.rank in (None, rank)}


@dataclass
class Step:
    """What a rank recorded of a step, in addition to its spans."""

    loss: float  # of its own samples, before the update
    samples: list[int]
    weights: float  # their sum after the update
    held: int  # bytes of tensors that exist after it


@dataclass
class Record:
    """What a run has left. steps: [rank][step]. timeline: what each rank's device and link did, in
    virtual seconds. waiting: rank -> the operation in which it waits, if the run has stopped."""

    size: int
    steps: list[list[Step]]
    timeline: Timeline
    waiting: dict[int, str] = field(default_factory=dict)

    @property
    def went(self) -> Went:
        """Where the time of a step went, without the first two, in which everything starts."""
        return where_it_went(self.timeline, skip=2)

    def messages(self, rank: int) -> float:
        """Return the all-reduces per step."""
        spans = self.timeline.spans[rank]
        return sum(span.kind == "communication" for span in spans) / len(self.steps[rank])

    def __repr__(self) -> str:
        done = ", ".join(str(len(steps)) for steps in self.steps)
        lines = [f"{self.size} ranks, which completed {done} steps"]
        for rank, what in sorted(self.waiting.items()):
            lines.append(f"  rank {rank} waits in {what}")
        return "\n".join(lines if self.waiting else [*lines, repr(self.went)])


RECORDS: dict[Sick, Record] = {}  # each run is made once per process


def run(sick: Sick) -> Record:
    """Train on ranks, and read what they have written."""
    run_all([sick])
    return RECORDS[sick]


def run_all(several: Iterable[Sick]) -> None:
    """Make the runs that are missing: one launch per size, and one for each run that stops."""
    missing = [sick for sick in several if sick not in RECORDS]
    stops = [[sick] for sick in missing if sick.disease == "save on one rank"]
    sizes = sorted({sick.size for sick in missing})
    go_on = [
        [sick for sick in missing if sick.size == size and [sick] not in stops] for size in sizes
    ]
    for together in filter(None, [*go_on, *stops]):
        with tempfile.TemporaryDirectory() as folder:
            waiting = {}
            try:
                launch(train_all, together[0].size, (together, folder), device="cpu", quiet=True)
            except RankError as error:
                if together not in stops or not all(flight.waiting for flight in error.flights):
                    raise
                waiting = {rank: f.waiting.text for rank, f in enumerate(error.flights)}
            for number, sick in enumerate(together):
                RECORDS[sick] = read(Path(folder, str(number)), sick.size, waiting)


def train_all(several: list[Sick], folder: str, group) -> None:
    for number, sick in enumerate(several):
        Path(folder, str(number)).mkdir(exist_ok=True)
        train(sick, Path(folder, str(number)), group)


def read(folder: Path, size: int, waiting: dict[int, str]) -> Record:
    """Read what the ranks have written until the run ended or stopped."""
    lines = [
        [json.loads(line) for line in (folder / f"{rank}.jsonl").read_text().splitlines()]
        for rank in range(size)
    ]
    spans = [
        [Span(*s[:6], s[6] and tuple(s[6])) for line in mine for s in line["spans"]]
        for mine in lines
    ]
    steps = [[tuple(line["step"]) for line in mine] for mine in lines]
    told = [[Step(**line["told"]) for line in mine] for mine in lines]
    return Record(size, told, Timeline(steps, spans), waiting)


# ---- the program ---------------------------------------------------------------------------------

LAYERS, WIDTH = 4, 16  # WIDTH weights per layer of the linear model, which stand for 1 MiB
FORWARD, BACKWARD, UPDATE = 1e-3, 2e-3, 0.5e-3  # seconds per layer for 8 samples; UPDATE: in all
LOAD = 5e-3  # seconds per batch, which is loaded in the background, one batch ahead
HOST = 4e-3  # Python's part of a step, hidden as long as the host runs ahead of the device
LINK = Link(latency=5e-5, bandwidth=5e9)


class Unhurried(Clock):
    """Virtual time only: nobody sleeps."""

    def sleep_until(self, moment: float) -> float:
        return moment


def train(sick: Sick, folder: Path, group) -> None:
    """Run one rank of data-parallel training, whose messages overlap with backward."""
    rank, size = group.rank(), group.size()
    here = sick.on(rank)
    savers = dist.new_group(list(range(size)))  # a checkpoint uses a group of its own
    batch = round(sick.batch * here.get("another batch size", 1.0))
    slow = here.get("straggler", 1.0)
    pieces = 16 if "buckets too small" in here else 1  # messages per layer
    work = slow * batch / 8
    device, network, loader = (EmulatedDevice(Unhurried()) for _ in range(3))
    truth = torch.linspace(-1, 1, LAYERS * WIDTH, dtype=torch.float64)
    weights, host, kept, ended = torch.zeros_like(truth), 0.0, [], 0.0
    message = torch.empty(len(truth) + size * LAYERS, dtype=truth.dtype)
    with open(folder / f"{rank}.jsonl", "w", buffering=1) as file, Alive() as alive:
        for step in range(sick.steps):
            spans: list[Span] = []
            asked = host

            # Data: loaded in the background while the step before runs.
            load = LOAD * (1 + 2 * here.get("input stall", 0.0))
            there = loader.run(load, loader.free, "load")
            host = max(host, there) + HOST
            if there > max(asked, device.free):
                spans.append(Span("data", "data", max(asked, device.free), there))
            samples = draw(sick, here, rank, size, step, batch)
            inputs, targets = rows(samples, truth)
            if "bad shard" in here and step == sick.steps // 2:
                targets = targets * (15 * here["bad shard"])

            # Forward and backward. Gradients leave layer by layer, the last layer first.
            for layer in range(LAYERS):
                spans.append(computed(device, f"forward {layer}", work * FORWARD, host))
            error = inputs @ weights - targets
            loss, gradient = error.square().mean(), 2 * inputs.T @ error / len(samples)
            if "memory leak" in here:
                kept.append(inputs * here["memory leak"])  # like a loss that is kept with its graph
            leave = []  # when the gradient of each layer is ready to leave
            for layer in reversed(range(LAYERS)):
                spans.append(computed(device, f"backward {layer}", work * BACKWARD, host))
                leave.append(device.free)
            averaged = average(gradient, leave, pieces, network, spans, message, group)
            ready = max(host, network.free)
            spans.append(computed(device, "update", slow * UPDATE, ready))
            weights = weights - 0.1 * averaged

            # The end of the step, and now and then a look at the loss, for which the host waits.
            spans.append(Span("program", "region", ended, device.free))
            if "host sync" in here or step % 5 == 4:
                spans.append(Span("loss.item()", "sync", host, device.free))
                host = device.free
            told = Step(loss.item(), samples, weights.sum().item(), 0)
            del inputs, targets, error, loss, gradient, averaged
            told.held = alive.nbytes()
            line = {"told": vars(told), "step": (ended, device.free), "spans": spans}
            file.write(json.dumps(line) + "\n")
            ended = device.free
            if "save on one rank" in here and step == sick.steps // 2:
                everyones = [torch.empty_like(weights) for _ in range(size)]
                options = AllgatherOptions()
                options.asyncOp = False  # this rank waits until it is over
                savers.allgather([everyones], [weights], options).wait()


def draw(sick: Sick, here: dict, rank: int, size: int, step: int, batch: int) -> list[int]:
    """Return this rank's samples, from an order that is the same on all ranks with one seed."""
    seed = 1 + rank if "unsynchronised seeds" in here else 0
    widest = 64  # no batch is larger, so ranks with one seed share no sample
    order = torch.randperm(
        size * widest * sick.steps, generator=torch.Generator().manual_seed(seed)
    )
    start = (step * size + rank) * widest
    return order[start : start + batch].tolist()


def rows(samples: list[int], truth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, which depend on nothing but the samples' numbers."""
    made = [torch.Generator().manual_seed(1000 + sample) for sample in samples]
    inputs = torch.stack([torch.randn(len(truth), generator=g).double() for g in made])
    inputs = inputs / len(truth) ** 0.5
    return inputs, inputs @ truth


def computed(device: EmulatedDevice, name: str, seconds: float, ready: float) -> Span:
    end = device.run(seconds, ready, name)
    return Span(name, "compute", end - seconds, end)


def average(gradient, leave, pieces: int, network: EmulatedDevice, spans: list, message, group):
    """Return the mean gradient: `pieces` messages per layer on the link, `message` on this machine.

    `message` also carries the times at which each rank's layers were ready. A message on the link
    begins when the last rank is ready and the previous one is over, and takes the time of a ring.
    """
    rank, size = group.rank(), group.size()
    message.zero_()[: len(gradient)] = gradient
    message[len(gradient) :].view(size, len(leave))[rank] = torch.tensor(leave)
    options = dist.AllreduceOptions()
    options.asyncOp = False
    group.allreduce([message], options).wait()
    seconds = cost_of_all_reduce(2**20 // pieces, size, "ring", LINK).seconds
    ready = message[len(gradient) :].view(size, len(leave)).tolist()
    for layer in range(len(leave)):
        everyones = [mine[layer] for mine in ready]
        last = max(everyones)
        for _ in range(pieces):
            start = max(everyones[rank], network.free)
            end = network.run(seconds, last)
            late = (everyones.index(last), last)
            spans.append(Span("all_reduce", "communication", start, end, late=late))
    return message[: len(gradient)] / size
