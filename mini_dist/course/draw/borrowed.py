"""Draw what ran in each lane while a device computed, and how its memory was allocated."""

from __future__ import annotations

from collections.abc import Iterable

from mini_dist.strategies.offload.allocator import HOLE, Allocator
from mini_dist.strategies.offload.emulated import Took
from mini_dist.strategies.offload.lanes import LANES

from .svg import WIDEST, Drawing, Panel, numbered, round_places

LANE_COLORS = {
    "device": "#9ecae1",
    "to_host": "#fdbe85",
    "host": "#a1d99b",
    "to_device": "#dadaeb",
    "read": "#e6550d",
    "write": "#756bb1",
}


def lanes(logs: dict[str, Iterable[Took]]) -> Drawing:
    """Draw each program's lanes as rows, in virtual time."""
    logs = {name: list(log) for name, log in logs.items()}
    used = [
        lane
        for lane in ("device", *LANES)
        if any(each.lane == lane for log in logs.values() for each in log)
    ]
    ends = {name: 1e3 * max(t.end for t in log) for name, log in logs.items()}
    rows = len(logs) * (len(used) + 0.6)
    last, labels, y = max(ends.values()), {}, 0.0
    panel = Panel(
        WIDEST, 50 + 24 * rows, (0, 1.005 * last), (rows - 1, -0.6), xlabel="virtual ms",
        xticks=numbered(round_places(0, last, 9)),
    )  # fmt: skip
    for name, log in logs.items():
        for lane in used:
            for t in log:
                if t.lane == lane:
                    place = (1e3 * t.start, y - 0.4, 1e3 * t.end, y + 0.4)
                    panel.box(*place, LANE_COLORS[lane], gap=1)
            labels[y] = f"{name}: {lane}" if lane == used[0] else lane
            y += 1
        y += 0.6
    panel.yticks = labels
    return Drawing([panel], "; ".join(f"{name}: {end:.1f} ms" for name, end in ends.items()))


def memory_map(allocator: Allocator) -> Drawing:
    """Draw each segment as a row: blocks in use are dark, free ones are pale."""
    rows = [row for row in allocator.segments.values() if row]
    rows.sort(key=lambda row: -sum(block.size for block in row))
    most = max(block.start + block.size for row in rows for block in row) / 2**20
    panel = Panel(
        WIDEST, max(130, 60 + 9 * len(rows)), (0, most), (len(rows) - 0.5, -0.5), ylabel="segments",
        xlabel="MiB; dark: in use, pale: free", xticks=numbered(round_places(0, most, 9)),
    )  # fmt: skip
    for in_use, color in ((True, "#3182bd"), (False, "#fdd0a2")):
        for y, row in enumerate(rows):
            for block in row:
                if (block.owner is not None) == in_use and block.owner is not HOLE:
                    ends = block.start / 2**20, (block.start + block.size) / 2**20
                    panel.box(ends[0], y - 0.4, ends[1], y + 0.4, color, gap=0.5)
    said = f"{len(rows)} segments, {allocator.held:,} bytes in use, {allocator.cached:,} free"
    return Drawing([panel], said)
