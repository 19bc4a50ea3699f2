"""What every right answer has to bear: the same case once more, made harder in one way.

The result must be what it was. Each adversity wraps the learner's function, so the exercise's own
trial calls it as ever; what one finds by itself it tells by raising `Complaint`.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, is_dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes  # (torch has no public one)

from mini_dist.ranks.launch import RankError, Run, launch


class Complaint(Exception):
    """What an adversity has seen on a rank, in the words of a hint."""


@dataclass
class Facts:
    """What the engine knows of an exercise: `signature` of the library's function; `changes`: names
    of arguments that it is there to change; `again`: a second call gives the same; `contiguous`:
    names of arguments that never come in another way."""

    signature: inspect.Signature
    changes: frozenset[str] = frozenset()
    again: bool = True
    contiguous: frozenset[str] = frozenset()

    @property
    def gives_a_group(self) -> bool:
        return "group" in self.signature.parameters

    @property
    def gives_tensors(self) -> bool:
        """It may: a parameter is not annotated, or as one that may be or hold tensors."""
        kinds = {str(p.annotation) for p in self.signature.parameters.values()}
        return bool(kinds - {"int", "Schedule"})


@dataclass
class Wrapped:
    """The learner's function, called in another way."""

    fn: Callable
    facts: Facts

    def named(self, args: tuple, kwargs: dict) -> dict[str, object]:
        """The arguments by the names that the library's function has for them."""
        names = list(self.facts.signature.parameters)
        return {**dict(zip(names, args)), **kwargs}


class Late(Wrapped):
    """The last rank comes when the others have been waiting for it, and what the first one sends
    takes its time."""

    SECONDS, A_MESSAGE = 0.02, 0.002

    def __call__(self, *args, **kwargs):
        group = self.named(args, kwargs).get("group")
        if group is not None and group.rank() == group.size() - 1:
            time.sleep(self.SECONDS)
        if group is None or group.rank() > 0:
            return self.fn(*args, **kwargs)
        send = group.send

        def slowly(*message):
            time.sleep(self.A_MESSAGE)
            return send(*message)

        group.send = slowly
        try:
            return self.fn(*args, **kwargs)
        finally:
            del group.send


class Once(Wrapped):
    """An argument that may be any Iterable is one that can be gone through only once."""

    HINT = (
        "Right with a list of {names}. Any Iterable may come, as model.parameters() is one: it can "
        "be gone through once. Begin with {name} = list({name})."
    )

    @staticmethod
    def concerns(facts: Facts) -> list[str]:
        parameters = facts.signature.parameters.values()
        return [p.name for p in parameters if str(p.annotation).startswith("Iterable")]

    def __call__(self, *args, **kwargs):
        names = self.named(args, kwargs)
        once = {name: iter(names[name]) for name in self.concerns(self.facts)}
        args = [once.get(name, value) for name, value in zip(names, args)]
        return self.fn(*args, **{name: once.get(name, kwargs[name]) for name in kwargs})


def unseen(function: Callable) -> Callable:
    """What it makes is none of the learner's, where a trial notes what is made."""

    @functools.wraps(function)
    def call(*args):
        with _disable_current_modes():
            return function(*args)

    return call


class Strided(Wrapped):
    """Tensors whose elements do not lie side by side in memory."""

    HINT = (
        "Right with tensors that are contiguous, not with others: a part of a larger tensor or a "
        "transposed one may come. .reshape and .flatten() take them, .view does not; what is sent "
        "has to be .contiguous()."
    )

    def __call__(self, *args, **kwargs):
        given = self.named(args, kwargs)
        loose = {n: v if n in self.facts.contiguous else strided(v) for n, v in given.items()}
        args = [loose[name] for name, _ in zip(given, args)]
        return self.fn(*args, **{name: loose[name] for name in kwargs})


@unseen
def strided(value):
    """The same numbers in another order in memory, or with gaps; only of plain tensors, also in a
    named tuple, not of weights or what has a graph behind it."""
    if hasattr(value, "_fields"):
        return type(value)(*map(strided, value))
    if not isinstance(value, Tensor) or value.requires_grad or value.dim() == 0:
        return value
    if value.dim() == 1:
        return torch.stack([value, value], -1)[..., 0]
    return value.transpose(0, -1).contiguous().transpose(0, -1)


class Careful(Wrapped):
    """Looks at what was given before and after, at what is still under way, and calls twice."""

    def __call__(self, *args, **kwargs):
        given = self.named(args, kwargs)
        before = {name: photograph(value) for name, value in given.items()}
        result = self.fn(*args, **kwargs)
        for name, photo in before.items():
            if name not in self.facts.changes and not photo.is_of(given[name]):
                raise Complaint(
                    f"Your function changes {name}: the caller still needs it as it was."
                )
        nothing_under_way(given.get("group"))
        if not self.facts.again:
            return result
        again = self.fn(*args, **kwargs)
        shared = storages(result) & storages(again) - storages(list(given.values()))
        if shared and not self.facts.changes:
            raise Complaint(
                "The second call writes where the result of the first one is, which its caller may "
                "still need: return new tensors each time."
            )
        return again

    HINT = (
        "The first call is right, a second one is not: something of the first is left over, such "
        "as hooks, a list that grows, or a tensor that was changed."
    )


def nothing_under_way(group) -> None:
    """Raise Complaint if anything that was begun has not been waited for."""
    recorder = getattr(group, "recorder", None)
    open_ = [row for row in (recorder.comms if recorder else []) if row[6] is None]
    if open_:
        raise Complaint(
            f"When your function returns, a {open_[0][0]} of it is still under way: keep what "
            "starting it returns, and .wait() for it."
        )


@dataclass
class Photograph:
    """The numbers of an argument's tensors, those of their gradients, and the number of hooks."""

    tensors: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    hooks: int = 0

    def is_of(self, value) -> bool:
        now = photograph(value)
        pairs = zip(self.tensors + self.gradients, now.tensors + now.gradients)
        return (len(now.tensors), now.hooks) == (len(self.tensors), self.hooks) and all(
            (a is None) == (b is None) and (a is None or a.dtype == b.dtype and equal(a, b))
            for a, b in pairs
        )


@unseen
def photograph(value) -> Photograph:
    photo = Photograph()
    for tensor in tensors_in(value):
        photo.tensors.append(tensor.detach().clone())
        grad = tensor.grad if tensor.is_leaf and tensor.requires_grad else None
        there = grad is not None and grad.untyped_storage().nbytes() > 0  # or its memory was freed
        photo.gradients.append(grad.clone() if there else None)
        photo.hooks += hooks_of([tensor])
    return photo


def hooks_of(tensors: Iterable[Tensor]) -> int:
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return sum(len(getattr(tensor, kind, None) or ()) for tensor in tensors for kind in kinds)


def storages(value) -> set[int]:
    """Where the numbers of its tensors are."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_in(value) if tensor.numel()}


def equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def tensors_in(value) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


# --- a part of a larger world -------------------------------------------------------------------

PART = (
    "Right as long as the group is the whole job. Here it was ranks 1 to {n} of {more}, which are "
    "0 to {last} in the group: send to ranks of the group that you were given, and ask it for "
    "group.rank() and group.size(), not torch.distributed."
)


LATE = (
    "Right when all ranks come together. Here the last one came later, and the messages of the "
    "first took their time: what is returned must not depend on who is first. Say from whom you "
    "receive, and wait for what you use."
)


def in_a_part(trial: Callable, fn: Callable, case, world):
    """On each rank of a world: the trial in a group of all ranks but the first, where a rank's
    number is another one than in the job. Who speaks to the whole job waits for one that knows
    nothing of it."""
    import torch.distributed as dist

    from mini_dist.ranks.rank import seed_everything

    if world.rank() == 0:
        return None
    members = list(range(1, world.size()))
    group = dist.new_group(members, use_local_synchronization=True)
    seed_everything(group.rank())  # as `launch` does for the ranks of a world
    return trial(fn, case, group)


def twice(trial: Callable, fn: Callable, case, group):
    """The second of two trials in one process."""
    trial(fn, case, group)
    return trial(fn, case, group)


# --- messages from any source -------------------------------------------------------------------

ANYONE = (
    "You receive from any source, and more than one rank sends to you: now and then another one's "
    "message is the first. Say from whom: recv(like, source, group)."
)


class Shuffled(Wrapped):
    """What may come from any source comes from the ranks of `sources`, one after the other."""

    def __init__(self, fn: Callable, facts: Facts, sources: dict[int, list[int]]):
        super().__init__(fn, facts)
        self.sources = sources

    def __call__(self, *args, **kwargs):
        group = self.named(args, kwargs)["group"]
        if group.rank() not in self.sources:
            return self.fn(*args, **kwargs)
        sources = self.sources[group.rank()]
        group.recv_anysource = lambda tensors, tag: group.recv(tensors, sources.pop(0), tag)
        try:
            return self.fn(*args, **kwargs)
        finally:
            del group.recv_anysource


def orders(run: Run) -> list[dict[int, list[int]]]:
    """Two orders in which messages could have come, low ranks first and high ranks first: of each
    rank that received from any source where several send, the senders. None if there is none."""
    leaves, low, high = list(run.ledger.leaves()), {}, {}
    for rank in {comm.rank for comm in leaves if comm.op == "recv_anysource"}:
        sent = Counter(comm.rank for comm in leaves if comm.op == "send" and rank in comm.sent_to)
        for comm in leaves:
            if comm.op == "recv" and comm.rank == rank:
                sent.subtract(comm.received_from.keys())
        if len(+sent) > 1:  # of each sender the first message, then of each the second, ...
            messages = [(k, sender) for sender, count in sent.items() for k in range(count)]
            low[rank] = [sender for _, sender in sorted(messages)]
            high[rank] = [-sender for _, sender in sorted((k, -sender) for k, sender in messages)]
    return [low, high] if low else []


def depends_on_luck(trial: Callable, fn: Callable, case, run: Run, facts: Facts) -> bool:
    """Whether another result comes if the messages come in another order. (Where a run does not
    end in that order, it could not have come about.)"""
    for sources in orders(run):
        try:
            args = (Shuffled(fn, facts, sources), case)
            results = once_started(trial, len(run.results), args).results
        except RankError:
            continue
        if not same(results, run.results):
            return True
    return False


# --- all of them --------------------------------------------------------------------------------


def mistake_in(trial: Callable, fn: Callable, case, run: Run, facts: Facts) -> str:
    """The hint of the first adversity that changes what came of a case that was right; else ""."""
    size = len(run.results)
    if size > 1 and facts.gives_a_group:
        if depends_on_luck(trial, fn, case, run, facts):
            return ANYONE
        late, hint = Late(fn, facts), PART.format(n=size, more=size + 1, last=size - 1)
        if found := harder(hint, in_a_part, size + 1, (trial, late, case), run, 1):
            return harder(LATE, trial, size, (late, case), run) or found
    once = Once.concerns(facts)
    if once:
        hint = Once.HINT.format(names=" and ".join(once), name=once[0])
        if found := harder(hint, trial, size, (Once(fn, facts), case), run):
            return found
    if facts.gives_tensors:
        if found := harder(Strided.HINT, trial, size, (Strided(fn, facts), case), run):
            return found
    return harder(Careful.HINT, twice, size, (trial, Careful(fn, facts), case), run)


def harder(hint: str, function: Callable, size: int, args: tuple, run: Run, others: int = 0) -> str:
    """Run it; the hint if what comes of it, but for the first `others` ranks, is not what `run` has
    given."""
    try:
        results = once_started(function, size, args).results[others:]
    except RankError as error:
        return told(error) or f"{hint}\n{error}"
    return "" if same(results, run.results) else hint


SECONDS = 10  # until a run that does not end, and is no deadlock that one could name, is given up


def once_started(function: Callable, size: int, args: tuple) -> Run:
    """Launch it; with more time where torch or a module was still being loaded, as on a laptop that
    is busy: that is nobody's mistake."""
    try:
        return launch(function, size, args, timeout=SECONDS, quiet=True)
    except RankError as error:
        if not any(sign in str(error) for sign in ("No rank has started", "<frozen importlib")):
            raise
    return launch(function, size, args, timeout=6 * SECONDS, quiet=True)


def told(error: RankError) -> str:
    """What a rank has complained of, if that is why the run has failed."""
    complaints = [f.message for f in error.failures.values() if f.type == "Complaint"]
    return complaints[0] if complaints else ""


def same(a, b) -> bool:
    """Whether two results say the same, up to rounding. Two types are two results, save that an
    int may be a float: a list is no tuple here, as both came from one and the same trial."""
    if a is None:
        return b is None
    if isinstance(a, float) or isinstance(b, float):
        both = isinstance(a, (int, float)) and isinstance(b, (int, float))
        return both and (abs(a - b) <= 1e-4 * max(1.0, abs(b)) or a != a != b)
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        return torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a) if f.compare)
    if type(a).__eq__ is object.__eq__:  # it has no idea of equality of its own
        return same(vars(a), vars(b))
    return a == b
