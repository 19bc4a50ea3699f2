"""The ways in which a tour calls the learner's function (adversities.py), each harder than usual.

A way that sees a mistake by itself raises `Complaint`, in the words of a hint.
"""

from __future__ import annotations

import functools
import gc
import inspect
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes  # (torch has no public one)


class Complaint(Exception):
    """A mistake that a way has seen on a rank, in the words of a hint."""


@dataclass
class Facts:
    """What the engine knows about an exercise. solution: the library's function. changes: names of
    arguments that it is meant to change. again: a second call gives the same result. contiguous:
    names of arguments that are always contiguous. scales: any numbers may be given. one_dtype: a
    peer of the trial expects float32."""

    solution: Callable
    changes: frozenset[str] = frozenset()
    again: bool = True
    contiguous: frozenset[str] = frozenset()
    scales: bool = True
    one_dtype: bool = False

    @property
    def parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.solution).parameters.values())

    @property
    def gives_tensors(self) -> bool:
        """Whether a parameter has no annotation, or one that allows tensors."""
        return bool({str(p.annotation) for p in self.parameters} - {"int", "Schedule"})


@dataclass
class Wrapped:
    """The learner's function, called in another way."""

    fn: Callable
    facts: Facts

    def named(self, args: tuple, kwargs: dict) -> dict[str, object]:
        """Return the arguments by their names in the library's function."""
        return {**dict(zip((p.name for p in self.facts.parameters), args)), **kwargs}

    def with_others(self, args: tuple, kwargs: dict, other: Callable):
        """Call the function with `other(name, value)` for each argument."""
        named = {name: other(name, value) for name, value in self.named(args, kwargs).items()}
        first = [named[name] for name, _ in zip(self.named(args, {}), args)]
        return self.fn(*first, **{name: named[name] for name in kwargs})


def groups_in(args: tuple, kwargs: dict) -> list:
    return [v for v in (*args, *kwargs.values()) if isinstance(v, dist.ProcessGroup)]


class Late(Wrapped):
    """The last rank arrives after the others have waited for it, and the messages of the first are
    slow."""

    SECONDS, A_MESSAGE = 0.02, 0.002

    def __call__(self, *args, **kwargs):
        groups = groups_in(args, kwargs)
        if any(0 < group.rank() == group.size() - 1 for group in groups):
            time.sleep(self.SECONDS)
        slow = [group for group in groups if group.rank() == 0]
        for group in slow:
            group.send = functools.partial(self.slowly, group.send)
        try:
            return self.fn(*args, **kwargs)
        finally:
            for group in slow:
                del group.send

    def slowly(self, send: Callable, *message):
        time.sleep(self.A_MESSAGE)
        return send(*message)


class Once(Wrapped):
    """An argument that may be any Iterable can be iterated only once."""

    HINT = (
        "Right with a list of {names}. Any Iterable may come, as model.parameters() is one: it can "
        "be gone through once. Begin with {name} = list({name})."
    )

    @staticmethod
    def concerns(facts: Facts) -> list[str]:
        return [p.name for p in facts.parameters if str(p.annotation).startswith("Iterable")]

    def __call__(self, *args, **kwargs):
        concerned = self.concerns(self.facts)
        return self.with_others(
            args, kwargs, lambda name, value: iter(value) if name in concerned else value
        )


class LeavesLists(Wrapped):
    """The caller's lists have to hold the same things afterwards."""

    def __call__(self, *args, **kwargs):
        given = self.named(args, kwargs)
        before = {name: contents(value) for name, value in given.items()}
        result = self.fn(*args, **kwargs)
        for name, value in given.items():
            if contents(value) != before[name]:
                raise Complaint(CHANGES.format(name=name))
        return result


def contents(value) -> object:
    """Return the ids of what is in a list, and in the lists in it."""
    return [*map(contents, value)] if isinstance(value, list) else id(value)


CHANGES = "Your function changes {name}: the caller still needs it as it was."


class Between(Wrapped):
    """Call the function again before backward, in a group of this rank alone. (Not if it is given a
    module, which may count its calls.)"""

    def __call__(self, *args, **kwargs):
        result, has_group = self.fn(*args, **kwargs), bool(groups_in(args, kwargs))
        has_module = any(isinstance(v, nn.Module) for v in (*args, *kwargs.values()))
        if has_group > has_module and any(tensor.grad_fn for tensor in tensors_in(result)):
            alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            with suppress(Exception):  # sizes need not fit one rank
                self.with_others(
                    args, kwargs, lambda _, v: alone if isinstance(v, dist.ProcessGroup) else v
                )
        return result


def unseen(function: Callable) -> Callable:
    """Make a function whose tensors do not count as the learner's in a trial that notes tensors."""

    @functools.wraps(function)
    def call(*args):
        with _disable_current_modes():
            return function(*args)

    return call


class Strided(Wrapped):
    """Tensors whose elements are not contiguous in memory."""

    HINT = (
        "Right with tensors that are contiguous, not with others: a part of a larger tensor or a "
        "transposed one may come. .reshape and .flatten() take them, .view does not; what is sent "
        "has to be .contiguous()."
    )

    def __call__(self, *args, **kwargs):
        kept = self.facts.contiguous
        return self.with_others(
            args, kwargs, lambda name, value: value if name in kept else strided(value)
        )


@unseen
def strided(value):
    """Return the same numbers in another order in memory, or with gaps. Only plain tensors change,
    also in a named tuple; scalars, weights and tensors with a graph do not."""
    if hasattr(value, "_fields"):
        return type(value)(*map(strided, value))
    if not isinstance(value, Tensor) or value.requires_grad or value.dim() == 0:
        return value
    if value.dim() == 1:
        return torch.stack([value, value], -1)[..., 0]
    return value.transpose(0, -1).contiguous().transpose(0, -1)


class Careful(Wrapped):
    """Compare the arguments before and after, look for unfinished work, and call twice."""

    def __call__(self, *args, **kwargs):
        given = self.named(args, kwargs)
        before = {name: photograph(value) for name, value in given.items()}
        result = self.fn(*args, **kwargs)
        for name, photo in before.items():
            if name not in self.facts.changes and not photo.is_of(given[name]):
                raise Complaint(CHANGES.format(name=name))
        nothing_under_way(*groups_in(args, kwargs)[:1])
        if not self.facts.again:
            return result
        again = self.fn(*args, **kwargs)
        shared = storages(result) & storages(again) - storages(list(given.values()))
        if shared and not self.facts.changes and [*tensors_in(list(given.values()))]:
            raise Complaint(
                "The second call writes where the result of the first one is, which its caller may "
                "still need: return new tensors each time."
            )
        return again


def nothing_under_way(group=None, kept: dict[int, tuple] | None = None) -> None:
    """Raise Complaint if the call started something and did not wait for it, though it may be
    complete by now. kept: what nobody has waited for (`watch.handles_kept`)."""
    recorder, open_ = getattr(group, "recorder", None), []
    until = time.monotonic() + Late.SECONDS / 2  # gloo's thread notes an end once it has the GIL
    while time.monotonic() < until:
        open_ = [row for row in (recorder.comms if recorder else []) if row[6] is None]
        if not open_:
            break
        time.sleep(0.002)
    names = [row[0] for row in open_] or [name for _, name in list((kept or {}).values())]
    if names:
        raise Complaint(
            f"When your function returns, one {names[0]} of it is still under way: keep what "
            "starting it returns, and .wait() for it."
        )


@dataclass
class Photograph:
    """The numbers of an argument's tensors and gradients, and how many hooks they have."""

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
        there = grad is not None and grad.untyped_storage().nbytes() > 0  # its memory is not freed
        photo.gradients.append(grad.clone() if there else None)
        photo.hooks += hooks_of([tensor])
    return photo


HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hooks_of(tensors: Iterable[Tensor]) -> int:
    return sum(len(getattr(tensor, kind, None) or ()) for tensor in tensors for kind in HOOKS)


def take_hooks_from(tensors: Iterable[Tensor]) -> None:
    """Remove all hooks: one that refers to its tensor keeps it alive, which gc does not see."""
    for tensor in tensors:
        for kind in HOOKS:
            (getattr(tensor, kind, None) or {}).clear()


def storages(value) -> set[int]:
    """Return the addresses of the storages of all tensors in `value`."""
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
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in(vars(value))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


# --- other numbers, and what is left over ---------------------------------------------------------


class Quiet(Wrapped):
    """Call it first without gradients, as an evaluation does; the result must be the same."""

    HINT = (
        "Right where inputs need gradients. Under torch.no_grad(), or with inputs that need none, "
        "{}. What is returned must not depend on that."
    )

    def __call__(self, *args, **kwargs):
        needs = [isinstance(v, Tensor) and v.requires_grad for v in (*args, *kwargs.values())]
        if not any(needs) or not self.facts.again:
            return self.fn(*args, **kwargs)
        found = []
        for grad in (False, True):
            with torch.random.fork_rng([]), torch.set_grad_enabled(grad):
                try:
                    found.append(self.with_others(args, kwargs, lambda name, value: cut_off(value)))
                except RuntimeError as error:
                    raise Complaint(self.HINT.format(f"it raises {error}")) from error
        result = self.fn(*args, **kwargs)
        for quiet in found:
            if not same(*(list(map(cut_off, tensors_in(each))) for each in (quiet, result))):
                raise Complaint(self.HINT.format("the result is another one"))
        return result


def cut_off(value):
    return value.detach() if isinstance(value, Tensor) else value


@dataclass
class Scaled(Wrapped):
    """Multiply all given numbers by one factor, so that equal numbers stay equal."""

    factor: float = 1.0

    def __call__(self, *args, **kwargs):
        return self.with_others(
            args, kwargs, lambda name, v: self.times(v, name in self.facts.changes)
        )

    def times(self, value, in_place: bool):
        if hasattr(value, "_fields"):
            return type(value)(*(self.times(each, in_place) for each in value))
        if isinstance(value, list):
            return [self.times(each, True) for each in value]
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if value.requires_grad and (in_place or value.grad is not None):
            if value.grad is not None:
                value.grad.mul_(self.factor)
            return value
        scaled = torch.where(value.isfinite(), value * self.factor, value)
        return value.copy_(scaled) if in_place else scaled


class Wider(Wrapped):
    """Numbers in float32 come in float64. (Not if a module is given, whose weights are float32.)"""

    HINT = (
        "Right with numbers in float32. With numbers in float64 the result is not in float64: "
        "make tensors with x.new_empty(...) or torch.empty_like(x), because torch.empty(...) is in "
        "float32."
    )

    def __call__(self, *args, **kwargs):
        if any(isinstance(value, nn.Module) for value in (*args, *kwargs.values())):
            return self.fn(*args, **kwargs)
        return self.with_others(
            args, kwargs, lambda name, v: v if name in self.facts.changes else self.wide(v)
        )

    def wide(self, value):
        if hasattr(value, "_fields"):
            return type(value)(*map(self.wide, value))
        if isinstance(value, list):
            return [*map(self.wide, value)]
        is_narrow = isinstance(value, Tensor) and value.dtype is torch.float32
        return value.double() if is_narrow else value


def near(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding: a sum in another order, the 1e-6 that
    guards a division. The room is relative to the largest number, because terms of sums cancel."""
    if (a.shape, a.dtype) != (b.shape, b.dtype) or not b.is_floating_point():
        return equal(a, b)
    finite = b[b.isfinite()].abs()
    largest = max(1.0, finite.max().item()) if finite.numel() else 1.0
    room = max(1e-5, torch.finfo(b.dtype).eps ** 0.75)
    return torch.allclose(a, b, rtol=0, atol=room * largest, equal_nan=True)


class Left(Wrapped):
    """Note the memory of all tensors that one call is given, makes and returns."""

    def __call__(self, *args, **kwargs):
        from .measures import Alive, storages  # imported late: measures imports engine

        self.alive = Alive()
        with self.alive:
            result = self.fn(*args, **kwargs)
        given = [*tensors_in([args, kwargs])]  # without a given tensor the result may be a cache
        for storage in storages([*given, *tensors_in(result)]) if given else ():
            self.alive.made[storage._cdata] = weakref.ref(storage)
        return result

    def left(self) -> str:
        """Return the hint if some of it still exists when the trial and its result are gone."""
        left = 1 if hasattr(self, "alive") else 0
        until = time.monotonic() + 2.0  # a backend lets go of what it has sent a little later
        while left and time.monotonic() < until:
            gc.collect()
            if left := self.alive.nbytes():
                time.sleep(0.02)
        return left and (
            f"When all is over, {left:,} bytes of tensors of the call are still there: a global "
            "list, a class or a closure holds on to them. Keep nothing of a call."
        )


def same(a, b) -> bool:
    """Return whether two results of one trial are equal up to rounding. Their types must be equal,
    except that an int may be a float."""
    if a is None:
        return b is None
    if isinstance(a, float) or isinstance(b, float):
        both = isinstance(a, (int, float)) and isinstance(b, (int, float))
        return both and (abs(a - b) <= 1e-4 * max(1.0, abs(b)) or a != a != b)
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return near(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a) if f.compare)
    if type(a).__eq__ is object.__eq__:  # its class does not define equality
        return same(vars(a), vars(b))
    return a == b
