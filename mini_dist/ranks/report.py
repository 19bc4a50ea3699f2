"""The display of a run in a notebook or a terminal."""

from __future__ import annotations

import reprlib
import sys
from dataclasses import dataclass, field
from typing import Any

from mini_dist.plan.tables import Markup, escaped, html_table

from .hosts import Hosts
from .ledger import Ledger
from .membership import Lost


@dataclass
class Run:
    """The result of a launch, everything in rank order.

    results: what each rank returned. outputs: what each rank printed. ledger: what was sent.
    seconds: from the call to the last result. device: where the
    ranks' tensors belong (devices.py). hosts: the requested hosts;
    no_hosts: why the ranks were on one host anyway. lost: in an elastic run, the ranks that
    died; their results are None, and their messages are in no ledger.
    """

    results: list[Any]
    outputs: list[str]
    ledger: Ledger
    seconds: float
    device: str
    hosts: Hosts | None = None
    no_hosts: str | None = None
    lost: list[Lost] = field(default_factory=list)

    @property
    def shown(self) -> int:
        """How many ranks' results are shown."""
        return self.world_size

    @property
    def world_size(self) -> int:
        return len(self.results)

    @property
    def peak_memory(self) -> list[int]:
        """The most bytes that each rank held at once. Raises ValueError if the run was launched
        without memory=True."""
        if not self.ledger.memory or self.ledger.memory[0] is None:
            raise ValueError("this run does not record memory: launch(..., memory=True)")
        peaks = [record.peak_bytes() for record in self.ledger.memory]
        kinds = getattr(self.ledger, "kinds", None)  # of a simulated run (simulation/by_kind.py)
        return [peaks[kinds.of(rank)] for rank in range(self.world_size)] if kinds else peaks

    def __repr__(self) -> str:
        lines = [self.title()]
        some = enumerate(self.results[: self.shown])
        lines += [f"  rank {rank}  {short(result)}" for rank, result in some]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [
            (rank, Markup(f"<code>{escaped(short(result))}</code>"))
            for rank, result in enumerate(self.results[: self.shown])
        ]
        table = html_table(rows, ["rank", "returned"], sides=["right", "left"])
        return f"<div>{escaped(self.title())}{table}</div>"

    def title(self) -> str:
        carriers = " and ".join(self.ledger.carriers()) or "nothing sent"
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{ranks} on {self.device}, {carriers}"


@dataclass(repr=False)
class SimulatedRun(Run):
    """What came back from launch(..., simulate=...): a Run whose times are virtual.

    seconds: from the start of the function to its end on the last rank. device: the machine.
    steps: (start, end) of each training step of rank 0, in seconds. spans: what each rank computed,
    and when it waited (ranks/simulation/player.py). costs: what each rank that was run took here.
    """

    steps: list[tuple[float, float]] = field(default_factory=list)
    spans: list = field(default_factory=list)
    costs: list = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: the mean of all but the first, if there are several."""
        lengths = [end - start for start, end in self.steps]
        return sum(lengths[1:]) / len(lengths[1:]) if len(lengths) > 1 else lengths[0]

    def title(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size:,} ranks"
        most = max(self.peak_memory) / 1e9
        return f"{ranks} on {self.device}, simulated: {self.seconds:.4g} s, at most {most:.3g} GB"

    @property
    def shown(self) -> int:
        return 16


def short(result: Any) -> str:
    """Describe any result in one line; large tensors by shape."""
    if hasattr(result, "shape") and hasattr(result, "dtype") and hasattr(result, "numel"):
        if result.numel() > 8:
            return f"{type(result).__name__} {list(result.shape)} {result.dtype}"
    text = " ".join(ONE_LINE.repr(result).split())
    return text if len(text) <= 120 else text[:117] + "..."


ONE_LINE = reprlib.Repr()
ONE_LINE.maxstring = ONE_LINE.maxother = 100


def print_outputs(outputs: list[str]) -> None:
    """Print the ranks' outputs, rank by rank, each line marked with its rank."""
    lines = [
        f"[rank {rank}] {line}"
        for rank, output in enumerate(outputs)
        for line in output.splitlines()
    ]
    if not lines or sys.stdout is None:
        return
    try:
        print("\n".join(lines))
    except UnicodeEncodeError:  # a terminal with few characters: no reason to lose the results
        encoding = sys.stdout.encoding
        print("\n".join(lines).encode(encoding, "backslashreplace").decode(encoding))
