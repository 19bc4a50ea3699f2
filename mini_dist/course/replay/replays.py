"""A run replayed: the figures, and the table of other machines."""

from __future__ import annotations

from dataclasses import dataclass

from mini_dist.plan.calculators import Hardware, hardware, readable
from mini_dist.plan.tables import Table
from mini_dist.ranks.ledger import Ledger
from mini_dist.ranks.simulation.calculated import CalculatedMachine
from mini_dist.ranks.simulation.player import Player, Span

SLOW_NETWORK = 1.25e9  # bytes/s a device: 10 Gb/s Ethernet


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

        In a pipeline this includes the bubble.
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
        from ..draw import replayed

        return replayed(self, title)

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


HEAD = ["machine", "a step", "exposed", "of the step", "MFU"]


def replay(
    run, machine: Hardware | str | CalculatedMachine = "h100", *, nodes: int = 1, wider: float = 1.0
) -> Replay:
    """Play `run`, made by launch(..., count=True), on another machine.

    machine: a name of calculators.HARDWARE, a Hardware, or anything with the functions of
    CalculatedMachine (`measure_here()`). nodes: over how many its ranks are spread, evenly; with 1
    they share one, however many they are. wider: see CalculatedMachine. Raises ValueError for a run
    that was not counted.
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
        machine = CalculatedMachine(placed, wider)
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
