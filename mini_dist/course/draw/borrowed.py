"""What went on in the lanes beside a device, and how its memory is dealt out."""

from __future__ import annotations

from collections.abc import Iterable

from mini_dist.strategies.offload.allocator import HOLE, Allocator
from mini_dist.strategies.offload.emulated import Took
from mini_dist.strategies.offload.lanes import LANES

from .picture import Picture, canvas

LANE_COLORS = {
    "device": "#9ecae1",
    "to_host": "#fdbe85",
    "host": "#a1d99b",
    "to_device": "#dadaeb",
    "read": "#e6550d",
    "write": "#756bb1",
}


def lanes(logs: dict[str, Iterable[Took]]) -> Picture:
    """Each program's lanes below each other, in virtual time."""
    logs = {name: list(log) for name, log in logs.items()}
    used = [
        lane
        for lane in ("device", *LANES)
        if any(each.lane == lane for log in logs.values() for each in log)
    ]
    figure, axes = canvas(8, 0.5 + 0.27 * len(used) * len(logs))
    labels, y = {}, 0.0
    for name, log in logs.items():
        for lane in used:
            spans = [(1e3 * t.start, 1e3 * (t.end - t.start)) for t in log if t.lane == lane]
            axes.broken_barh(spans, (y - 0.4, 0.8), color=LANE_COLORS[lane], edgecolor="white")
            labels[y] = f"{name}: {lane}" if lane == used[0] else lane
            y -= 1
        y -= 0.6
    axes.set_yticks(list(labels), list(labels.values()), fontsize=8)
    axes.set_xlabel("virtual ms")
    ends = {name: 1e3 * max(t.end for t in log) for name, log in logs.items()}
    return Picture(figure, "; ".join(f"{name}: {end:.1f} ms" for name, end in ends.items()))


def memory_map(allocator: Allocator) -> Picture:
    """Each segment a row: blocks in use dark, free ones pale."""
    rows = [row for row in allocator.segments.values() if row]
    rows.sort(key=lambda row: -sum(block.size for block in row))
    figure, axes = canvas(8, 0.6 + 0.09 * len(rows))
    for y, row in enumerate(rows):
        for in_use, color in ((True, "#3182bd"), (False, "#fee6ce")):
            spans = [
                (block.start / 2**20, block.size / 2**20)
                for block in row
                if (block.owner is not None) == in_use and block.owner is not HOLE
            ]
            axes.broken_barh(spans, (-y - 0.4, 0.8), color=color, edgecolor="white", linewidth=0.3)
    axes.set_yticks([])
    axes.set_ylabel("segments")
    axes.set_xlabel("MiB; dark: in use, pale: free")
    said = f"{len(rows)} segments, {allocator.held:,} bytes in use, {allocator.cached:,} free"
    return Picture(figure, said)
