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
    def world_size(self) -> int:
        return len(self.results)

    def __repr__(self) -> str:
        lines = [self.title()]
        lines += [f"  rank {rank}  {short(result)}" for rank, result in enumerate(self.results)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [
            (rank, Markup(f"<code>{escaped(short(result))}</code>"))
            for rank, result in enumerate(self.results)
        ]
        table = html_table(rows, ["rank", "returned"], sides=["right", "left"])
        return f"<div>{escaped(self.title())}{table}</div>"

    def title(self) -> str:
        carriers = " and ".join(self.ledger.carriers()) or "nothing sent"
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{ranks} on {self.device}, {carriers}"


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
