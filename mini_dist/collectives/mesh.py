"""Name the axes of the rank grid, and give each rank one group per axis.

    mesh = Mesh(group, dp=2, tp=4)     # 8 ranks: rank = dp_index * 4 + tp_index
    mesh["tp"]                         # the group of the ranks that differ from mine in tp only
    mesh["dp", "tp"]                   # ... in dp and tp only

The first axis is the outermost. The last axis joins neighboring ranks, so it should be the axis
that communicates most. The usual order is AXES: tensor-parallel ranks are neighbors, inside a node.
If a launcher numbered the ranks differently, `Mesh(group, by_hosts=True, ...)` numbers them host by
host; for `parallelize`, which makes its own mesh, pass `host_by_host(group)`.

Experts divide the same ranks differently. `ep` is not an axis of the grid: the dp*cp ranks with
the same index in pp and tp are split into groups of ep, each of which holds all experts. The
rest, edp = dp*cp/ep, is the experts' own data parallelism: ranks that hold the same experts.

    Mesh(group, pp=2, dp=4, cp=1, tp=2, ep=2)["edp"]       # averages the experts' gradients

With `etp` as well as `ep`, the experts divide the ranks of dp*cp*tp instead: etp ranks shard an
expert's matrices where tp ranks shard the others, ep can span tp, and edp = dp*cp*tp/(ep*etp).
Megatron-core numbers the ranks in the same way (`RankGenerator` in parallel_state.py, Core 0.16).

    Mesh(group, pp=1, dp=2, cp=1, tp=2, ep=4, etp=1)["ep"]     # all four ranks
"""

from __future__ import annotations

import itertools
import math
from functools import cached_property
from typing import TYPE_CHECKING

from mini_dist.plan.fields import checks_kinds

if TYPE_CHECKING:
    import torch.distributed as dist  # (Grid does not need torch and works without it)

AXES = ("pp", "dp", "cp", "tp")  # the usual order, outermost first


@checks_kinds
class Grid:
    """Map ranks to positions on axes: pure arithmetic, for any number of ranks.

    Give the axes in order, outermost first. `ep` is also given by name, and groups neighbors among
    the dp*cp ranks: before `dp` in the order it would group the ranks that are furthest apart. With
    `etp`, in any position, ep groups ranks of dp*cp*tp that are etp apart, and tp is the last axis.
    Raises ValueError for a size below 1 and for an ep that does not divide dp*cp, or dp*cp*tp/etp.
    """

    def __init__(self, **axes: int):
        for axis, size in axes.items():
            if size < 1:
                raise ValueError(f"{axis}={size}: an axis has at least 1 rank")
        names = list(axes)
        self.axes = {axis: size for axis, size in axes.items() if axis not in ("ep", "etp")}
        self.size = math.prod(self.axes.values())
        # How experts divide the ranks: {"edp": ..., "ep": ...} and perhaps "etp", outermost first.
        self.experts: dict[str, int] = {}
        self.cut_by_experts = [axis for axis in self.axes if axis in ("dp", "cp")]
        if "etp" in axes:
            self._check_etp(axes)
            self.cut_by_experts.append("tp")
        if "ep" in axes:
            etp = axes.get("etp", 1)
            shared = math.prod(self.axes[axis] for axis in self.cut_by_experts) // etp
            if shared % axes["ep"]:
                works = [str(d) for d in range(1, shared + 1) if shared % d == 0]
                of = "dp*cp*tp/etp" if "etp" in axes else "dp*cp"
                raise ValueError(
                    f"ep={axes['ep']} does not divide {of}={shared}: give one of {', '.join(works)}"
                )
            self.experts = {"edp": shared // axes["ep"], "ep": axes["ep"]}
            if "dp" in names and names.index("ep") < names.index("dp"):
                self.experts = dict(reversed(self.experts.items()))
            if "etp" in axes:
                self.experts["etp"] = etp

    def _check_etp(self, axes: dict[str, int]) -> None:
        if "ep" not in axes or list(self.axes)[-1] != "tp":
            raise ValueError(
                f"etp={axes['etp']} needs ep beside it and tp as the last axis, not "
                f"{', '.join(axes)}: give pp, dp, cp, tp, ep, etp"
            )
        if axes["tp"] % axes["etp"]:
            works = [str(d) for d in range(1, axes["tp"] + 1) if axes["tp"] % d == 0]
            raise ValueError(
                f"etp={axes['etp']} does not divide tp={axes['tp']}: give one of {', '.join(works)}"
            )

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the rank's index along every axis, including ep and edp."""
        index, left = {}, rank
        for axis, size in reversed(self.axes.items()):
            left, index[axis] = divmod(left, size)
        if self.experts:
            number = 0  # the rank's number among those that the experts divide
            for axis in self.cut_by_experts:
                number = number * self.axes[axis] + index[axis]
            for axis, size in reversed(self.experts.items()):
                number, index[axis] = divmod(number, size)
        return index

    @cached_property
    def all_coordinates(self) -> list[dict[str, int]]:
        """Of every rank; kept, because a mesh of 98,304 ranks asks for them once for each axis."""
        return [self.coordinates(rank) for rank in range(self.size)]

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the lists of ranks that differ in these axes only, each in rank order.

        Grid(dp=2, tp=2).groups("dp") == [[0, 2], [1, 3]]

        Raises KeyError for an unknown axis, and for an expert axis together with an axis that the
        experts divide.
        """
        view = self.check(*axes)
        others = [axis for axis in view if axis not in axes]
        lists: dict[tuple, list[int]] = {}
        for rank, index in enumerate(self.all_coordinates):
            lists.setdefault(tuple(index[axis] for axis in others), []).append(rank)
        return list(lists.values())

    def check(self, *axes: str) -> list[str]:
        """Return the axes that give a rank's coordinates, including these; KeyError as in
        `groups`."""
        known = [*self.axes, *self.experts]
        for axis in axes:
            if axis not in known:
                raise KeyError(f"no axis {axis!r} in this mesh; it has {', '.join(known)}")
        if not set(axes) & set(self.experts):
            return list(self.axes)
        shared = self.cut_by_experts
        if mixed := [axis for axis in axes if axis in shared]:
            ranks = "dp*cp*tp" if "tp" in shared else "dp*cp"
            raise KeyError(
                f"{' and '.join(axes)}: {and_(sorted(self.experts, key=len))} cut the ranks of "
                f"{ranks} anew, so {' and '.join(mixed)} cannot be named with them"
            )
        return [axis for axis in self.axes if axis not in shared] + [*self.experts]

    def crossing(self, hosts: list[int]) -> dict[str, int]:
        """Count, for each axis, its groups with ranks on more than one host.

        hosts: the host of each rank, as `hosts_of(group)` returns it.
        """
        return {
            axis: sum(len({hosts[rank] for rank in ranks}) > 1 for ranks in self.groups(axis))
            for axis in (*self.axes, *self.experts)
        }

    def __str__(self) -> str:
        """Show all groups of all axes, one line per axis."""
        sizes = self.axes | self.experts
        shape = " x ".join(f"{axis} {size}" for axis, size in self.axes.items())
        lines = [f"{self.size} ranks = {shape}"]
        for axis, size in sizes.items():
            lists = (" ".join(map(str, ranks)) for ranks in self.groups(axis))
            lines.append(f"{axis:>3} {size}:  {' | '.join(lists)}")
        return "\n".join(lines)


def and_(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def axis_groups(**axes: int) -> dict[str, list[list[int]]]:
    """Return, for each axis, the lists of ranks that differ in that axis only, in rank order.

    axis_groups(dp=2, tp=2) == {"dp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]}
    """
    grid = Grid(**axes)
    return {axis: grid.groups(axis) for axis in (*grid.axes, *grid.experts)}


def uplink_bytes(grid: Grid, sent: dict[str, int], hosts: list[int]) -> int:
    """Return the bytes that the busiest host sends to others, if each group of an axis is a ring.

    sent: for each axis, the bytes that a rank sends to the next one in its group. hosts: the host
    of each rank.
    """
    out = dict.fromkeys(hosts, 0)
    for axis, nbytes in sent.items():
        for ranks in grid.groups(axis):
            for rank, after in zip(ranks, ranks[1:] + ranks[:1]):
                out[hosts[rank]] += nbytes * (hosts[rank] != hosts[after])
    return max(out.values())


def order_on_hosts(axes: dict[str, int], sent: dict[str, int], ranks_per_host: int) -> tuple:
    """Return the order of the axes, outermost first, that sends least over the busiest uplink.

    The ranks are on hosts in order, `ranks_per_host` on each; the rest is as in
    `uplink_bytes`. Of equally good orders, it returns the first, in the order of `axes`.
    """
    size = math.prod(axes.values())
    hosts = [rank // ranks_per_host for rank in range(size)]

    def busiest(order: tuple) -> int:
        return uplink_bytes(Grid(**{axis: axes[axis] for axis in order}), sent, hosts)

    return min(itertools.permutations(axes), key=busiest)


def host_by_host(group) -> dist.ProcessGroup:
    """Return a group of the same ranks in the order of their hosts, for a Mesh whose last axes
    should be inside hosts, whatever the launcher did. All ranks call it."""
    import torch.distributed as dist

    from mini_dist.ranks.hosts import hosts_of
    from mini_dist.ranks.older_torch import new_group

    hosts, members = hosts_of(group), dist.get_process_group_ranks(group)
    order = sorted(range(group.size()), key=lambda rank: hosts[rank])
    if order == list(range(group.size())):
        return group
    return new_group([members[rank] for rank in order])


def megatron_order(order: str, **sizes: int) -> dict[str, int]:
    """Read Megatron's order string, which names the *innermost* axis first, for Grid and Mesh.

    megatron_order("tp-cp-ep-dp-pp", tp=2, dp=4, pp=2) == dict(pp=2, dp=4, ep=1, cp=1, tp=2)

    An axis of size 1 may be left out. Megatron-core's `initialize_model_parallel` makes the same
    groups. Raises ValueError for a word that is not an axis, and for a size without its axis.
    """
    words = order.lower().split("-")
    known = (*AXES, "ep")
    for word in words:
        if word not in known or words.count(word) > 1:
            raise ValueError(
                f"order={order!r}: {word!r} stands there {words.count(word)} times; "
                f"give each of {', '.join(known)} at most once"
            )
    for axis, size in sizes.items():
        if size != 1 and axis not in words:
            raise ValueError(f"{axis}={size}, but order={order!r} does not say where {axis} goes")
    return {axis: sizes.get(axis, 1) for axis in reversed(words)}


@checks_kinds
class Mesh:
    """The ranks of `group` as a Grid, with a process group for every axis.

    Every member of `group` must make the same mesh. by_hosts: number the ranks host by host, so
    that the last axes are inside hosts, whatever the launcher did (`host_by_host`); then all ranks
    of the world must make it. Raises ValueError if the product of the axes' sizes is not the size
    of the group.
    """

    def __init__(self, group: dist.ProcessGroup, *, by_hosts: bool = False, **axes: int):
        self.group, self.grid = group, Grid(**axes)
        self.axes = self.grid.axes
        if self.grid.size != group.size():
            shape = " * ".join(f"{axis}={size}" for axis, size in self.axes.items())
            raise ValueError(f"{shape} is {self.grid.size}, but the group has {group.size()} ranks")
        if by_hosts:
            self.group = host_by_host(group)
        self._groups: dict[frozenset[str], dist.ProcessGroup] = {}
        for axis in (*self.axes, *self.grid.experts):
            if axis == "etp" and self.grid.experts["etp"] == self.axes["tp"]:
                self._groups[frozenset([axis])] = self["tp"]  # the same ranks
            else:
                self._groups[frozenset([axis])] = self._make(axis)

    def _make(self, *axes: str) -> dist.ProcessGroup:
        mine = next(ranks for ranks in self.grid.groups(*axes) if self.group.rank() in ranks)
        if len(mine) == self.group.size() and axes[0] in self.axes:
            made = self.group
        else:
            import torch.distributed as dist

            from mini_dist.ranks.older_torch import new_group

            members = dist.get_process_group_ranks(self.group)
            made = new_group(  # (host by host, world ranks need not rise along an axis)
                [members[rank] for rank in mine], use_local_synchronization=True
            )
        if hasattr(self.group, "recorder"):  # so that the ledger can name the axis
            self.group.recorder.axes[made.group_name] = "*".join(axes)
        return made

    def __getitem__(self, axes: str | tuple[str, ...]) -> dist.ProcessGroup:
        """Return the group along an axis, or along several: mesh["dp", "cp"].

        A group along several axes is made at its first use, so its members must ask for it at the
        same point of their program. Raises KeyError, which lists the axes.
        """
        axes = (axes,) if isinstance(axes, str) else axes
        sizes = self.axes | self.grid.experts
        self.grid.check(*axes)
        wide = [axis for axis in sizes if axis in axes and sizes[axis] > 1] or [axes[0]]
        if frozenset(wide) not in self._groups:
            self._groups[frozenset(wide)] = self._make(*wide)
        return self._groups[frozenset(wide)]

    def index(self, *axes: str) -> int:
        """Return my index along an axis, or along several taken together."""
        return self[axes].rank()

    def __repr__(self) -> str:
        index = self.grid.coordinates(self.group.rank())
        sizes = self.axes | self.grid.experts
        where = ", ".join(f"{axis} {index[axis]}/{size}" for axis, size in sizes.items())
        return f"Mesh(rank {self.group.rank()}: {where})"
