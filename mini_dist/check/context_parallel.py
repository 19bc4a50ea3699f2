"""Exercises of lesson 11: merge two partial softmaxes, one step of the ring, the zig-zag order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import context_parallel as library
from ..context_parallel.placement import block_of, positions_of_ranks
from ..context_parallel.ring import add_block
from ..launch import RankError
from ..model import explicit_attention
from .exercise import WRONG, Exercise, Line, Trial, Verdict, calls_of

RING_STEPS = {"ring_step", "ring_attention", "all_gather_attention"}
PLACERS = {"zigzag", "contiguous", "positions_of_ranks", "positions_here"}


class NotedExercise(Exercise):
    """An exercise that may need no communication: which functions of the library were called is
    noted while the learner's runs, and comes back as `borrowed` in each rank's result."""

    def used(self, trials: list[Trial]) -> set[str]:
        return {name for one in trials for result in one.run.results for name in result.borrowed}

    def _failed(self, trials, world_size: int, case, error: RankError) -> Verdict:
        if world_size > 1:
            return super()._failed(trials, world_size, case, error)
        lines, hint = self._judge(trials) if trials else ([], "")  # no ranks to speak of
        return Verdict(self.name, WRONG, lines, hint or f"With {case}: {error}")


# -- merge ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MergeCase:
    scale: float  # of the scores
    b_is_empty: bool = False

    def __str__(self) -> str:
        empty = ", the second over no keys at all" * self.b_is_empty
        return f"two partial results, scores up to about ±{3 * self.scale:g}{empty}"


MERGE_CASES = [(1, MergeCase(1)), (1, MergeCase(300)), (1, MergeCase(1, b_is_empty=True))]


@dataclass
class Merged:
    out: Tensor | None
    lse: Tensor | None
    kept: bool
    borrowed: set[str]


def partials(case: MergeCase):
    """Attention over 3 keys, over 5 others, and over all 8, in float64."""
    generator = torch.Generator().manual_seed(7)
    scores = case.scale * torch.randn(2, 3, 6, 8, generator=generator, dtype=torch.float64)
    values = torch.randn(2, 3, 8, 4, generator=generator, dtype=torch.float64)

    def part(keys: slice) -> library.Partial:
        s, v = scores[..., keys], values[..., keys, :]
        return library.Partial(s.softmax(-1) @ v, s.logsumexp(-1))

    a, b, whole = part(slice(3)), part(slice(3, 8)), part(slice(8))
    if case.b_is_empty:
        b = library.Partial(torch.zeros_like(a.out), torch.full_like(a.lse, -math.inf))
        whole = a
    return a, b, whole


def try_merge(fn: Callable, case: MergeCase, group) -> Merged:
    a, b, _ = partials(case)
    given = [tensor.clone() for tensor in (*a, *b)]
    with calls_of({"merge"}, library) as borrowed:
        came = fn(a, b)
    kept = all(torch.equal(now, then) for now, then in zip((*a, *b), given))
    is_pair = isinstance(came, tuple) and len(came) == 2
    is_pair = is_pair and all(isinstance(part, Tensor) for part in came)
    out, lse = came if is_pair else (None, None)
    return Merged(out, lse, kept, borrowed)


def judge_merge(trials: list[Trial]) -> tuple[list[Line], str]:
    lines, hint = [], ""
    for number, one in enumerate(trials):
        result, (a, b, whole) = one.run.results[0], partials(one.case)
        named = f" ({one.case})" * (number > 0)
        found = [
            Line(
                f"output{named}", right(result.out, whole.out), "right", same(result.out, whole.out)
            ),
            Line(f"lse{named}", right(result.lse, whole.lse), "right", same(result.lse, whole.lse)),
            Line("a and b are unchanged", result.kept, True, result.kept),
        ]
        lines += found if number == 0 else [line for line in found if not line.ok]
        if not all(line.ok for line in found) and not hint:
            hint = f"Right at first, but with {one.case}: " * (number > 0)
            hint += merge_mistake(result, a, b, whole)
    return lines, hint


def right(found: Tensor | None, expected: Tensor) -> str:
    if found is None or found.shape != expected.shape:
        return "missing" if found is None else f"of shape {list(found.shape)}"
    if not found.isfinite().all():
        return "inf or nan"
    return "right" if same(found, expected) else f"off by {(found - expected).abs().max():.2g}"


def same(found: Tensor | None, expected: Tensor) -> bool:
    return (
        found is not None
        and found.shape == expected.shape
        and torch.allclose(found.to(expected), expected, rtol=0, atol=1e-9)
    )


def merge_mistake(result: Merged, a, b, whole) -> str:
    out, lse = result.out, result.lse
    if out is None:
        return "Return a pair of tensors, Partial(out, lse): the lse is needed for the next merge."
    if not result.kept:
        return "You wrote into a or b. Whoever called still needs them: make new tensors."
    if out.shape != whole.out.shape:
        return (
            f"The output has shape {list(out.shape)}, it should have {list(whole.out.shape)}: "
            "a weight has no head dim, give it one with [..., None]."
        )
    if not (out.isfinite().all() and lse.isfinite().all()):
        return (
            "There is inf or nan. exp(lse) overflows for large scores, and 0 * inf is nan. "
            "Take a common number out of both first: exp(lse - total) is never more than 1, where "
            "total is the lse of both together (torch.logaddexp)."
        )
    share_b = (b.lse - torch.logaddexp(a.lse, b.lse)).exp()[..., None]
    if same(out, (a.out + b.out) / 2):
        return (
            "This is the plain mean of the two outputs. Each counts by the sum of its "
            "exponentials, e^lse: keys with high scores count more."
        )
    if same(out, a.out + b.out):
        return "This is the sum of the outputs. Each was divided by its own sum; take a mean."
    if same(out, torch.lerp(b.out, a.out, share_b)):
        return "The weights are the wrong way round: a's output got b's share."
    weights = torch.stack([a.lse, b.lse])[..., None]
    if same(out, (weights * torch.stack([a.out, b.out])).sum(0) / weights.sum(0)):
        return "You weigh by lse, which is a logarithm. Weigh by e^lse."
    if same(out, whole.out) and same(lse, a.lse + b.lse):
        return "lse is a logarithm of a sum, so the two do not add up: log(e^a + e^b)."
    if same(out, whole.out) and same(lse, torch.maximum(a.lse, b.lse)):
        return "The lse is that of the larger one only: log(e^a + e^b), torch.logaddexp."
    if same(out, whole.out):
        return "The output is right, the lse is not: log(e^a + e^b). The next merge needs it."
    return "out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b). Compare with yours."


# -- a step of the ring -----------------------------------------------------------------------


@dataclass(frozen=True)
class RingCase:
    placement: str
    causal: bool

    def __str__(self) -> str:
        return f"{self.placement}, {'causal' if self.causal else 'full'} attention"


RING_CASES = [
    (4, RingCase("contiguous", False)),
    (3, RingCase("zigzag", True)),
    (2, RingCase("contiguous", True)),
]
RING_S, RING_HEADS, RING_KV_HEADS, RING_HEAD_DIM = 24, 4, 2, 4


@dataclass
class Ringed:
    out: Tensor | None
    sources: list[int]  # whose keys the kernel was called with, in turn; -1: nobody's
    came: list[int]  # whose keys and values each step returned
    kernel_spans: list[tuple[float, float]]
    mistake: str = ""  # something came back that no next step could use
    kept: bool = True  # what was given to each step, the step left as it was
    borrowed: set[str] = field(default_factory=set)


def whole_sequence(case: RingCase, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, N, S, H] and k, v [B, K, S, H]."""
    generator = torch.Generator().manual_seed(size)
    heads = (RING_HEADS, RING_KV_HEADS, RING_KV_HEADS)
    shapes = [(2, n, RING_S, RING_HEAD_DIM) for n in heads]
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)


def try_ring_step(fn: Callable, case: RingCase, group) -> Ringed:
    rank, size = group.rank(), group.size()
    positions = positions_of_ranks(case.placement, RING_S, size)
    q, k, v = whole_sequence(case, size)
    pieces = [torch.stack([k[:, :, place], v[:, :, place]]) for place in positions]
    result = Ringed(None, [], [], [])

    def forward(q, k, v, causal):
        whose = [s for s, kv in enumerate(pieces) if torch.equal(k, kv[0, :, :, : k.shape[2]])]
        result.sources.append(whose[0] if whose else -1)
        began = time.time()
        part = library.fused_attend(q, k, v, causal)
        time.sleep(0.002)  # long enough to tell what happens meanwhile
        result.kernel_spans.append((began, time.time()))
        return part

    kernel = library.Kernel(forward, None)
    q, kv, total = q[:, :, positions[rank]], pieces[rank].clone(), None
    with calls_of(RING_STEPS, library) as result.borrowed:
        for step in range(size - 1):
            block = block_of(positions, rank, (rank - step) % size, case.causal)
            given = kv.clone()
            came = fn(total, q, kv, block, kernel, group)
            result.kept = result.kept and torch.equal(kv, given)
            if mistake := not_a_step(came):
                result.mistake = mistake
                return result
            total, kv = came
            whose = [s for s, piece in enumerate(pieces) if torch.equal(kv, piece)]
            result.came.append(whose[0] if whose else -1)
    block = block_of(positions, rank, (rank + 1) % size, case.causal)
    result.out = add_block(total, q, kv, block, kernel).out
    return result


def not_a_step(came) -> str:
    is_pair = isinstance(came, tuple) and len(came) == 2
    if is_pair and isinstance(came[0], tuple) and isinstance(came[1], Tensor):
        return ""
    return "Return two things, in this order: what add_block gave you, and what has arrived."


def judge_ring(trials: list[Trial]) -> tuple[list[Line], str]:
    lines, hint = [], ""
    for number, one in enumerate(trials):
        found, found_hint = judge_one_ring(one)
        for line in found:
            if number == 0 or not line.ok:
                line.what += f" ({one.run.world_size} ranks, {one.case})" * (number > 0)
                lines.append(line)
        if found_hint and not hint:
            hint = f"With {one.run.world_size} ranks, {one.case}: " * (number > 0) + found_hint
    return lines, hint


def judge_one_ring(one: Trial) -> tuple[list[Line], str]:
    run, size, case = one.run, one.run.world_size, one.case
    positions = positions_of_ranks(case.placement, RING_S, size)
    q, k, v = whole_sequence(case, size)
    expected = explicit_attention(q, k, v, None if case.causal else torch.zeros(RING_S))
    outputs = [same(r.out, expected[:, :, positions[i]]) for i, r in enumerate(run.results)]
    came = [
        r.came == [(i - 1 - s) % size for s in range(size - 1)] for i, r in enumerate(run.results)
    ]
    one_kv = 2 * k.nbytes // size
    sent = [run.ledger.total_bytes(rank=rank) for rank in range(size)]
    pairs = {(comm.rank, peer) for comm in run.ledger.leaves() for peer in comm.sent_to}
    ring = {(rank, (rank + 1) % size) for rank in range(size)}
    native = sorted({c.op for c in run.ledger.leaves() if c.op not in ("send", "recv")})
    kept = all(result.kept for result in run.results)
    overlapped = all(travels_while_computing(run.ledger, i, r) for i, r in enumerate(run.results))
    count = f"{size} of {size} ranks"
    wanted = (size - 1) * one_kv
    lines = [
        Line("right attention on", f"{sum(outputs)} of {size} ranks", count, all(outputs)),
        Line("the right keys came to", f"{sum(came)} of {size} ranks", count, all(came)),
        Line("bytes sent by a rank", max(sent), wanted, set(sent) == {wanted}),
        Line("who sends to whom", arrows(pairs), arrows(ring), pairs == ring),
        Line("calls of the backend's collectives", ", ".join(native) or "none", "none", not native),
        Line("what it was given is untouched", kept, True, kept),
        Line("they travel while the kernel works", overlapped, True, overlapped),
    ]
    if all(line.ok for line in lines):
        return lines, ""
    return lines, ring_mistake(run, size, outputs, came, sent, wanted, pairs, ring, native)


def travels_while_computing(ledger, rank: int, result: Ringed) -> bool:
    """Whether in each step a message of this rank was under way during the kernel's whole call."""
    spans = result.kernel_spans[:-1] if len(result.kernel_spans) > 1 else []
    sends = [comm for comm in ledger.leaves(rank=rank) if comm.op == "send"]
    return all(any(s.start <= began and ended <= s.end for s in sends) for began, ended in spans)


def arrows(pairs) -> str:
    return ", ".join(f"{source}->{target}" for source, target in sorted(pairs)) or "nobody"


def ring_mistake(run, size, outputs, came, sent, wanted, pairs, ring, native) -> str:
    results = run.results
    if results[0].mistake:
        return results[0].mistake
    if native:
        return (
            f"The work is done by the backend's own {' and '.join(native)}. A step of the ring is "
            "one message to the rank after, one from the rank before."
        )
    if not pairs:
        return "Nothing was sent. In each step kv leaves for the rank after."
    if pairs != ring:
        backwards = {(target, source) for source, target in ring}
        if pairs == backwards and size > 2:
            return (
                "Your ring turns the other way: keys come from the rank *after*. The blocks you "
                "are given are those of keys that come from the rank before: send to (rank + 1)."
            )
        return "In a ring each rank sends to the rank after it only, (rank + 1) % size."
    if any(s > wanted for s in sent):
        return (
            f"The busiest rank sent {max(sent)} bytes instead of {wanted}: send kv on once a step, "
            "and nothing else."
        )
    if any(s < wanted for s in sent):
        return f"A rank sent {min(sent)} bytes instead of {wanted}: kv holds keys *and* values."
    # From here on which of the numbers fail is chance, so the causes come in order.
    if any(comm.end == comm.start for comm in run.ledger.leaves()):  # (see Comm.end)
        return (
            "You returned before the messages were through: wait(handles) after add_block, for "
            "what arrives and for what leaves."
        )
    if not all(result.kept for result in results):
        return (
            "You received into kv itself. It is still being attended to, and still on its way to "
            "the rank after: receive into a tensor of its own, torch.empty_like(kv)."
        )
    if not all(came):
        rank = came.index(False)
        if results[rank].came[0] == rank:
            return (
                f"Rank {rank} got its own keys and values back from your function: return those "
                "that have arrived, they are the next step's."
            )
        return (
            f"Rank {rank} should have got the keys of rank {(rank - 1) % size} in the first step. "
            "Receive from (rank - 1) % size, and wait before you return what you received."
        )
    first = next((r for r, result in enumerate(results) if result.sources[:1] != [r]), None)
    if first is not None:
        return (
            f"Rank {first} did not begin with its own keys. Attend to the kv that you were given; "
            "what arrives is for the next step."
        )
    if not all(outputs):
        calls = {len(result.sources) for result in results}
        if calls == {1} and size > 2:
            return "The kernel ran only in the last step. add_block(total, q, kv, block, kernel)."
        return (
            "The right keys came, but the attention is wrong: is what was in `total` still in what "
            "you return? add_block(total, q, kv, block, kernel) gives it back with this block."
        )
    return (
        "Right values, right bytes, but nothing travels while the kernel works: then each step "
        "takes the time of the hop *and* that of the kernel. start(...) the messages, attend, and "
        "only then wait(...) for them."
    )


# -- the zig-zag order ------------------------------------------------------------------------


@dataclass(frozen=True)
class OrderCase:
    seq_len: int
    size: int

    def __str__(self) -> str:
        return f"{self.seq_len} tokens on {self.size} ranks"


ORDER_CASES = [
    (1, OrderCase(8, 2)),
    (1, OrderCase(48, 4)),
    (1, OrderCase(30, 3)),
    (1, OrderCase(6, 1)),
]


@dataclass
class Ordered:
    table: list[list[int]] | None
    borrowed: set[str]


def try_zigzag(fn: Callable, case: OrderCase, group) -> Ordered:
    with calls_of(PLACERS, library) as borrowed:
        came = fn(case.seq_len, case.size)
    try:
        table = [[int(position) for position in row] for row in came]
    except TypeError:
        table = None
    return Ordered(table, borrowed)


def judge_zigzag(trials: list[Trial]) -> tuple[list[Line], str]:
    lines, hint = [], ""
    for number, one in enumerate(trials):
        found, found_hint = judge_one_order(one.run.results[0].table, one.case)
        for line in found:
            if number == 0 or not line.ok:
                line.what += f" ({one.case})" * (number > 0)
                lines.append(line)
        if found_hint and not hint:
            hint = f"With {one.case}: " * (number > 0) + found_hint
    return lines, hint


def judge_one_order(table, case: OrderCase) -> tuple[list[Line], str]:
    S, size = case.seq_len, case.size
    if table is None or [len(row) for row in table] != [S // size] * size:
        shape = "something else" if table is None else f"rows of {[len(row) for row in table]}"
        line = Line(
            "a row of S/cp positions for each rank", shape, f"{size} rows of {S // size}", False
        )
        return [line], f"Return a table with {size} rows (one a rank) of {S // size} positions."
    once = sorted(position for row in table for position in row) == list(range(S))
    rising = all(row == sorted(row) for row in table)
    work = scores_of(table)
    expected = scores_of(library.zigzag(S, size).tolist())
    per_rank = [sum(row) for row in work]
    even = len(set(per_rank)) == 1
    even_steps = all(row == work[0] for row in work)
    exact = table == library.zigzag(S, size).tolist()
    lines = [
        Line("each token on one rank", once, True, once),
        Line("a rank's tokens in rising order", rising, True, rising),
        Line("scores to compute, by rank", per_rank, [sum(row) for row in expected], even),
        Line("equal in every step of the ring", even_steps, True, even_steps),
        Line(
            "rank 0 holds", shorten(table[0]), shorten(library.zigzag(S, size)[0].tolist()), exact
        ),
    ]
    if all(line.ok for line in lines):
        return lines, ""
    return lines, order_mistake(table, S, size, once, rising, even, even_steps)


def scores_of(table: list[list[int]]) -> list[list[int]]:
    """[rank][step]: pairs of a query and a key that it may see, counted one by one."""
    size, rows = len(table), [torch.tensor(row) for row in table]
    return [
        [int((rows[r][:, None] >= rows[(r - s) % size]).sum()) for s in range(size)]
        for r in range(size)
    ]


def shorten(row: list[int]) -> str:
    return str(row) if len(row) <= 8 else f"[{', '.join(map(str, row[:4]))}, ... {row[-1]}]"


def order_mistake(table, S, size, once, rising, even, even_steps) -> str:
    if not once:
        return "Some token is on no rank, or on two. Cut into 2*size chunks and deal each out once."
    if table == library.contiguous(S, size).tolist() and size > 1:
        return (
            "These are contiguous pieces: the last rank sees everything before it and has most to "
            "do. Cut into 2*size chunks; rank r gets chunk r and, to make up for it, a late one."
        )
    if table == torch.arange(S).view(-1, size).T.tolist() and size > 1:
        return (
            "Dealt out one by one, like cards: balanced but for a few scores, yet every block has "
            "a diagonal mask. Zig-zag deals out whole chunks, 2*size of them."
        )
    if not rising:
        return (
            "Some rank holds a later token before an earlier one. A chunk stays in the order of "
            "the sequence, and the early chunk comes first."
        )
    if not even:
        work = [sum(row) for row in scores_of(table)]
        return (
            f"The ranks have {work} scores to compute. Rank r's second chunk should be as far from "
            "the end as its first is from the start: chunk 2*size-1-r."
        )
    if not even_steps:
        return "Equal in total, but not in every step: the ranks wait for each other in each hop."
    return "Balanced, but rank r should hold chunks r and 2*size-1-r."


EXERCISES = [
    NotedExercise(
        "merge",
        library.merge,
        try_merge,
        MERGE_CASES,
        judge_merge,
        hints=[
            "a.lse is the log of the sum that a.out was divided by. Undo both divisions, add, and "
            "divide by the sum of both sums: "
            "out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b).",
            "First lse = torch.logaddexp(a.lse, b.lse). Then the share of b is "
            "(b.lse - lse).exp(), which cannot overflow, and that of a alike. "
            "They need [..., None] to multiply an output.",
        ],
        skeleton="""\
def my_merge(a, b):
    lse = torch.logaddexp(..., ...)
    share_a = (...).exp()[..., None]
    share_b = (...).exp()[..., None]
    return Partial(share_a * ... + share_b * ..., lse)""",
    ),
    NotedExercise(
        "ring_step",
        library.ring_step,
        try_ring_step,
        RING_CASES,
        judge_ring,
        hints=[
            "Three things, in this order: start the messages (kv to the rank after, an empty "
            "tensor like it to be filled from the rank before), attend to the kv that is here, "
            "wait.",
            "arriving = torch.empty_like(kv); "
            "handles = start(group, receives=[(arriving, before)], sends=[(kv, after)]); "
            "total = add_block(total, q, kv, block, kernel); wait(handles).",
        ],
        skeleton="""\
def my_ring_step(total, q, kv, block, kernel, group):
    rank, size = group.rank(), group.size()
    arriving = torch.empty_like(kv)
    handles = start(group, receives=[(arriving, ...)], sends=[(kv, ...)])
    total = add_block(total, q, ..., block, kernel)
    wait(...)
    return total, ...""",
    ),
    NotedExercise(
        "zigzag",
        library.zigzag,
        try_zigzag,
        ORDER_CASES,
        judge_zigzag,
        hints=[
            "Cut the positions 0..S-1 into 2*size equal chunks. Rank r gets chunk r and the chunk "
            "that is as far from the end.",
            "chunks = torch.arange(seq_len).view(2 * size, -1); rank r holds chunks[r] and then "
            "chunks[2 * size - 1 - r].",
        ],
        skeleton="""\
def my_zigzag(seq_len, size):
    chunks = torch.arange(seq_len).view(..., -1)
    return torch.stack([torch.cat([chunks[...], chunks[...]]) for r in range(size)])""",
    ),
]
