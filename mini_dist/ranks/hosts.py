"""Several hosts on one machine: which rank is on which host, and how fast each host's uplink is.

    launch(fn, world_size=8, hosts=Hosts(2, uplink="200 Mbit/s"))

Each host is a network namespace with its own address, and one cable, `eth0`, to a switch that
joins them all (cables.py). Ranks on one host communicate inside it, at the speed of memory.
Messages to another host cross its own uplink and the other's; the kernel limits and counts the
bytes. If a system allows no namespaces, the same program runs on its loopback, and `seconds_on`
(ledger/hosts.py) computes how long its messages would have taken.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mini_dist.plan.fields import checks_kinds

UPLINK = "eth0"  # the name of a host's one cable, inside it
FRAME, PAYLOAD = 1514, 1448  # bytes of a full Ethernet frame, and what TCP carries in it
UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}
MOST = 32  # hosts: the most that our switch was tried with


@checks_kinds
@dataclass(frozen=True)
class Hosts:
    """`number` hosts, each joined with the others by its own uplink.

    uplink: its speed each way, as "200 Mbit/s" (including headers, as a cable's speed always
    does). latency: extra seconds per message, if the kernel has netem. ranks:
    "neighbours", the first ranks on the first host and so on; "dealt", like cards, one to each host
    in turn; or a list with each rank's host. emulated: do not try namespaces.

    Raises ValueError for an invalid number, speed or placement.
    """

    number: int
    uplink: str = "1 Gbit/s"
    latency: float = 0.0
    ranks: str | Sequence[int] = "neighbours"
    emulated: bool = False

    def __post_init__(self):
        if not 1 <= self.number <= MOST:
            raise ValueError(f"number={self.number!r} of hosts: give 1 to {MOST}")
        if not 0 <= self.latency < 10:
            raise ValueError(f"latency={self.latency!r}: give seconds, from 0 to 10")
        if isinstance(self.ranks, str) and self.ranks not in ("neighbours", "dealt"):
            raise ValueError(
                f'ranks={self.ranks!r} is no way to place ranks: give "neighbours", "dealt", or a '
                "list with the host of each rank"
            )
        if not isinstance(self.ranks, str):
            object.__setattr__(self, "ranks", tuple(self.ranks))
        self.bandwidth  # noqa: B018  (raises for a speed that cannot be read)

    @property
    def bandwidth(self) -> float:
        """Return the bytes per second that an uplink carries each way, including headers."""
        found = re.fullmatch(r"\s*([\d.]+)\s*([kMG]?)bit/s\s*", str(self.uplink))
        try:
            rate = float(found[1]) * UNITS[found[2]] / 8
        except (TypeError, ValueError):
            rate = 0.0
        if not 1e3 <= rate <= 1.25e10:
            raise ValueError(
                f'uplink={self.uplink!r} is no speed: give one such as "200 Mbit/s", from '
                '"8 kbit/s" to "100 Gbit/s"'
            )
        return rate

    @property
    def payload_bandwidth(self) -> float:
        """Return the bytes of tensors per second: the speed minus the headers of full frames."""
        return self.bandwidth * PAYLOAD / FRAME

    def places(self, world_size: int) -> list[int]:
        """Return the host of every rank.

        Raises ValueError for fewer ranks than hosts, and for a list that does not fit.
        """
        if not isinstance(self.ranks, str):
            wrong = [host for host in self.ranks if host not in range(self.number)]
            if len(self.ranks) != world_size or wrong or {*self.ranks} != {*range(self.number)}:
                raise ValueError(
                    f"ranks={list(self.ranks)} does not place {world_size} ranks on {self.number} "
                    f"hosts: give each rank a host from 0 to {self.number - 1}, and each host a "
                    "rank"
                )
            return list(self.ranks)
        if world_size < self.number:
            raise ValueError(
                f"{self.number} hosts for {world_size} ranks: one would be empty; give at least "
                f"world_size={self.number}"
            )
        if self.ranks == "dealt":
            return [rank % self.number for rank in range(world_size)]
        fewest, more = divmod(world_size, self.number)
        return [host for host in range(self.number) for _ in range(fewest + (host < more))]

    def seconds(self, nbytes: float) -> float:
        """Return the time for these bytes of tensors over an uplink, in full frames."""
        return self.latency + nbytes / self.payload_bandwidth


def hosts_of(group) -> list[int]:
    """Return the host of every rank of a group: from `launch(hosts=...)`, or torchrun's number of
    its node (GROUP_RANK); all 0 if nothing is known."""
    recorder = getattr(group, "recorder", None)
    places = recorder.hosts if recorder else None
    if not places:
        return [0] * group.size()
    if hasattr(group, "whole"):  # Members: ranks of another group
        whole = hosts_of(group.whole)
        return [whole[rank] for rank in group.ranks]
    return [places[rank] for rank in group.ranks]


def uplink_counters() -> tuple[int, int] | None:
    """Return the bytes that `eth0` has sent and received, including headers, as the kernel counts
    them. None if there is no such interface; `is_on_a_host` tells whose it is."""
    try:
        lines = Path("/proc/self/net/dev").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, numbers = line.partition(":")
        if name.strip() == UPLINK:
            fields = numbers.split()
            return int(fields[8]), int(fields[0])
    return None


def is_unplugged(pid: int) -> bool:
    """Return whether the uplink of this process's host is down: then its routes are gone."""
    try:
        routes = Path(f"/proc/{pid}/net/route").read_text()
    except OSError:
        return False
    return not re.search(rf"^{UPLINK}\b", routes, re.M)


def ranks_of(host: int, places: Sequence[int]) -> list[int]:
    return [rank for rank, home in enumerate(places) if home == host]
