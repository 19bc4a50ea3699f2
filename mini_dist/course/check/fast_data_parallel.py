"""Exercises of lesson 05: gradients in buckets, and buckets that leave during backward.

Right values are not enough: one bucket per parameter is no bucketing, and an all-reduce that
backward waits for hides nothing. So the calls, their sizes and their times are judged as well.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from mini_dist.strategies import data_parallel
from mini_dist.strategies.data_parallel import average_in_buckets, make_buckets, overlapped_backward

from .engine import NO_BARRIER, Exercise, Line, Measured, line, on_ranks
from .measures import all_close as same
from .measures import mistake_of_dtype
from .watch import functions_of
from .ways import hooks_of

HELPERS = ("flatten", "unflatten", "mean", "mean_", "ring_mean", "backend_mean_")
WRAPPERS = (data_parallel.Naive, data_parallel.Bucketed, data_parallel.Overlapped)
REFUSED = {f for f in functions_of(data_parallel) if f.__name__ not in HELPERS}
REFUSED |= {wrapper.__init__ for wrapper in WRAPPERS}


# ---- buckets ------------------------------------------------------------------------------------

SHAPES = [(30, 10), (10,), (200,), (), (8, 5, 3), (200, 10), (9,), (6, 7), (7,)]
FROZEN, UNUSED = 2, 6  # neither has a gradient
LARGEST = 100.0


@dataclass(frozen=True)
class Buckets:
    bucket_bytes: int
    dtype: torch.dtype = torch.float32
    without: frozenset[int] = frozenset({FROZEN, UNUSED})

    def __str__(self) -> str:
        kind = "" if self.dtype == torch.float32 else f" of {self.dtype}"
        none = f"{len(self.without)} without a gradient"
        return f"{len(SHAPES)} parameters{kind}, {none}, and bucket_bytes={self.bucket_bytes}"

    def gradients(self, rank: int) -> list[Tensor | None]:
        generator = torch.Generator().manual_seed(rank)
        made = []
        for number, shape in enumerate(SHAPES):  # matrices are transposed: not contiguous
            grad = torch.randint(-400, 400, shape[::-1], generator=generator) / 4
            grad = grad.permute([*range(grad.dim())][::-1]).to(self.dtype)
            made.append(None if number in self.without else grad)
        return made

    def parameters(self, rank: int) -> list[nn.Parameter]:
        made = []
        for number, (shape, grad) in enumerate(zip(SHAPES, self.gradients(rank))):
            ones = torch.ones(shape, dtype=self.dtype)
            made.append(nn.Parameter(ones, requires_grad=number != FROZEN))
            made[-1].grad = grad
        return made


def bucket_trial(fn, case: Buckets, group):
    parameters = case.parameters(group.rank())
    fn(list(parameters), case.bucket_bytes, group)
    kept = all(bool((parameter == 1).all()) for parameter in parameters)
    return [parameter.grad for parameter in parameters], kept


def filled(nbytes: list[int], limit: int, full: Callable = operator.gt, room=None) -> list[int]:
    """Return the bytes of buckets that are closed when the next gradient would make them too full.
    room: the sizes by which fullness is judged, if they are not the bytes."""
    sizes: list[int] = []
    held = 0
    for each, taken in zip(nbytes, room or nbytes):
        if sizes and not full(held + taken, limit):
            sizes[-1], held = sizes[-1] + each, held + taken
        else:
            sizes.append(each)
            held = taken
    return [size for size in sizes if size]


def first_fit(nbytes: list[int], limit: int) -> list[int]:
    """Return the bytes of the buckets if each gradient goes into the first with room for it."""
    sizes: list[int] = []
    for each in nbytes:
        room = [number for number, held in enumerate(sizes) if held + each <= limit]
        if room:
            sizes[room[0]] += each
        else:
            sizes.append(each)
    return sizes


class Bucketing(Measured):
    def measure(self):
        limit = self.case.bucket_bytes
        everyones = [self.case.gradients(rank) for rank in range(self.size)]
        self.own = everyones
        self.totals = [None if g[0] is None else torch.stack(g).sum(0) for g in zip(*everyones)]
        self.means = [None if total is None else total / self.size for total in self.totals]
        self.found, self.kept = zip(*self.results)
        have = [mean.nbytes for mean in self.means[::-1] if mean is not None]
        self.one_each, self.wanted = have, filled(have, limit)
        self.wanted_bytes = 2 * (self.size - 1) * sum(have)
        calls, ranks = self.run.ledger.comms, range(self.size)
        sizes = [[c.nbytes for c in calls if c.rank == rank and is_reduction(c)] for rank in ranks]
        self.sizes = next((each for each in sizes if each != self.wanted), self.wanted)
        top = {c.op for c in calls if c.parent is None or c.parent.op == "average_in_buckets"}
        halves = ("reduce", "broadcast", "all_gather", "average_in_buckets")
        self.beside = sorted(op for op in top if not any(half in op for half in halves))

    def right(self, found) -> bool:
        return same(found, self.means, LARGEST)

    def lines(self) -> list[Line]:
        lines = [on_ranks("right gradients on", map(self.right, self.found))]
        if self.size > 1:
            lines += [
                line("all-reduces", len(self.sizes), len(self.wanted)),
                line("bytes in each, in order", self.sizes, self.wanted),
                line("bytes sent by all ranks", self.sent, self.wanted_bytes),
            ]
        if self.beside:
            lines.append(line("beside them", ", ".join(self.beside), "nothing"))
        if not all(self.kept):
            lines.append(line("the weights", "others", "as they were"))
        return lines

    def mistake(self) -> str:
        return self.mistake_in_values() or self.mistake_in_sizes()

    def mistake_in_values(self) -> str:
        found, several = self.found, self.size > 1
        if not all(self.kept):
            return "You changed the weights, which are the optimizer's: gradients are averaged."
        if any(result[i] is not None for result in found for i in self.case.without):
            return "A parameter whose grad was None has one now. Frozen parameters are left alone."
        if wrong_dtype := mistake_of_dtype(self.run, self.case.dtype, self.wanted_bytes):
            return wrong_dtype
        if several and all(same(result, self.totals, LARGEST) for result in found):
            return "These are sums: divide by the number of ranks, or all_reduce with op='mean'."
        if several and all(same(mine, own, LARGEST) for mine, own in zip(found, self.own)):
            return (
                "Nothing happened to the gradients: the parts of the averaged bucket must go back "
                "into each parameter.grad, in its shape."
            )
        for result in found:
            for number, mean in enumerate(self.means):
                if not same([result[number]], [mean], LARGEST):
                    return (
                        f"Parameter number {number} (counted from 0), of shape "
                        f"{list(SHAPES[number])}, has a wrong gradient. Cut the bucket in the "
                        "order and sizes in which you filled it; the last bucket is sent as well, "
                        "full or not."
                    )
        return ""

    def mistake_in_sizes(self) -> str:
        sizes, wanted, limit = self.sizes, self.wanted, self.case.bucket_bytes
        if "barrier" in self.beside:
            return NO_BARRIER
        if self.beside:
            return (
                f"Besides the averages there is the backend's or library's {self.beside[0]}: to "
                "average each bucket once is enough."
            )
        if not sizes:
            return "There is no all-reduce in the ledger: average with all_reduce(flat, group)."
        if sizes == [each for each in wanted for _ in range(2)]:
            return "Each bucket is averaged twice: once is enough."
        if sizes == self.one_each:
            return (
                "An all-reduce for each parameter: that is the naive way. Join several, then send."
            )
        too_full = [size for size in sizes if size > limit and size not in self.one_each]
        numbers = [mean.numel() for mean in self.means[::-1] if mean is not None]
        if sizes == filled(self.one_each, limit, room=numbers):
            return "bucket_bytes counts bytes, p.grad.nbytes, not numbers."
        if too_full:
            return (
                f"A bucket of {max(too_full)} bytes is more than bucket_bytes={limit}. Only a "
                "single parameter that is larger may be: it has a bucket to itself."
            )
        if sizes in (wanted[::-1], filled(self.one_each[::-1], limit)):
            return (
                "The buckets begin with the first parameters. Backward makes the gradients of the "
                "last ones first: go through the parameters in reverse, so that a bucket is ready "
                "early."
            )
        if sizes == filled(self.one_each, limit, operator.ge):
            return (
                f"A bucket of exactly bucket_bytes={limit} is full, not too full: begin a new one "
                "where it would be larger, >, not >=."
            )
        nbytes = [0 if mean is None else mean.nbytes for mean in self.means]
        room = [p.nbytes for p in self.case.parameters(0)]
        if sizes == filled(nbytes[::-1], limit, room=room[::-1]):
            return "Parameters without a gradient take up no room: what is sent are gradients."
        if sizes == first_fit(self.one_each, limit):
            return (
                "A parameter went into an earlier bucket that had room. That bucket then waits "
                "for it, and cannot leave early: only the last bucket is open."
            )
        if len(sizes) > len(wanted):
            return (
                f"{len(sizes)} all-reduces where {len(wanted)} are enough: fill a bucket until the "
                "next parameter would not fit."
            )
        if sum(sizes) == sum(wanted):
            return (
                f"The buckets have {sizes} bytes, but should have {wanted}: go through the "
                "parameters in reverse, and close a bucket where the next one would make it too "
                "large."
            )
        return "More is sent than the gradients need: average each bucket once, which is enough."

    @staticmethod
    def raised(error: str) -> str:
        if "'NoneType' object" not in error:
            return ""
        return (
            "something is None: the grad of a parameter that is frozen, or that was not used and "
            "requires one all the same. Ask `p.grad is not None`.\n"
        )


def is_reduction(comm) -> bool:
    """Return whether a call is a reduction and not a part of another reduction."""
    itself, *outer = comm.within()
    return "reduce" in itself.op and not any("reduce" in each.op for each in outer)


# ---- overlap ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Overlap:
    """turned: in each bucket the gradient that is ready last comes first. crossing: odd ranks use
    the layers in reverse, so their last bucket is complete before their first."""

    turned: bool = False
    crossing: bool = False
    layers: int = 6
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        special = f" of {self.dtype}" * (self.dtype != torch.float64)
        special += ", another order inside the buckets" * self.turned
        special += ", gradients ready in another order on rank 1" * self.crossing
        return f"{self.layers} layers, two of which share a weight{special}"

    def model(self, rank: int) -> Layers:
        return Layers(self.layers, self.dtype, backwards=self.crossing and rank % 2 == 1)

    def buckets(self, model: Layers) -> list[list[nn.Parameter]]:
        weights = list(model.weights)
        buckets = make_buckets(weights, 2 * weights[0].nbytes)
        return [bucket[::-1] for bucket in buckets] if self.turned else buckets

    def hand_overs(self, rank: int) -> list[int]:
        """Return how many gradients are complete when each bucket can leave, in its turn."""
        model, complete = self.model(rank), []
        for weight in model.weights:
            weight.register_post_accumulate_grad_hook(lambda weight: complete.append(id(weight)))
        self.losses(model, rank)[1].backward()
        last = [max(complete.index(id(p)) + 1 for p in each) for each in self.buckets(model)]
        return [*accumulate(last, max)]

    def losses(self, model: Layers, rank: int) -> tuple[Tensor, Tensor]:
        """Return the losses of two micro-batches; the second one's backward is the learner's."""
        generator = torch.Generator().manual_seed(rank)
        first, last = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator).to(self.dtype)
        return model(first).sum(), model(last).sum()


class Layers(nn.Module):
    """Layers of one weight each; the first is used again after the third, as a tied weight is."""

    def __init__(self, layers: int, dtype: torch.dtype, backwards: bool):
        super().__init__()
        self.weights = nn.ParameterList(
            torch.linspace(0.5 + i / 10, 1, 4, dtype=dtype).view(2, 2) for i in range(layers)
        )
        self.backwards = backwards

    def forward(self, x):
        weights = list(self.weights)[:: -1 if self.backwards else 1]
        for number, weight in enumerate(weights):
            x = (x * weight.flatten()).tanh()
            if number == 2:
                x = x * weights[0].flatten()
        return x


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class SlowSender(ThreadPoolExecutor):
    """An executor that starts no work before backward is over, so a hook that waits for it blocks.

    It notes at each hand-over how many gradients were complete, and whether backward was running.
    """

    PATIENCE = 1.0  # seconds; after them, backward must be waiting
    TRAVEL = 0.005  # seconds per bucket

    def __init__(self, weights):
        super().__init__(max_workers=1)
        self.complete, self.seen, self.futures = 0, [], []
        self.over, self.waited_for = threading.Event(), False
        for weight in weights:
            weight.register_post_accumulate_grad_hook(self.gradient_is_complete)

    def gradient_is_complete(self, _) -> None:
        self.complete += 1
        torch.autograd.Variable._execution_engine.queue_callback(self.over.set)

    def submit(self, fn, /, *args, **kwargs):
        self.seen.append((self.complete, in_backward()))
        if not in_backward():
            self.over.set()
        self.futures.append(super().submit(self.later, fn, *args, **kwargs))
        return self.futures[-1]

    def later(self, fn, /, *args, **kwargs):
        if not self.over.wait(self.PATIENCE):
            self.waited_for = True
            self.over.set()
        time.sleep(self.TRAVEL)
        return fn(*args, **kwargs)


@dataclass(eq=False)
class Left:
    """What the learner's function left behind on a rank."""

    gradients: list[Tensor | None]
    seen: list[tuple[int, bool]]  # per hand-over: complete gradients, in backward or not
    waited_for: bool  # whether backward waited for a bucket
    under_way: int  # buckets still in flight
    hooks: int


def overlap_trial(fn, case: Overlap, group) -> Left:
    model = case.model(group.rank())
    first, last = case.losses(model, group.rank())
    first.backward()
    sender = SlowSender(model.weights)
    before = hooks_of(model.weights)
    fn(last, case.buckets(model), sender, group)
    under_way = sum(not future.done() for future in sender.futures)
    gradients = [None if w.grad is None else w.grad.clone() for w in model.weights]
    sender.shutdown()
    hooks = hooks_of(model.weights) - before
    return Left(gradients, sender.seen, sender.waited_for, under_way, hooks)


class Overlapping(Measured):
    def measure(self):
        self.local = []  # per rank: the gradients of both micro-batches
        for rank in range(self.size):
            model = self.case.model(rank)
            both = self.case.losses(model, rank)
            self.local.append([torch.autograd.grad(loss, list(model.weights)) for loss in both])
        self.firsts, self.lasts = (
            [sum(grads) / self.size for grads in zip(*(rank[which] for rank in self.local))]
            for which in (0, 1)
        )
        self.means = [first + last for first, last in zip(self.firsts, self.lasts)]
        model = self.case.model(0)
        wanted = [self.case.hand_overs(rank) for rank in range(self.size)]
        nbytes = sum(weight.nbytes for weight in model.weights)
        self.wanted_bytes = 2 * (self.size - 1) * nbytes
        self.found = [left.gradients for left in self.results]
        moments = [[count for count, during in left.seen if during] for left in self.results]
        rank = next((r for r in range(self.size) if moments[r] != wanted[r]), 0)
        self.seen, self.moments, self.wanted = self.results[rank].seen, moments[rank], wanted[rank]

    def same(self, found, expected) -> bool:
        return same(found, expected, 10.0)

    def right(self) -> list[bool]:
        return [self.same(found, self.means) for found in self.found]

    def lines(self) -> list[Line]:
        of = len(self.wanted)
        waited = sum(left.waited_for for left in self.results)
        lines = [
            on_ranks("right gradients on", self.right()),
            line(
                "handed over during backward",
                f"{len(self.moments)} of {of} buckets",
                f"{of} of {of} buckets",
            ),
            line("gradients complete at each hand-over", self.moments, self.wanted),
            line("ranks where backward waited for a bucket", waited, 0),
            line("buckets under way at the end", max(left.under_way for left in self.results), 0),
            line("bytes sent by all ranks", self.sent, self.wanted_bytes),
            line("hooks left behind", max(left.hooks for left in self.results), 0),
        ]
        if self.barriers:
            lines.append(line("barriers", self.barriers, 0))
        return lines

    def mistake(self) -> str:
        found, right = self.found, all(self.right())
        if self.case.crossing and not right:
            return (
                "The ranks average different buckets with each other: their gradients are ready in "
                "different orders. A bucket that is complete waits until all before it in the list "
                "have left."
            )
        if wrong_dtype := mistake_of_dtype(self.run, self.case.dtype, self.wanted_bytes):
            return wrong_dtype
        if self.size > 1 and not self.sent:
            return (
                "Nothing was handed to the sender, and nothing was averaged: no hook has found its "
                "bucket complete. One that is defined in a loop sees the loop's last bucket, "
                "unless it binds its own: def ready(p, number=number)."
            )
        if not right and any(left.under_way for left in self.results):
            return (
                "When your function returns, buckets are still in flight: keep what submit "
                "returns, and wait for each with .result() after backward."
            )
        if not right:
            return self.mistake_in_values(found)
        if not self.seen:
            return (
                "Nothing was handed to the sender: a call in the hook itself keeps backward "
                "waiting. sender.submit(mean, flat, group) returns at once; wait with .result() "
                "after backward."
            )
        if not self.moments:
            return (
                "All buckets leave after backward: nothing is hidden. Let a hook on each "
                "parameter, register_post_accumulate_grad_hook, hand over the bucket that it "
                "completes."
            )
        if any(left.waited_for for left in self.results):
            return (
                "A hook calls .result(), or waits in another way: backward stops until that "
                "bucket is averaged, and nothing is hidden. Keep what submit returns, and wait "
                "after loss.backward()."
            )
        if self.wanted != self.moments == sorted({*self.wanted}):
            return (
                "A bucket that was complete before its turn stays behind: after each bucket that "
                "leaves, look at the next one as well (while, not if)."
            )
        if len(self.seen) > len(set(self.seen)):
            return "Several buckets leave at once: hand over each as soon as it is complete."
        if max(left.hooks for left in self.results):
            return (
                "Your hooks are still there in the next backward: keep the handles, .remove() them."
            )
        if self.barriers:
            return NO_BARRIER
        if self.sent > self.wanted_bytes:
            return (
                f"Right, but {self.sent:,} bytes were sent where {self.wanted_bytes:,} do: average "
                "each bucket once."
            )
        return "Each bucket leaves once, as soon as its own last gradient is there."

    def mistake_in_values(self, found: list) -> str:
        totals = [mean * self.size for mean in self.means]
        if self.size > 1 and all(self.same(result, totals) for result in found):
            return "These are sums: hand over a function that averages, such as data_parallel.mean."
        either = [
            [
                first if self.same([grad], [first]) else mean
                for grad, first, mean in zip(result, self.firsts, self.means)
            ]
            for result in found
        ]
        if all(map(self.same, found, either)):  # some or all are the first micro-batch's
            return (
                "The last micro-batch is missing where a gradient came last in its bucket. Either "
                "the bucket left with the first of its gradients, not the last (a hook on each, "
                "and a count: which is the last, the bucket's order does not say); or your hook is "
                "on the parameter itself (register_hook), which runs before its gradient is added "
                "to .grad: register_post_accumulate_grad_hook runs after."
            )
        if all(self.same(result, self.lasts) for result in found):
            return (
                "Only the last micro-batch was reduced: the earlier ones' gradients are in .grad "
                "already, and the sum of all is what must leave. Send parameter.grad, in a "
                "post-accumulate hook."
            )
        mixed = [[mine + last for mine, last in zip(rank[0], self.lasts)] for rank in self.local]
        if self.size > 1 and all(map(self.same, found, mixed)):
            return (
                "Only the last micro-batch was averaged; the earlier ones stay each rank's own, "
                "and the ranks drift apart. Send parameter.grad, which holds the sum of all."
            )
        return (
            "Wrong gradients. A bucket may leave when the last of its parameters has its gradient, "
            "not the first; and its mean goes back into .grad, part by part."
        )

    @staticmethod
    def raised(error: str) -> str:
        if "KeyError" not in error and "IndexError" not in error:
            return ""
        return (
            "a bucket was never handed over, or counted where it is not. A hook that is defined in "
            "a loop sees the loop's variables as they are when it runs, the last ones, unless it "
            "binds its own: def ready(p, number=number).\n"
        )


EVERY = frozenset(range(len(SHAPES)))

EXERCISES = [
    Exercise(
        "average_in_buckets",
        average_in_buckets,
        bucket_trial,
        [
            (3, Buckets(1300)),
            (3, Buckets(195)),  # one byte less than the last two need
            (1, Buckets(1 << 20)),
            (4, Buckets(1724)),  # a later bucket fits to the byte
            (2, Buckets(392, torch.float64)),  # the first bucket fits to the byte
            (2, Buckets(861, torch.bfloat16)),  # one byte less than a later bucket needs
            (1, Buckets(1300, without=EVERY)),
            (2, Buckets(20, without=frozenset({0, FROZEN}))),  # the last parameter is larger
            (2, Buckets(1000, torch.float64, frozenset())),
        ],
        Bucketing,
        refuses=REFUSED,
        changes=("parameters",),
        hints=[
            "Go through reversed(parameters), those with a grad. Keep a list; before you add one "
            "that would make it larger than bucket_bytes (p.grad.nbytes counts), send the list, if "
            "it is not empty.",
            "To send a list: unflatten(mean(flatten(bucket), group), bucket). The last list is "
            "sent after the loop.",
        ],
        skeleton="""\
def average_in_buckets(parameters, bucket_bytes, group):
    def send(bucket):
        unflatten(mean(..., group), bucket)

    bucket, held = [], 0
    for p in reversed(...):              # those with a grad
        if bucket and held + p.grad.nbytes > bucket_bytes:
            send(bucket)
            bucket, held = [], 0
        ...
    if bucket:
        send(bucket)""",
    ),
    Exercise(
        "overlapped_backward",
        overlapped_backward,
        overlap_trial,
        [
            (2, Overlap()),
            (2, Overlap(turned=True)),
            (2, Overlap(crossing=True)),
            (3, Overlap(layers=5, dtype=torch.float32)),
            (1, Overlap()),
        ],
        Overlapping,
        refuses=REFUSED,
        changes=("buckets",),
        again=False,
        hints=[
            "p.register_post_accumulate_grad_hook(fn) calls fn(p) when p.grad is complete. Count "
            "for each bucket how many are missing; at zero it may leave, if all before it have "
            "left: sender.submit(mean, flatten(bucket), group).",
            "Keep what submit returns in a list: its length is the number of the bucket that is "
            "next. After loss.backward(): for each bucket, flat = kept.result(), then "
            "unflatten(flat, bucket). Remove the hooks at the end.",
        ],
        skeleton="""\
def overlapped_backward(loss, buckets, sender, group):
    missing, leaving, hooks = [len(bucket) for bucket in buckets], [], []
    for number, bucket in enumerate(buckets):
        def ready(p, number=number):
            missing[number] -= 1
            while len(leaving) < len(buckets) and ...:       # the next one is complete
                leaving.append(sender.submit(mean, flatten(...), group))
        hooks += [p.register_post_accumulate_grad_hook(ready) for p in bucket]
    loss.backward()
    ...                                  # wait for each bucket, put its parts back
    for hook in hooks:
        hook.remove()""",
    ),
]
