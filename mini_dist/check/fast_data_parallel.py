"""Exercises of lesson 05: gradients in buckets, and buckets that leave during backward.

Right values are not enough: a bucket a parameter is no bucketing, and an all-reduce that backward
waits for hides nothing. So calls, their sizes and the moment of handing over are judged, too.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import nn

from ..data_parallel import average_in_buckets, make_buckets, overlapped_backward
from .exercise import Exercise, Line, Trial, ranks

ALL_REDUCES = frozenset(
    {"all_reduce", "mean", "ring_reduce_scatter", "ring_all_gather"}
    | {f"{way}_all_reduce" for way in ("star", "stars", "tree", "ring", "pipelined_ring")}
    | {"doubling_all_reduce", "halving_doubling_all_reduce"}
    | {"star_reduce", "star_broadcast", "tree_reduce", "tree_broadcast"}
    | {"recursive_halving_reduce_scatter", "recursive_doubling_all_gather"}
)


def reductions(run, rank: int) -> list:
    """The all-reduces that a rank asked for, ours or the backend's, in order."""
    top = [comm for comm in run.ledger.comms if comm.rank == rank and "all_reduce" in comm.op]
    return [comm for comm in top if comm.parent is None or "all_reduce" not in comm.parent.op]


def same(found, expected) -> bool:
    return len(found) == len(expected) and all(
        a is None
        if b is None
        else isinstance(a, torch.Tensor) and a.shape == b.shape and torch.allclose(a, b)
        for a, b in zip(found, expected)
    )


def line(what: str, measured, expected) -> Line:
    return Line(what, measured, expected, measured == expected)


# ---- buckets ------------------------------------------------------------------------------------

FROZEN = 2
SHAPES = [(30, 10), (10,), (5,), (), (8, 5, 3), (200, 10), (6, 7), (7,)]


@dataclass(frozen=True)
class Buckets:
    bucket_bytes: int

    def __str__(self) -> str:
        return f"8 parameters, one of them frozen, and bucket_bytes={self.bucket_bytes}"


def gradients(rank: int) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(rank)
    made = [torch.randint(-400, 400, shape, generator=generator) / 4 for shape in SHAPES]
    return [None if number == FROZEN else grad for number, grad in enumerate(made)]


def parameters_with(grads):
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for parameter, grad in zip(parameters, grads):
        parameter.grad = grad
    return parameters


def bucket_trial(fn, case: Buckets, group):
    parameters = parameters_with(gradients(group.rank()))
    fn(parameters, case.bucket_bytes, group)
    return [parameter.grad for parameter in parameters]


def judge_buckets(trials: list[Trial]) -> tuple[list[Line], str]:
    lines: list[Line] = []
    for number, one in enumerate(trials):
        found, hint = judge_one_bucketing(one)
        lines += [each for each in found if number == 0 or not each.ok]
        if hint:
            case = f"With {ranks(one.run.world_size)}, {one.case}: " * (number > 0)
            return lines, case + hint
    return lines, ""


def judge_one_bucketing(one: Trial) -> tuple[list[Line], str]:
    run, size, limit = one.run, one.run.world_size, one.case.bucket_bytes
    everyones = [gradients(rank) for rank in range(size)]
    totals = [None if grads[0] is None else torch.stack(grads).sum(0) for grads in zip(*everyones)]
    means = [None if total is None else total / size for total in totals]
    right = sum(same(result, means) for result in run.results)
    have = [p for p in parameters_with(everyones[0]) if p.grad is not None]
    wanted = [sum(p.nbytes for p in bucket) for bucket in make_buckets(have, limit)]
    sizes = [comm.nbytes for comm in reductions(run, 0)]
    total = 2 * (size - 1) * sum(p.nbytes for p in have)
    lines = [
        line("right gradients on", f"{right} of {size} ranks", f"{size} of {size} ranks"),
        line("all-reduces", len(sizes), len(wanted)),
        line("bytes in each, in order", sizes, wanted),
        line("bytes sent by all ranks", run.ledger.total_bytes(), total),
    ]
    if all(each.ok for each in lines):
        return lines, ""
    return lines, bucketing_mistake(run.results, everyones, totals, means, sizes, wanted, limit)


def bucketing_mistake(results, everyones, totals, means, sizes, wanted, limit) -> str:
    if any(result[FROZEN] is not None for result in results):
        return "A parameter whose grad was None has one now. Frozen parameters are left alone."
    if len(results) > 1 and all(same(result, totals) for result in results):
        return "These are sums: divide by the number of ranks, or all_reduce with op='mean'."
    if len(results) > 1 and all(same(result, own) for result, own in zip(results, everyones)):
        return (
            "Nothing happened to the gradients: the parts of the averaged bucket must go back into "
            "each parameter.grad, in its shape."
        )
    if not all(same(result, means) for result in results):
        wrong = next(i for i, mean in enumerate(means) if not same([results[0][i]], [mean]))
        return (
            f"Parameter number {wrong} (counted from 0), of shape {list(SHAPES[wrong])}, has a "
            "wrong gradient. Cut the bucket in the order and sizes in which you filled it; the "
            "last bucket is sent, too, full or not."
        )
    if not sizes:
        return "There is no all-reduce in the ledger: average with all_reduce(flat, group)."
    if len(sizes) == len(everyones[0]) - 1 and len(wanted) < len(sizes):
        return "An all-reduce for each parameter: that is the naive way. Join several, then send."
    if max(sizes) > max(limit, *wanted):
        return (
            f"A bucket of {max(sizes)} bytes is more than bucket_bytes={limit}. Only a single "
            "parameter that is larger may be: it has a bucket to itself."
        )
    if sizes == wanted[::-1] or (sum(sizes) == sum(wanted) and sizes[0] != wanted[0]):
        return (
            "The buckets begin with the first parameters. Backward makes the gradients of the last "
            "ones first: go through the parameters in reverse, so that a bucket is ready early."
        )
    if len(sizes) > len(wanted):
        return (
            f"{len(sizes)} all-reduces where {len(wanted)} are enough: fill a bucket until the "
            "next parameter would not fit."
        )
    if sum(sizes) == sum(wanted):
        return (
            "Buckets are filled beyond bucket_bytes, or closed too early: bucket_bytes counts "
            "bytes, p.grad.nbytes, not numbers."
        )
    return "More is sent than the gradients need: average each bucket once."


# ---- overlap ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Overlap:
    """turned: in each bucket the gradient that is ready last comes first. crossing: odd ranks use
    the layers the other way round, so that their last bucket is complete before their first."""

    turned: bool = False
    crossing: bool = False
    layers: int = 6

    def __str__(self) -> str:
        special = ", another order inside the buckets" * self.turned
        special += ", gradients ready in another order on rank 1" * self.crossing
        return f"{self.layers} layers, two of which share a weight{special}"

    def model(self, rank: int) -> Layers:
        return Layers(self.layers, backwards=self.crossing and rank % 2 == 1)

    def buckets(self, model: Layers) -> list[list[nn.Parameter]]:
        buckets = make_buckets(list(model.weights), 2 * 4 * 8)  # two weights each
        return [bucket[::-1] for bucket in buckets] if self.turned else buckets


class Layers(nn.Module):
    """Layers of one weight each; the first is used again after the third, as a tied weight is."""

    def __init__(self, layers: int, backwards: bool = False):
        super().__init__()
        self.weights = nn.ParameterList(
            torch.linspace(0.5 + i / 10, 1, 4, dtype=torch.float64) for i in range(layers)
        )
        self.backwards = backwards

    def forward(self, x):
        weights = list(self.weights)[:: -1 if self.backwards else 1]
        for number, weight in enumerate(weights):
            x = (x * weight).tanh()
            if number == 2:
                x = x * weights[0]
        return x


def losses(model, rank: int):
    """A micro-batch whose gradients are there already, and one whose backward is the learner's."""
    generator = torch.Generator().manual_seed(rank)
    first, last = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)
    return model(first).sum(), model(last).sum()


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class CountingSender(ThreadPoolExecutor):
    """Notes, at each hand-over, how many gradients were complete, and whether backward ran; and
    how often backward was made to wait for a bucket."""

    def __init__(self, complete: list):
        super().__init__(max_workers=1)
        self.complete, self.seen, self.waits = complete, [], 0

    def submit(self, fn, /, *args, **kwargs):
        self.seen.append((len(self.complete), in_backward()))
        future = super().submit(fn, *args, **kwargs)
        wait = future.result

        def result(timeout=None):
            self.waits += in_backward()
            return wait(timeout)

        future.result = result
        return future


def hooks_of(parameters) -> int:
    """Those of either kind that are registered now."""
    return sum(
        len(hooks or ())
        for p in parameters
        for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)
    )


def overlap_trial(fn, case: Overlap, group):
    model = case.model(group.rank())
    first, last = losses(model, group.rank())
    first.backward()
    complete: list = []
    for weight in model.weights:
        weight.register_post_accumulate_grad_hook(complete.append)
    sender, before = CountingSender(complete), hooks_of(model.weights)
    fn(last, case.buckets(model), sender, group)
    sender.shutdown()
    left_behind = hooks_of(model.weights) - before
    return [w.grad.clone() for w in model.weights], sender.seen, sender.waits, left_behind


def judge_overlap(trials: list[Trial]) -> tuple[list[Line], str]:
    lines: list[Line] = []
    for number, one in enumerate(trials):
        found, hint = judge_one_overlap(one)
        lines += [each for each in found if number == 0 or not each.ok]
        if hint:
            case = f"With {ranks(one.run.world_size)} and {one.case}: " * (number > 0)
            return lines, case + hint
    return lines, ""


def judge_one_overlap(one: Trial) -> tuple[list[Line], str]:
    run, size, layers = one.run, one.run.world_size, one.case.layers
    local: list[list] = []  # of each rank: the gradients of both micro-batches
    for rank in range(size):
        model = one.case.model(rank)
        both = losses(model, rank)
        local.append([torch.autograd.grad(loss, list(model.weights)) for loss in both])
    totals = [sum(first) + sum(last) for first, last in zip(*map(zip_all, zip(*local)))]
    means = [total / size for total in totals]
    grads, seen, waits, left_behind = zip(*run.results)
    right = sum(same(result, means) for result in grads)
    moments = [complete for complete, during in seen[0] if during]
    wanted = list(range(2, layers + 1, 2))  # two weights a bucket
    lines = [
        line("right gradients on", f"{right} of {size} ranks", f"{size} of {size} ranks"),
        line(
            "handed over during backward",
            f"{len(moments)} of {len(wanted)} buckets",
            f"{len(wanted)} of {len(wanted)} buckets",
        ),
        line("gradients complete at each hand-over", moments, wanted),
        line("times backward waited for a bucket", max(waits), 0),
        line("hooks left behind", max(left_behind), 0),
    ]
    if all(each.ok for each in lines):
        return lines, ""
    if one.case.crossing and right < size:
        return lines, (
            "The ranks average different buckets with each other: their gradients get ready in "
            "different orders. A bucket that is complete waits until all before it in the list "
            "have left."
        )
    return lines, overlap_mistake(
        size, local, totals, means, grads, seen[0], moments, max(waits), max(left_behind)
    )


def zip_all(per_rank):
    return list(zip(*per_rank))


def overlap_mistake(size, local, totals, means, grads, seen, moments, waits, left_behind) -> str:
    firsts, lasts = (
        [sum(grads) / size for grads in zip_all(rank[which] for rank in local)] for which in (0, 1)
    )
    if size > 1 and all(same(result, totals) for result in grads):
        return "These are sums: hand over a function that averages, such as data_parallel.mean."
    either = [
        [first if same([grad], [first]) else mean for grad, first, mean in zip(*three)]
        for three in ((result, firsts, means) for result in grads)
    ]
    wrong = not all(same(result, means) for result in grads)
    if wrong and all(map(same, grads, either)):  # the last of each bucket, or all of them
        return (
            "The last micro-batch is missing where a gradient came last in its bucket. Either the "
            "bucket left with the first of its gradients, not the last (a hook on each, and a "
            "count: which is the last, the bucket's order does not say); or your hook is on the "
            "parameter itself (register_hook), which runs before its gradient is added to .grad: "
            "register_post_accumulate_grad_hook runs after."
        )
    if all(same(result, lasts) for result in grads):
        return (
            "Only the last micro-batch was reduced: the earlier ones' gradients are in .grad "
            "already, and the sum of all is what must leave. Send parameter.grad, in a "
            "post-accumulate hook."
        )
    mixed = [[mine + last for mine, last in zip(rank[0], lasts)] for rank in local]
    if size > 1 and all(same(result, own) for result, own in zip(grads, mixed)):
        return (
            "Only the last micro-batch was averaged; the earlier ones stay each rank's own, and "
            "the ranks drift apart. Send parameter.grad, which holds the sum of all."
        )
    if not all(same(result, means) for result in grads):
        return (
            "Wrong gradients. A bucket may leave when the last of its parameters has its gradient, "
            "not the first; and its mean goes back into .grad, part by part."
        )
    if not seen:
        return (
            "Nothing was handed to the sender: a call in the hook itself keeps backward waiting. "
            "sender.submit(mean, flat, group) returns at once; wait with .result() after backward."
        )
    if not moments:
        return (
            "All buckets leave after backward: nothing is hidden. Let a hook on each parameter, "
            "register_post_accumulate_grad_hook, hand over the bucket that it completes."
        )
    if len(moments) > len(seen) or len(seen) > len(set(seen)):
        return "Several buckets leave at once: hand over each as soon as it is complete."
    if waits:
        return (
            "A hook calls .result(): backward stands still until that bucket is averaged, and "
            "nothing is hidden. Keep what submit returns, and wait after loss.backward()."
        )
    if left_behind:
        return "Your hooks are still there in the next backward: keep the handles, .remove() them."
    return "Each bucket leaves once, as soon as its own last gradient is there."


EXERCISES = [
    Exercise(
        "average_in_buckets",
        average_in_buckets,
        bucket_trial,
        [(3, Buckets(1300)), (3, Buckets(1)), (1, Buckets(1 << 20)), (4, Buckets(1 << 20))],
        judge_buckets,
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
        parts=ALL_REDUCES,
    ),
    Exercise(
        "overlapped_backward",
        overlapped_backward,
        overlap_trial,
        [
            (2, Overlap()),
            (2, Overlap(turned=True)),
            (2, Overlap(crossing=True)),
            (3, Overlap()),
            (1, Overlap()),
        ],
        judge_overlap,
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
        parts=ALL_REDUCES,
    ),
]
