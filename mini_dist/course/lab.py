"""A lab's parameters, checked before anything runs, and its result, stored as JSON.

    lab = Lab(                                     # in the cell below the `parameters` cell
        "collectives_cost",
        algorithm=choice("ring", "star", "tree"),
        world_size=whole(1, 16),
        overlap=flag(),
    )
    p = lab.parameters()                           # p.world_size, or ParameterError in one sentence
    lab.save({"seconds": 0.12}, curve=picture)     # result.json, and next to it curve.svg

papermill checks nothing: it only warns about an unknown name, `-p overlap true` gives the string
'true', and a non-empty string counts as true. So the notebook checks its parameters itself, no
matter whether a person, papermill or `python -m mini_dist.course.sweep` gives the values.

`choice`, `whole`, `real`, `flag` and `text` also describe the controls of mini_dist.course.widgets.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import json
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mini_dist.plan.fields import checks_kinds

INJECTED = "# Parameters"  # the first line of papermill's cell
FOLDER = "folder"  # a parameter of every lab: the folder for its result
RESULT = "result.json"


class ParameterError(ValueError):
    """An invalid parameter: its name, its value, and what would be valid."""


# ---- what a value may be -------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """One of a few values."""

    values: tuple

    def check(self, name: str, value: Any) -> Any:
        # 1 == True == 1.0 in Python, but they are different answers
        if not any(type(value) is type(known) and value == known for known in self.values):
            raise ParameterError(
                f"{name}={value!r} is not known: give {_one_of(self.values)}"
                f"{_nearest(value, self.values)}."
            )
        return value


@checks_kinds
@dataclass(frozen=True)
class Number:
    """A number from `least` to `most`; whole or real. `log`: a slider's steps grow."""

    least: float
    most: float
    is_whole: bool
    unit: str = ""
    log: bool = False

    def check(self, name: str, value: Any) -> float:
        kinds, kind = ((int,), "whole number") if self.is_whole else ((int, float), "number")
        between = f"from {self.least:,} to {self.most:,}{f' {self.unit}' if self.unit else ''}"
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ParameterError(f"{name}={value!r} is {_kind(value)}: give a {kind} {between}.")
        if not self.least <= value <= self.most:  # nan also compares false
            raise ParameterError(f"{name}={value!r} is out of range: give a {kind} {between}.")
        return value


@dataclass(frozen=True)
class Flag:
    """True or False, and no other value that counts as one of them."""

    def check(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ParameterError(f"{name}={value!r} is {_kind(value)}: give True or False.")
        return value


@dataclass(frozen=True)
class Text:
    """A string that is not empty."""

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise ParameterError(f"{name}={value!r} is {_kind(value)}: give some text.")
        return value


Parameter = Choice | Number | Flag | Text


def choice(*values) -> Choice:
    return Choice(values)


@checks_kinds
def whole(least: int, most: int, unit: str = "", log: bool = False) -> Number:
    return Number(least, most, True, unit, log)


@checks_kinds
def real(least: float, most: float, unit: str = "", log: bool = False) -> Number:
    return Number(least, most, False, unit, log)


def flag() -> Flag:
    return Flag()


def text() -> Text:
    return Text()


def check(declared: Mapping[str, Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """Check each given value against its declaration, with no name unknown or missing."""
    for name in given:
        if name not in declared:
            raise ParameterError(
                f"{name}={given[name]!r} is not a parameter: there are "
                f"{', '.join(declared)}{_nearest(name, declared)}."
            )
    for name in declared:
        if name not in given:
            raise ParameterError(f"{name} is missing: give it a value in the parameters cell.")
    return {name: parameter.check(name, given[name]) for name, parameter in declared.items()}


def _one_of(values) -> str:
    return " or ".join(filter(None, (", ".join(map(repr, values[:-1])), repr(values[-1]))))


def _nearest(value, known) -> str:
    near = difflib.get_close_matches(str(value), [str(k) for k in known], n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _kind(value) -> str:
    if isinstance(value, str):
        return "a string" if value else "an empty string"
    return {bool: "a bool", float: "a float", int: "an int", type(None): "no value"}.get(
        type(value), f"a {type(value).__name__}"
    )


# ---- a lab ---------------------------------------------------------------------------------------


@checks_kinds
class Lab:
    """A notebook with declared parameters. Every lab has `folder`, where its result goes."""

    def __init__(self, name: str, /, **declared: Parameter):
        for parameter, kind in declared.items():
            if not isinstance(kind, Parameter):
                raise TypeError(
                    f"{parameter}={kind!r} says nothing about what is allowed: give "
                    "choice(...), whole(...), real(...), flag() or text()."
                )
        self.name = name
        self.declared = {**declared, FOLDER: text()}
        self._values: dict[str, Any] | None = None

    def parameters(self, given: Mapping[str, Any] | None = None) -> SimpleNamespace:
        """Return the checked values of the parameters cell (or those in `given`).

        An earlier run's result in the folder moves to run-1, run-2, ... inside it, so a run that
        fails leaves no result in its place. Raises ParameterError, a ValueError, for an invalid
        value, a missing name and an undeclared name.
        """
        given = _values_in_notebook(self.declared) if given is None else given
        self.began = time.monotonic()
        if isinstance(given.get(FOLDER), str):
            put_away(below_here(given[FOLDER]))
        self._values = check(self.declared, given)
        return SimpleNamespace(**self._values)

    def save(self, result: Mapping[str, Any], /, **figures) -> Path:
        """Write result.json, and NAME.svg for each figure (a Drawing), into the lab's folder.

        Prints the path, relative to the current folder. The JSON has the lab's name, its
        parameters, the result, the names of the figures, and facts about the run: date, seconds,
        versions, machine. Raises ValueError for a result that JSON cannot represent.
        """
        if self._values is None:
            raise ValueError("no parameters were checked yet: call parameters() first.")
        shown = {name: value for name, value in self._values.items() if name != FOLDER}
        record = {
            "lab": self.name,
            "parameters": shown,
            "result": dict(result),
            "figures": [f"{name}.svg" for name in figures],
            "run": {
                "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "seconds": round(time.monotonic() - self.began, 1),
                "versions": versions(),
                "machine": machine(),
            },
        }
        try:
            content = json.dumps(record, indent=1, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the result of lab {self.name!r} does not fit in JSON ({error}): "
                "give plain finite numbers, strings, lists and dicts."
            ) from None
        folder = Path(self._values[FOLDER])
        folder.mkdir(parents=True, exist_ok=True)
        for name, picture in figures.items():
            picture.save(folder / f"{name}.svg")
        # The JSON is written last and atomically: once it exists, everything exists.
        partial = folder / f"result.{os.getpid()}.partial"
        partial.write_text(content + "\n", encoding="utf-8")
        path = partial.replace(folder / RESULT)
        print("written:", ", ".join([_from_here(path), *record["figures"]]))
        return path


def put_away(folder: Path) -> None:
    """Move a folder's result, and the figures that it names, to run-1 inside it, or the next
    free number. Other files stay: the learner may have chosen this folder."""
    former = folder / RESULT
    if not former.is_file():
        return
    number = next(n for n in itertools.count(1) if not (folder / f"run-{n}").exists())
    kept = folder / f"run-{number}"
    kept.mkdir()
    try:
        figures = json.loads(former.read_text(encoding="utf-8"))["figures"]
    except (ValueError, KeyError, TypeError):  # not a lab's output
        figures = []
    for path in [former, *(folder / Path(str(name)).name for name in figures)]:
        if path.is_file():
            path.replace(kept / path.name)


def below_here(folder: str) -> Path:
    """Return a folder as a Path; refuse one that leads out of the current folder step by step.

    Such a path leads to a different place depending on where the lab runs: papermill, for example,
    runs a notebook in the folder in which it was called. A full path is unambiguous.
    """
    if not os.path.isabs(folder) and os.path.normpath(folder).split(os.sep)[0] == os.pardir:
        raise ParameterError(
            f"{FOLDER}={folder!r} leads out of the current folder: give a folder below it, such as "
            f"'runs', or a full path."
        )
    return Path(folder)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a lab's numbers depend on."""
    found = {"python": platform.python_version()}
    for package in ("mini_dist", "torch", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def machine() -> dict[str, str | int]:
    """Describe the machine as far as it affects times, without its name."""
    processor = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        processor = next(names, processor)
    return {
        "system": platform.platform(),
        "processor": processor,
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
    }


def _from_here(path: Path) -> str:
    """Shorten a path, because no stored output may name a folder of the machine that made it."""
    here, path = Path.cwd(), path.resolve()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else str(path)


def _values_in_notebook(declared) -> dict[str, Any]:
    """Return the declared names among the notebook's variables, and other names that were assigned.

    An unknown name is a variable like any other; it is recognized only by its neighbors, in the
    parameters cell or in the one that papermill puts below it.
    """
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None:
        raise ValueError("not in a notebook: call parameters({'name': value, ...}).")
    by_hand, injected = [], []
    for cell in shell.user_ns["In"]:
        names = _names_set(cell)
        if cell.startswith(INJECTED):
            injected = names
        elif set(names) & set(declared):
            by_hand = names  # a cell that was fixed and run again counts in its new form
    names = dict.fromkeys([*declared, *by_hand, *injected])
    return {name: shell.user_ns[name] for name in names if name in shell.user_ns}


def _names_set(source: str) -> list[str]:
    """Return what a cell assigns, if it only gives names plain values."""
    try:
        body = ast.parse(source).body
    except SyntaxError:  # a magic, or a typo: not a parameters cell
        return []
    names = []
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a note in quotes
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        if not all(isinstance(target, ast.Name) for target in targets):
            return []
        if any(isinstance(part, ast.Name) for part in ast.walk(node.value)):
            return []  # derived from something
        names += [target.id for target in targets]
    return names
