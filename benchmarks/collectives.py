"""Compare our collectives with gloo's: time (max over ranks) and bytes on the wire.

Both run through the same recording group, in turn, in one run, with a barrier before each. gloo
reduces in place and gathers into an existing buffer; ours return new tensors. "shared memory" is
the lower bound on one machine: every rank sums its chunk directly from the others' memory, so its
row shows the cost of using a network at all.

Run it more than once. gloo's all-reduce of 64 MB on 4 ranks took 100 to 117 ms in four runs and our
ring 87 to 98 ms; the ratio was 0.74, 0.98, 0.83 and 0.83.

    python benchmarks/collectives.py [--json FILE] [--long]
"""

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from mini_dist import collectives, launch
from mini_dist.ranks.ledger.wire import wire_bytes

sys.path.insert(0, str(Path(__file__).parent))
from _form import Case, as_shipped, main

KB, MB = 1 << 10, 1 << 20
SIZES = (KB, MB, 64 * MB)
RANKS = (2, 4, 8)
BARS = {  # on 4 ranks
    ("all_reduce auto", KB): 0.5,
    ("all_reduce auto", MB): 0.6,
    ("all_reduce ring", 64 * MB): 1.05,
    ("all_reduce pipelined_ring", 64 * MB): 1.05,
    ("reduce_scatter auto", 64 * MB): 0.5,
    ("all_gather auto", 64 * MB): 0.5,
}
REPEATS = {KB: 70, MB: 20, 64 * MB: 6}  # on 4 ranks, which have bars; others get half


def contestants(nbytes: int, group, directory: str) -> dict[str, tuple[Callable, Callable]]:
    """Return {name: (ours, gloo's)}, functions without arguments."""
    rank, size = group.rank(), group.size()
    x = torch.zeros(nbytes // 4)  # Zeros stay zeros, however often gloo sums them in place.
    shard = x.tensor_split(size)[rank].clone()
    whole, mine = torch.empty_like(x), torch.empty_like(shard)

    def reduce_scatter():
        dist.reduce_scatter_tensor(mine, x, group=group)

    def all_gather():
        dist.all_gather_into_tensor(whole, shard, group=group)

    def all_reduce():
        dist.all_reduce(x, group=group)

    def ours(op, algorithm, x):
        return lambda: getattr(collectives, op)(x, group, algorithm=algorithm)

    ways = ["auto", "ring"]
    ways += ["pipelined_ring"] if nbytes > MB else ["star", "stars", "halving_doubling"]
    pairs = {f"all_reduce {way}": (ours("all_reduce", way, x), all_reduce) for way in ways}
    pairs["all_reduce shared memory"] = (
        shared_memory_all_reduce(nbytes, group, directory),
        all_reduce,
    )
    pairs["reduce_scatter auto"] = ours("reduce_scatter", "auto", x), reduce_scatter
    pairs["all_gather auto"] = ours("all_gather", "auto", shard), all_gather
    return pairs


def shared_memory_all_reduce(nbytes: int, group, directory: str) -> Callable:
    """All-reduce tensors that all ranks have mapped, without sending anything."""
    rank, size, count = group.rank(), group.size(), nbytes // 4

    def shared(name, length, dtype):
        return torch.from_file(f"{directory}/{name}", shared=True, size=length, dtype=dtype)

    tensors = [shared(peer, count, torch.float32) for peer in range(size)]
    chunks = [tensor.tensor_split(size)[rank] for tensor in tensors]
    turns = shared("turns", size, torch.int64).numpy()

    def meet():
        turns[rank] += 1
        while turns.min() < turns[rank]:
            os.sched_yield()

    def run():
        meet()
        for chunk in chunks[1:]:
            chunks[0].add_(chunk)
        for chunk in chunks[1:]:
            chunk.copy_(chunks[0])
        meet()

    return run


def measure(nbytes: int, repeats: int, directory: str, group) -> dict[str, list[tuple]]:
    """Return {name: [(our seconds, gloo's, our bytes on the wire, gloo's), ...]} on this rank."""
    warnings.simplefilter("ignore", FutureWarning)  # torch is renaming reduce_scatter_tensor
    samples = {}
    pairs = contestants(nbytes, group, directory)
    for turn in range(-2, repeats):  # Negative turns warm up.
        for name, pair in pairs.items():
            sample = [0.0] * 4
            for side in (0, 1) if turn % 2 else (1, 0):
                count = turn == 0  # Not in timed turns: reading socket counters takes time.
                with as_shipped() if side else nullcontext():
                    dist.barrier(group=group)
                    before = wire_bytes() if count else None
                    start = time.perf_counter()
                    pair[side]()
                    sample[side] = time.perf_counter() - start
                if count:
                    dist.barrier(group=group)
                    sample[2 + side] = wire_bytes()[0] - before[0]
            if turn >= 0:
                samples.setdefault(name, []).append(sample)
    return samples


def cases(long: bool) -> Iterator[Case]:
    for ranks in RANKS:
        for nbytes in SIZES:
            repeats = REPEATS[nbytes] * 5 if long else REPEATS[nbytes] // (1 if ranks == 4 else 2)
            label = f"{nbytes // MB} MB" if nbytes >= MB else f"{nbytes // KB} KB"
            with tempfile.TemporaryDirectory(dir=Path("/dev/shm")) as directory:
                for name in [*range(ranks), "turns"]:
                    length = nbytes if name != "turns" else 8 * ranks
                    Path(directory, str(name)).write_bytes(bytes(length))
                run = launch(measure, ranks, (nbytes, repeats, directory), timeout=600)
            for name in run.results[0]:
                turns = list(zip(*(result[name] for result in run.results), strict=True))
                slowest = [
                    [max(rank[side] for rank in turn) * 1e3 for turn in turns] for side in (0, 1)
                ]
                bar = BARS.get((name, nbytes)) if ranks == 4 else None
                yield Case(f"{name}, {label} x {ranks}", *taken(*slowest), bar, repeats=repeats)
                if nbytes > KB and "shared" not in name:
                    wire = [sum(rank[2 + side] for rank in turns[0]) / nbytes for side in (0, 1)]
                    title = f"    bytes on the wire / {label}"
                    yield Case(title, lambda ours=wire[0]: ours, wire[1], unit="N", repeats=1)


def taken(ours: list[float], theirs: list[float]):
    """Return functions that replay the measurements of the run one at a time, as the form asks."""
    return tuple(iter([side[0], *side]).__next__ for side in (ours, theirs))


if __name__ == "__main__":
    sys.exit(main(cases, __doc__))
