"""Say what this machine has for the course, one line each, with the cure for what it lacks.

    mini-dist doctor

Exit status: 0 if ranks run here, 1 if something keeps them from it. Whatever else is lacking makes
the course slower or makes one lesson fall back on an emulation, and its line says which.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from mini_dist.ranks.devices import count_gpus
from mini_dist.ranks.folder import ROOM, base_directory

MIB = 1 << 20
# Settings by which Linux forbids namespaces: file, the value that forbids, the cure.
FORBIDDEN_BY = [
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
    (
        "/proc/sys/kernel/unprivileged_userns_clone",
        "0",
        "sudo sysctl -w kernel.unprivileged_userns_clone=1",
    ),
    ("/proc/sys/user/max_user_namespaces", "0", "sudo sysctl -w user.max_user_namespaces=10000"),
]
WITHOUT_NAMESPACES = (
    "Ranks use the host's loopback, lesson 26 emulates its hosts, and grading has no sandbox"
)


@dataclass
class Finding:
    """A line of the report. cure: what to do, or "" if all is well; stops: no rank can run."""

    what: str
    found: str
    cure: str = ""
    stops: bool = False

    def __str__(self) -> str:
        mark = "ok" if not self.cure else "NO" if self.stops else "--"
        return f"{mark}  {self.what:11} {self.found}{f'. {self.cure}' if self.cure else ''}"


def findings() -> Iterator[Finding]:
    """Check one thing after the other."""
    yield python()
    yield torch()
    yield packages()
    yield cores()
    yield shared_memory()
    yield namespaces()
    yield fonts()
    yield gpu()
    yield ranks()


def python() -> Finding:
    from packaging.specifiers import SpecifierSet

    here, wanted = platform.python_version(), metadata.metadata("mini_dist")["Requires-Python"]
    fits = SpecifierSet(wanted or "").contains(here, prereleases=True)
    cure = "" if fits else f"The course needs Python {wanted}"
    return Finding("Python", f"{here}, {sys.executable}", cure, stops=True)


def torch() -> Finding:
    (wanted,) = (each for each in requirements() if each.name == "torch")
    if cure := missing(wanted):
        return Finding("torch", "does not fit", cure, stops=True)
    return Finding("torch", metadata.version("torch"))


def packages() -> Finding:
    wanted = [each for each in requirements() if each.name != "torch"]
    cures = [cure for each in wanted if (cure := missing(each))]
    return Finding("packages", f"{len(wanted) - len(cures)} of {len(wanted)}", "; ".join(cures))


def requirements() -> list:
    """Return what `pip install mini_dist` requires, without the extras."""
    from packaging.requirements import Requirement

    found = map(Requirement, metadata.requires("mini_dist") or ())
    return [each for each in found if not each.marker or each.marker.evaluate({"extra": ""})]


def missing(wanted) -> str:
    """Return how to get a package whose version is too old or that is not installed; else ""."""
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"{wanted.name} is not installed: pip install '{wanted}'"
    if wanted.specifier.contains(version, prereleases=True):
        return ""
    return f"{wanted.name} {version} is too old: pip install '{wanted}'"


def cores() -> Finding:
    affinity = hasattr(os, "sched_getaffinity")
    number = len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1
    cure = "" if number > 1 else "Give this machine two: on one core, no timing shows an overlap"
    return Finding("cores", str(number), cure)


def shared_memory() -> Finding:
    place = base_directory()
    if sys.platform != "linux":
        return Finding("/dev/shm", f"not on {sys.platform}: ranks meet in {place}")
    if place != "/dev/shm":
        small = f"has less than {ROOM // MIB} MiB free: ranks meet in {place}, which is slower"
        return Finding("/dev/shm", small, "In Docker: docker run --shm-size=1g")
    return Finding("/dev/shm", f"{shutil.disk_usage(place).free // MIB:,} MiB free")


def namespaces() -> Finding:
    """Try one in another process, because a process that has left the network cannot return."""
    code = "from mini_dist.ranks import network; print(network.leave_the_hosts_network() or '')"
    tried = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    why = tried.stdout.strip() or tried.stderr.strip()[-200:]
    if not why:
        return Finding("namespaces", "ranks get a network of their own")
    if sys.platform != "linux":
        return Finding("namespaces", f"{why}. {WITHOUT_NAMESPACES}")
    return Finding("namespaces", f"{why}. {WITHOUT_NAMESPACES}", how_to_allow_namespaces())


def how_to_allow_namespaces() -> str:
    for path, forbids, cure in FORBIDDEN_BY:
        if Path(path).exists() and Path(path).read_text().strip() == forbids:
            return cure
    return "In Docker: docker run --security-opt seccomp=unconfined"


def fonts() -> Finding:
    """Find out whether a browser on this machine can show the Chinese words of each lesson."""
    if sys.platform != "linux" or not shutil.which("fc-list"):
        return Finding("fonts", "those of the machine that shows the notebook")
    listed = subprocess.run(["fc-list", ":lang=zh"], capture_output=True, text=True).stdout
    if listed:
        return Finding("fonts", "Chinese words are shown")
    boxes = "a browser on this machine shows Chinese words as boxes"
    return Finding("fonts", boxes, "On Debian and Ubuntu: sudo apt install fonts-noto-cjk")


def gpu() -> Finding:
    number = count_gpus()
    if number:
        import torch

        names = {torch.cuda.get_device_name(each) for each in range(number)}
        few = f"runs of up to {number} ranks use NCCL" if number > 1 else "one rank can use it"
        return Finding("GPU", f"{number} × {', '.join(sorted(names))}: {few}")
    if not os.path.exists("/dev/nvidiactl"):
        return Finding("GPU", "none: ranks compute on the CPU, for which the course is made")
    cure = "Install a torch with CUDA: pytorch.org/get-started/locally says which"
    return Finding("GPU", f"torch {metadata.version('torch')} cannot use this machine's", cure)


def ranks() -> Finding:
    """Start two ranks and let them add up their numbers."""
    try:
        from mini_dist import launch

        began = time.perf_counter()
        sums = launch(add_up, 2, device="cpu", timeout=60).results
        seconds = time.perf_counter() - began
    except Exception as error:  # A machine can fail in many ways. Each is worth a line.
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        return Finding("ranks", "two ranks did not run", first, stops=True)
    return Finding("ranks", f"two ranks added up 1 + 2 = {sums[0]:g} in {seconds:.1f} s")


def add_up(group) -> float:
    import torch

    from mini_dist import all_reduce

    return all_reduce(torch.tensor([group.rank() + 1.0]), group).item()


def main() -> int:
    stopped = False
    for finding in findings():
        print(finding, flush=True)
        stopped |= finding.stops and bool(finding.cure)
    return int(stopped)


if __name__ == "__main__":
    sys.exit(main())
