"""Exercises of lesson 11: merge two partial softmaxes, one step of the ring, the zig-zag order."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mini_dist.model.gpt import explicit_attention
from mini_dist.strategies import context_parallel as library
from mini_dist.strategies.context_parallel import Partial, TileKernel, add_block
from mini_dist.strategies.context_parallel.placement import block_of, positions_of_ranks
from mini_dist.strategies.context_parallel.ring import Hop

from .engine import Exercise, Line, Measured, are_two, line, on_ranks, too_few_bytes
from .measures import plain
from .watch import functions_of
from .ways import Complaint

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def bits(dtype: torch.dtype) -> str:
    return "" if dtype == F64 else f" in {str(dtype).removeprefix('torch.')}"


# -- merge ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    scale: float
    empty: str = ""  # which partial result covers no keys
    dtype: torch.dtype = F64

    def __str__(self) -> str:
        empty = f", {self.empty} over no keys at all" * bool(self.empty)
        up_to = f"{3 * self.scale:g}{bits(self.dtype)}"
        return f"two partial results, scores up to about ±{up_to}{empty}"


# How many of the first queries see no key of a, and how many of the last see no key of b.
BLIND = {"": (0, 0), "the first": (6, 0), "the second": (0, 6), "each for some queries": (2, 2)}


def partials(case: Scores) -> tuple[Partial, Partial, Partial]:
    """Return the attention of 6 queries over 3 keys, over 5 other keys, and over all 8."""
    generator = torch.Generator().manual_seed(7)
    scores = case.scale * torch.randn(2, 3, 6, 8, generator=generator, dtype=F64)
    values = torch.randn(2, 3, 8, 4, generator=generator, dtype=F64)
    first, last = BLIND[case.empty]
    scores[:, :, :first, :3] = -math.inf
    scores[:, :, 6 - last :, 3:] = -math.inf

    def part(keys: slice) -> Partial:
        s, v = scores[..., keys], values[..., keys, :]
        pair = s.softmax(-1).nan_to_num() @ v, s.logsumexp(-1)
        return Partial(*(tensor.to(case.dtype) for tensor in pair))

    return part(slice(3)), part(slice(3, 8)), part(slice(8))


def merge_trial(fn, case: Scores, group):
    a, b, whole = partials(case)
    given = [tensor.clone() for tensor in (*a, *b)]
    came = fn(a, b)
    if not are_two(came, Tensor, Tensor):
        raise Complaint(
            "Return a pair of tensors, Partial(out, lse): the lse is needed for the next merge."
        )
    shapes, wanted = ([list(tensor.shape) for tensor in pair] for pair in (came, whole))
    if shapes != wanted:
        raise Complaint(
            f"Output and lse have the shapes {shapes}, they should have {wanted}: a weight has no "
            "head dim, give it one with [..., None]."
        )
    if {tensor.dtype for tensor in came} != {case.dtype}:
        raise Complaint(f"Return {case.dtype}, the dtype of a and b: .to(a.out.dtype).")
    return *came, all(map(torch.equal, (*a, *b), given))


class Merged(Measured):
    def measure(self):
        self.a, self.b, self.whole = partials(self.case)
        ((self.out, self.lse, self.kept),) = self.results
        # The rounding error of an lse, and so of its exponential, grows with its size.
        self.rounding = 100 * torch.finfo(self.case.dtype).eps * max(4, 3 * self.case.scale)

    def is_(self, found: Tensor, expected: Tensor, tolerance: float = 0) -> bool:
        tolerance = tolerance or self.rounding
        return torch.allclose(found, expected, rtol=tolerance, atol=tolerance)

    def in_words(self, found: Tensor, expected: Tensor) -> str:
        if not torch.equal(found.isfinite(), expected.isfinite()):
            return "inf or nan"
        off = (found - expected).nan_to_num().abs().max()
        return "right" if self.is_(found, expected) else f"off by {off:.2g}"

    def lines(self) -> list[Line]:
        return [
            line("output", self.in_words(self.out, self.whole.out), "right"),
            line("lse", self.in_words(self.lse, self.whole.lse), "right"),
            line("a and b are unchanged", self.kept, True),
        ]

    @staticmethod
    def raised(error: str) -> str:
        if "must match the size" not in error:
            return ""
        return "a weight has no head dim, an output has: give the weight one with [..., None].\n"

    def mistake(self) -> str:
        out, lse, (a, b, whole) = self.out, self.lse, (self.a, self.b, self.whole)
        if not self.kept:
            return "You wrote into a or b. The caller still needs them: make new tensors."
        if not (out.isfinite().all() and lse.isfinite().all()):
            return (
                "There is inf or nan. exp(lse) overflows for large scores, and 0 * inf is nan. "
                "Take a common number out of both first: exp(lse - total) is never more than 1, "
                "where total is the lse of both together (torch.logaddexp)."
            )
        share_b = (b.lse - whole.lse).exp()[..., None]
        weights = torch.stack([a.lse, b.lse])[..., None]
        known = {
            "This is the plain mean of the two outputs. Each counts by the sum of its "
            "exponentials, e^lse: keys with high scores count more.": (a.out + b.out) / 2,
            "This is the sum of the outputs. Each was divided by its own sum: take a weighted "
            "mean.": a.out + b.out,
            "The weights are the wrong way round: a's output got b's share.": (
                torch.lerp(b.out, a.out, share_b)
            ),
            "You weigh by lse, which is a logarithm. Weigh by e^lse.": (
                (weights * torch.stack([a.out, b.out])).sum(0) / weights.sum(0)
            ),
        }
        for says, wrong in known.items():
            if self.is_(out, wrong):
                return says
        if not self.is_(out, whole.out):
            if self.is_(out, whole.out, 1e-5):
                return "Right to seven digits only: something in it is float32. Keep a.out's dtype."
            return (
                "out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b). Compare with yours."
            )
        if self.is_(lse, a.lse + b.lse):
            return "lse is a logarithm of a sum, so the two do not add up: log(e^a + e^b)."
        if self.is_(lse, torch.maximum(a.lse, b.lse)):
            return "The lse covers only the larger one: log(e^a + e^b), torch.logaddexp."
        return "The output is right, the lse is not: log(e^a + e^b). The next merge needs it."


# -- a step of the ring -----------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    placement: str
    causal: bool
    dtype: torch.dtype = F64

    def __str__(self) -> str:
        attention = "causal" if self.causal else "full"
        return f"{self.placement}, {attention} attention{bits(self.dtype)}"

    def whole(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, N, S, H] and k, v [B, K, S, H] of the whole sequence."""
        generator = torch.Generator().manual_seed(size)
        shapes = [(2, heads, 24, 4) for heads in (4, 2, 2)]
        return tuple(torch.randn(s, generator=generator, dtype=F64).to(self.dtype) for s in shapes)

    def positions(self, size: int) -> Tensor:
        return positions_of_ranks(self.placement, 24, size)

    def pieces(self, size: int) -> list[Tensor]:
        """Return each rank's keys and values."""
        _, k, v = self.whole(size)
        return [torch.stack([k[:, :, at], v[:, :, at]]) for at in self.positions(size)]


@dataclass
class Ringed:
    """What a rank saw. Keys are noted by the rank that they belong to; -1: no rank."""

    out: Tensor | None = None
    attended: list[int] = field(default_factory=list)  # whose keys each kernel call had
    came: list[int] = field(default_factory=list)  # whose keys each step returned
    kept: bool = True  # no step changed the kv that it was given
    let_go: bool = True  # every step released the kv that it was given
    overlapped: bool = True  # kv travels when the kernel ends; no wait comes before the kernel


def ring_trial(fn, case: Ring, group) -> Ringed:
    rank, size, recorder = group.rank(), group.size(), group.recorder
    positions, pieces, seen = case.positions(size), case.pieces(size), Ringed()
    q, kv, total = case.whole(size)[0][:, :, positions[rank]], pieces[rank].clone(), None

    def whose(tensor, of=lambda piece: piece) -> int:
        return next((s for s, piece in enumerate(pieces) if torch.equal(tensor, of(piece))), -1)

    def both_ways() -> bool:  # kv is being sent and received
        rows = [row for row in recorder.comms[before:] if row[0][:4] in ("send", "recv")]
        return sum(row[3] for row in rows) >= 2 * kv.nbytes

    def forward(q, k, v, causal):
        seen.attended.append(whose(k, lambda piece: piece[0, :, :, : k.shape[2]]))
        at_work.set()
        seen.overlapped = seen.overlapped and soon(both_ways)
        return library.attend(q, k, v, causal)

    def wait_for(row):
        seen.overlapped = seen.overlapped and soon(at_work.is_set)
        waits(row)

    kernel, waits, recorder.waits = TileKernel(forward, None), recorder.waits, wait_for
    for step in range(size - 1):
        block = block_of(positions, rank, (rank - step) % size, case.causal)
        given, before, at_work = kv.clone(), len(recorder.comms), threading.Event()
        if block is None:
            at_work.set()  # the kernel has nothing to do
        came = fn(total, q, kv, block, kernel, group)
        if mistake := not_a_step(came, block, recorder.comms[before:]):
            raise Complaint(mistake)
        seen.kept = seen.kept and torch.equal(kv, given)
        old, total, kv = weakref.ref(kv.untyped_storage()), Partial(*came[0]), came[1]
        seen.let_go = seen.let_go and soon(lambda old=old: old() is None)
        seen.came.append(whose(kv))
    recorder.waits = waits
    block = block_of(positions, rank, (rank + 1) % size, case.causal)
    seen.out = add_block(total, q, kv, block, TileKernel(library.attend, None)).out
    return seen


def soon(happens: Callable[[], bool], seconds: float = 2) -> bool:
    """Return whether `happens()` is true; if the learner has other threads, give them time."""
    deadline = time.monotonic() + seconds
    while not happens() and threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    return happens()


def not_a_step(came, block, rows) -> str:
    """Return what is wrong with a step so that the next one cannot begin; "" if nothing is."""
    sent = any(not row[0].startswith("recv") for row in rows)
    if not sent and block is None:
        return (
            "A rank sent nothing in a step in which it has nothing to attend to (block is None). "
            "The ranks after it still need these keys: pass kv on in every step."
        )
    if not sent:
        return "Nothing was sent. In each step kv leaves for the rank after."
    if any(row[6] is None for row in rows):  # nobody has waited for it
        return (
            "You returned before the messages had arrived: wait(handles) after add_block, for "
            "what arrives and for what leaves."
        )
    if are_two(came, (tuple, list), Tensor) and are_two(came[0], Tensor, Tensor):
        return ""
    return "Return two things, in this order: what add_block gave you, and what has arrived."


class Step(Measured):
    def measure(self):
        size, case, ledger = self.size, self.case, self.run.ledger
        q, k, v = case.whole(size)
        mask = None if case.causal else torch.zeros(24)
        whole = explicit_attention(q.double(), k.double(), v.double(), mask)
        tolerance = 0.05 if case.dtype == BF16 else 1e-4 if case.dtype == F32 else 1e-9
        self.right = [
            result.out.shape == whole[:, :, at].shape
            and torch.allclose(result.out.double(), whole[:, :, at], rtol=0, atol=tolerance)
            for result, at in zip(self.results, case.positions(size))
        ]
        self.came = [
            result.came == [(rank - 1 - step) % size for step in range(size - 1)]
            for rank, result in enumerate(self.results)
        ]
        self.of_rank = [ledger.total_bytes(rank=rank) for rank in range(size)]
        self.wanted = (size - 1) * 2 * k.nbytes // size
        self.pairs = {(comm.rank, peer) for comm in ledger.leaves() for peer in comm.sent_to}
        self.ring = {(rank, (rank + 1) % size) for rank in range(size)}
        self.overlapped = all(result.overlapped for result in self.results)

    def lines(self) -> list[Line]:
        sent = self.of_rank
        return [
            on_ranks("right attention on", self.right),
            on_ranks("the right keys came to", self.came),
            Line("bytes sent by a rank", max(sent), self.wanted, set(sent) == {self.wanted}),
            line("who sends to whom", arrows(self.pairs), arrows(self.ring)),
            self.backend_line(),
            line("what it was given is untouched", all(r.kept for r in self.results), True),
            line("and released afterwards", all(r.let_go for r in self.results), True),
            line("they travel while the kernel works", self.overlapped, True),
        ]

    @staticmethod
    def raised(error: str) -> str:
        if "be contiguous" not in error:
            return ""
        return "a message must be contiguous in memory: .contiguous() makes one.\n"

    def mistake(self) -> str:
        size, ledger, sent = self.size, self.run.ledger, self.of_rank
        if self.barriers or self.backend:
            return self.of_the_backend(
                "A step of the ring is one message to the rank after, one from the rank before."
            )
        if self.pairs != self.ring:
            if self.pairs == {(target, source) for source, target in self.ring}:
                return (
                    "Your ring runs the other way: keys come from the rank *after*. The blocks "
                    "you are given belong to keys that come from the rank before: send to "
                    "(rank + 1)."
                )
            return "In a ring each rank sends to the rank after it only, (rank + 1) % size."
        if max(sent) > self.wanted:
            return (
                f"The busiest rank sent {max(sent)} bytes instead of {self.wanted}: send kv on "
                "once a step, in the dtype that it has, and nothing else."
            )
        if min(sent) < self.wanted:
            dtypes = {comm.dtype for comm in ledger.leaves()}
            if dtypes != {str(self.case.dtype).removeprefix("torch.")}:
                return too_few_bytes(min(sent), self.wanted)
            return (
                f"A rank sent {min(sent)} bytes instead of {self.wanted}: kv holds keys *and* "
                "values."
            )
        if not all(result.kept for result in self.results):
            return (
                "You received into kv itself. It is still being attended to, and still in flight "
                "to the rank after: receive into a tensor of its own, torch.empty_like(kv)."
            )
        if not all(self.came):
            rank = self.came.index(False)
            if self.results[rank].came[0] == rank:
                return (
                    f"Rank {rank} got its own keys and values back from your function: return "
                    "those that have arrived, they are the next step's."
                )
            return (
                f"Rank {rank} should get what rank {(rank - 1) % size} has, in every step. Receive "
                "from (rank - 1) % size, and wait before you return what you received."
            )
        for rank, result in enumerate(self.results):
            if result.attended[:1] != [rank]:
                return (
                    f"Rank {rank} did not begin with its own keys. Attend to the kv that you were "
                    "given; what arrives is for the next step."
                )
        if not all(self.right):
            return (
                "The right keys came, but the attention is wrong: is what was in `total` still in "
                "what you return? add_block(total, q, kv, block, kernel) gives it back with this "
                "block."
            )
        if not all(result.let_go for result in self.results):
            return (
                "Your function still holds the kv of a step that is over, in a list or a buffer of "
                "its own: a rank would soon hold the keys and values of all ranks."
            )
        return (
            "Right values, right bytes, but nothing travels while the kernel works, so each step "
            "takes the time of the hop *plus* the kernel's. start(...) the messages, attend, "
            "and only then wait(...) for them."
        )


def arrows(pairs) -> str:
    return ", ".join(f"{source}->{target}" for source, target in sorted(pairs)) or "nobody"


# -- the zig-zag order ------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    seq_len: int
    size: int

    def __str__(self) -> str:
        return f"{self.seq_len} tokens on {self.size} ranks"


def order_trial(fn, case: Tokens, group) -> list[list[int]]:
    came, length = plain(fn(case.seq_len, case.size)), case.seq_len // case.size
    rows = list(came) if isinstance(came, (list, tuple)) else []
    if [len(row) for row in rows if isinstance(row, (list, tuple))] != [length] * case.size:
        raise Complaint(f"Return a table with {case.size} rows (1 per rank) of {length} positions.")
    rows = [list(row) for row in rows]
    if not all(isinstance(position, int) for row in rows for position in row):
        raise Complaint("Positions are whole numbers: // gives whole numbers, / gives floats.")
    return rows


class Order(Measured):
    def measure(self):
        (self.table,), (S, size) = self.results, (self.case.seq_len, self.case.size)
        self.expected = library.zigzag(S, size).tolist()
        self.work, even = scores_of(self.table), scores_of(self.expected)
        self.of_rank, self.even = [sum(row) for row in self.work], [sum(row) for row in even]
        self.once = sorted(p for row in self.table for p in row) == list(range(S))
        self.rising = all(row == sorted(row) for row in self.table)
        self.even_steps = all(row == self.work[0] for row in self.work)

    def lines(self) -> list[Line]:
        shown, expected = shorten(self.table[0]), shorten(self.expected[0])
        return [
            line("each token on one rank", self.once, True),
            line("a rank's tokens in rising order", self.rising, True),
            line("scores to compute, by rank", self.of_rank, self.even),
            line("equal in every step of the ring", self.even_steps, True),
            Line("rank 0 holds", shown, expected, self.table == self.expected),
        ]

    def mistake(self) -> str:
        S, size, table = self.case.seq_len, self.case.size, self.table
        if not self.once:
            return (
                "Some token is on no rank, or on two. Cut into 2*size chunks and deal each out "
                "once."
            )
        if table == library.contiguous(S, size).tolist() and size > 1:
            return (
                "These are contiguous pieces: the last rank sees everything before it and has most "
                "to do. Cut into 2*size chunks; rank r gets chunk r and, to make up for it, a late "
                "one."
            )
        if table == library.striped(S, size).tolist() and size > 1:
            return (
                "Dealt out one by one, like cards: balanced but for a few scores, yet every block "
                "has a diagonal mask. Zig-zag deals out whole chunks, 2*size of them."
            )
        if not self.rising:
            return (
                "Some rank holds a later token before an earlier one. A chunk stays in the order "
                "of the sequence, and the early chunk comes first."
            )
        if len(set(self.of_rank)) > 1:
            return (
                f"The ranks have {self.of_rank} scores to compute. Rank r's second chunk should be "
                "as far from the end as its first is from the start: chunk 2*size-1-r."
            )
        if not self.even_steps:
            return (
                "Equal in total, but not in every step: the ranks wait for each other in each hop."
            )
        return "Balanced, but rank r should hold chunks r and 2*size-1-r."


def scores_of(table: list[list[int]]) -> list[list[int]]:
    """Return [rank][step] -> how many pairs of a query and a key that it may see there are."""
    size, rows = len(table), [torch.tensor(row) for row in table]
    ordered = [row.sort().values for row in rows]
    return [
        [
            int(torch.searchsorted(ordered[(r - s) % size], rows[r], right=True).sum())
            for s in range(size)
        ]
        for r in range(size)
    ]


def shorten(row: list[int]) -> str:
    return str(row) if len(row) <= 8 else f"[{', '.join(map(str, row[:4]))}, ... {row[-1]}]"


EXERCISES = [
    Exercise(
        "merge",
        library.merge,
        merge_trial,
        [
            (1, Scores(1)),
            (1, Scores(1, "the second")),
            (1, Scores(1, "the first")),
            (1, Scores(1000)),
            (1, Scores(50, "each for some queries", F32)),
        ],
        Merged,
        hints=[
            "a.lse is the log of the sum that a.out was divided by. Undo both divisions, add, and "
            "divide by the sum of both sums: "
            "out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b).",
            "First lse = torch.logaddexp(a.lse, b.lse). Then the share of b is "
            "(b.lse - lse).exp(), which cannot overflow; the share of a likewise. "
            "They need [..., None] to multiply an output.",
        ],
        skeleton="""\
def merge(a, b):
    lse = torch.logaddexp(..., ...)
    share_a = (...).exp()[..., None]
    share_b = (...).exp()[..., None]
    return Partial(share_a * ... + share_b * ..., lse)""",
        refuses=functions_of(library),
    ),
    Exercise(
        "ring_step",
        library.ring_step,
        ring_trial,
        [
            (4, Ring("contiguous", False)),
            (3, Ring("contiguous", True, F32)),
            (2, Ring("zigzag", True, BF16)),
        ],
        Step,
        hints=[
            "Three things, in this order: start the messages (kv to the rank after, an empty "
            "tensor like it to be filled from the rank before), attend to the kv that is here, "
            "wait.",
            "arriving = torch.empty_like(kv); "
            "handles = start(group, receives=[(arriving, before)], sends=[(kv, after)]); "
            "total = add_block(total, q, kv, block, kernel); wait(handles).",
        ],
        skeleton="""\
def ring_step(total, q, kv, block, kernel, group):
    rank, size = group.rank(), group.size()
    arriving = torch.empty_like(kv)
    handles = start(group, receives=[(arriving, ...)], sends=[(kv, ...)])
    total = add_block(total, q, ..., block, kernel)
    wait(...)
    return total, ...""",
        refuses={*functions_of(library), Hop.__init__} - {add_block, library.merge},
        changes={"total"},
        again=False,
        contiguous={"kv"},
        one_dtype=True,
    ),
    Exercise(
        "zigzag",
        library.zigzag,
        order_trial,
        [
            (1, Tokens(8, 2)),
            (1, Tokens(96, 12)),
            (1, Tokens(30, 3)),
            (1, Tokens(10, 5)),
            (1, Tokens(6, 1)),
            (1, Tokens(96, 3)),
            (1, Tokens(1 << 17, 16)),
        ],
        Order,
        hints=[
            "Cut the positions 0..S-1 into 2*size equal chunks. Rank r gets chunk r and the chunk "
            "that is as far from the end.",
            "chunks = torch.arange(seq_len).view(2 * size, -1); rank r holds chunks[r] and then "
            "chunks[2 * size - 1 - r].",
        ],
        skeleton="""\
def zigzag(seq_len, size):
    chunks = torch.arange(seq_len).view(..., -1)
    return torch.stack([torch.cat([chunks[...], chunks[...]]) for r in range(size)])""",
        refuses=functions_of(library),
    ),
]
