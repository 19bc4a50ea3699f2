"""A caching allocator to study: blocks, splits, fragments, and an OOM with enough memory free.

    asked = requests(run.ledger.memory[0])       # a training step's real requests, in order
    allocator = Allocator(capacity=24 * 2**20)
    replay(asked, allocator)
    print(allocator.cached, allocator.largest_free)

The rules are those of PyTorch's CUDA allocator (c10/cuda/CUDACachingAllocator.cpp) on one stream:

    sizes are rounded up to 512 bytes; small requests (to 1 MiB) and large ones have separate pools
    a segment is memory from the driver: 2 MiB for a small request, 20 MiB for one below 10 MiB,
      and above that the request rounded up to 2 MiB
    a request takes the smallest free block that is large enough; the rest is split off,
      if it is at least 512 bytes (small, or expandable) or more than 1 MiB (large)
    a freed block merges with free neighbors in its segment, and stays cached
    if the driver has no more, entirely free segments are returned to it, and it is asked again

With `expandable` a pool is one segment that grows at its end by 2 MiB pages (20 MiB large), as with
expandable_segments:True: a free block at its end can grow without being returned first. When the
driver has no more, whole free pages return to it wherever they are, and are mapped again at the
end. (PyTorch also fills such holes again, because its address range is finite.)
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from mini_dist.plan.fields import checks_kinds
from mini_dist.ranks.ledger.memory import MemoryRecord

MIB = 2**20
HOLE = object()  # owner of holes: pages in the middle that were returned to the driver


@dataclass(order=True)
class MemoryBlock:
    """A range of a segment; free if it has no owner."""

    size: int
    segment: int
    start: int = 0
    owner: object = field(default=None, compare=False)


class OutOfMemory(MemoryError):
    """No block is large enough, and the driver has no more."""


@checks_kinds
class Allocator:
    """capacity: of the device, in bytes. scale: divides all sizes in the rules, so that
    a laptop's small step meets them as a large step does on a GPU."""

    def __init__(self, capacity: int, expandable: bool = False, scale: int = 1):
        self.capacity, self.expandable, self.scale = capacity, expandable, scale
        self.segments: dict[int, list[MemoryBlock]] = {}  # sorted by address
        self.pools: dict[int, str] = {}
        self.blocks: dict[object, MemoryBlock] = {}  # by owner
        self.count = 0

    # -- its interface ------------------------------------------------------------------------

    def allocate(self, owner: object, nbytes: int) -> MemoryBlock:
        """Allocate. Raises OutOfMemory, which names the free bytes and the largest free block."""
        size = -(-max(nbytes, 1) // self.unit(512)) * self.unit(512)
        pool = "small" if size <= self.unit(MIB) else "large"
        block = self.best_fit(pool, size) or self.grow(pool, size)
        if block is None:
            self.release_free_segments()
            block = self.grow(pool, size)
        if block is None:
            raise OutOfMemory(
                f"tried to allocate {nbytes:,} bytes: of {self.capacity:,} {self.held:,} are in "
                f"use and {self.capacity - self.held:,} free, {self.cached:,} of them in blocks of "
                f"at most {self.largest_free:,}"
            )
        self.split(block, size, pool)
        block.owner = owner
        self.blocks[owner] = block
        return block

    def free_(self, owner: object) -> None:
        """Free a block and merge it with its free neighbors."""
        block = self.blocks.pop(owner)
        block.owner = None
        row = self.segments[block.segment]
        at = next(i for i, each in enumerate(row) if each is block)
        for left in (at, at - 1):  # with the next block, then with the previous block
            if 0 <= left < len(row) - 1 and row[left].owner is row[left + 1].owner is None:
                row[left].size += row.pop(left + 1).size

    # -- how it finds room --------------------------------------------------------------------

    def unit(self, nbytes: int) -> int:
        return max(1, nbytes // self.scale)

    def best_fit(self, pool: str, size: int) -> MemoryBlock | None:
        free = (b for b in self.free_blocks() if self.pools[b.segment] == pool and b.size >= size)
        return min(free, default=None)

    def grow(self, pool: str, size: int) -> MemoryBlock | None:
        """Ask the driver for more; return a free block, or None if the driver has no more."""
        return self.more_pages(pool, size) if self.expandable else self.new_segment(pool, size)

    def new_segment(self, pool: str, size: int) -> MemoryBlock | None:
        if pool == "small":
            wanted = self.unit(2 * MIB)
        elif size < self.unit(10 * MIB):
            wanted = self.unit(20 * MIB)
        else:
            wanted = -(-size // self.unit(2 * MIB)) * self.unit(2 * MIB)
        if self.reserved + wanted > self.capacity:
            return None
        self.count += 1
        self.segments[self.count] = [MemoryBlock(wanted, self.count)]
        self.pools[self.count] = pool
        return self.segments[self.count][0]

    def more_pages(self, pool: str, size: int) -> MemoryBlock | None:
        """Extend the free block at the end of the pool's only segment."""
        number, page = {"small": 1, "large": 2}[pool], self.page(pool)
        row = self.segments.setdefault(number, [])
        self.pools[number] = pool
        last = row[-1] if row and row[-1].owner is None else None
        missing = -(-(size - (last.size if last else 0)) // page) * page
        if self.reserved + missing > self.capacity:
            return None
        if last is None:
            end = row[-1].start + row[-1].size if row else 0
            last = MemoryBlock(0, number, end)
            row.append(last)
        last.size += missing
        return last

    def split(self, block: MemoryBlock, size: int, pool: str) -> None:
        """Split the rest of the block off as a free block, unless it is too small."""
        rest = block.size - size
        finely = pool == "small" or self.expandable
        if rest < self.unit(512) or (not finely and rest <= self.unit(MIB)):
            return
        row = self.segments[block.segment]
        at = next(i for i, each in enumerate(row) if each is block)
        row.insert(at + 1, MemoryBlock(rest, block.segment, block.start + size))
        block.size = size

    def page(self, pool: str) -> int:
        return self.unit(2 * MIB if pool == "small" else 20 * MIB)

    def release_free_segments(self) -> None:
        """Return segments without used blocks to the driver."""
        for number, row in list(self.segments.items()):
            if self.expandable:
                row[:] = self.without_free_pages(row, self.page(self.pools[number]))
            if not row or (len(row) == 1 and row[0].owner is None):
                del self.segments[number], self.pools[number]

    @staticmethod
    def without_free_pages(row: list[MemoryBlock], page: int) -> list[MemoryBlock]:
        """Turn whole free pages of an expandable segment into holes, and cut them off at its
        end."""
        kept = []
        for block in row:
            first, end = -(-block.start // page) * page, block.start + block.size
            last = end // page * page
            if block.owner is not None or first >= last:
                kept.append(block)
                continue
            parts = (block.start, first, None), (first, last, HOLE), (last, end, None)
            kept += [MemoryBlock(b - a, block.segment, a, who) for a, b, who in parts if a < b]
        while kept and kept[-1].owner is HOLE:
            kept.pop()
        return kept

    # -- what can be seen ---------------------------------------------------------------------

    def free_blocks(self) -> Iterable[MemoryBlock]:
        return (b for row in self.segments.values() for b in row if b.owner is None)

    @property
    def reserved(self) -> int:
        """Return the bytes obtained from the driver."""
        row_by_row = (block for row in self.segments.values() for block in row)
        return sum(block.size for block in row_by_row if block.owner is not HOLE)

    @property
    def held(self) -> int:
        return sum(block.size for block in self.blocks.values())

    @property
    def cached(self) -> int:
        """Return the free bytes in its own segments."""
        return self.reserved - self.held

    @property
    def largest_free(self) -> int:
        return max((block.size for block in self.free_blocks()), default=0)


def requests(memory: MemoryRecord) -> list[tuple[int, int]]:
    """Return a run's requests, in order: (number of the storage, bytes), 0 bytes when it is freed.

    A storage that is resized counts as a new one: (number, 0) and then (number, new size).
    """
    sizes: dict[int, int] = {}
    asked = []
    for serial, change in zip(memory.serials, (event[-1] for event in memory.events)):
        before = sizes.get(serial, 0)
        sizes[serial] = before + change
        if before:
            asked.append((serial, 0))
        if sizes[serial]:
            asked.append((serial, sizes[serial]))
    return asked


def replay(asked: Iterable[tuple[int, int]], allocator: Allocator) -> list[tuple[int, int]]:
    """Replay the requests on an allocator; return (held, reserved) after each. Raises
    OutOfMemory."""
    seen = []
    for owner, nbytes in asked:
        if nbytes:
            allocator.allocate(owner, nbytes)
        elif owner in allocator.blocks:
            allocator.free_(owner)
        seen.append((allocator.held, allocator.reserved))
    return seen


def lost(asked: Iterable[tuple[int, int]], **options) -> float:
    """Return (peak reserved - peak in use) / peak in use, the calculator's `fragmentation`, for
    these requests on a device with enough memory. options: of `Allocator`.
    """
    held, reserved = map(max, zip(*replay(asked, Allocator(10**15, **options))))
    return reserved / held - 1


def lifetimes(asked: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return (bytes, begin, end) for each tensor, counted in requests: the input of `offsets`."""
    begun: dict[int, tuple[int, int]] = {}
    found, moment = [], 0
    for moment, (owner, nbytes) in enumerate(asked):
        if nbytes:
            begun[owner] = nbytes, moment
        elif owner in begun:
            insort(found, (begun[owner][1], begun.pop(owner)[0], moment))
    for nbytes, begin in begun.values():
        insort(found, (begin, nbytes, moment + 1))
    return [(nbytes, begin, end) for begin, nbytes, end in found]


def on_a_gpu(asked: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Make the same requests to PyTorch's own allocator, to compare with `replay`: a test and
    benchmarks/offload.py do so on a GPU. (On an H100 with torch 2.11 the two agreed to the byte.)
    """
    import torch

    torch.cuda.empty_cache()
    kept, seen = {}, []
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for owner, nbytes in asked:
        kept.pop(owner, None)
        if nbytes:
            kept[owner] = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        now = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        seen.append((now[0] - before[0], now[1] - before[1]))
    return seen
