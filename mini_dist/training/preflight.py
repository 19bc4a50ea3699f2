"""Before a long run: are all hosts healthy, equal, and connected as they should be?

    python -m mini_dist.training.preflight                     # four ranks on this machine
    torchrun --nnodes 2 --nproc-per-node 8 ... -m mini_dist.training.preflight --folder /shared/runs

Every rank reports what it is and has. Then all neighbors in the ring of ranks measure their link
and the difference of their clocks. Each problem is reported in one sentence, and then the exit
status is 1. (We have not run this between several hosts: we had one machine.)
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import torch

from mini_dist.collectives import all_gather, exchange
from mini_dist.plan.fields import checks_kinds
from mini_dist.plan.tables import Table
from mini_dist.ranks.launch import launch

GIB = 2**30
PINGS, PING_BYTES, BULK_BYTES = 30, 8, 8 << 20


@dataclass(frozen=True)
class HostReport:
    """What one rank found. offset: how far (in seconds) the next rank's clock is ahead, accurate to
    half the round trip; latency, bandwidth: of the link to the next rank, one direction."""

    rank: int
    host: str
    versions: dict[str, str]
    disk_bytes: int  # free, in the folder of the run
    writable: bool
    memory_bytes: int  # available on the host, shared by its ranks
    gpus: int
    latency: float | None = None
    bandwidth: float | None = None
    offset: float | None = None


@checks_kinds
@dataclass(frozen=True)
class Limits:
    """The needs of a run. A link is slow if it has less than `share` of the median bandwidth, or a
    latency that exceeds the median by the inverse factor."""

    disk_bytes: int = 10 * GIB
    memory_bytes: int = GIB
    clock: float = 0.05
    share: float = 0.5


def inspect(folder: str, group) -> list[HostReport]:
    """Report this rank and measure the link to the next rank; return all ranks' reports."""
    rank, size = group.rank(), group.size()
    link = measure_link(group) if size > 1 else (None, None, None)
    path, writable = nearest_existing(Path(folder)), True
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError:
        writable = False
    report = HostReport(
        rank,
        socket.gethostname(),
        versions(),
        shutil.disk_usage(path).free,
        writable,
        available_memory(),
        torch.cuda.device_count(),
        *link,
    )
    return gather_objects(report, group)


def measure_link(group) -> tuple[float, float, float]:
    """Measure the time of a small message, the bytes/s of a large one, and how far the next rank's
    clock is ahead: the time in its answer minus the middle of the round trip (Cristian 1989)."""
    rank, size = group.rank(), group.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    trips, offsets = [], []
    for _ in range(PINGS):
        began = time.time()
        exchange(torch.zeros(PING_BYTES // 8, dtype=torch.float64), after, before, group)
        answer = torch.tensor([time.time()], dtype=torch.float64)
        theirs = exchange(answer, before, after, group)  # from the next rank, back to me
        ended = time.time()
        trips.append(ended - began)
        offsets.append(theirs.item() - (began + ended) / 2)
    best = min(range(PINGS), key=trips.__getitem__)  # the fastest trip was disturbed least
    bulk = torch.zeros(BULK_BYTES // 4)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        exchange(bulk, after, before, group)
        seconds.append(time.perf_counter() - began)
    return median(trips) / 2, BULK_BYTES / min(seconds), offsets[best]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "numpy", "mini_dist"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def nearest_existing(path: Path) -> Path:
    """Return the folder itself, or the nearest existing one above it."""
    path = path.resolve()
    return next(each for each in (path, *path.parents) if each.exists())


def available_memory() -> int:
    """Return the bytes that programs can use without swapping; all memory if that is unknown."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gather_objects(value: HostReport, group) -> list[HostReport]:
    """Gather every rank's report, as text in a tensor."""
    import ast
    import dataclasses

    data = repr(dataclasses.asdict(value)).encode()
    sizes = all_gather(torch.tensor([len(data)]), group).tolist()
    page = torch.zeros(1, max(sizes), dtype=torch.uint8)
    page[0, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    pages = all_gather(page, group)
    return [
        HostReport(**ast.literal_eval(bytes(row[:length].tolist()).decode()))
        for row, length in zip(pages, sizes)
    ]


def problems(reports: list[HostReport], limits: Limits) -> list[str]:
    """Return the problems that should be fixed before the run, one sentence each."""
    found = []
    for what in reports[0].versions:
        have = {r.rank: r.versions.get(what) for r in reports}
        if len(set(have.values())) > 1:
            each = ", ".join(f"rank {rank} has {value}" for rank, value in have.items())
            found.append(f"{what} is not the same everywhere: {each}.")
    if len({r.gpus for r in reports}) > 1:
        found.append(f"numbers of GPUs differ: {[r.gpus for r in reports]}.")
    for r in reports:
        where = f"rank {r.rank} on {r.host}"
        if not r.writable:
            found.append(f"{where} cannot write into the folder of the run.")
        if r.disk_bytes < limits.disk_bytes:
            found.append(
                f"{where} has {r.disk_bytes / GIB:.1f} GiB of disk, and "
                f"{limits.disk_bytes / GIB:.1f} are wanted."
            )
        if r.memory_bytes < limits.memory_bytes:
            found.append(
                f"{where} has {r.memory_bytes / GIB:.1f} GiB of memory left, and "
                f"{limits.memory_bytes / GIB:.1f} are wanted."
            )
        if r.offset is not None and abs(r.offset) > limits.clock + r.latency:
            after = reports[(r.rank + 1) % len(reports)]
            found.append(
                f"the clock of {after.host} (rank {after.rank}) is {1e3 * r.offset:+.0f} ms from "
                f"that of {r.host} (rank {r.rank}): their records would not fit on one timeline."
            )
    links = [r for r in reports if r.bandwidth is not None]
    if links:
        usual, lag = (median(values) for values in zip(*((r.bandwidth, r.latency) for r in links)))
        for r in links:
            to = (r.rank + 1) % len(reports)
            if r.bandwidth < limits.share * usual:
                found.append(
                    f"the link from rank {r.rank} to rank {to} carries {r.bandwidth / 1e9:.2f} "
                    f"GB/s, but the median link carries {usual / 1e9:.2f}."
                )
            if r.latency > lag / limits.share and r.latency - lag > 1e-4:
                found.append(
                    f"a message from rank {r.rank} to rank {to} takes {1e6 * r.latency:.0f} us "
                    f"where the median takes {1e6 * lag:.0f}."
                )
    return found


def table(reports: list[HostReport]) -> Table:
    rows = []
    for r in reports:
        link = [""] * 3
        if r.bandwidth is not None:
            link = [f"{1e6 * r.latency:.0f}", f"{r.bandwidth / 1e9:.2f}", f"{1e3 * r.offset:+.2f}"]
        sizes = f"{r.disk_bytes / GIB:.0f}", f"{r.memory_bytes / GIB:.1f}"
        rows.append((r.rank, r.host, r.versions["torch"], r.gpus, *sizes, *link))
    head = ["rank", "host", "torch", "GPUs", "disk GiB", "memory GiB"]
    return Table([*head, "to next: us", "GB/s", "its clock, ms"], rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mini_dist.training.preflight",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    world = int(os.environ.get("WORLD_SIZE", 4))
    parser.add_argument("--ranks", type=int, default=world)
    parser.add_argument("--folder", default=".", help="where the run will write")
    parser.add_argument("--disk-gib", type=float, default=10.0)
    parser.add_argument("--memory-gib", type=float, default=1.0)
    given = parser.parse_args(arguments)
    reports = launch(inspect, given.ranks, (given.folder,), quiet=True).results[0]
    limits = Limits(round(given.disk_gib * GIB), round(given.memory_gib * GIB))
    found = problems(reports, limits)
    if os.environ.get("RANK", "0") == "0":
        print(table(reports))
        print("\n".join(f"NOT READY: {problem}" for problem in found) or "ready")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
