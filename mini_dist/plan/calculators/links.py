"""A link and how long a message takes over it, on one level or two.

The alpha-beta model: a message of N bytes over a link takes `latency + N / bandwidth` (Hockney
1994).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..fields import checks_kinds, whole_number


@checks_kinds
@dataclass(frozen=True)
class Link:
    """One rank's port, full duplex: `latency` in seconds per message, `bandwidth` in bytes/s."""

    latency: float
    bandwidth: float

    def __post_init__(self):
        for field, least in (("latency", "0 or more seconds"), ("bandwidth", "bytes/s above 0")):
            value = getattr(self, field)
            if value < 0 or field == "bandwidth" and value == 0:
                raise ValueError(f"{field}={value!r} is not a {field} of a link: give {least}.")

    def seconds(self, num_bytes: float, rounds: int = 1) -> float:
        """Return the time of `rounds` messages of `num_bytes` each, one after the other."""
        return rounds * (self.latency + num_bytes / self.bandwidth)

    def slowest(self, distance: int, size: int, paired: bool = False) -> Link:
        return self  # the same for everyone


@checks_kinds
@dataclass(frozen=True)
class Hierarchy:
    """Nodes of `ranks_per_node` ranks: one link for messages inside a node, one between nodes.

    `outer.bandwidth` is what one rank gets while all ranks of its node send at once.
    """

    ranks_per_node: int
    inner: Link
    outer: Link

    def __post_init__(self):
        whole_number(self, "ranks_per_node", at_least=1)

    def slowest(self, distance: int, size: int, paired: bool = False) -> Link:
        """The link that a round waits for, in a group of `size` neighbouring ranks.

        When every rank sends `distance` further, some pair of neighbours sits on two nodes; when
        ranks exchange in pairs inside blocks of 2 * distance, a block may fit in a node.
        """
        fits = size <= self.ranks_per_node
        fits |= paired and self.ranks_per_node % (2 * distance) == 0
        return self.inner if fits else self.outer
