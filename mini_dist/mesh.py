"""Name the axes of the rank grid, and give each rank one group per axis.

    mesh = Mesh(group, dp=2, tp=4)     # 8 ranks: rank = dp_index * 4 + tp_index
    mesh["tp"]                         # the group of the ranks that differ from me in tp only

The first axis is the outermost: the last one joins neighbouring ranks, so it should be the one
that talks most.
"""

from __future__ import annotations

import math
from itertools import product

import torch.distributed as dist

AXES = ("pp", "dp", "cp", "tp")  # the usual order, outermost first


def axis_groups(**axes: int) -> dict[str, list[list[int]]]:
    """For each axis the lists of ranks that differ in that axis only, in rank order.

    axis_groups(dp=2, tp=2) == {"dp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]}
    """
    sizes = list(axes.values())
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    groups = {}
    for i, axis in enumerate(axes):
        others = [range(1) if j == i else range(size) for j, size in enumerate(sizes)]
        first = [sum(k * stride for k, stride in zip(place, strides)) for place in product(*others)]
        groups[axis] = [[rank + k * strides[i] for k in range(sizes[i])] for rank in first]
    return groups


class Mesh:
    """The ranks of `group` as a grid with named axes.

    Every member of `group` must make the same mesh. Raises ValueError if the sizes of the axes do
    not multiply to the size of the group.
    """

    def __init__(self, group: dist.ProcessGroup, **axes: int):
        world = math.prod(axes.values())
        if world != group.size() or any(size < 1 for size in axes.values()):
            shape = " * ".join(f"{axis}={size}" for axis, size in axes.items())
            raise ValueError(f"{shape} is {world}, but the group has {group.size()} ranks")
        self.group, self.axes = group, axes
        members = dist.get_process_group_ranks(group)
        self._groups = {}
        for axis, lists in axis_groups(**axes).items():
            mine = next(ranks for ranks in lists if group.rank() in ranks)
            if len(mine) == group.size():
                self._groups[axis] = group
            else:
                self._groups[axis] = dist.new_group(
                    [members[rank] for rank in mine], use_local_synchronization=True
                )
            if hasattr(group, "recorder"):  # so that the ledger can say which axis spoke
                group.recorder.axes[self._groups[axis].group_name] = axis

    def __getitem__(self, axis: str) -> dist.ProcessGroup:
        """The group along `axis`; raises KeyError with the axes there are."""
        if axis not in self._groups:
            raise KeyError(f"no axis {axis!r} in this mesh; it has {', '.join(self.axes)}")
        return self._groups[axis]

    def index(self, axis: str) -> int:
        """My place along `axis`."""
        return self[axis].rank()

    def __repr__(self) -> str:
        place = ", ".join(f"{axis} {self.index(axis)}/{size}" for axis, size in self.axes.items())
        return f"Mesh(rank {self.group.rank()}: {place})"
