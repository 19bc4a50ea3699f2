"""A run that another framework describes, in our words: what from_*.py have in common.

    print(from_deepspeed("ds_config.json", world_size=16))
    print(from_megatron("--tensor-model-parallel-size 8 ...", world_size=64))
    print(from_torchtitan("llama3_70b.toml", world_size=64))

The same batch equation holds in all of them: global = micro-batch x accumulated x dp.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from ..config import Layout
from ..fields import nearest_divisor, whole
from .layouts import short


@dataclass(frozen=True)
class Imported:
    """A layout read from another framework's words, and what these say besides."""

    layout: Layout
    cannot_say: tuple[str, ...] = ()  # one sentence for each thing that a Layout has no word for
    passed_over: tuple[str, ...] = ()  # names that change neither the cuts nor the batch

    @property
    def batch(self) -> str:
        """The batch equation, in sequences."""
        layout = self.layout
        return (
            f"global {layout.global_batch_size} = micro-batch {layout.micro_batch_size} x "
            f"{layout.num_micro_batches} accumulated x dp {layout.dp}"
        )

    def __str__(self):
        lines = [f"{short(self.layout)} on {self.layout.world_size} ranks", self.batch]
        lines += [f"not in a Layout: {sentence}" for sentence in self.cannot_say]
        if self.passed_over:
            lines.append(f"ignored: {', '.join(self.passed_over)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Batch:
    """The three sizes that a config may name, under its own names; None is not said."""

    total: int | None
    micro: int | None
    accumulated: int | None
    names: tuple[str, str, str]

    def solve(self, dp: int | None) -> tuple[int, int, int]:
        """(dp, micro-batch size, accumulated) that fulfil total = micro x accumulated x dp.

        What is not said follows from the rest, and accumulation is 1 where nothing says it.
        Raises ValueError with the fields, their values and the nearest that fits.
        """
        total, micro, accumulated = self.total, self.micro, self.accumulated
        all_of, each, times = self.names
        if total is None and micro is None:
            raise ValueError(f"Neither {all_of} nor {each} is given: give one, such as {each}=1.")
        if dp is None:
            if None in (total, micro, accumulated):
                said = ", ".join(self._said())
                raise ValueError(
                    f"{said} alone does not say how many ranks share the batch: give world_size."
                )
            if total % (micro * accumulated):
                raise ValueError(
                    f"{all_of}={total} is not {each}={micro} x {times}={accumulated} x any number "
                    f"of replicas: give {_nearest_multiple(total, micro * accumulated)}."
                )
            return total // (micro * accumulated), micro, accumulated
        if total is None:
            return dp, micro, accumulated or 1
        if micro is None:
            accumulated = accumulated or 1
            self._divides(total, accumulated * dp, f"{times}={accumulated} x dp={dp}")
            return dp, total // (accumulated * dp), accumulated
        if accumulated is None:
            self._divides(total, micro * dp, f"{each}={micro} x dp={dp}")
            return dp, micro, total // (micro * dp)
        if total != (right := micro * accumulated * dp):
            fix = f"give {all_of}={right}"
            if total % (micro * dp) == 0:
                fix += f", or {times}={total // (micro * dp)}"
            raise ValueError(
                f"{all_of}={total} is not {each}={micro} x {times}={accumulated} x dp={dp}, which "
                f"is {right}: {fix}."
            )
        return dp, micro, accumulated

    def _divides(self, total: int, factor: int, said: str) -> None:
        if total % factor:
            raise ValueError(
                f"{self.names[0]}={total} is not a multiple of {said}, which is {factor}: give "
                f"{_nearest_multiple(total, factor)}."
            )

    def _said(self) -> list[str]:
        values = (self.total, self.micro, self.accumulated)
        return [f"{name}={value}" for name, value in zip(self.names, values) if value is not None]


def replicas(world_size: int, sizes: dict[str, int]) -> int:
    """dp: how often what `sizes` cut fits into the world; ValueError where it does not."""
    factor = 1
    for size in sizes.values():
        factor *= size
    if world_size % factor:
        names = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        fix = f"give world_size={_nearest_multiple(world_size, factor)}"
        if len([size for size in sizes.values() if size > 1]) == 1:
            ((name, size),) = [pair for pair in sizes.items() if pair[1] > 1]
            fix += f", or {name}={nearest_divisor(world_size, size)}"
        is_ = f", which is {factor}," if " x " in names else ""
        raise ValueError(f"{names}{is_} does not divide world_size={world_size}: {fix}.")
    return world_size // factor


def integer(name: str, value: object, at_least: int = 1) -> int:
    """The value, if it is a whole number; ValueError names the field and the nearest that is."""
    if isinstance(value, bool) or not isinstance(value, int):
        try:
            near = max(at_least, round(float(value)))
        except (TypeError, ValueError, OverflowError):
            near = None
        quotes = ", without quotes" if isinstance(value, str) and near is not None else ""
        give = f"give {near}{quotes}" if near is not None else f"give an int, {at_least} or more"
        raise ValueError(f"{name}={value!r} is not a whole number: {give}.")
    return whole(name, value, at_least)


def flag(name: str, value: object) -> bool:
    """The value, if it is True or False; ValueError names the field."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is neither true nor false: give one of them.")
    return value


def choice(name: str, value: object, known: Iterable[str]) -> str:
    """The value, if it is one of the known words; ValueError lists them."""
    known = list(known)
    if value not in known:
        raise ValueError(f"{name}={value!r} is not known: give one of {', '.join(known)}.")
    return value


def section(name: str, value: object) -> dict:
    """The value, if it is a group of keys; ValueError names it."""
    if not isinstance(value, dict):
        raise ValueError(f"{name}={value!r} is no group of keys: give one, such as {name} = {{}}.")
    return value


def alike(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is most like `name`, or None if none is."""
    plain = {word.replace("_", "-").lower(): word for word in known}
    found = difflib.get_close_matches(name.replace("_", "-").lower(), plain, 1, cutoff)
    return plain[found[0]] if found else None


def check_keys(found: Iterable[str], known: Iterable[str], where: str) -> None:
    """ValueError for a key that the framework does not know, with the one that is most like it."""
    known = list(known)
    for key in found:
        if key not in known:
            near = alike(str(key), known)
            fix = f"give {near!r}" if near else "take it out"
            raise ValueError(f"{key!r} is not a key of {where}: {fix}.")


def _nearest_multiple(number: int, factor: int) -> int:
    return max(1, round(number / factor)) * factor
