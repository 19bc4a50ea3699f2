"""Exercises of lesson 27: a sample order that any number of ranks can resume, and tiled attention.

Right values are not enough. The first exercise counts how often an order is drawn. The second one
counts the bytes between slow and fast memory, and the fast memory in use.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mini_dist.model import slow_memory
from mini_dist.model.slow_memory import SlowMemory, tiled_attention
from mini_dist.training.stream import TokenStream, next_samples

from .engine import Exercise, Line, Measured, line, yes
from .measures import Alive, close, plain
from .watch import functions_of
from .ways import Complaint
from .zero import at_most

# ---- samples -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a run resumes. batches: the size of each batch, over all ranks."""

    position: int
    batches: tuple[int, ...]
    num_samples: int = 20

    def __str__(self) -> str:
        sizes = " then ".join(map(str, dict.fromkeys(self.batches)))
        return f"{self.num_samples} samples, batches of {sizes}, position {self.position}"

    def order(self, epoch: int) -> list[int]:
        return np.random.default_rng([7, epoch]).permutation(self.num_samples).tolist()

    def samples(self, first: int, last: int) -> list[int]:
        """Return the samples that one process takes between two positions."""
        places = [divmod(number, self.num_samples) for number in range(first, last)]
        return [self.order(epoch)[index] for epoch, index in places]


@dataclass
class Taken:
    """What one call returned, and the epochs whose orders it drew."""

    samples: list[int]
    position: int
    drawn: list[int] = field(compare=False)


def take(fn, case: Place, group) -> list[Taken]:
    position, steps, orders = case.position, [], {}
    for batch_size in case.batches:
        drawn = []

        def order(epoch, drawn=drawn):
            drawn.append(plain(epoch))
            return orders.setdefault(epoch, case.order(epoch))  # a changed list stays changed

        came = fn(position, batch_size, case.num_samples, order, group)
        with suppress(TypeError):
            came = tuple(came)
        if not isinstance(came, tuple) or len(came) != 2:
            raise Complaint("Return two things: this rank's sample numbers, the next position.")
        samples, after = plain(came[0]), plain(came[1])
        with suppress(TypeError):
            samples = [plain(sample) for sample in samples]
        if not isinstance(samples, list) or not all(type(s) is int for s in samples):
            raise Complaint(f"A list of whole numbers was expected first, not {came[0]!r}.")
        if type(after) is not int:
            raise Complaint(f"The next position is to be one whole number, not {came[1]!r}.")
        steps.append(Taken(samples, after, drawn))
        position = after
    return steps


class Sampling(Measured):
    def measure(self):
        case, self.starts = self.case, [self.case.position]
        for batch_size in case.batches:
            self.starts.append(self.starts[-1] + batch_size)
        self.positions = self.starts[1:]
        self.batches = [case.samples(*ends) for ends in zip(self.starts, self.positions)]
        self.shares = [[each.samples for each in step] for step in zip(*self.results)]
        self.joined = [sum(shares, []) for shares in self.shares]
        self.uneven = max(max(map(len, s)) - min(map(len, s)) for s in self.shares)

    def drawn_too_often(self) -> bool:
        for steps in self.results:
            for start, end, step in zip(self.starts, self.positions, steps):
                needed = {number // self.case.num_samples for number in range(start, end + 1)}
                if len(step.drawn) > len(set(step.drawn)) or not set(step.drawn) <= needed:
                    return True
        return False

    def lines(self) -> list[Line]:
        right = sum(a == b for a, b in zip(self.joined, self.batches))
        positions = [[step.position for step in steps] for steps in self.results]
        wrong = [found for found in positions if found != self.positions]
        return [
            line("batches that the ranks together have right", right, len(self.batches)),
            line("positions afterwards", (wrong or positions)[0], self.positions),
            at_most("samples more on one rank than on another", self.uneven, 1),
            yes("each order drawn once, and only if needed", not self.drawn_too_often()),
            line("bytes sent", self.sent, 0),
        ]

    def mistake(self) -> str:
        if self.sent or self.barriers:
            return (
                "Nobody needs to send anything: all ranks know the position and draw the same "
                "order."
            )
        for rank, steps in enumerate(self.results):
            for start, batch_size, step in zip(self.starts, self.case.batches, steps):
                if step.position != start + batch_size:
                    return self.mistake_in_position(rank, start, batch_size, step)
        wrong = [n for n, joined in enumerate(self.joined) if joined != self.batches[n]]
        if wrong:
            return self.mistake_in_samples(wrong[0])
        if self.uneven > 1:
            return (
                f"One rank has {self.uneven} samples more than another, and the others wait for "
                "it: let rank r have those from batch_size * r // size on."
            )
        return (
            "Right, but order(epoch) was called more than once for one epoch of a call, or for an "
            "epoch that the batch does not touch. With a billion samples each call takes a "
            "minute: keep what it returns."
        )

    def mistake_in_position(self, rank: int, start: int, batch_size: int, step: Taken) -> str:
        after, size = step.position, self.size
        told = f"At position {start} with a batch of {batch_size}, rank {rank} returns {after}. "
        if size > 1 and after == start + len(step.samples):
            return told + (
                "It has counted its own samples. After a restart on another number of ranks that "
                "number would mean another place: count the samples of all ranks."
            )
        if after == start + 1:
            return told + (
                "It has counted steps. With another batch size that number would mean another "
                "place: count samples."
            )
        if after == (start + batch_size) % self.case.num_samples:
            return told + (
                "The position starts again with each epoch, and nobody knows the epoch any more: "
                "let it go on growing."
            )
        return told + f"All ranks together have had {start + batch_size} samples by then."

    def mistake_in_samples(self, number: int) -> str:
        case, shares, batch = self.case, self.shares[number], self.batches[number]
        start, joined, n = self.starts[number], self.joined[number], self.case.num_samples
        where = f"At position {start}: " if number or case.position else ""
        if self.size > 1 and all(sorted(share) == sorted(batch) for share in shares):
            return where + "Every rank has the whole batch: rank r takes its part."
        if joined == case.samples(start, start + len(batch) * self.size) and self.size > 1:
            return where + (
                "Each rank has batch_size samples. But batch_size counts the samples of all ranks "
                "together."
            )
        if [s for step in zip(*shares) for s in step] == batch and self.size > 1:
            return where + (
                "The samples are dealt like cards, rank::size. Put together in the order of ranks, "
                "they are in another order for each number of ranks: give each rank neighbors."
            )
        if sorted(joined) == sorted(batch):
            return where + "These are the batch's samples, in another order."
        if joined == [case.order(0)[i % n] for i in range(start, start + len(batch))]:
            return where + (
                "Every epoch has the order of epoch 0: ask order(epoch), with epoch = number // "
                "num_samples of each sample. (PyTorch's set_epoch, forgotten, does the same.)"
            )
        first = case.order(start // n)
        if joined == [first[i % n] for i in range(start, start + len(batch))]:
            return where + (
                "The batch begins in one epoch and ends in the next one, and all of it comes from "
                "the first one's order. Ask for each sample which epoch it is in."
            )
        if joined == batch[: len(joined)] and n - start % n == len(joined):
            return where + (
                "The batch ends where its epoch ends, and is too short: go on in the next epoch."
            )
        each = len(batch) // self.size
        if len(joined) < len(batch) and all(len(share) == each for share in shares):
            return where + (
                f"{len(batch)} samples on {self.size} ranks: {len(batch) % self.size} of them no "
                "rank has. Some ranks take one more."
            )
        if len(joined) != len(batch):
            return where + (
                f"The ranks together have {len(joined)} samples, and the batch has {len(batch)}."
            )
        return where + (
            "These are not the samples that one process has. Sample number n of the run, counted "
            "from 0, is "
            "order(n // num_samples)[n % num_samples]; the batch is the numbers from position on."
        )


# ---- attention -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneHead:
    queries: int = 200
    keys: int = 200
    head_dim: int = 8
    tile: int = 16
    size: float = 1.0  # standard deviation of the numbers
    opposed: bool = False  # all scores are below 0
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        special = f", numbers of about {self.size:g}" * (self.size != 1)
        special += f" of {self.dtype}" * (self.dtype != torch.float64)
        return f"{self.queries} queries, {self.keys} keys, tiles of {self.tile} rows{special}"

    def tensors(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.queries)

        def numbers(rows: int) -> Tensor:
            made = torch.randn(rows, self.head_dim, dtype=torch.float64, generator=generator)
            return (self.size * made).to(self.dtype)

        q, k, v = numbers(self.queries), numbers(self.keys), numbers(self.keys)
        if self.opposed:
            q, k = q.abs(), -k.abs()
        return dict(q=q, k=k, v=v, out=torch.zeros_like(q))

    @property
    def fast_memory(self) -> int:
        """Return its size in bytes: room for several tiles of rows and of scores."""
        return 6 * self.tile * (self.tile + self.head_dim) * self.dtype.itemsize


class TilesOnly(SlowMemory):
    """A memory as a kernel sees it, which cannot take whole tensors."""

    def __getitem__(self, name: str) -> Tensor:
        raise Complaint(
            f"memory[{name!r}] takes the whole tensor and is not counted, so a kernel may not use "
            "it: memory.load(name, first, last)."
        )


class FastMemory(Alive):
    """Note the most bytes that tensors made inside `with` take at any moment."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.most = max(self.most, self.nbytes())
        return result


@dataclass(eq=False)
class Attended:
    out: Tensor
    loaded: dict[str, int] = field(compare=False)
    stored: dict[str, int] = field(compare=False)
    most: int = field(compare=False)


def attend(fn, case: OneHead, group) -> Attended:
    tensors = case.tensors()
    memory = TilesOnly(**tensors)
    with FastMemory() as fast:
        fn(memory, case.tile)
    return Attended(tensors["out"], dict(memory.loaded), dict(memory.stored), fast.most)


def with_mistake(case: OneHead, mistake: str) -> Tensor:
    """Return the output of attention with one of the usual mistakes in merging tiles."""
    q, k, v, out = case.tensors().values()
    scores = q @ k.T / (1 if mistake == "not divided by sqrt" else case.head_dim**0.5)
    total, largest = q.new_zeros(len(q), 1), q.new_full((len(q), 1), -torch.inf)
    for part, values in zip(scores.split(case.tile, 1), v.split(case.tile)):
        if mistake == "each tile alone":
            out = out + part.softmax(-1) @ values
            continue
        before, largest = largest, torch.maximum(largest, part.amax(-1, keepdim=True))
        shrink, weights = (before - largest).exp(), (part - largest).exp()
        if mistake not in ("total not shrunk", "nothing shrunk"):
            total = total * shrink
        if mistake not in ("out not shrunk", "nothing shrunk"):
            out = out * shrink
        total, out = total + weights.sum(-1, keepdim=True), out + weights @ values
    return out if mistake in ("each tile alone", "not divided by total") else out / total


SHRINK = (
    "When a row's largest score grows, all that has been added up shrinks with it: multiply both "
    "the total and the output so far by exp(before - largest)."
)
MERGING = {
    "not divided by sqrt": "The scores are to be divided by the square root of the head dim.",
    "each tile alone": "Every tile has a softmax of its own, and their outputs are added. A row's "
    "weights have one common total: keep the sum of exponentials, and divide at the end.",
    "not divided by total": "The sums of weights times values are right: divide each row by its "
    "total of exponentials, once, before it is stored.",
    "total not shrunk": SHRINK,
    "out not shrunk": SHRINK,
    "nothing shrunk": SHRINK,
}


class Attending(Measured):
    def measure(self):
        case, self.found = self.case, self.results[0]
        q, k, v, _ = case.tensors().values()
        scores = q @ k.T / case.head_dim**0.5
        self.expected = scores.softmax(-1) @ v
        self.largest = (v.abs().max() * scores.abs().max().clamp(min=10)).item()
        self.tiles = -(-case.queries // case.tile)
        self.loaded = {"q": q.nbytes, "k": self.tiles * k.nbytes, "v": self.tiles * v.nbytes}
        self.stored = {"out": q.nbytes}
        self.in_all = sum(self.loaded.values()) + q.nbytes
        self.moved = sum(self.found.loaded.values()) + sum(self.found.stored.values())

    def right(self, found: Tensor, expected: Tensor) -> bool:
        return close(found, expected, self.largest)

    def lines(self) -> list[Line]:
        found = self.found
        return [
            yes(f"{self.case}: right output", self.right(found.out, self.expected)),
            line("bytes loaded of q", found.loaded.get("q", 0), self.loaded["q"]),
            line(
                "bytes loaded of k and v",
                found.loaded.get("k", 0) + found.loaded.get("v", 0),
                self.loaded["k"] + self.loaded["v"],
            ),
            line("bytes stored", sum(found.stored.values()), self.stored["out"]),
            line("bytes moved in all", self.moved, self.in_all),
            at_most("bytes of fast memory in use", found.most, self.case.fast_memory),
        ]

    def mistake(self) -> str:
        if not self.found.stored.get("out"):
            return 'Nothing was stored in out: memory.store("out", rows, first).'
        if not self.right(self.found.out, self.expected):
            return self.mistake_in_values()
        return self.mistake_in_traffic() or (
            f"{self.found.most:,} bytes of fast memory are in use at once, and it has "
            f"{self.case.fast_memory:,}: hold one tile of keys, one of values and its scores "
            "at a time."
        )

    def mistake_in_values(self) -> str:
        found, case = self.found.out, self.case
        if not found.isfinite().all():
            return (
                "Some numbers are nan or inf. exp overflows: subtract the row's largest score so "
                "far before exp, and begin with -inf as the largest."
            )
        rest = case.queries % case.tile
        whole = case.queries - rest
        if rest and self.right(found[:whole], self.expected[:whole]):
            return (
                f"The last {rest} rows are wrong: {case.queries} rows are no whole number of tiles "
                f"of {case.tile}. The last tile is shorter."
            )
        for mistake, hint in MERGING.items():
            if self.right(found, with_mistake(case, mistake)):
                return hint
        return (
            "Wrong output. For each tile of keys: the largest score so far may grow; then what "
            "has been added up, output and total, is multiplied by exp(before - largest). Add the "
            "tile's weights times its values, and its sum of weights."
        )

    def mistake_in_traffic(self) -> str:
        found, case, most = self.found.loaded, self.case, self.tiles
        if found.get("out"):
            return (
                "out is loaded: a tile of queries keeps what it has added up in fast memory until "
                "all keys have been seen. Let the loop over queries be the outer one."
            )
        if sum(self.found.stored.values()) > self.stored["out"]:
            return (
                "out is stored more than once: only when a tile of queries has seen all keys is "
                "its output final."
            )
        if found.get("q", 0) > self.loaded["q"]:
            return (
                f"The queries are loaded {found['q'] / self.loaded['q']:.3g} times: load a tile of "
                "them before the loop over keys."
            )
        if set(found) != set(self.loaded):
            return (
                f"Of what is in memory a kernel needs q, k and v, and it loads {', '.join(found)}."
            )
        pair = found["k"] + found["v"], self.loaded["k"] + self.loaded["v"]
        if pair[0] > pair[1]:
            return (
                f"Keys and values are loaded {most * pair[0] / pair[1]:.3g} times, and {most} do: "
                "once for each tile of queries."
            )
        if pair[0] < pair[1]:
            return (
                "Fewer bytes of keys and values move than with these tiles: your tiles of queries "
                f"have more than {case.tile} rows, or all keys stay in fast memory, which has "
                f"{case.fast_memory:,} bytes; you use {self.found.most:,}."
            )
        return ""


EXERCISES = [
    Exercise(
        "next_samples",
        next_samples,
        take,
        [
            (2, Place(0, (6, 6))),
            (3, Place(32, (6, 6, 6))),
            (4, Place(18, (6, 6))),
            (1, Place(47, (6, 8))),
            (3, Place(9, (12, 4), 5)),
            (2, Place(1, (11, 4), 3)),
        ],
        Sampling,
        refuses=[TokenStream.batch],
        scales=False,
        hints=[
            "Number all samples of the whole run: 0, 1, 2, ... Number n is in epoch n // "
            "num_samples, and there it is number n % num_samples of the order. A batch is "
            "range(position, position + batch_size), and rank r has a part of it.",
            "Rank r has the numbers from position + batch_size * r // size up to, and without, "
            "position + batch_size * (r + 1) // size. Keep the orders in a dict by epoch, so that "
            "each is drawn once.",
        ],
        skeleton="""\
def next_samples(position, batch_size, num_samples, order, group):
    rank, size = group.rank(), group.size()
    first, last = ...                        # of this rank's numbers, in the whole run
    orders, samples = {}, []
    for number in range(first, last):
        epoch, index = ...
        if epoch not in orders:
            orders[epoch] = order(epoch)
        samples.append(...)
    return samples, ...                      # where the next batch begins""",
    ),
    Exercise(
        "tiled_attention",
        tiled_attention,
        attend,
        [
            (1, OneHead(100, 100, tile=8)),
            (1, OneHead(64, 50, tile=16)),
            (1, OneHead(70, 96, head_dim=4, size=60.0)),
            (1, OneHead(40, 33, head_dim=4, size=60.0, opposed=True)),
            (1, OneHead(48, 48, head_dim=16, dtype=torch.float32)),
            (1, OneHead(5, 100, head_dim=4)),
        ],
        Attending,
        refuses=functions_of(slow_memory),
        changes=("memory",),
        again=False,
        scales=False,
        hints=[
            "Swap the loops of keys_outside: load a tile of queries, then go through all keys and "
            "values. What does not have to be loaded and stored any more?",
            "out, total and largest of a tile of queries are ordinary variables of the outer loop: "
            "they begin as zeros and -inf. In the inner loop load k and v, and update the three. "
            'After it: memory.store("out", out / total, i).',
        ],
        skeleton="""\
def tiled_attention(memory, tile):
    for i in range(0, memory.num_rows("q"), tile):
        q = memory.load("q", i, min(i + tile, memory.num_rows("q")))
        out, total, largest = ...
        for j in range(0, memory.num_rows("k"), tile):
            until = min(j + tile, memory.num_rows("k"))
            scores = ...
            ...                              # a larger largest, the weights, total and out
        memory.store("out", ..., i)""",
    ),
]
